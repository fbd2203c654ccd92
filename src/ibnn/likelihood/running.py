"""Sums up the probabilities of draws as they come: their mean, its entropies and its Monte Carlo error.

Draws of components 0 and 1, 2 and 3, … with the same number are mirror images of each other (`draws`). So only
*rounds*, the draws of all components with one number, are independent of each other, and errors are found from the
sums of such pairs. For draws that are independent altogether that is right, too.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.prediction import Prediction

HELD = 2**25  # entries of draws' outputs that a running summary holds at most before it sums them up


class Split(NamedTuple):
    """How the entropy of the mean probability splits, (B, …) each."""

    aleatoric: Tensor
    between: Tensor
    within: Tensor


class RunningProbabilities:
    """Mean, entropies and standard error of draws' probabilities, which come component by component, a few at a time.

    Of draws p_ks:  total = H[mean p],  by component = mean_k H[mean_s p_ks],  aleatoric = mean_ks H[p_ks].
    """

    def __init__(
        self,
        components: int,
        samples: int,
        log_probs: Callable[[Tensor], Tensor],
        prediction: Callable[[Tensor, Split, Tensor], Prediction],
    ) -> None:
        self.components, self.samples, self.log_probs, self.prediction = components, samples, log_probs, prediction
        self.held: list[Tensor] = []
        zero = torch.zeros(())
        self.begun = False
        self.logs = zero  # log of the sum of all probabilities
        self.means = zero  # of the components' draws, summed
        self.entropy, self.component_entropy = zero, zero  # of draws and of components' means, summed
        self.variance = zero  # over rounds, of the sums of two components, summed
        self.closed = 0  # components that are complete
        self.open = _Moments()  # of the draws of a component that has begun
        self.pair = _Moments()  # of their sums with those of the component before
        self.waiting: list[Tensor] = []  # draws of a component whose mirror images are still to come
        self.across = _Moments()  # of the components, where they have one draw each

    def add(self, draws: Tensor) -> None:
        """Takes the next draws of outputs, (J, B, …), component-major; holds them while they are few."""
        self.held.append(draws)
        if sum(part.numel() for part in self.held) > HELD:
            self._flush()

    def _flush(self) -> None:
        draws, self.held = torch.cat(self.held), []
        while len(draws):
            whole = len(draws) // self.samples * self.samples
            if self.open.number or not whole:  # a part of one component
                now = draws[: self.samples - self.open.number][None]
            else:
                now = draws[:whole].unflatten(0, (-1, self.samples))
            self.take(now)
            draws = draws[now.shape[0] * now.shape[1] :]

    def take(self, draws: Tensor) -> None:
        """Takes draws of whole components, (k, S, B, …), or some of one, (1, s, B, …)."""
        log_probs = self.log_probs(draws)  # (k, s, B, …, C)
        probs, logs = log_probs.exp(), log_probs.flatten(0, 1).logsumexp(0)
        self.logs = torch.logaddexp(self.logs, logs) if self.begun else logs
        self.begun = True
        self.entropy = self.entropy + entropy(probs).sum((0, 1))
        if probs.shape[:2] == (self.components, self.samples):
            self._close(probs.mean(1))
            self.variance = paired(probs).var(1).sum(0) if self.samples > 1 else self.variance
            return
        for part in probs:
            self._join(part)

    def _join(self, probs: Tensor) -> None:
        """Takes some draws of one component, (s, B, …, C)."""
        first, last = self.open.number, self.closed == self.components - 1
        self.open = self.open.joined(probs)
        if self.closed % 2 == 0 and not last:
            self.waiting.extend(probs)
        else:
            others = self.waiting[first : first + len(probs)]
            self.pair = self.pair.joined(probs + torch.stack(others) if others else probs)
        if self.open.number < self.samples:
            return
        self._close(self.open.mean[None])
        if self.pair.number:
            self.variance = self.variance + self.pair.squares / max(self.samples - 1, 1)
            self.pair, self.waiting = _Moments(), []
        self.open = _Moments()

    def _close(self, means: Tensor) -> None:
        """Takes the means of whole components, (k, B, …, C)."""
        self.closed += len(means)
        self.means = self.means + means.sum(0)
        self.component_entropy = self.component_entropy + entropy(means).sum(0)
        if self.samples == 1:
            self.across = self.across.joined(means)

    def result(self) -> Prediction:
        """Returns the prediction made of all draws."""
        if self.held:
            self._flush()
        count = self.components * self.samples
        logs = (self.logs - math.log(count)).clamp_max(0)  # rounding may end above
        total, component = entropy(self.means / self.components), self.component_entropy / self.components
        aleatoric = self.entropy / count
        # By concavity the differences are ≥ 0; the clamp only removes rounding.
        split = Split(aleatoric, (total - component).clamp_min(0), (component - aleatoric).clamp_min(0))
        return self.prediction(logs, split, self._standard_error())

    def _standard_error(self) -> Tensor:
        """Returns what `standard_error` would of all draws."""
        if self.components == self.samples == 1:
            return torch.full_like(self.means, math.nan)
        if self.samples == 1:
            return (self.across.squares / (self.components - 1) / self.components).sqrt()
        return (self.variance / self.samples).sqrt() / self.components


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


class _Moments(NamedTuple):
    """Number, mean and sum of squared deviations of tensors."""

    number: int = 0
    mean: Tensor = torch.zeros(())
    squares: Tensor = torch.zeros(())

    def joined(self, values: Tensor) -> "_Moments":
        """Returns the moments with more tensors, (n, …)."""
        more, mean = len(values), values.mean(0)
        squares = (values - mean).square().sum(0)
        if not self.number:
            return _Moments(more, mean, squares)
        number, apart = self.number + more, mean - self.mean
        squares = self.squares + squares + apart.square() * (self.number * more / number)
        return _Moments(number, self.mean + apart * (more / number), squares)


def entropy(probs: Tensor) -> Tensor:
    """Returns the entropy over the last axis."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1)
