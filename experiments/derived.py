"""Models made of kept runs, without training: rows of a recipe with `of`, by the name in `make`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ibnn.lab.parts import Splits
from ibnn.likelihood import Categorical


class Ensemble(nn.Module):
    """Several classifiers that answer together: the draws of each, at its own temperature, count alike."""

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__()
        self.members, self.likelihood = nn.ModuleList(members), Categorical()
        self.components = sum(member.components for member in members)
        self.random = any(getattr(member, "random", True) for member in members)

    def forwards(self, samples: int) -> int:
        """Returns the forward passes of a prediction."""
        return self.components * (samples if self.random else 1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Holds all members in eval mode within a block."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.evaluating())
            yield

    def each_draw(self, x: Any, samples: int = 5, seed: int = 0, **options: Any) -> Iterator[Tensor]:
        """Yields draws of the members' outputs, (J, B, C), member by member."""
        for member in self.members:
            for part in member.each_draw(x, samples, seed, **options):
                yield part / float(member.likelihood.temperature)

    def draw_logits(self, x: Any, samples: int = 5, seed: int = 0, **options: Any) -> Tensor:
        """Returns all draws, (J, B, C)."""
        return torch.cat(list(self.each_draw(x, samples, seed, **options)))


DERIVED: dict[str, Callable[[Sequence[Any], Splits], Any]] = {"ensemble": lambda models, splits: Ensemble(models)}
