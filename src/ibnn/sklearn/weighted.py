"""A likelihood whose rows have weights, for `sample_weight` and `class_weight`."""

import functools
from typing import Any, Self

import torch
from torch import Tensor

from ibnn.errors import complaint
from ibnn.likelihood import Categorical, Likelihood
from ibnn.likelihood.base import Temperature, Terms, by_row
from ibnn.prediction import Prediction, Running


class Weighted(Likelihood):
    """Another likelihood with a weight for every row: one of weight 2 counts as two rows, in loss, KL and scores.

    Weights come in front of the targets, as a column of one float tensor (B, 1 + targets); see `join`. So they go
    wherever targets go: batches, workers, held-out rows. (Drawing rows as often as they weigh is not the same: it has
    the right loss on average only, and none of a row that is never drawn.)

    >>> likelihood, logits = Weighted(Categorical()), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    >>> weighted = likelihood.terms(logits, likelihood.join(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])))
    >>> torch.allclose(weighted.loss, Categorical().terms(logits[[0, 1, 1]], torch.tensor([0, 1, 1])).loss)
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

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns weighted means over the data of the batch."""
        weight, rest = self.part(target)
        of_row = functools.partial(self.inner.terms, temperature=self._resolve(temperature))
        loss, nll, *totals = torch.vmap(of_row)(output[:, None], rest[:, None])
        counts, weights = (weight.to(loss) * total.to(loss) for total in totals)

        def mean(losses: Tensor, totals: Tensor) -> Tensor:
            return (totals * losses).sum() / totals.sum().clamp_min(torch.finfo(losses.dtype).tiny)

        return Terms(mean(loss, weights), mean(nll, counts), counts.sum(), weights.sum())

    def count(self, target: Tensor) -> int:
        """Returns how many rows the weights stand for, at least 1."""
        return max(round(float(self.total_weight(target))), 1)

    def total_weight(self, target: Tensor) -> Tensor:
        """Returns the sum of the weights of the data."""
        weight, rest = self.part(target)
        return (weight * torch.vmap(self.inner.total_weight)(rest[:, None]).to(weight)).sum()

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
        """Returns the weighted NLL."""
        weight, rest = self.part(target)
        losses, outputs = -by_row(prediction.log_prob(rest)), rest.numel() // len(rest)
        return {"nll": (weight * losses).sum().item() / float((weight * outputs).sum())}

    def classes(self, target: Tensor) -> Tensor | None:
        """Returns those of the likelihood inside."""
        return self.inner.classes(self.part(target)[1])

    def surprise(self, output: Tensor) -> Tensor | None:
        """Returns that of the likelihood inside."""
        return self.inner.surprise(output)

    def base_rates(self, target: Tensor) -> Tensor:
        """Returns those of the likelihood inside; weights do not count."""
        return self.inner.base_rates(self.part(target)[1])

    def fall_back(self, prediction: Any, weight: Tensor, base: Tensor) -> Any:
        """Does what the likelihood inside does."""
        return self.inner.fall_back(prediction, weight, base)

    def nonconformity(self, prediction: Any, target: Tensor) -> Tensor | None:
        """Returns that of the likelihood inside."""
        return self.inner.nonconformity(prediction, self.part(target)[1])
