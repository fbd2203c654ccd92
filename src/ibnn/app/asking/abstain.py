"""ABSTAINING: the doubt above which no answer is given, so that those given are wrong at most so often."""

import math
from typing import NamedTuple

from torch import Tensor

from ibnn.errors import complaint

LEVELS = 20  # nested sets of the most certain answers that are tried: 5 %, 10 %, … 100 %


class Threshold(NamedTuple):
    """Where to abstain, and the evidence.

    Attributes:
        limit: Answers of more doubt than this are withheld; −inf withholds all.
        coverage: Share of the labelled answers that are given.
        errors: How many of those given are wrong.
        bound: Upper confidence bound of the share of wrong answers among those given.
    """

    limit: float
    coverage: float
    errors: int
    bound: float


def threshold(doubt: Tensor, wrong: Tensor, risk: float, *, confidence: float = 0.95) -> Threshold:
    """The largest of the nested sets whose share of errors is, with confidence, at most `risk`.

    The bound of a set is that of Clopper and Pearson at 1 − (1 − confidence) / 20, for one of 20 sets is chosen by the
    same labels (Bonferroni): whichever it is, the promise holds, for inputs like those that were labelled.

    >>> import torch
    >>> threshold(torch.arange(100.0), torch.arange(100) >= 95, 0.1).coverage
    0.95

    Args:
        doubt: Of labelled answers, (N,).
        wrong: Whether each was wrong, (N,).
        risk: Largest share of errors that is accepted.
        confidence: Probability with which the promise holds.
    """
    if not 0 < risk < 1:
        raise ValueError(complaint("risk", "between 0 and 1", risk, "Pass 0.05."))
    doubt, miss = doubt.double(), (1 - confidence) / LEVELS
    ordered = doubt.sort().values
    for level in range(LEVELS, 0, -1):
        limit = ordered[math.ceil(len(doubt) * level / LEVELS) - 1].item()
        given = doubt <= limit  # with all ties
        count, errors = int(given.sum()), int(wrong[given].sum())
        if at_most(errors, count, risk) <= miss:  # then the bound is at most the risk
            return Threshold(limit, count / len(doubt), errors, upper_bound(errors, count, miss))
    return Threshold(-math.inf, 0.0, 0, 1.0)


def at_most(errors: int, count: int, rate: float) -> float:
    """Probability of so many errors or fewer, each answer being wrong at the same rate: the binomial's CDF.

    >>> round(at_most(1, 2, 0.5), 9)
    0.75
    """
    ways = (math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(errors + 1))
    logs = (way + k * math.log(rate) + (count - k) * math.log1p(-rate) for k, way in enumerate(ways))
    return min(1.0, math.fsum(map(math.exp, logs)))


def upper_bound(errors: int, count: int, miss: float) -> float:
    """Clopper–Pearson: the rate at which so few errors, or fewer, have probability `miss`; by bisection.

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
