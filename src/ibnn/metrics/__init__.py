"""METRICS: accuracy, calibration and usefulness of uncertainty, as pure functions of tensors on any device.

Numbers are computed in float64 on the CPU, except `rmse` and `coverage`, which keep the targets' precision. Axes: N
rows, C classes. Dense predictions (N, C, ...) count every position as a row; `axis` is the axis of their classes, -1
for tokens (N, T, C): pass `axis=prediction.axis`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.metrics.checks import check_level, check_numbers, class_rows, problem, same_shape, score_column

__all__ = ["ReliabilityCurve", "RiskCoverage", "reliability_curve", "risk_coverage", "scores"]  # of classifiers
__all__ += ["aurc", "auroc", "brier", "ece", "error", "fpr_at_95_tpr", "nll"]
__all__ += ["coverage", "crps", "interval_score", "rmse"]  # of numbers
__all__ += ["Interval", "bootstrap", "score_intervals"]  # by resampling

Metric = Callable[..., float]
BINS = 15  # of reliability curves and the ECE, as in the paper


class ReliabilityCurve(NamedTuple):
    """What a reliability diagram draws, one entry per bin; empty bins have nan means and count 0.

    >>> reliability_curve(torch.tensor([[0.9, 0.1]]), torch.tensor([0]), bins=2).count.tolist()
    [0, 1]
    """

    confidence: Tensor  # mean probability of the predicted class (bins,)
    accuracy: Tensor  # share of rows predicted right (bins,)
    count: Tensor  # type: ignore[assignment]  # rows (bins,); hides tuple.count
    edges: Tensor  # borders of the bins (bins + 1,)


class RiskCoverage(NamedTuple):
    """Error rate among the i most certain rows, for i = 1 to N.

    >>> risk_coverage(torch.tensor([0.1, 0.9]), torch.tensor([True, False])).coverage.tolist()
    [0.5, 1.0]
    """

    coverage: Tensor  # i / N (N,)
    risk: Tensor  # errors among the first i, over i (N,)
    area: float  # AURC, the mean of risk


def error(probs: Tensor, labels: Tensor, *, axis: int = 1) -> float:
    """Share of rows whose most probable class (the first, if tied) is not the label.

    >>> error(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    probs, labels = class_rows("probs", probs, labels, axis)
    return (probs.argmax(1) != labels).double().mean().item()


def nll(log_probs: Tensor, labels: Tensor, *, axis: int = 1) -> float:
    """Mean of -log p(label), in nats; takes log-probabilities, since probabilities underflow.

    >>> round(nll(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0])), 6)  # log 4
    1.386294
    """
    log_probs, labels = class_rows("log_probs", log_probs, labels, axis)
    return 0 - log_probs.gather(1, labels[:, None]).double().mean().item()  # 0, never -0


def brier(probs: Tensor, labels: Tensor, *, axis: int = 1) -> float:
    """Squared distance of the probabilities to the one-hot label, summed over classes: 0 to 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    0.5
    """
    probs, labels = class_rows("probs", probs, labels, axis)
    return (probs.double() - F.one_hot(labels, probs.shape[1])).square().sum(1).mean().item()


def reliability_curve(probs: Tensor, labels: Tensor, bins: int = BINS, *, axis: int = 1) -> ReliabilityCurve:
    """Confidence and accuracy of the predicted class in bins of equal width, each (lo, hi].

    Confidence 1 falls in the last bin and 0 in the first. Borders are rounded as `probs` are, so
    that 0.6 lies on the border 9/15 in float32 too.

    >>> probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.5, 0.5]])
    >>> reliability_curve(probs, torch.tensor([0, 1, 1]), bins=2).accuracy.tolist()
    [0.0, 0.5]
    """
    if bins < 1:
        raise problem("bins", "an integer of at least 1", f"{bins}", "pass bins=15 as the paper")
    probs, labels = class_rows("probs", probs, labels, axis)
    confidence, guess = probs.max(1)
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins  # linspace would miss some by an ulp
    index = _bin_numbers(confidence, edges)
    count = index.bincount(minlength=bins)
    total = index.bincount(confidence.double(), minlength=bins)
    hits = index.bincount((guess == labels).double(), minlength=bins)
    return ReliabilityCurve(total / count, hits / count, count, edges)


def _bin_numbers(confidence: Tensor, edges: Tensor) -> Tensor:
    """Returns the bin, (lo, hi], of each confidence."""
    return torch.bucketize(confidence, edges.to(confidence.dtype)).sub(1).clamp(0, len(edges) - 2)


def ece(probs: Tensor, labels: Tensor, bins: int = BINS, *, axis: int = 1) -> float:
    """Expected calibration error: mean gap of confidence and accuracy over the bins, by their rows.

    >>> ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    0.25
    """
    curve = reliability_curve(probs, labels, bins, axis=axis)
    gap = (curve.confidence - curve.accuracy).abs()
    return ((gap * curve.count).nansum() / curve.count.sum()).item()


def auroc(negatives: Tensor, positives: Tensor) -> float:
    """Probability that a positive scores higher than a negative, ties counted one half; exact.

    Args:
        negatives: Scores such as the uncertainty of in-distribution inputs, (N,).
        positives: Scores such as the uncertainty of out-of-distribution inputs, (M,).

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
    0.875
    """
    negatives, positives = score_column("negatives", negatives), score_column("positives", positives)
    negatives = negatives.sort().values
    below = torch.searchsorted(negatives, positives)  # (M,)
    not_above = torch.searchsorted(negatives, positives, right=True)  # (M,)
    twice_wins = int((below + not_above).sum())
    return twice_wins / (2 * len(negatives) * len(positives))  # of integers: rounded only once


def fpr_at_95_tpr(negatives: Tensor, positives: Tensor) -> float:
    """Share of negatives at or above the largest threshold that at least 95 % of positives reach.

    >>> fpr_at_95_tpr(torch.tensor([0.0, 0.1, 0.2, 0.3]), torch.tensor([0.2, 0.4]))
    0.5
    """
    negatives, positives = score_column("negatives", negatives), score_column("positives", positives)
    needed = -(-95 * len(positives) // 100)  # ceil of 0.95 M without its rounding
    threshold = positives.sort(descending=True).values[needed - 1]
    return (negatives >= threshold).double().mean().item()


def risk_coverage(uncertainty: Tensor, correct: Tensor) -> RiskCoverage:
    """Error rate when only the most certain rows are answered, for every coverage.

    Rows of equal uncertainty share their errors evenly (the mean over their orders), so the result
    does not depend on the order of rows.

    Args:
        uncertainty: Any score that grows with doubt, (N,).
        correct: Whether each row was predicted right, bool or 0 and 1, (N,).

    >>> risk_coverage(torch.tensor([0.3, 0.1]), torch.tensor([False, True])).risk.tolist()
    [0.0, 0.5]
    """
    uncertainty, right = score_column("uncertainty", uncertainty), score_column("correct", correct)
    rows = len(uncertainty)
    if len(right) != rows:
        raise problem("correct", f"of length {rows}", f"length {len(right)}", "pass one entry per row of `uncertainty`")
    if len(odd := right[(right != 0) & (right != 1)]):
        raise problem("correct", "True or False", f"{odd[0]}", "pass probs.argmax(1) == labels")
    uncertainty, order = uncertainty.sort(stable=True)
    new = (uncertainty[1:] != uncertainty[:-1]).long()
    group = F.pad(new.cumsum(0), (1, 0))  # (N,) number of the tie
    size, errors = group.bincount(), group.bincount(1 - right[order])  # (groups,)
    kept = torch.arange(1, rows + 1, dtype=torch.float64)
    within = kept - (size.cumsum(0) - size)[group]  # how many of its own group are kept
    risk = ((errors.cumsum(0) - errors)[group] + within * errors[group] / size[group]) / kept
    return RiskCoverage(kept / rows, risk, risk.mean().item())


def aurc(probs: Tensor, labels: Tensor, *, axis: int = 1) -> float:
    """Area under the risk-coverage curve when the most confident rows are answered first.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.25
    """
    probs, labels = class_rows("probs", probs, labels, axis)
    confidence, guess = probs.max(1)
    return risk_coverage(1 - confidence, guess == labels).area


_SCORES: dict[str, Metric] = {"error": error, "nll": nll, "ece": ece, "brier": brier, "aurc": aurc}


def scores(
    probs: Tensor, log_probs: Tensor, labels: Tensor, names: Sequence[str] = tuple(_SCORES), *, axis: int = 1
) -> dict[str, float]:
    """Scores of a classifier by name.

    Args:
        probs: Class probabilities, (N, C) or dense.
        log_probs: Their logarithms, which `nll` needs.
        labels: Class indices.
        names: Which scores, in order: some of error, nll, ece, brier, aurc.
        axis: Axis of the classes.

    >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    >>> scores(probs, probs.log(), torch.tensor([0, 1]), ("error", "aurc"))
    {'error': 0.5, 'aurc': 0.25}
    """
    return {name: _SCORES[name](log_probs if name == "nll" else probs, labels, axis=axis) for name in names}


def rmse(mean: Tensor, target: Tensor) -> float:
    """Root mean squared error.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0]))  # of 3 and 4
    3.535533905029297
    """
    target, mean = same_shape(target, mean=mean)
    return (mean - target).square().mean().sqrt().item()


def coverage(low: Tensor, high: Tensor, target: Tensor) -> float:
    """Share of targets inside their intervals, ends included.

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    0.5
    """
    target, low, high = same_shape(target, low=low, high=high)
    return ((low <= target) & (target <= high)).double().mean().item()


def interval_score(low: Tensor, high: Tensor, target: Tensor, level: float = 0.9) -> float:
    """Mean width of central intervals, plus 2 / (1 - level) times the distance of each target outside; lower is better.

    Its expectation is lowest for the true quantiles (Gneiting & Raftery, 2007).

    >>> round(interval_score(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.5]), level=0.9), 6)  # 1 and 1 + 20 / 2
    6.0
    """
    check_level(level)
    target, low, high = (values.double() for values in same_shape(target, low=low, high=high))
    outside = (low - target).clamp_min(0) + (target - high).clamp_min(0)
    return (high - low + 2 / (1 - level) * outside).mean().item()


def crps(means: Tensor, stds: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Continuous ranked probability score of a mixture of Gaussians, E|X - y| - E|X - X'| / 2; lower is better.

    In closed form (Grimit et al., 2006). For one Gaussian it is an absolute error that uncertainty softens.

    Args:
        means: Mean of each draw, (J, N, ...): `prediction.draw_means`.
        stds: Standard deviation of each draw, (J, N, ...): `prediction.draw_stds`.
        target: (N, ...).
        weights: Weight of each draw, (J, N, ...), if they are not equal: `prediction.draw_weights`.

    >>> round(crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1)), 4)  # (sqrt 2 - 1) / sqrt pi
    0.2337
    """
    if means.shape != stds.shape or not len(means) or not bool((stds > 0).all()):
        got = f"shapes {tuple(means.shape)} and {tuple(stds.shape)}, or a std that is not positive"
        raise problem("stds", "positive, of the shape of means", got, "pass prediction.draw_stds")
    weights = torch.full_like(means, 1 / len(means)) if weights is None else weights
    if weights.shape != means.shape or bool((weights < 0).any() or ((weights.sum(0) - 1).abs() > 1e-3).any()):
        got = f"shape {tuple(weights.shape)}, sums from {weights.sum(0).min():.4g} to {weights.sum(0).max():.4g}"
        raise problem("weights", "of the shape of means, with sum 1 over draws", got, "pass prediction.draw_weights")
    same_shape(target, means=means[0], stds=stds[0])
    means, stds, target, weights = (values.detach().cpu().double() for values in (means, stds, target, weights))
    apart = torch.zeros_like(target)
    for mean, std, weight in zip(means, stds, weights, strict=True):  # (J, N, ...) at a time
        apart += weight * (weights * _mean_distance(means - mean, (stds.square() + std.square()).sqrt())).sum(0)
    return ((weights * _mean_distance(means - target, stds)).sum(0) - apart / 2).mean().item()


def _mean_distance(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of X ~ N(mean, std²)."""
    ratio = mean / std
    return mean * torch.erf(ratio / math.sqrt(2)) + std * math.sqrt(2 / math.pi) * (-0.5 * ratio.square()).exp()


class Interval(NamedTuple):
    """A metric's value on the data and the ends of its confidence interval.

    >>> Interval(value=0.12, low=0.1, high=0.15).high
    0.15
    """

    value: float
    low: float
    high: float


def bootstrap(
    metric: Metric, *samples: Tensor, resamples: int = 1000, level: float = 0.95, seed: int = 0, paired: bool = True
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
        "ece": _bin_numbers(confidence, torch.arange(BINS + 1, dtype=torch.float64) / BINS),
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
