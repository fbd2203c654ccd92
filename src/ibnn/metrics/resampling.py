"""RESAMPLING: bootstrap intervals of metrics."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.metrics.checks import check_level, check_numbers, class_rows, problem
from ibnn.metrics.classification import BINS, bin_numbers


class Interval(NamedTuple):
    """A metric's value on the data and the ends of its confidence interval.

    >>> Interval(value=0.12, low=0.1, high=0.15).high
    0.15
    """

    value: float
    low: float
    high: float


def bootstrap(
    metric: Callable[..., float],
    *samples: Tensor,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    paired: bool = True,
) -> Interval:
    """Percentile bootstrap interval of a metric; the ends are resampled values, rounded outwards.

    Args:
        metric: Called as `metric(*samples)`.
        samples: Tensors with rows on axis 0.
        resamples: How many times rows are drawn with replacement.
        level: Share of resampled values between the ends.
        seed: Of a generator of its own; the global one is not touched.
        paired: Draw the same rows of all samples (error, nll, ece), or of each its own (auroc).

    >>> probs, labels = torch.tensor([[0.9, 0.1]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> from ibnn.metrics import error
    >>> bootstrap(error, probs, labels)  # 0.2 and two standard errors of 0.04
    Interval(value=0.2, low=0.12, high=0.28)
    """
    sizes = [len(sample) if sample.ndim else 0 for sample in samples]
    if not sizes or 0 in sizes:
        raise problem("samples", "tensors with rows on axis 0", f"rows {sizes}", "pass some data")
    if paired and len(set(sizes)) > 1:
        remedy = "pass paired=False if the samples are independent"
        raise problem("samples", "as many rows in each, being paired", f"rows {sizes}", remedy)
    if resamples < 1:
        raise problem("resamples", "an integer of at least 1", f"{resamples}", "pass 1000 or so")
    check_level(level)
    data, generator = [s.detach() for s in samples], torch.Generator().manual_seed(seed)
    values = torch.empty(resamples, dtype=torch.float64)
    independent = sizes[:1] if paired else sizes
    for r in range(resamples):
        drawn = [torch.randint(n, (n,), generator=generator) for n in independent]
        drawn *= len(sizes) // len(independent)
        values[r] = metric(*(s[i.to(s.device)] for s, i in zip(data, drawn, strict=True)))
    check_numbers("metric", values)
    ranked = values.sort().values.tolist()
    cut = int((1 - level) / 2 * (resamples - 1) + 1e-9)  # ranks beyond each end, less rounding
    return Interval(float(metric(*data)), ranked[cut], ranked[-1 - cut])


def score_intervals(probs: Tensor, log_probs: Tensor, labels: Tensor) -> dict[str, Interval]:
    """Error, NLL, ECE and Brier score of a classifier, each with its 95 % bootstrap interval.

    Equals `bootstrap` of each metric up to rounding, but computes every row's contribution only once.

    >>> probs, labels = torch.tensor([[0.9, 0.1]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> score_intervals(probs, probs.log(), labels)["error"]
    Interval(value=0.2, low=0.12, high=0.28)
    """
    log_probs, _ = class_rows("log_probs", log_probs, labels, 1)
    probs, labels = class_rows("probs", probs, labels, 1)
    confidence, guess = probs.max(1)
    wrong = (guess != labels).double()
    gap = confidence.double() - 1 + wrong
    columns = {
        "error": wrong,
        "nll": 0 - log_probs.gather(1, labels[:, None])[:, 0].double(),
        "ece": bin_numbers(confidence, torch.arange(BINS + 1, dtype=torch.float64) / BINS),
        "brier": (probs.double() - F.one_hot(labels, probs.shape[1])).square().sum(1),
    }

    def mean(values: Tensor) -> float:
        return values.mean().item()

    def mean_gap(bins: Tensor, gap: Tensor) -> float:
        return bins.bincount(gap, minlength=BINS).abs().sum().item() / len(gap)

    return {
        name: bootstrap(mean_gap, column, gap) if name == "ece" else bootstrap(mean, column)
        for name, column in columns.items()
    }
