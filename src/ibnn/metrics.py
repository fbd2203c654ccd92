"""Accuracy, calibration and usefulness of uncertainty, as pure functions of tensors on any device or numpy arrays.

Numbers are computed in float64 on the CPU, except `rmse` and `coverage`, which keep the targets' precision. Axes: N
rows, C classes. Dense predictions (N, C, ...) count every position as a row; `axis` is the axis of their classes, -1
for tokens (N, T, C): pass `axis=prediction.axis`.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ReliabilityCurve", "RiskCoverage", "reliability_curve", "risk_coverage", "scores"]  # of classifiers
__all__ += ["adaptive_ece", "augrc", "aupr", "aurc", "auroc", "brier", "classwise_ece", "ece", "error"]
__all__ += ["fpr_at_95_tpr", "nll"]
__all__ += ["coverage", "crps", "pit", "rmse"]  # of numbers
__all__ += ["Interval", "bootstrap", "score_intervals"]  # by resampling

Values: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"  # what metrics accept
Metric = Callable[..., float | Tensor]
BINS = 15  # of reliability curves and the ECE, as in the paper
SUM_TOLERANCE = 1e-3  # of a row's total probability
TOP_TOLERANCE = 1e-4  # of the largest (log-)probability, which rounding may lift above its bound


class ReliabilityCurve(NamedTuple):
    """What a reliability diagram draws, one entry per bin; empty bins have nan means and count 0."""

    confidence: Tensor  # mean probability of the predicted class (bins,)
    accuracy: Tensor  # share of rows predicted right (bins,)
    count: Tensor  # type: ignore[assignment]  # rows (bins,); hides tuple.count
    edges: Tensor  # borders of the bins (bins + 1,)


class RiskCoverage(NamedTuple):
    """Error rate among the i most certain rows, for i = 1 to N."""

    coverage: Tensor  # i / N (N,)
    risk: Tensor  # errors among the first i, over i (N,)
    area: float  # AURC, the mean of risk


def error(probs: Values, labels: Values, *, axis: int = 1) -> float:
    """Share of rows whose most probable class (the first, if tied) is not the label.

    >>> error(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    return (~_guesses(probs, labels, axis)[1]).double().mean().item()


def nll(log_probs: Values, labels: Values, *, axis: int = 1) -> float:
    """Mean of -log p(label), in nats; takes log-probabilities, since probabilities underflow.

    >>> round(nll(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0])), 6)  # log 4
    1.386294
    """
    log_probs, labels = class_rows("log_probs", log_probs, labels, axis)
    return 0 - log_probs.gather(1, labels[:, None]).double().mean().item()  # 0, never -0


def brier(probs: Values, labels: Values, *, axis: int = 1) -> float:
    """Squared distance of the probabilities to the one-hot label, summed over classes: 0 to 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    0.5
    """
    probs, labels = class_rows("probs", probs, labels, axis)
    return (probs.double() - F.one_hot(labels, probs.shape[1])).square().sum(1).mean().item()


def reliability_curve(probs: Values, labels: Values, bins: int = BINS, *, axis: int = 1) -> ReliabilityCurve:
    """Confidence and accuracy of the predicted class in bins of equal width, each (lo, hi]; 0 falls in the first.

    >>> probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.5, 0.5]])
    >>> reliability_curve(probs, torch.tensor([0, 1, 1]), bins=2).accuracy.tolist()
    [0.0, 0.5]
    """
    edges = _edges(bins)
    confidence, right = _guesses(probs, labels, axis)
    index = _bin_numbers(confidence, edges)
    count = index.bincount(minlength=bins)
    total, hits = (index.bincount(values.double(), minlength=bins) for values in (confidence, right))
    return ReliabilityCurve(total / count, hits / count, count, edges)


def _guesses(probs: Values, labels: Values, axis: int) -> tuple[Tensor, Tensor]:
    """Returns the probability of each row's most probable class, and whether that class is the label, (R,) each."""
    probs, labels = class_rows("probs", probs, labels, axis)
    confidence, guess = probs.max(1)
    return confidence, guess == labels


def _edges(bins: int) -> Tensor:
    check.integer("bins", bins, remedy="Pass bins=15.")
    return torch.arange(bins + 1, dtype=torch.float64) / bins  # linspace would miss some by an ulp


def _bin_numbers(confidence: Tensor, edges: Tensor) -> Tensor:
    """Returns the bin, (lo, hi], of each confidence."""
    return torch.bucketize(confidence, edges.to(confidence.dtype)).sub(1).clamp(0, len(edges) - 2)


def ece(probs: Values, labels: Values, bins: int = BINS, *, axis: int = 1) -> float:
    """Expected calibration error: mean gap of confidence and accuracy over the bins, by their rows.

    >>> ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    0.25
    """
    curve = reliability_curve(probs, labels, bins, axis=axis)
    return ((curve.confidence - curve.accuracy).abs() * curve.count).nansum().item() / int(curve.count.sum())


def adaptive_ece(probs: Values, labels: Values, bins: int = BINS, *, axis: int = 1) -> float:
    """ECE with bins that hold equally many rows, so that none is nearly empty (Nguyen & O'Connor, 2015).

    Rows of equal confidence share a bin, so the result does not depend on the order of rows.

    >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.7, 0.3], [0.7, 0.3]])
    >>> round(adaptive_ece(probs, torch.tensor([0, 0, 0, 1]), bins=2), 6)  # (0.1 + 0.2) / 2
    0.15
    """
    check.integer("bins", bins, remedy="Pass bins=15.")
    confidence, right = (values.double() for values in _guesses(probs, labels, axis))
    last = torch.arange(1, bins + 1) * len(confidence) // bins - 1  # the last row of each bin, by rank
    borders = confidence.sort().values[last.clamp_min(0)].unique()
    index = torch.bucketize(confidence, borders)
    return index.bincount(confidence - right).abs().sum().item() / len(confidence)  # sums of confidence − accuracy


def classwise_ece(probs: Values, labels: Values, bins: int = BINS, *, axis: int = 1) -> float:
    """ECE of every class's own probability against how often that class is true, averaged over classes.

    The ECE looks at the predicted class alone; here every probability counts (Kull et al., 2019).

    >>> classwise_ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    0.25
    """
    edges, (probs, labels) = _edges(bins), class_rows("probs", probs, labels, axis)
    columns = zip(probs.T.contiguous(), F.one_hot(labels, probs.shape[1]).T.double(), strict=True)
    gaps = [_bin_numbers(own, edges).bincount(own.double() - hit).abs().sum() for own, hit in columns]
    return torch.stack(gaps).mean().item() / len(probs)


def auroc(negatives: Values, positives: Values) -> float:
    """Probability that a positive scores higher than a negative, ties counted one half; exact.

    Args:
        negatives: Scores such as the uncertainty of in-distribution inputs, (N,).
        positives: Scores such as the uncertainty of out-of-distribution inputs, (M,).

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
    0.875
    """
    negatives, positives = score_column("negatives", negatives).sort().values, score_column("positives", positives)
    below, not_above = (torch.searchsorted(negatives, positives, right=right) for right in (False, True))  # (M,)
    return int((below + not_above).sum()) / (2 * len(negatives) * len(positives))  # of integers: rounded only once


def aupr(negatives: Values, positives: Values) -> float:
    """Area under the precision-recall curve (average precision): precision at each positive's score, averaged.

    It equals the share of positives for scores without information. Arguments are those of `auroc`.

    >>> round(aupr(torch.tensor([0.1, 0.3]), torch.tensor([0.2, 0.4])), 6)  # precisions 1 and 2 / 3
    0.833333
    """
    negatives, positives = score_column("negatives", negatives), score_column("positives", positives)
    true = len(positives) - torch.searchsorted(positives.sort().values, positives)  # positives at or above, (M,)
    false = len(negatives) - torch.searchsorted(negatives.sort().values, positives)
    return (true / (true + false).double()).mean().item()


def fpr_at_95_tpr(negatives: Values, positives: Values) -> float:
    """Share of negatives at or above the largest threshold that at least 95 % of positives reach.

    >>> fpr_at_95_tpr(torch.tensor([0.0, 0.1, 0.2, 0.3]), torch.tensor([0.2, 0.4]))
    0.5
    """
    negatives, positives = score_column("negatives", negatives), score_column("positives", positives)
    needed = -(-95 * len(positives) // 100)  # ceil of 0.95 M without its rounding
    threshold = positives.sort(descending=True).values[needed - 1]
    return (negatives >= threshold).double().mean().item()


def risk_coverage(uncertainty: Values, correct: Values) -> RiskCoverage:
    """Error rate when only the most certain rows are answered, for every coverage.

    Rows of equal uncertainty share their errors evenly, so the result does not depend on the order of rows.

    Args:
        uncertainty: A score that grows with doubt, (N,).
        correct: Whether each row was predicted right, bool or 0 and 1, (N,).

    >>> risk_coverage(torch.tensor([0.3, 0.1]), torch.tensor([False, True])).risk.tolist()
    [0.0, 0.5]
    """
    uncertainty, right = score_column("uncertainty", uncertainty), score_column("correct", correct)
    rows = len(uncertainty)
    check.shape("correct", right, (rows,), remedy="Pass one entry per row of `uncertainty`.")
    if len(odd := right[(right != 0) & (right != 1)]):
        raise ValueError(complaint("correct", "True or False", odd[0].item(), "Pass probs.argmax(1) == labels."))
    uncertainty, order = uncertainty.sort(stable=True)
    new = (uncertainty[1:] != uncertainty[:-1]).long()
    group = F.pad(new.cumsum(0), (1, 0))  # (N,) number of the tie
    size, errors = group.bincount(), group.bincount(1 - right[order])  # (groups,)
    kept = torch.arange(1, rows + 1, dtype=torch.float64)
    within = kept - (size.cumsum(0) - size)[group]  # how many of its own group are kept
    risk = ((errors.cumsum(0) - errors)[group] + within * errors[group] / size[group]) / kept
    return RiskCoverage(kept / rows, risk, risk.mean().item())


def aurc(probs: Values, labels: Values, *, axis: int = 1) -> float:
    """Area under the risk-coverage curve when the most confident rows are answered first.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.25
    """
    confidence, right = _guesses(probs, labels, axis)
    return risk_coverage(1 - confidence, right).area


def augrc(probs: Values, labels: Values, *, axis: int = 1) -> float:
    """Area under the generalised risk-coverage curve, which counts undetected errors (Traub et al., 2024).

    The generalised risk at a coverage is the share of *all* rows that are answered and wrong. Its area is
    (1 − AUROC) · accuracy · error + error² / 2, where the AUROC is that of confidence for telling right from wrong.

    >>> augrc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))  # the error is the less confident row
    0.125
    """
    confidence, right = _guesses(probs, labels, axis)
    wrong = 1 - right.double().mean().item()
    missed = 1 - auroc(confidence[~right], confidence[right]) if 0 < wrong < 1 else 0.0
    return missed * wrong * (1 - wrong) + wrong**2 / 2


_SCORES: dict[str, Callable[..., float]] = {"error": error, "nll": nll, "ece": ece, "brier": brier, "aurc": aurc}


def scores(
    probs: Values, log_probs: Values, labels: Values, names: Sequence[str] = tuple(_SCORES), *, axis: int = 1
) -> dict[str, float]:
    """Returns scores of a classifier by name, in the order of `names`: some of error, nll, ece, brier, aurc.

    >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    >>> scores(probs, probs.log(), torch.tensor([0, 1]), ("error", "aurc"))
    {'error': 0.5, 'aurc': 0.25}
    """
    return {name: _SCORES[name](log_probs if name == "nll" else probs, labels, axis=axis) for name in names}


def rmse(mean: Values, target: Values) -> float:
    """Root mean squared error.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0]))  # of 3 and 4
    3.535533905029297
    """
    target, mean = same_shape(target, mean=mean)
    return (mean - target).square().mean().sqrt().item()


def coverage(low: Values, high: Values, target: Values) -> float:
    """Share of targets inside their intervals, ends included.

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    0.5
    """
    target, low, high = same_shape(target, low=low, high=high)
    return ((low <= target) & (target <= high)).double().mean().item()


def crps(means: Values, stds: Values, target: Values, weights: "Values | None" = None) -> float:
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
    means, stds, target, weights = _mixture(means, stds, target, weights)
    apart = torch.zeros_like(target)
    for mean, std, weight in zip(means, stds, weights, strict=True):  # (J, N, ...) at a time
        apart += weight * (weights * _mean_distance(means - mean, (stds.square() + std.square()).sqrt())).sum(0)
    return ((weights * _mean_distance(means - target, stds)).sum(0) - apart / 2).mean().item()


def pit(means: Values, stds: Values, target: Values, weights: "Values | None" = None) -> Tensor:
    """Probability integral transform: where each target lies in its predicted distribution, from 0 to 1.

    They are uniform if predictions are calibrated; many near 0 and 1 mean that predictions are too narrow. Arguments
    are those of `crps`.

    >>> pit(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0.0, 1.0])).round(decimals=4).tolist()
    [0.5, 0.8413]
    """
    means, stds, target, weights = _mixture(means, stds, target, weights)
    below: Tensor = torch.special.ndtr((target - means) / stds)
    return (weights * below).sum(0)


def _mixture(
    means: Values, stds: Values, target: Values, weights: "Values | None"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checks the draws of a mixture of Gaussians and its targets. Returns all in float64; default weights are equal."""
    means, stds = numbers("means", means), numbers("stds", stds)
    equal = torch.ones_like(means)
    weights = equal / equal.sum(0) if weights is None else numbers("weights", weights)
    for name, values in (("stds", stds), ("weights", weights)):
        check.shape(name, values, tuple(means.shape), remedy=f"Pass prediction.draw_{name}.")
    if not bool((stds > 0).all()):
        raise ValueError(complaint("stds", "positive", f"{stds.min():.4g}", "Pass prediction.draw_stds."))
    if bool((weights < 0).any() or ((weights.sum(0) - 1).abs() > 1e-3).any()):
        got = f"sums from {weights.sum(0).min():.4g} to {weights.sum(0).max():.4g}"
        raise ValueError(complaint("weights", "of sum 1 over draws", got, "Pass prediction.draw_weights."))
    target = same_shape(target, means=means.sum(0))[0]
    return means.double(), stds.double(), target.double(), weights.double()


def _mean_distance(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of X ~ N(mean, std²)."""
    ratio = mean / std
    return mean * torch.erf(ratio / math.sqrt(2)) + std * math.sqrt(2 / math.pi) * (-0.5 * ratio.square()).exp()


class Interval(NamedTuple):
    """A metric's value on the data and the ends of its confidence interval."""

    value: float
    low: float
    high: float


def bootstrap(
    metric: Metric, *samples: Values, resamples: int = 1000, level: float = 0.95, seed: int = 0, paired: bool = True
) -> Interval:
    """Percentile bootstrap interval of a metric; the ends are resampled values, rounded outwards.

    Args:
        metric: Called as `metric(*samples)`.
        samples: Tensors or arrays with rows on axis 0.
        resamples: How many times rows are drawn with replacement.
        level: Share of resampled values between the ends.
        seed: Of a generator of its own; the global one is not touched.
        paired: Draw the same rows of all samples (error, nll, ece), or of each its own (auroc).

    >>> probs, labels = torch.tensor([[0.9, 0.1]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> bootstrap(error, probs, labels)  # 0.2 and two standard errors of 0.04
    Interval(value=0.2, low=0.12, high=0.28)
    """
    data = [torch.as_tensor(sample).detach().cpu() for sample in samples]
    sizes = [len(sample) if sample.ndim else 0 for sample in data]
    if not sizes or 0 in sizes or (paired and len(set(sizes)) > 1):
        remedy = "Pass some data, with paired=False if the samples are independent."
        raise ValueError(complaint("samples", "of one or more rows, as many in each if paired", sizes, remedy))
    check.integer("resamples", resamples, remedy="Pass resamples=1000.")
    check.share("level", level, remedy="Pass 0.95 for 95 %.")
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(resamples, dtype=torch.float64)
    for r in range(resamples):
        drawn = [torch.randint(n, (n,), generator=generator) for n in (sizes[:1] if paired else sizes)]
        values[r] = metric(*(sample[rows] for sample, rows in zip(data, drawn * len(sizes), strict=False)))
    ranked = numbers("metric", values).sort().values.tolist()
    cut = int((1 - level) / 2 * (resamples - 1) + 1e-9)  # ranks beyond each end, less rounding
    return Interval(float(metric(*data)), ranked[cut], ranked[-1 - cut])


def score_intervals(probs: Values, log_probs: Values, labels: Values) -> dict[str, Interval]:
    """Error, NLL, ECE and Brier score of a classifier, each with its 95 % bootstrap interval.

    Equals `bootstrap` of each metric up to rounding, but computes every row's contribution only once.

    >>> probs, labels = torch.tensor([[0.9, 0.1]]).expand(100, 2), (torch.arange(100) < 20).long()
    >>> score_intervals(probs, probs.log(), labels)["error"]
    Interval(value=0.2, low=0.12, high=0.28)
    """
    log_probs, _ = class_rows("log_probs", log_probs, labels, 1)
    probs, labels = class_rows("probs", probs, labels, 1)
    confidence, guess = probs.max(1)
    wrong, bins = (guess != labels).double(), _bin_numbers(confidence, _edges(BINS))

    def mean_gap(bins: Tensor, gap: Tensor) -> float:
        return bins.bincount(gap, minlength=BINS).abs().sum().item() / len(gap)

    return {
        "error": bootstrap(torch.mean, wrong),
        "nll": bootstrap(torch.mean, 0 - log_probs.gather(1, labels[:, None])[:, 0].double()),
        "ece": bootstrap(mean_gap, bins, confidence.double() - 1 + wrong),
        "brier": bootstrap(torch.mean, (probs.double() - F.one_hot(labels, probs.shape[1])).square().sum(1)),
    }


# ------------------------------------------------------------------------------------------------------------- checks


def real(name: str, values: Values) -> Tensor:
    """Returns values of any kind as a tensor on the CPU, without its graph; raises unless they are real numbers."""
    try:
        found = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "Pass numbers, in rows of equal length."
        raise TypeError(complaint(name, "a tensor, an array or a list", type(values).__name__, remedy)) from error
    if found.is_complex():
        raise TypeError(complaint(name, "real numbers", f"dtype {found.dtype}", f"Pass {name}.real."))
    return found


def numbers(name: str, values: Values) -> Tensor:
    """Returns what `real` does; raises if a number is NaN, too."""
    found = real(name, values)
    if len(nans := found.isnan().nonzero()):
        got = "NaN" if found.dim() == 0 else f"NaN in row {nans[0, 0]}"
        raise ValueError(complaint(name, "numbers", got, "Find what made it upstream."))
    return found


def class_rows(name: str, values: Values, labels: Values, axis: int) -> tuple[Tensor, Tensor]:
    """Checks `values` (N, C, ...), named probs or log_probs, classes in an axis, and flattens both: (R, C), (R,)."""
    values, labels = numbers(name, values), numbers("labels", labels)
    if values.ndim < 2 or values.numel() == 0 or not values.is_floating_point():
        got, remedy = f"{values.dtype} {tuple(values.shape)}", f"Pass prediction.{name}."
        raise ValueError(complaint(name, "a non-empty float tensor (N, C) or (N, C, ...)", got, remedy))
    axis = axis + values.ndim if -values.ndim <= axis < 0 else axis
    check.integer("axis", axis, most=values.ndim - 1, remedy="Pass 1 or -1.")
    values = values.movedim(axis, 1)
    remedy = f"Pass one class index per row, classes on axis {axis}."
    check.shape("labels", labels, tuple(values[:, 0].shape), remedy=remedy)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(complaint("labels", "of an integer dtype", labels.dtype, "Pass labels.long()."))
    values, labels = values.movedim(1, -1).flatten(0, -2), labels.long().reshape(-1)
    if len(wrong := labels[(labels < 0) | (labels >= values.shape[1])]):
        remedy = "Drop rows without a label and count classes from 0."
        raise ValueError(complaint("labels", f"in 0 to {values.shape[1] - 1}", int(wrong[0]), remedy))
    wide, logs = values.double(), name == "log_probs"
    probs, top = (wide.exp(), 0) if logs else (wide, 1)
    outside = ((wide > top + TOP_TOLERANCE) | (probs < 0)).any(1)
    if len(bad := (outside | ((probs.sum(1) - 1).abs() > SUM_TOLERANCE)).nonzero()):
        (low, high), total = wide[bad[0]].aminmax(), probs[bad[0]].sum()
        got = f"{low:.4g} to {high:.4g}, with probabilities summing to {total:.4g}, in row {int(bad[0])}"
        remedy = f"Did you pass logits? Pass prediction.{name}, in float32 or wider."
        raise ValueError(complaint(name, "logs of probabilities" if logs else "probabilities", got, remedy))
    return values, labels


def score_column(name: str, values: Values) -> Tensor:
    """Checks that `values` are one or more numbers along one axis."""
    values = numbers(name, values)
    if values.ndim != 1 or len(values) == 0:
        got = f"shape {tuple(values.shape)}"
        raise ValueError(complaint(name, "a non-empty 1-D tensor", got, f"Pass {name}.flatten() of some data."))
    return values.double().contiguous()  # else searchsorted warns


def same_shape(target: Values, **others: Values) -> list[Tensor]:
    """Checks numbers that must have the target's shape; returns the target and the others as tensors."""
    found, tensors = numbers("target", target), {name: numbers(name, values) for name, values in others.items()}
    for name, values in tensors.items():
        if values.shape != found.shape or not found.numel():
            got = f"{tuple(values.shape)} and {tuple(found.shape)}"
            raise ValueError(complaint("target", f"of the shape of {name}, not empty", got, "Pass one of that shape."))
    return [found, *tensors.values()]
