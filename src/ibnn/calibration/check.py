"""CHECK: a choice is held against temperature scaling, on all rows, with draws that answers will be made of."""

from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.calibration.choice import Candidate, crossed, measured, paired
from ibnn.calibration.few import Completed, FewDraws
from ibnn.calibration.outputs import Outputs
from ibnn.calibration.plan import FIRST, Plan
from ibnn.calibration.race import Race
from ibnn.likelihood.temperature import Losses

LESS = (1, 2, 8, 32)  # what the choice is divided by in turn, as far as the plan allows, until it is not worse


class Settled(NamedTuple):
    """The scale that is taken, what comes with it, and why it is not the race's choice, if so."""

    scale: float
    temperature: float
    scaled: dict[str, float]
    scores: dict[str, float]
    cross_nll: tuple[float, float]
    gain: tuple[float, float]
    reason: str


class Check:
    """Answers all rows at some scales, and compares."""

    def __init__(self, outputs: Outputs, y: Tensor, plain: Tensor, plan: Plan, *, temper: bool) -> None:
        self.outputs, self.y, self.plain, self.plan, self.temper = outputs, y, plain, plan, temper
        self.likelihood, self.components = outputs.model.likelihood, outputs.model.components
        alike = not outputs.trained or plan.samples > 1  # or the components' spread would pass for that of draws
        draws = self.components * outputs.samples if alike else 0
        self.foreseen: Losses = FewDraws(self.likelihood, draws)
        self.completed: Losses = self.likelihood
        if plan.samples < outputs.samples:
            self.completed = Completed(self.likelihood, draws, plan.samples)

    def scores(self, draws: Tensor, temperature: float | None) -> dict[str, float]:
        """Returns the likelihood's scores of draws (K, S, N, …)."""
        return self.likelihood.score(self.likelihood.summarise(draws, temperature), self.y)

    def drawn(self, factors: Tensor, scale: float) -> Tensor:
        """Returns the first draws of every component that `predict` would make, (K, S₀, N, …); sets the noise."""
        self.outputs.set_noise(factors, scale)
        return self.outputs.predicted(self.outputs.everything, self.plan.samples)

    def cycled(self, few: Tensor) -> Tensor:
        """Returns as many draws as answers have, (K, S, N, …): a few, again and again."""
        return few[:, torch.arange(self.outputs.samples, device=few.device) % few.shape[1]]

    def settled(self, race: Race, scale: float, zero: Candidate) -> tuple[Settled, Tensor]:
        """Tries the race's choice, then half of it, and so on; returns what is taken and its outputs.

        The first that is not worse than temperature scaling is taken, and no noise if none is.
        """
        alone, counts = crossed(self.likelihood, self.plain, self.y)
        scaled, base = self.scores(self.plain, zero.temperature), float(alone.sum() / counts.sum())
        if not self.temper:
            answers = self._completed(self.drawn(race.factors, scale), zero) if scale else self.plain
            after, other = self.scores(answers, 1.0), race.crossed()
            return Settled(scale, 1.0, scaled, after, (base, other), (base - other, 0.0), ""), answers
        reason = ""
        for divisor in LESS if scale else ():
            less = scale / divisor
            if divisor > 1 and not self._affordable(self.components * self.plan.samples):
                break
            few = self.drawn(race.factors, less)
            tried, answers = measured(self.foreseen, few, less, self.y), self.cycled(few)
            cross = crossed(self.foreseen, few, self.y)[0]
            if cross.sum() <= alone.sum() and few.shape[1] < self.outputs.samples:
                answers = self._completed(few, zero)
                tried = measured(self.completed, answers, less, self.y)
                cross = crossed(self.completed, answers, self.y)[0]
            after, nll = self.scores(answers, tried.temperature), float(cross.sum() / counts.sum())
            if self.completed is not self.likelihood:  # of as many draws as answers have
                after["nll"] = float(tried.tempered.sum() / tried.counts.sum())
            if nll <= base and after["nll"] <= scaled["nll"]:
                reason = reason and f"{reason}: {less:.3g} is not."
                gain = paired(alone, cross, counts)
                return Settled(less, tried.temperature, scaled, after, (base, nll), gain, reason), answers
            reason = reason or (
                f"Noise of scale {less:.3g} is worse than temperature scaling (NLL {after['nll']:.4f} to "
                f"{scaled['nll']:.4f}, cross-fitted {nll:.4f} to {base:.4f})"
            )
        beginning = f"{reason}, and so is less of it: this" if reason else "Noise does not lower the NLL: this"
        reason = f"{beginning} is temperature scaling, without noise."
        return Settled(0.0, zero.temperature, scaled, scaled, (base, base), (0.0, 0.0), reason), self.plain

    def _completed(self, few: Tensor, zero: Candidate) -> Tensor:
        """Returns outputs of all the draws that answers have for the rows of the largest loss; of others the few."""
        answers, missing, rows = self.cycled(few), self.outputs.samples - few.shape[1], len(self.y)
        if missing and len(zero.tempered) == rows and self._affordable(FIRST):
            hard = zero.tempered.topk(min(FIRST * rows // (self.components * missing), rows)).indices.sort().values
            answers[:, few.shape[1] :, hard] = self.outputs.predicted(hard.cpu(), missing, first=few.shape[1])
        return answers

    def _affordable(self, draws: int) -> bool:
        """Whether so many draws of all rows are within the plan."""
        return self.outputs.passed + draws * len(self.y) + self.plan.novelty <= self.plan.total
