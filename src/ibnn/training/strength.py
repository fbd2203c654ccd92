"""TEMPERATURES: raw draws, and the temperature that minimises their NLL."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ibnn.calibration import group_losses
from ibnn.likelihood import Likelihood
from ibnn.prediction import Collected, Method, Prediction, predict


@dataclass(frozen=True)
class Draws(Prediction):
    """Raw draws of the network's output, (K, S, B, …): a prediction that can be tempered afterwards."""

    outputs: Tensor = field(metadata={"batch": 2})


class _Raw:
    """A model whose `predict` keeps the draws as they are; also the likelihood that `predict` asks to summarise."""

    def __init__(self, model: Method) -> None:
        self.components, self.model, self.likelihood = model.components, model, self
        self.parameters, self.each_draw, self.modules = model.parameters, model.each_draw, model.modules
        self.random = model.random

    def summarise(self, draws: Tensor) -> Draws:
        return Draws(draws)

    def running(self, components: int, samples: int) -> Collected:
        return Collected(self, components)


def draw(model: Method, batches: Iterable[Any], samples: int) -> Draws:
    """The model's draws for an iterable of inputs; workers share them as in `predict`."""
    drawn = predict(_Raw(model), batches, samples=samples, progress=False)
    assert isinstance(drawn, Draws)
    return drawn


@torch.no_grad()
def tempered_nll(likelihood: Likelihood, draws: Tensor, target: Tensor, temperature: float) -> float:
    """NLL of draws (K, S, N, …) at a temperature."""
    before = likelihood.temperature.clone()
    try:
        likelihood.temperature.fill_(temperature)
        losses, counts = group_losses(likelihood, draws, target)
        return float(losses.sum() / counts.sum())
    finally:
        likelihood.temperature.copy_(before)


def best_temperature(likelihood: Likelihood, draws: Tensor, target: Tensor) -> float:
    """T of the lowest NLL of draws (K, S, N, …), between 1/3 and 20."""
    draws = draws.double()  # the NLL is flat at its minimum: rounding would choose
    low, high = -math.log(3), math.log(20)
    for _ in range(24):
        left, right = low + (high - low) * 0.4, low + (high - low) * 0.6
        nlls = [tempered_nll(likelihood, draws, target, math.exp(log_t)) for log_t in (left, right)]
        low, high = (low, right) if nlls[0] <= nlls[1] else (left, high)
    return math.exp((low + high) / 2)


def confidence(likelihood: Likelihood, draws: Tensor, target: Tensor) -> tuple[float, float]:
    """The temperature, over the present one, that mends the answer of draws (K, S, N, …) best, and the NLL at it.

    Of probabilities it is a temperature of their mean: a few draws that disagree want to be flattened one by one
    although their mean may be shy already.
    """
    if not likelihood.discrete:
        best = best_temperature(likelihood, draws, target)
        return best / float(likelihood.temperature), tempered_nll(likelihood, draws, target, best)
    mean = likelihood.combine(draws.flatten(0, 1))[None, None]
    best = best_temperature(likelihood, mean, target)
    return best, tempered_nll(likelihood, mean, target, best)


def settled_temperature(likelihood: Likelihood, draws: Tensor, target: Tensor) -> float:
    """The best temperature, if that of either half of the data lowers the NLL of the other half; else the present one.

    A few hundred labels would otherwise move the temperature of a network that is calibrated already.
    """
    now = float(likelihood.temperature)
    even, odd = (slice(start, None, 2) for start in (0, 1))
    gain = 0.0
    for mine, other in ((even, odd), (odd, even)):
        temperature = best_temperature(likelihood, draws[:, :, mine], target[mine])
        nlls = [tempered_nll(likelihood, draws[:, :, other], target[other], t) for t in (now, temperature)]
        gain += nlls[0] - nlls[1]
    return best_temperature(likelihood, draws, target) if gain > 0 else now
