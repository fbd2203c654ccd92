"""CHOICE: which scale of the noise to take, by losses of groups of held-out rows."""

import math
from typing import NamedTuple

from torch import Tensor

from ibnn.calibration.report import Point

NEGLIGIBLE = 0.001  # nats per datum that noise may cost: the least of it already tells known inputs from unknown ones


class Candidate(NamedTuple):
    """A scale, and sums of losses over groups of rows (G,): at T = 1, at the best T, and at the best T of each half."""

    scale: float
    temperature: float
    counts: Tensor  # data in each group
    plain: Tensor
    tempered: Tensor
    crossed: tuple[Tensor, Tensor]

    def point(self) -> Point:
        """Returns the mean losses, for the report."""
        total = float(self.counts.sum())
        return Point(self.scale, float(self.plain.sum()) / total, self.temperature, float(self.tempered.sum()) / total)


def choose(losses: list[Tensor], counts: Tensor, *, largest: bool) -> int:
    """Returns which of some scales in order, the first without noise, to take by the losses of groups of rows (G,).

    The one of the lowest NLL; with `largest` the largest that is within one standard error of it (of the paired
    differences) and keeps half of what it gains over the first, or is within a quarter of one, or 0.001 nats, of it.

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
        halfway = totals[at] <= (totals[0] + totals[best]) / 2
        if difference <= max(error if halfway else error / 4, NEGLIGIBLE):
            return at
    return best


def cross_fitted(curve: list[Candidate], *, temper: bool) -> float:
    """Returns the NLL of each half at the scale, and with `temper` the temperature, that the other half chooses."""
    counts, total = curve[0].counts, 0.0
    halves = slice(0, len(counts) // 2), slice(len(counts) // 2, None)
    for number, (own, other) in enumerate((halves, halves[::-1])):
        losses = [c.crossed[number] if temper else c.plain for c in curve]
        at = choose([loss[own] for loss in losses], counts[own], largest=temper)
        total += float(losses[at][other].sum())
    return total / float(counts.sum())


def paired(losses: Tensor, others: Tensor, counts: Tensor) -> tuple[float, float]:
    """Returns the difference of two NLLs, and its standard error, from the groups' differences."""
    difference = losses - others
    mean = difference.sum() / counts.sum()
    spread = (difference - mean * counts).square().sum() * len(counts) / max(len(counts) - 1, 1)
    return float(mean), float(spread.sqrt() / counts.sum())
