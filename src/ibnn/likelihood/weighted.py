"""WEIGHTS: rows that count more or less than others."""

import functools
from typing import Any, Self

import torch
from torch import Tensor

from ibnn.errors import complaint
from ibnn.likelihood.base import Likelihood, Temperature
from ibnn.likelihood.categorical import Categorical
from ibnn.prediction import Prediction, Running


class Weighted(Likelihood):
    """Another likelihood with a weight for every row: one of weight 2 counts as two rows, in loss, KL and scores.

    Weights come in front of the targets, as a column of one float tensor (B, 1 + targets); see `join`. So they go
    wherever targets go: batches, workers, held-out rows. (Drawing rows as often as they weigh is not the same: it has
    the right loss on average only, and none of a row that is never drawn.)

    >>> likelihood, logits = Weighted(Categorical()), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    >>> weighted = likelihood.nll(logits, likelihood.join(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])))
    >>> torch.allclose(weighted, Categorical().nll(logits[[0, 1, 1]], torch.tensor([0, 1, 1])))
    True
    """

    def __init__(self, inner: Likelihood) -> None:
        """Takes the likelihood of a single row; its temperature is shared."""
        super().__init__()
        self.inner, self.discrete = inner, inner.discrete
        self.temperature = inner.temperature

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inner.temperature = self.temperature  # a move to another device has made two of it
        return self

    @staticmethod
    def join(weight: Tensor, target: Tensor) -> Tensor:
        """Weights (B,) and targets, (B,) or (B, …), as one tensor."""
        return torch.cat([weight[:, None], target.reshape(len(target), -1).to(weight.dtype)], 1)

    def part(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and targets of a joined tensor."""
        rest = target[:, 1:]
        return target[:, 0], rest[:, 0].long() if isinstance(self.inner, Categorical) else rest

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if a weight is negative, or as the likelihood inside does."""
        weight, rest = self.part(target)
        if not bool((weight >= 0).all()):
            raise ValueError(complaint("weight", "not negative", f"{weight.min():g}", "Pass 0 to leave a row out."))
        self.inner.check(output, rest)

    def nll(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns the weighted mean over the data of the batch."""
        _, rest = self.part(target)
        by_row = torch.vmap(functools.partial(self.inner.nll, temperature=self._resolve(temperature)))
        losses: Tensor = by_row(output[:, None], rest[:, None])
        mass = self._masses(target).to(losses)
        return (mass * losses).sum() / mass.sum().clamp_min(torch.finfo(losses.dtype).tiny)

    def _masses(self, target: Tensor) -> Tensor:
        """Weight times number of data, (B,)."""
        weight, rest = self.part(target)
        return weight * torch.vmap(self.inner.mass)(rest[:, None]).to(weight)

    def mass(self, target: Tensor) -> Tensor:
        """The sum of the weights of the data."""
        return self._masses(target).sum()

    def data(self, target: Tensor) -> int:
        """How many data the weights stand for, at least 1."""
        return max(round(float(self.mass(target))), 1)

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Any:
        """Does what the likelihood inside does."""
        return self.inner.combine(draws, self._resolve(temperature))

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Does what the likelihood inside does."""
        return self.inner.summarise(draws, self._resolve(temperature))

    def running(self, components: int, samples: int, temperature: Temperature = None) -> Running:
        """Does what the likelihood inside does."""
        return self.inner.running(components, samples, self._resolve(temperature))

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the losses and numbers of data of the likelihood inside, times the weights of the rows."""
        weight, rest = self.part(target)
        sums, counts = self.inner.losses(draws, rest, self._resolve(temperature))
        return sums * weight, counts * weight

    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """The weighted NLL."""
        weight, rest = self.part(target)
        total = 0.0
        for value in weight.unique():
            rows = (weight == value).nonzero()[:, 0]
            mass = float(value) * self.inner.data(rest[rows])
            total += mass * self.inner.score(prediction.rows(rows), rest[rows])["nll"]
        return {"nll": total / float(self.mass(target))}
