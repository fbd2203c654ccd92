"""ABSTAINING: the uncertainty above which no answer is given, so that at most a chosen share of answers is wrong."""

import math
from typing import NamedTuple

from torch import Tensor

from ibnn.errors import complaint

LEVELS = 20  # sets of the most certain answers that are tried: 5 %, 10 %, … 100 %


class Threshold(NamedTuple):
    """Where to abstain, and the evidence."""

    limit: float  # answers above this uncertainty are withheld; −inf withholds all
    coverage: float  # share of the labelled answers that are given
    errors: int  # wrong answers among those given
    bound: float  # upper confidence bound on the share of wrong answers among those given


def threshold(uncertainty: Tensor, wrong: Tensor, risk: float, *, confidence: float = 0.95) -> Threshold:
    """Returns the largest set of the most certain answers whose error rate is, with confidence, at most `risk`.

    A set's bound is that of Clopper and Pearson at 1 − (1 − confidence) / 20, because the same labels choose one of 20
    sets (Bonferroni). The guarantee holds for inputs like the labelled ones.

    >>> import torch
    >>> threshold(torch.arange(100.0), torch.arange(100) >= 95, 0.1).coverage
    0.95

    Args:
        uncertainty: Uncertainty of labelled answers, (N,).
        wrong: Whether each is wrong, (N,).
        risk: Largest accepted share of errors.
        confidence: Probability that the guarantee holds.
    """
    if not 0 < risk < 1:
        raise ValueError(complaint("risk", "between 0 and 1", risk, "Pass 0.05."))
    uncertainty, miss = uncertainty.double(), (1 - confidence) / LEVELS
    ordered = uncertainty.sort().values
    for level in range(LEVELS, 0, -1):
        limit = ordered[math.ceil(len(uncertainty) * level / LEVELS) - 1].item()
        given = uncertainty <= limit  # ties included
        count, errors = int(given.sum()), int(wrong[given].sum())
        if at_most(errors, count, risk) <= miss:  # then the bound is at most the risk
            return Threshold(limit, count / len(uncertainty), errors, upper_bound(errors, count, miss))
    return Threshold(-math.inf, 0.0, 0, 1.0)


def at_most(errors: int, count: int, rate: float) -> float:
    """Returns the probability of at most this many errors: the binomial CDF.

    >>> round(at_most(1, 2, 0.5), 9)
    0.75
    """
    ways = (math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(errors + 1))
    logs = (way + k * math.log(rate) + (count - k) * math.log1p(-rate) for k, way in enumerate(ways))
    return min(1.0, math.fsum(map(math.exp, logs)))


def upper_bound(errors: int, count: int, miss: float) -> float:
    """Returns the Clopper–Pearson bound: the rate at which at most this many errors have probability `miss`.

    >>> round(upper_bound(0, 59, 0.05), 3), upper_bound(3, 3, 0.05)
    (0.05, 1.0)
    """
    if errors >= count:
        return 1.0
    low, high = errors / count, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (rate, high) if at_most(errors, count, rate) > miss else (low, rate)
    return high
