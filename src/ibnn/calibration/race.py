"""RACE: which scale of the noise is best, on more and more rows for fewer and fewer scales."""

import math

import torch
from torch import Tensor

from ibnn.calibration.choice import Candidate, choose, measured, paired
from ibnn.calibration.few import FewDraws
from ibnn.calibration.outputs import Outputs
from ibnn.calibration.plan import MOST_ROWS, Plan
from ibnn.calibration.report import Point

KEPT = 3  # scales of the second round


class Race:
    """Tries scales with given factors of the layers.

    The second half of the rows comes first: the first half fits the factors.
    """

    def __init__(self, outputs: Outputs, factors: Tensor, plain: Tensor, y: Tensor, plan: Plan, *, temper: bool):
        self.outputs, self.factors, self.plain, self.y = outputs, factors, plain, y
        self.plan, self.temper = plan, temper
        self.order = torch.arange(len(y)).roll(-(len(y) // 2))
        self.likelihood = FewDraws(outputs.model.likelihood, outputs.model.components * outputs.samples)
        self.drawn: dict[float, Tensor] = {}
        self.found: dict[float, tuple[int, Candidate]] = {}  # on the most rows so far
        self.alone: dict[int, Candidate] = {}  # without noise, by number of rows
        self.last: list[Candidate] = []  # candidates of the last round
        self.rows, self.first = plan.rows, 0.0  # of the round, and the least scale

    def tried(self, scale: float, rows: int) -> Candidate:
        """Returns a scale's losses for the first so many rows; those that it had before are not run again."""
        order = self.order[:rows]
        if scale == 0:
            if rows not in self.alone:
                self.alone[rows] = measured(self.outputs.model.likelihood, self.plain[:, :, order], 0.0, self.y[order])
            return self.alone[rows]
        before = self.drawn.get(scale)
        have = 0 if before is None else before.shape[2]
        if have < rows:
            more = self.outputs.noisy(self.factors, scale, order[have:], self.plan.draws)
            self.drawn[scale] = more if before is None else torch.cat([before, more], 2)
        candidate = measured(self.likelihood, self.drawn[scale][:, :, :rows], scale, self.y[order])
        self.found[scale] = rows, candidate
        return candidate

    def begin(self, first: float, scales: int) -> list[Candidate]:
        """Returns candidates of growing scale until it is clearly too much."""
        self.first, rows = first, self.rows
        curve = [self.tried(0.0, rows)]
        for number in range(scales):
            curve.append(self.tried(first * 2**number, rows))
            difference, error = paired(self._losses(curve[-1]), self._losses(self.best(curve)), curve[0].counts)
            if not difference <= 4 * error:
                break
        return curve

    def narrow(self, curve: list[Candidate], reserve: int) -> list[Candidate]:
        """Returns the largest scales that may still be the best, on more rows; so many rows are left for others."""
        best = self.best(curve)
        near = [paired(self._losses(c), self._losses(best), c.counts) for c in curve]
        scales = [c.scale for c, (gap, error) in zip(curve, near, strict=True) if c.scale and gap <= 2 * error]
        return self._on_more_rows(curve, set(scales[-KEPT:]), reserve, part=3)

    def finish(self, curve: list[Candidate]) -> float:
        """Returns the scale to take: the best, the choice and new ones beside it have a last round."""
        for number in range(2):
            at, step = self.choose(curve), 2 ** (0.5 ** (number + 1))
            chosen = curve[at].scale
            new = {chosen * step} if at else {self.first / 2}
            new |= set() if self.temper or not at else {chosen / step}
            curve = self._on_more_rows(curve, {chosen, self.best(curve).scale} | new, 0, part=2 - number)
        self.last = curve
        return curve[self.choose(curve)].scale

    def _on_more_rows(self, curve: list[Candidate], scales: set[float], reserve: int, part: int) -> list[Candidate]:
        """Returns candidates of these scales, on as many rows as one part of what is left allows; the curve if none."""
        scales -= {0.0}
        left = (self.plan.search - self.outputs.passed - reserve) // part // self.plan.draws
        have = [0 if scale not in self.drawn else self.drawn[scale].shape[2] for scale in scales]
        rows = min((left + sum(have)) // max(len(scales), 1), len(self.y), MOST_ROWS)
        if not scales or rows < max(self.rows, *have):
            return curve
        self.rows = rows
        return [self.tried(scale, rows) for scale in (0.0, *sorted(scales))]

    def crossed(self) -> float:
        """Returns the NLL, in the last round, of each half of the rows at the scale that the other half chooses."""
        total, counts = 0.0, self.last[0].counts
        halves = slice(0, len(counts) // 2), slice(len(counts) // 2, None)
        for own, other in (halves, halves[::-1]):
            losses = [self._losses(candidate) for candidate in self.last]
            at = choose([loss[other] for loss in losses], counts[other], largest=self.temper)
            total += float(losses[at][own].sum())
        return total / float(counts.sum())

    def points(self, everywhere: Candidate) -> tuple[Point, ...]:
        """Returns all that was tried, in order."""
        found = [self.found[scale] for scale in sorted(self.found)]
        points = [candidate.point(self.tried(0.0, rows), everywhere) for rows, candidate in found]
        return (everywhere.point(everywhere, everywhere), *points)

    def best(self, curve: list[Candidate]) -> Candidate:
        """Returns the candidate of the lowest NLL."""
        return min(curve, key=self.value)

    def value(self, candidate: Candidate) -> float:
        """Returns its sum of losses."""
        value = float(self._losses(candidate).sum())
        return value if math.isfinite(value) else math.inf

    def choose(self, curve: list[Candidate]) -> int:
        """Returns the number of the candidate to take."""
        losses, part = [self._losses(c) for c in curve], self.rows / len(self.y)
        return choose(losses, curve[0].counts, largest=self.temper, part=part)

    def _losses(self, candidate: Candidate) -> Tensor:
        return candidate.losses(self.temper)
