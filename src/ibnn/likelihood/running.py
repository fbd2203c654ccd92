"""Sums up the probabilities of draws: their mean, its entropies and its Monte Carlo error.

Draws of components 0 and 1, 2 and 3, … with the same number are mirror images of each other (`draws`). So only
*rounds*, the draws of all components with one number, are independent of each other, and errors are found from the
sums of such pairs. For draws that are independent altogether that is right, too.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ibnn.prediction import Prediction

HELD = 2**25  # entries of draws' outputs that are held at most before they are summed up one by one
Split = tuple[Tensor, Tensor, Tensor]  # aleatoric, between and within parts of an entropy, (B, …) each


class Running:
    """Makes a prediction of draws that come a few at a time; this class holds them all."""

    def __init__(self, summarise: Callable[[Tensor], Prediction], components: int) -> None:
        self.summarise, self.components = summarise, components
        self.parts: list[Tensor] = []

    def add(self, draws: Tensor) -> None:
        """Takes the next draws of a network's output, (J, B, …), component-major."""
        self.parts.append(draws)

    def result(self) -> Prediction:
        """Returns the prediction made of all draws."""
        return self.summarise(torch.cat(self.parts).unflatten(0, (self.components, -1)))


class RunningProbabilities(Running):
    """Mean, entropies and standard error of draws' probabilities p_ks.

    total = H[mean p],  by component = mean_k H[mean_s p_ks],  aleatoric = mean_ks H[p_ks].
    """

    def __init__(
        self,
        components: int,
        samples: int,
        log_probs: Callable[[Tensor], Tensor],
        prediction: Callable[[Tensor, Split, Tensor], Prediction],
    ) -> None:
        super().__init__(self.at_once, components)
        self.samples, self.log_probs, self.prediction = samples, log_probs, prediction
        self.number = 0  # of the next draw that is summed up
        zero = torch.zeros(())
        self.logs = zero - math.inf  # log of the sum of all probabilities
        self.means = self.entropy = self.component_entropy = zero  # sums over components, draws and components
        self.mean = zero  # of the draws so far of one component
        self.centre = self.squares = zero  # mean and squared deviations of what standard errors are found from
        self.waiting: list[Tensor] = []  # draws of a component whose mirror images are still to come

    def at_once(self, draws: Tensor) -> Prediction:
        """Returns the prediction made of draws of outputs, (K, S, B, …)."""
        log_probs = self.log_probs(draws)  # (K, S, B, …, C)
        probs = log_probs.exp()
        means, aleatoric, error = probs.mean(1), entropy(probs).mean((0, 1)), standard_error(probs)
        logs = log_probs.flatten(0, 1).logsumexp(0)
        return self._answer(logs, means.mean(0), entropy(means).mean(0), aleatoric, error)

    def add(self, draws: Tensor) -> None:
        """Takes the next draws of outputs, (J, B, …), component-major; holds them while they are few."""
        super().add(draws)
        if sum(part.numel() for part in self.parts) > HELD:
            self._sum_up()

    def _sum_up(self) -> None:
        parts, self.parts = self.parts, []
        for part in parts:
            for draw in part:
                self._take(self.log_probs(draw[None, None])[0, 0])

    def _take(self, log_probs: Tensor) -> None:
        """Takes the log-probabilities of one draw, (B, …, C)."""
        component, sample = divmod(self.number, self.samples)
        probs = log_probs.exp()
        self.number += 1
        self.logs, self.entropy = torch.logaddexp(self.logs, log_probs), self.entropy + entropy(probs)
        self.mean = self.mean + probs / self.samples
        if sample == self.samples - 1:
            self.component_entropy = self.component_entropy + entropy(self.mean)
            self.means, self.mean = self.means + self.mean, torch.zeros(())
        if self.samples > 1 and component % 2 == 0 and component < self.components - 1:
            self.waiting.append(probs)
            return
        number = component + 1 if self.samples == 1 else sample + 1
        values = probs + self.waiting.pop(0) if self.waiting else probs
        centre = self.centre if number > 1 else torch.zeros(())
        apart = values - centre
        self.centre = centre + apart / number
        self.squares = self.squares + apart * (values - self.centre)

    def result(self) -> Prediction:
        """Returns the prediction made of all draws."""
        if not self.number:
            return super().result()
        self._sum_up()
        k, s = self.components, self.samples
        error = (self.squares / (k * (k - 1) if s == 1 else k * k * s * (s - 1))).sqrt()  # as `standard_error`
        return self._answer(self.logs, self.means / k, self.component_entropy / k, self.entropy / (k * s), error)

    def _answer(self, logs: Tensor, mean: Tensor, component: Tensor, aleatoric: Tensor, error: Tensor) -> Prediction:
        # Rounding may lift a probability above 1. By concavity the differences are ≥ 0 without rounding.
        logs = (logs - math.log(self.components * self.samples)).clamp_max(0)
        split = aleatoric, (entropy(mean) - component).clamp_min(0), (component - aleatoric).clamp_min(0)
        return self.prediction(logs, split, error)


def paired(draws: Tensor) -> Tensor:
    """Returns sums of components 0 and 1, 2 and 3, … of draws (K, S, …), (⌈K / 2⌉, S, …); an odd last one is alone.

    >>> paired(torch.tensor([[1.0], [2.0], [5.0]])).tolist()
    [[3.0], [5.0]]
    """
    even = len(draws) // 2 * 2
    return torch.cat([draws[:even].unflatten(0, (-1, 2)).sum(1), draws[even:]])


def standard_error(draws: Tensor) -> Tensor:
    """Returns the standard error of the mean over draws (K, S, B, …).

    The mean over components is 1/K of the sum over pairs, which are independent of each other, as are rounds: its
    variance is the sum of the pairs' variances over rounds, over S K². S = 1 does not show how much of the spread is
    between components, where it does no harm: all of it counts, and mirror images as if they were independent.
    """
    components, samples = draws.shape[:2]
    if components == samples == 1:
        return torch.full_like(draws[0, 0], math.nan)
    if samples == 1:
        return draws[:, 0].std(0) / math.sqrt(components)
    return (paired(draws).var(1).sum(0) / samples).sqrt() / components


def entropy(probs: Tensor) -> Tensor:
    """Returns the entropy over the last axis."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1)
