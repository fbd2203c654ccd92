"""CHOICE: which scale of the noise to take, by losses of groups of held-out rows."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.calibration.report import Point
from ibnn.likelihood.temperature import Losses, helpful_temperature

NEGLIGIBLE = 0.001  # nats per datum that noise may cost: the least of it already tells known inputs from unknown ones


class Candidate(NamedTuple):
    """A scale, its best temperature, and sums of losses over groups of rows (G,), at T = 1 and at the best T."""

    scale: float
    temperature: float
    counts: Tensor  # data in each group
    plain: Tensor
    tempered: Tensor

    def losses(self, temper: bool) -> Tensor:
        """Returns the losses at the best temperature, or at 1."""
        return self.tempered if temper else self.plain

    def point(self, here: "Candidate", everywhere: "Candidate") -> Point:
        """Returns mean losses of all rows: those without noise everywhere, and what noise adds here, on some rows."""
        nll, tempered = (
            _mean(all_rows, everywhere) + _mean(own, self) - _mean(alone, here)
            for all_rows, own, alone in (
                (everywhere.plain, self.plain, here.plain),
                (everywhere.tempered, self.tempered, here.tempered),
            )
        )
        return Point(self.scale, nll, everywhere.temperature * self.temperature / here.temperature, tempered)


def _mean(losses: Tensor, candidate: Candidate) -> float:
    return float(losses.sum() / candidate.counts.sum())


def measured(likelihood: Losses, draws: Tensor, scale: float, y: Tensor) -> Candidate:
    """Returns the losses of draws (K, S, N, …) of a scale."""
    plain, counts = likelihood.losses(draws, y, 1.0)
    best = helpful_temperature(likelihood, draws, y)
    return Candidate(scale, best, counts, plain, likelihood.losses(draws, y, best)[0])


def choose(losses: list[Tensor], counts: Tensor, *, largest: bool, part: float = 1.0) -> int:
    """Returns which of some scales in order, the first without noise, to take by the losses of groups of rows (G,).

    The one of the lowest NLL; with `largest` the largest that is within one standard error of it (of the paired
    differences) and keeps half of what it gains over the first, or is within a quarter of one, or 0.001 nats, of it.
    The rows are so large a part of all: it is the standard error of all rows that counts.

    >>> import torch
    >>> losses = [torch.tensor(pair) for pair in ([4.0, 2.0], [2.0, 2.0], [2.0, 2.5], [3.0, 4.0])]
    >>> [choose(losses, torch.ones(2), largest=largest) for largest in (False, True)]
    [1, 2]
    """
    totals = [float(loss.sum()) if loss.isfinite().all() else math.inf for loss in losses]
    best = min(range(len(totals)), key=totals.__getitem__)
    if not largest:
        return best
    for at in reversed(range(best, len(totals))):
        difference, error = paired(losses[at], losses[best], counts)
        error *= part**0.5
        halfway = totals[at] <= (totals[0] + totals[best]) / 2
        if difference <= max(error if halfway else error / 4, NEGLIGIBLE):
            return at
    return best


def crossed(likelihood: Losses, draws: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns losses and data of groups of rows (G,), each half of the rows at the best temperature of the other."""
    halves = slice(0, len(y) // 2), slice(len(y) // 2, None)
    parts = []
    for own, other in (halves, halves[::-1]):
        temperature = helpful_temperature(likelihood, draws[:, :, other], y[other])
        parts.append(likelihood.losses(draws[:, :, own], y[own], temperature))
    losses, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    return losses, counts


def paired(losses: Tensor, others: Tensor, counts: Tensor) -> tuple[float, float]:
    """Returns the difference of two NLLs, and its standard error, from the groups' differences."""
    difference = losses - others
    mean = difference.sum() / counts.sum()
    spread = (difference - mean * counts).square().sum() * len(counts) / max(len(counts) - 1, 1)
    return float(mean), float(spread.sqrt() / counts.sum())
