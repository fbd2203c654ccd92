"""Finds the temperature T that held-out labels support.

Draws (K, S, N, …) are raw outputs of a network, targets are as `Likelihood.losses` takes them.
"""

import copy
import math

import torch
from torch import Tensor

from ibnn.likelihood.base import Likelihood

WIDENING, FARTHEST = 2.0, 20.0  # steps of log T beyond the first bounds, and where they end
PRICE = 5.0  # nats over all rows that a temperature e times as high or low must save (experiments/few_labels.py)
GOLDEN = (math.sqrt(5) - 1) / 2  # of an interval, each side


@torch.no_grad()
def nll(likelihood: Likelihood, draws: Tensor, target: Tensor, temperature: float) -> float:
    """Returns the NLL of draws at a temperature, in nats per datum."""
    losses, counts = likelihood.losses(draws, target, temperature)
    return float(losses.sum() / counts.sum())


@torch.no_grad()
def best_temperature(
    likelihood: Likelihood, draws: Tensor, target: Tensor, *, price: float = 0.0, now: float = 1.0, rough: bool = False
) -> float:
    """Returns the temperature T of the lowest cost: the loss of all rows in nats, and `price` · |log(T / now)|.

    The price, in nats, is a Laplace prior on log T around `now`, the temperature without these labels. A few labels
    cannot outweigh it, and T is `now` exactly; for n rows it costs of the order of price²/n² nats per row. Below 1/3
    and above 20, every factor of e must save another nat: without a price, labels that are all right would ask for
    T = 0. `rough` takes a third of the time and finds T to 0.06 %, not to 0.001 %.
    """
    shrinkings = 17 if rough else 25
    if not rough:  # the NLL is flat there: rounding would choose
        likelihood, draws, target = copy.deepcopy(likelihood).cpu(), draws.cpu().double(), target.cpu()
    low, high = -math.log(3), math.log(20)

    def at(log_t: float) -> float:
        losses, counts = likelihood.losses(draws, target, math.exp(log_t))
        prior = price * abs(log_t - math.log(now)) + max(low - log_t, log_t - high, 0.0)
        return float((losses.sum() + prior) / counts.sum())

    def lowest(low: float, high: float) -> float:
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        at_left, at_right = at(left), at(right)
        for _ in range(shrinkings):  # each keeps one of the two inner points
            if at_left <= at_right:
                high, right, at_right = right, left, at_left
                left = high - GOLDEN * (high - low)
                at_left = at(left)
            else:
                low, left, at_left = left, right, at_right
                right = low + GOLDEN * (high - low)
                at_right = at(right)
        return (low + high) / 2

    best = lowest(low, high)
    if min(best - low, high - best) < 2e-3:  # at an end: the minimum may be beyond it
        end, step = best, math.copysign(WIDENING, best)
        while abs(end) < FARTHEST and at(end + step) < at(end):
            end += step
        further = lowest(end - WIDENING, end + WIDENING)
        best = further if at(further) < at(best) else best
    return math.exp(best) if not price or at(best) < at(math.log(now)) else now


def supported_temperature(
    likelihood: Likelihood, draws: Tensor, target: Tensor, *, price: float = PRICE, rough: bool = False
) -> float:
    """Returns the temperature that labels support: the best one, shrunk towards the likelihood's own."""
    return best_temperature(likelihood, draws, target, price=price, now=float(likelihood.temperature), rough=rough)


def confidence(likelihood: Likelihood, draws: Tensor, target: Tensor) -> tuple[float, float]:
    """Returns the NLL-minimising temperature, relative to the current one, and that NLL.

    Of probabilities it is a temperature of the draws' mean: a few draws that disagree want to be flattened one by one
    although their mean may be underconfident already.
    """
    if not likelihood.discrete:
        best = best_temperature(likelihood, draws, target)
        return best / float(likelihood.temperature), nll(likelihood, draws, target, best)
    mean, of_mean = likelihood.read(likelihood.combine(draws.flatten(0, 1)))[None, None], likelihood.of_combined()
    best = best_temperature(of_mean, mean, target)
    return best, nll(of_mean, mean, target, best)
