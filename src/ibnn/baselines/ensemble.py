"""DEEP ENSEMBLE (Lakshminarayanan et al., 2017): several networks from different starts, trained side by side."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ibnn.baselines.plain import Plain
from ibnn.errors import complaint
from ibnn.inputs import Inputs, logits_of
from ibnn.latent import scale_gradient
from ibnn.likelihood import Likelihood


class Ensemble(Plain):
    """M networks, each trained as if alone; its components are the members.

    Args:
        nets: The members, initialised apart.
        likelihood: Default `Categorical`.
    """

    net: nn.ModuleList

    def __init__(self, nets: Sequence[nn.Module], likelihood: Likelihood | None = None) -> None:
        if len(nets) < 2 or len({id(p) for net in nets for p in net.parameters()}) < sum(
            len(list(net.parameters())) for net in nets
        ):
            got = f"{len(nets)} with parameters in common" if len(nets) > 1 else len(nets)
            raise ValueError(complaint("nets", "two or more separate networks", got, "Make each anew."))
        super().__init__(nn.ModuleList(nets), likelihood)
        self.components = len(nets)

    def _noisy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.likelihood.combine(torch.stack(list(self._draws(args, kwargs, range(1), 0))))

    def _loss(self, x: Inputs, y: Tensor) -> Tensor:
        """Returns the mean of the members' losses; each member's gradient is that of its own loss, not of the mean."""
        losses = []
        for member in self.net:
            output = self._checked(lambda args, kwargs, member=member: member(*args, **kwargs), x, y)
            losses.append(self.likelihood.nll(scale_gradient(output, float(self.components)), y))
        return torch.stack(losses).mean()

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        yield from (logits_of(member(*args, **kwargs)) for member in self.net)
