"""TEMPERATURE: the one search for the temperature T that minimises a held-out NLL, and what is decided by it.

Draws (K, S, N, …) are raw outputs of a network, targets are as `Likelihood.losses` takes them.
"""

import math

import torch
from torch import Tensor

from ibnn.likelihood.base import Likelihood

LOW, HIGH = -math.log(3), math.log(20)  # bounds of log T, where the search looks first
FARTHEST = 2.0**30  # beyond this, or its inverse, no temperature is looked for


@torch.no_grad()
def nll(likelihood: Likelihood, draws: Tensor, target: Tensor, temperature: float) -> float:
    """Returns the NLL of draws at a temperature, in nats per datum."""
    losses, counts = likelihood.losses(draws, target, temperature)
    return float(losses.sum() / counts.sum())


def best_temperature(
    likelihood: Likelihood, draws: Tensor, target: Tensor, *, bounded: bool = True, shrinkings: int = 24
) -> float:
    """Returns the temperature of the lowest NLL.

    Args:
        likelihood: Its own temperature does not matter, and stays.
        draws: Outputs (K, S, N, …).
        target: Targets of the N rows.
        bounded: Keeps to 1/3 … 20. Else the search goes on where the NLL falls towards an end of that.
        shrinkings: How often 60 % of the interval of log T are kept: 24 leave an error of 0.001 %, 16 of 0.06 %.

    >>> import ibnn
    >>> logits, labels = torch.tensor([[[[2.0, 0.0]] * 4]]), torch.tensor([0, 0, 0, 1])  # right in 3 of 4
    >>> round(best_temperature(ibnn.Categorical(), logits, labels), 3), round(2 / math.log(3), 3)
    (1.82, 1.82)
    """
    exact = draws.double()  # the NLL is flat at its minimum: rounding would choose
    low, high = LOW, HIGH
    best = _shrink(likelihood, exact, target, low, high, shrinkings)
    while not bounded and min(best - low, high - best) < 2e-3 and abs(best) < math.log(FARTHEST):
        step = math.copysign((high - low) / 2, best)
        low, high = low + step, high + step
        further = _shrink(likelihood, exact, target, low, high, shrinkings)
        nlls = [nll(likelihood, draws, target, math.exp(log_t)) for log_t in (best, further)]
        if not nlls[1] < nlls[0]:
            break
        best = further
    return math.exp(best)


def _shrink(likelihood: Likelihood, draws: Tensor, target: Tensor, low: float, high: float, times: int) -> float:
    """Returns the log of the best temperature in an interval of logs."""
    for _ in range(times):
        left, right = low + (high - low) * 0.4, low + (high - low) * 0.6
        nlls = [nll(likelihood, draws, target, math.exp(log_t)) for log_t in (left, right)]
        low, high = (low, right) if nlls[0] <= nlls[1] else (left, high)
    return (low + high) / 2


def helpful_temperature(likelihood: Likelihood, draws: Tensor, target: Tensor) -> float:
    """Returns the temperature of the lowest NLL without bounds, or 1 if that is no better or makes no difference."""
    below, one, above = (nll(likelihood, draws, target, t) for t in (0.5, 1.0, 2.0))
    if below == one == above:  # a likelihood that ignores it
        return 1.0
    best = best_temperature(likelihood, draws, target, bounded=False, shrinkings=16)
    return best if nll(likelihood, draws, target, best) < one else 1.0


def confidence(likelihood: Likelihood, draws: Tensor, target: Tensor) -> tuple[float, float]:
    """Returns the NLL-minimising temperature, relative to the current one, and that NLL.

    Of probabilities it is a temperature of the draws' mean: a few draws that disagree want to be flattened one by one
    although their mean may be underconfident already.
    """
    if not likelihood.discrete:
        best = best_temperature(likelihood, draws, target)
        return best / float(likelihood.temperature), nll(likelihood, draws, target, best)
    mean = likelihood.combine(draws.flatten(0, 1))[None, None]
    best = best_temperature(likelihood, mean, target)
    return best, nll(likelihood, mean, target, best)


def settled_temperature(likelihood: Likelihood, draws: Tensor, target: Tensor) -> float:
    """Returns the best temperature if each half's lowers the other half's NLL, else the current one.

    A few hundred labels would otherwise move the temperature of a network that is calibrated already.
    """
    now = float(likelihood.temperature)
    even, odd = (slice(start, None, 2) for start in (0, 1))
    gain = 0.0
    for mine, other in ((even, odd), (odd, even)):
        temperature = best_temperature(likelihood, draws[:, :, mine], target[mine])
        nlls = [nll(likelihood, draws[:, :, other], target[other], t) for t in (now, temperature)]
        gain += nlls[0] - nlls[1]
    return best_temperature(likelihood, draws, target) if gain > 0 else now
