"""PROBABILITIES: draws of probabilities summed up as they come, and the entropies of their mean."""

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.likelihood.base import Likelihood, Temperature, full
from ibnn.prediction import Prediction

HELD = 2**25  # entries of draws' outputs that a running summary holds at most before it sums them up


class Split(NamedTuple):
    """How the entropy of the mean probability splits, (B, …) each."""

    aleatoric: Tensor
    between: Tensor
    within: Tensor


class Discrete(Likelihood):
    """A likelihood of probabilities, whose logits a temperature divides."""

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns probabilities, and their entropy split into aleatoric, between and within."""
        found = self.running(draws.shape[0], draws.shape[1], temperature)
        found.take(draws)
        return found.result()

    def running(self, components: int, samples: int, temperature: Temperature = None) -> "RunningProbabilities":
        """Returns sums over draws: of their outputs they hold few at a time."""
        log_probs = functools.partial(self._log_probs, temperature=temperature)
        return RunningProbabilities(components, samples, log_probs, self._prediction)

    def _tempered(self, logits: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns logits over T, at least in float32."""
        return full(logits) / self._resolve(temperature)

    @abstractmethod
    def _log_probs(self, draws: Tensor, temperature: Temperature) -> Tensor:
        """Returns log-probabilities (K, S, B, …, C) of draws (K, S, B, …)."""

    @abstractmethod
    def _prediction(self, logs: Tensor, split: Split, error: Tensor) -> Prediction:
        """Returns the prediction of log-probabilities (B, …, C), with the standard errors of the probabilities."""


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
        self.variance = zero  # within components, summed
        self.open = _Moments()  # of the draws of a component that has begun
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
        if draws.shape[1] == self.samples:
            self._close(probs.mean(1), probs.var(1).sum(0) if self.samples > 1 else None)
            return
        self.open = self.open.joined(probs[0])
        if self.open.number == self.samples:
            self._close(self.open.mean[None], self.open.squares / (self.samples - 1))
            self.open = _Moments()

    def _close(self, means: Tensor, variance: Tensor | None) -> None:
        """Takes the means of whole components, (k, B, …, C), and the sum of the variances within them."""
        self.means = self.means + means.sum(0)
        self.component_entropy = self.component_entropy + entropy(means).sum(0)
        if variance is None:
            self.across = self.across.joined(means)
        else:
            self.variance = self.variance + variance

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
        """Returns what `gaussian._standard_error` would of all draws."""
        if self.components == self.samples == 1:
            return torch.full_like(self.means, math.nan)
        if self.samples == 1:
            return (self.across.squares / (self.components - 1) / self.components).sqrt()
        return (self.variance / self.samples).sqrt() / self.components


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
