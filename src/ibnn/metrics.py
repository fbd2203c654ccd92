"""METRICS: how good a prediction is, how honest its probabilities are, how useful its uncertainty.

Pure functions of tensors on any device, computed in float64 on the CPU.
Axes: N rows, C classes. Dense predictions (N, C, ...) count every position as a row of its own; `axis` says where their
classes are, and is -1 for tokens (N, T, C): pass that of the prediction, `axis=prediction.axis`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.errors import complaint

__all__ = [
    "Interval",
    "ReliabilityCurve",
    "RiskCoverage",
    "auroc",
    "bootstrap",
    "brier",
    "ece",
    "error",
    "fpr_at_95_tpr",
    "nll",
    "reliability_curve",
    "risk_coverage",
]

_SUM_TOLERANCE = 1e-3  # of a row's total probability
_TOP_TOLERANCE = 1e-4  # of the largest (log-)probability, which rounding may lift above its bound


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


class Interval(NamedTuple):
    """A metric's value on the data and the ends of its confidence interval.

    >>> Interval(value=0.12, low=0.1, high=0.15).high
    0.15
    """

    value: float
    low: float
    high: float


def _problem(argument: str, expected: str, came: str, remedy: str) -> ValueError:
    return ValueError(complaint(argument, expected, came, f"{remedy[0].upper()}{remedy[1:]}."))


def _check_numbers(name: str, values: Tensor) -> None:
    if len(nans := values.isnan().nonzero()):
        raise _problem(name, "numbers", f"NaN in row {nans[0, 0]}", "find what made it upstream")


def _check_distributions(name: str, values: Tensor) -> None:
    """Checks that every row of `values` (R, C), probs or log_probs by name, is a distribution."""
    logs = name == "log_probs"
    probs, top, what = (values.exp(), 0, "exps") if logs else (values, 1, "values")
    total = probs.sum(1)  # (R,)
    outside = ((values > top + _TOP_TOLERANCE) | (probs < 0)).any(1)
    if len(bad := (outside | ((total - 1).abs() > _SUM_TOLERANCE)).nonzero()):
        row = int(bad[0])
        expected = f"values {'of at most 0' if logs else 'in [0, 1]'} with {what} summing to 1"
        low, high = values[row].aminmax()
        came = f"{low:.4g} to {high:.4g} with {what} summing to {total[row]:.4g} in row {row}"
        remedy = f"did you pass logits? pass prediction.{name}, in float32 or wider"
        raise _problem(name, expected, came, remedy)


def _rows(name: str, values: Tensor, labels: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Checks `values` (N, C, ...), named probs or log_probs, classes in an axis, and flattens both: (R, C), (R,)."""
    values, labels = values.detach().cpu(), labels.detach().cpu()
    shape = tuple(values.shape)
    if values.ndim < 2 or values.numel() == 0 or not values.is_floating_point():
        expected = "a non-empty float tensor (N, C) or (N, C, ...)"
        raise _problem(name, expected, f"{values.dtype} {shape}", f"pass prediction.{name}")
    if axis in (0, -values.ndim) or not -values.ndim <= axis < values.ndim:
        raise _problem("axis", f"one of {name} {shape} beyond the first", f"{axis}", "pass 1 or -1")
    values = values.movedim(axis, 1)
    if labels.shape != values[:, 0].shape:
        expected = f"of shape {tuple(values[:, 0].shape)} to go with {name} {shape}"
        came = f"shape {tuple(labels.shape)}"
        raise _problem("labels", expected, came, f"pass one class index per row, classes on axis {axis}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise _problem("labels", "of an integer dtype", f"{labels.dtype}", "pass labels.long()")
    values, labels = values.movedim(1, -1).flatten(0, -2), labels.long().reshape(-1)
    classes = values.shape[1]
    if len(wrong := labels[(labels < 0) | (labels >= classes)]):
        remedy = "drop rows without a label and count classes from 0"
        raise _problem("labels", f"in 0 to {classes - 1}", f"{wrong[0]}", remedy)
    _check_numbers(name, values)
    _check_distributions(name, values.double())
    return values, labels


def _scores(name: str, values: Tensor) -> Tensor:
    """Checks that `values` are one or more numbers along one axis."""
    if values.ndim != 1 or len(values) == 0:
        came, remedy = f"shape {tuple(values.shape)}", f"pass {name}.flatten() of some data"
        raise _problem(name, "a non-empty 1-D tensor", came, remedy)
    _check_numbers(name, values)
    return values.detach().cpu().double().contiguous()  # else searchsorted warns


def error(probs: Tensor, labels: Tensor, *, axis: int = 1) -> float:
    """Share of rows whose most probable class (the first, if tied) is not the label.

    >>> error(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    probs, labels = _rows("probs", probs, labels, axis)
    return (probs.argmax(1) != labels).double().mean().item()


def nll(log_probs: Tensor, labels: Tensor, *, axis: int = 1) -> float:
    """Mean of -log p(label), in nats; takes log-probabilities, since probabilities underflow.

    >>> round(nll(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0])), 6)  # log 4
    1.386294
    """
    log_probs, labels = _rows("log_probs", log_probs, labels, axis)
    return 0 - log_probs.gather(1, labels[:, None]).double().mean().item()  # 0, never -0


def brier(probs: Tensor, labels: Tensor, *, axis: int = 1) -> float:
    """Squared distance of the probabilities to the one-hot label, summed over classes: 0 to 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    0.5
    """
    probs, labels = _rows("probs", probs, labels, axis)
    hit = torch.nn.functional.one_hot(labels, probs.shape[1])
    return (probs.double() - hit).square().sum(1).mean().item()


def reliability_curve(probs: Tensor, labels: Tensor, bins: int = 15, *, axis: int = 1) -> ReliabilityCurve:
    """Confidence and accuracy of the predicted class in bins of equal width, each (lo, hi].

    Confidence 1 falls in the last bin and 0 in the first. Borders are rounded as `probs` are, so
    that 0.6 lies on the border 9/15 in float32 too.

    >>> probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.5, 0.5]])
    >>> reliability_curve(probs, torch.tensor([0, 1, 1]), bins=2).accuracy.tolist()
    [0.0, 0.5]
    """
    if bins < 1:
        raise _problem("bins", "an integer of at least 1", f"{bins}", "pass bins=15 as the paper")
    probs, labels = _rows("probs", probs, labels, axis)
    confidence, guess = probs.max(1)
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins  # linspace would miss some by an ulp
    index = torch.bucketize(confidence, edges.to(probs.dtype)).sub(1).clamp(0, bins - 1)
    count = index.bincount(minlength=bins)
    total = index.bincount(confidence.double(), minlength=bins)
    hits = index.bincount((guess == labels).double(), minlength=bins)
    return ReliabilityCurve(total / count, hits / count, count, edges)


def ece(probs: Tensor, labels: Tensor, bins: int = 15, *, axis: int = 1) -> float:
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
    negatives, positives = _scores("negatives", negatives), _scores("positives", positives)
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
    negatives, positives = _scores("negatives", negatives), _scores("positives", positives)
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
    uncertainty, right = _scores("uncertainty", uncertainty), _scores("correct", correct)
    rows = len(uncertainty)
    if len(right) != rows:
        remedy = "pass one entry per row of `uncertainty`"
        raise _problem("correct", f"of length {rows}", f"length {len(right)}", remedy)
    if len(odd := right[(right != 0) & (right != 1)]):
        raise _problem("correct", "True or False", f"{odd[0]}", "pass probs.argmax(1) == labels")
    uncertainty, order = uncertainty.sort(stable=True)
    new = (uncertainty[1:] != uncertainty[:-1]).long()
    group = torch.nn.functional.pad(new.cumsum(0), (1, 0))  # (N,) number of the tie
    size, errors = group.bincount(), group.bincount(1 - right[order])  # (groups,)
    kept = torch.arange(1, rows + 1, dtype=torch.float64)
    within = kept - (size.cumsum(0) - size)[group]  # how many of its own group are kept
    risk = ((errors.cumsum(0) - errors)[group] + within * errors[group] / size[group]) / kept
    return RiskCoverage(kept / rows, risk, risk.mean().item())


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
    >>> bootstrap(error, probs, labels)  # 0.2 and two standard errors of 0.04
    Interval(value=0.2, low=0.12, high=0.28)
    """
    sizes = [len(sample) if sample.ndim else 0 for sample in samples]
    if not sizes or 0 in sizes:
        raise _problem("samples", "tensors with rows on axis 0", f"rows {sizes}", "pass some data")
    if paired and len(set(sizes)) > 1:
        remedy = "pass paired=False if the samples are independent"
        raise _problem("samples", "as many rows in each, being paired", f"rows {sizes}", remedy)
    if resamples < 1:
        raise _problem("resamples", "an integer of at least 1", f"{resamples}", "pass 1000 or so")
    if not 0 < level < 1:
        raise _problem("level", "a share between 0 and 1", f"{level}", "pass 0.95 for 95 %")
    data, generator = [s.detach() for s in samples], torch.Generator().manual_seed(seed)
    values = torch.empty(resamples, dtype=torch.float64)
    independent = sizes[:1] if paired else sizes
    for r in range(resamples):
        drawn = [torch.randint(n, (n,), generator=generator) for n in independent]
        drawn *= len(sizes) // len(independent)
        values[r] = metric(*(s[i.to(s.device)] for s, i in zip(data, drawn, strict=True)))
    _check_numbers("metric", values)
    ranked = values.sort().values.tolist()
    cut = int((1 - level) / 2 * (resamples - 1) + 1e-9)  # ranks beyond each end, less rounding
    return Interval(float(metric(*data)), ranked[cut], ranked[-1 - cut])
