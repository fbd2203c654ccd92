"""Metrics against closed forms, hand-worked examples, slow loops and scikit-learn."""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score
from torch import Tensor

from ibnn import metrics
from ibnn.metrics import (
    adaptive_ece,
    augrc,
    aupr,
    aurc,
    auroc,
    bootstrap,
    brier,
    classwise_ece,
    coverage,
    crps,
    ece,
    error,
    fpr_at_95_tpr,
    nll,
    pit,
    reliability_curve,
    risk_coverage,
    rmse,
    score_intervals,
    scores,
)

NAN = float("nan")
SCORES = st.lists(st.integers(-5, 5), min_size=1, max_size=25).map(torch.tensor)  # many ties


def binary(*confidence: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows [c, 1 - c], so that class 0 is predicted wherever c > 1/2."""
    top = torch.tensor(confidence, dtype=dtype)
    return torch.stack([top, 1 - top], dim=1)


def example(rows: int = 200, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random log-probabilities (N, C) in float64 and labels that mostly follow them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    labels = logits.softmax(1).multinomial(1, generator=generator).squeeze(1)
    return logits.log_softmax(1), labels


# --- error, nll, brier -------------------------------------------------------------------------


def test_error_nll_and_brier_of_a_hand_worked_table() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.25, 0.25, 0.5]])
    labels = torch.tensor([0, 1, 1])
    assert error(probs, labels) == pytest.approx(1 / 3, rel=1e-15)
    assert nll(probs.log(), labels) == pytest.approx(math.log(2 * 4 / 3 * 4) / 3, rel=1e-7)
    squares = (0.25 + 2 / 16) + (1 / 16 + 2 / 64) + (1 / 16 + 9 / 16 + 1 / 4)
    assert brier(probs, labels) == pytest.approx(squares / 3, rel=1e-15)


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_uniform_predictions_have_closed_forms(classes: int) -> None:
    probs = torch.full((7, classes), 1 / classes, dtype=torch.float64)
    labels = torch.arange(7) % classes
    assert nll(probs.log(), labels) == pytest.approx(math.log(classes), rel=1e-14)
    assert brier(probs, labels) == pytest.approx(1 - 1 / classes, rel=1e-14)
    wrong = (labels != 0).double().mean().item()  # a tie goes to the first class
    assert error(probs, labels) == wrong
    assert ece(probs, labels) == pytest.approx(abs(1 / classes - (1 - wrong)), abs=1e-14)


def test_perfect_and_certain_mistakes_are_the_extremes() -> None:
    probs = torch.tensor([[1.0, 0.0]])
    assert [f(probs, torch.tensor([0])) for f in (error, brier, ece)] == [0, 0, 0]
    assert [f(probs, torch.tensor([1])) for f in (error, brier, ece)] == [1, 2, 1]
    assert str(nll(probs.log(), torch.tensor([0]))) == "0.0"  # not -0.0
    assert nll(probs.log(), torch.tensor([1])) == math.inf


@pytest.mark.parametrize("classes", [2, 5])
def test_error_nll_and_brier_agree_with_scikit_learn(classes: int) -> None:
    log_probs, labels = example(classes=classes)
    probs = log_probs.exp()
    expected = log_loss(labels, probs, labels=list(range(classes)))
    assert nll(log_probs, labels) == pytest.approx(expected, rel=1e-12)
    one_hot = torch.eye(classes)[labels]
    columns = [brier_score_loss(one_hot[:, c], probs[:, c]) for c in range(classes)]
    assert brier(probs, labels) == pytest.approx(sum(columns), rel=1e-12)
    wrong = sum(p.index(max(p)) != y for p, y in zip(probs.tolist(), labels.tolist(), strict=True))
    assert error(probs, labels) == pytest.approx(wrong / len(labels), rel=1e-15)


def test_nll_keeps_log_probabilities_that_underflow() -> None:
    log_probs = torch.tensor([[0.0, -500.0]])
    assert nll(log_probs, torch.tensor([1])) == 500.0


def test_sums_are_float64() -> None:
    probs = torch.tensor([[0.75, 0.25]]).expand(3 * 10**5, 2)
    labels = torch.zeros(len(probs), dtype=torch.uint8)
    assert nll(probs.log(), labels) == pytest.approx(-probs[0, 0].log().item(), rel=1e-12)
    assert brier(probs, labels) == 0.125
    assert ece(probs, labels) == 0.25
    mixed = torch.tensor([[0, -(2.0**25)], [math.log(0.5), math.log(0.5)]])  # float32 drops log 2
    assert nll(mixed, torch.tensor([1, 0])) == (2**25 - mixed[1, 0].item()) / 2


def test_dense_predictions_count_positions_as_rows() -> None:
    log_probs, labels = example(rows=2 * 3 * 4)
    dense = log_probs.reshape(2, 3, 4, 5).permute(0, 3, 1, 2)  # (N, C, H, W)
    dense_labels = labels.reshape(2, 3, 4)
    for metric in (error, brier, ece):
        assert metric(dense.exp(), dense_labels) == metric(log_probs.exp(), labels)
    assert nll(dense, dense_labels) == nll(log_probs, labels)
    with pytest.raises(ValueError, match=r"`labels`.*shape \(2, 3, 4\)"):
        error(log_probs.exp().reshape(2, 3, 4, 5).permute(0, 3, 1, 2), labels)


# --- calibration -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ece_of_confidences_on_borders_by_hand(dtype: torch.dtype) -> None:
    # bins of 0.2: (0.4, 0.6] has 0.6 right and 0.6 wrong; (0.6, 0.8] 0.8 right; (0.8, 1] 1.0 wrong
    probs, labels = binary(0.6, 0.6, 0.8, 1.0, dtype=dtype), torch.tensor([0, 1, 0, 1])
    curve = reliability_curve(probs, labels, bins=5)
    assert curve.count.tolist() == [0, 0, 2, 1, 1]
    assert curve.edges.tolist() == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert curve.accuracy[2:].tolist() == [0.5, 1, 0]
    assert curve.confidence[2:].tolist() == pytest.approx([0.6, 0.8, 1.0], abs=1e-7)
    assert curve.confidence[:2].isnan().all()
    assert curve.accuracy[:2].isnan().all()
    assert ece(probs, labels, bins=5) == pytest.approx((2 * 0.1 + 0.2 + 1.0) / 4, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 49, 100])
def test_every_border_belongs_to_the_bin_below(bins: int, dtype: torch.dtype) -> None:
    for i in range((bins + 1) // 2, bins + 1):
        border = torch.tensor(i / bins, dtype=dtype)
        above = torch.nextafter(border, torch.tensor(2.0, dtype=dtype))
        for confidence, index in ((border, i - 1), (above, min(i, bins - 1))):
            if confidence >= 0.5:
                probs = torch.stack([confidence, 1 - confidence.clamp(max=1)])[None]
                count = reliability_curve(probs, torch.tensor([0]), bins).count
                assert count.nonzero().item() == index


def test_the_least_confidence_is_in_the_first_bin() -> None:
    probs = torch.full((1, 100), 0.01)
    assert reliability_curve(probs, torch.tensor([3])).count.tolist() == [1] + 14 * [0]


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_ece_agrees_with_a_loop(bins: int) -> None:
    log_probs, labels = example(rows=300)
    probs, total = log_probs.exp(), 0.0
    for b in range(bins):
        inside = [
            (max(p), p.index(max(p)) == y)
            for p, y in zip(probs.tolist(), labels.tolist(), strict=True)
            if b / bins < max(p) <= (b + 1) / bins
        ]
        total += abs(sum(c for c, _ in inside) - sum(right for _, right in inside))
    assert ece(probs, labels, bins) == pytest.approx(total / 300, rel=1e-12)
    if bins == 15:
        assert ece(probs, labels) == ece(probs, labels, bins)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1)), min_size=1, max_size=30),
    st.integers(1, 20),
)
def test_ece_properties(rows: list[tuple[float, int]], bins: int) -> None:
    probs, labels = binary(*(p for p, _ in rows)), torch.tensor([y for _, y in rows])
    mean_gap = abs(probs.max(1).values.mean().item() - (1 - error(probs, labels)))
    assert ece(probs, labels, bins=1) == pytest.approx(mean_gap, abs=1e-12)
    assert mean_gap - 1e-12 <= ece(probs, labels, bins) <= 1
    assert reliability_curve(probs, labels, bins).count.sum() == len(rows)


# --- separation --------------------------------------------------------------------------------


def test_auroc_by_hand() -> None:
    assert auroc(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) == 1
    assert auroc(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])) == 0
    assert auroc(torch.ones(3), torch.ones(5)) == 0.5
    # pairs (1,1) 1/2, (1,2) 1, (2,1) 0, (2,2) 1/2, (3,1) 0, (3,2) 0
    assert auroc(torch.tensor([1, 2, 3]), torch.tensor([1, 2])) == 2 / 6
    assert auroc(torch.tensor([-math.inf, 0.0]), torch.tensor([0.0, math.inf])) == 3.5 / 4


@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_auroc_agrees_with_scikit_learn(decimals: int) -> None:
    generator = torch.Generator().manual_seed(decimals)
    negatives = torch.randn(300, generator=generator, dtype=torch.float64).round(decimals=decimals)
    positives = torch.randn(170, generator=generator, dtype=torch.float64).round(decimals=decimals)
    truth = torch.cat([torch.zeros(300), torch.ones(170)])
    expected = roc_auc_score(truth, torch.cat([negatives, positives + 1]))
    assert auroc(negatives, positives + 1) == pytest.approx(expected, rel=1e-13)


def test_auroc_has_no_overflow_and_scales() -> None:
    scores = torch.arange(10**6)
    assert auroc(scores, scores) == 0.5
    assert auroc(scores, scores + 10**6) == 1


@given(SCORES, SCORES)
def test_auroc_properties(negatives: Tensor, positives: Tensor) -> None:
    pairs = itertools.product(negatives.tolist(), positives.tolist())
    wins = [(p > n) + (p == n) / 2 for n, p in pairs]
    value = auroc(negatives, positives)
    assert value == sum(wins) / len(wins)  # exact: halves of integers
    assert value + auroc(positives, negatives) == pytest.approx(1, abs=1e-15)
    monotone: list[Callable[[Tensor], Tensor]] = [
        lambda x: 3 * x - 7,
        lambda x: x.double().exp(),
        lambda x: x**3,
        lambda x: (x / 4).sigmoid(),
    ]
    assert all(auroc(f(negatives), f(positives)) == value for f in monotone)


@pytest.mark.parametrize(("rows", "threshold"), [(1, 1), (19, 1), (20, 2), (21, 2), (100, 6)])
def test_fpr95_threshold_by_hand(rows: int, threshold: int) -> None:
    # positives 1 to n: ceil(0.95 n) of them must score at least the threshold
    negatives = torch.arange(-50, 50)
    expected = (50 - threshold) / 100
    assert fpr_at_95_tpr(negatives, torch.arange(1, rows + 1).flip(0)) == expected


def test_fpr95_with_ties_and_separation() -> None:
    positives = torch.tensor(10 * [0.0] + 90 * [1.0])  # 90 % reach 1, so the threshold is 0
    assert fpr_at_95_tpr(torch.tensor([-1.0, 0.0, 0.5, 1.0]), positives) == 0.75
    positives = torch.tensor(5 * [0.0] + 95 * [1.0])  # exactly 95 % reach 1
    assert fpr_at_95_tpr(torch.tensor([-1.0, 0.0, 0.5, 1.0]), positives) == 0.25
    assert fpr_at_95_tpr(torch.zeros(3), torch.ones(3)) == 0
    assert fpr_at_95_tpr(torch.ones(3), torch.zeros(3)) == 1


@given(SCORES, SCORES)
def test_fpr95_agrees_with_a_loop(negatives: Tensor, positives: Tensor) -> None:
    n, p = negatives.tolist(), positives.tolist()
    threshold = max(t for t in p if 100 * sum(x >= t for x in p) >= 95 * len(p))
    assert fpr_at_95_tpr(negatives, positives) == sum(x >= threshold for x in n) / len(n)


# --- risk and coverage -------------------------------------------------------------------------


def test_risk_coverage_by_hand() -> None:
    curve = risk_coverage(torch.tensor([0.4, 0.1, 0.3, 0.2]), torch.tensor([0, 1, 1, 0]))
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert curve.risk.tolist() == [0, 1 / 2, 1 / 3, 1 / 2]
    assert curve.area == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4, rel=1e-15)


def test_risk_coverage_of_one_tie_is_the_error_rate() -> None:
    curve = risk_coverage(torch.zeros(8), torch.arange(8) >= 2)
    assert curve.risk.tolist() == 8 * [0.25]
    assert curve.area == 0.25


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_risk_coverage_is_the_mean_over_all_orders_of_ties(rows: list[tuple[int, bool]]) -> None:
    n, risks = len(rows), []
    for order in itertools.permutations(rows):
        ranked = sorted(order, key=lambda row: row[0])  # stable: keeps the order among ties
        risks.append([sum(not right for _, right in ranked[: i + 1]) / (i + 1) for i in range(n)])
    expected = [sum(column) / len(risks) for column in zip(*risks, strict=True)]
    curve = risk_coverage(torch.tensor([u for u, _ in rows]), torch.tensor([c for _, c in rows]))
    assert curve.risk.tolist() == pytest.approx(expected, abs=1e-12)
    assert curve.area == pytest.approx(sum(expected) / n, abs=1e-12)
    turned = [torch.tensor(column).flip(0) for column in zip(*rows, strict=True)]
    assert torch.equal(risk_coverage(*turned).risk, curve.risk)


# --- regression --------------------------------------------------------------------------------


def mixture(draws: int = 3, rows: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Means and standard deviations (J, N) of Gaussian mixtures, and targets (N,), in float64."""
    generator = torch.Generator().manual_seed(0)
    means, target = (torch.randn(n, rows, generator=generator, dtype=torch.float64) for n in (draws, 1))
    return means, 0.2 + torch.rand(draws, rows, generator=generator, dtype=torch.float64), 2 * target[0]


@pytest.mark.parametrize("draws", [1, 3])
def test_crps_is_the_integral_of_the_squared_error_of_the_distribution_function(draws: int) -> None:
    means, stds, target = mixture(draws)
    y = torch.linspace(-15, 15, 60_001, dtype=torch.float64)[:, None, None]
    cdf = torch.distributions.Normal(means, stds).cdf(y).mean(1)  # (grid, N)
    squares = (cdf - (y[:, 0] >= target).double()).square()
    integral = torch.trapezoid(squares, y[:, 0], dim=0)
    assert crps(means, stds, target) == pytest.approx(integral.mean().item(), abs=1e-3)  # the grid has steps of 5e-4


def test_crps_weighs_draws() -> None:
    """A draw of weight 0 is absent, one of weight 2 / 4 counts as two; rows have weights of their own."""
    means, stds, target = mixture()
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)[:, None].repeat(1, 7)
    twice = torch.tensor([0, 0, 1, 2])
    assert crps(means, stds, target, weights) == pytest.approx(crps(means[twice], stds[twice], target))
    weights[:, 3:] = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)[:, None]
    first, last = crps(means[twice, :3], stds[twice, :3], target[:3]), crps(means[:2, 3:], stds[:2, 3:], target[3:])
    assert crps(means, stds, target, weights) == pytest.approx((3 * first + 4 * last) / 7)


def test_crps_of_a_sharp_prediction_is_the_absolute_error() -> None:
    mean, _, target = mixture(1)
    assert crps(mean, torch.full_like(mean, 1e-9), target) == pytest.approx((mean[0] - target).abs().mean().item())
    means, stds, target = mixture()
    assert crps(means.repeat(2, 1), stds.repeat(2, 1), target) == pytest.approx(crps(means, stds, target))
    dense = [values.reshape(*values.shape[:-1], 7, 1) for values in (means, stds, target)]
    assert crps(*dense) == crps(means, stds, target)


def test_coverage_and_rmse_agree_with_a_count() -> None:
    generator = torch.Generator().manual_seed(1)
    low, width, target = (torch.randn(500, generator=generator, dtype=torch.float64) for _ in range(3))
    high = low + width.abs()
    inside, squares = 0, 0.0
    for a, b, y in zip(low.tolist(), high.tolist(), target.tolist(), strict=True):
        inside += a <= y <= b
        squares += (a - y) ** 2
    assert coverage(low, high, target) == inside / 500
    assert coverage(torch.zeros(3), torch.full((3,), 5.0), torch.tensor([1, 5, 9])) == pytest.approx(2 / 3)
    assert rmse(low, target) == pytest.approx(math.sqrt(squares / 500))


# --- several scores ------------------------------------------------------------------------------


def test_scores_are_those_of_the_single_metrics_in_the_order_asked_for() -> None:
    logs, labels = example()
    found = scores(logs.exp(), logs, labels)
    assert found == {
        "error": error(logs.exp(), labels),
        "nll": nll(logs, labels),
        "ece": ece(logs.exp(), labels),
        "brier": brier(logs.exp(), labels),
        "aurc": risk_coverage(1 - logs.exp().amax(1), logs.argmax(1) == labels).area,
    }
    assert list(scores(logs.exp(), logs, labels, ("nll", "error"))) == ["nll", "error"]
    dense = logs.reshape(20, 10, 5).movedim(-1, 1)
    assert aurc(dense.exp(), labels.reshape(20, 10)) == pytest.approx(found["aurc"])


def test_score_intervals_are_those_of_the_bootstrap() -> None:
    logs, labels = example(rows=60)
    found = score_intervals(logs.exp(), logs, labels)
    for name, metric in (("error", error), ("ece", ece), ("brier", brier)):
        assert found[name] == pytest.approx(bootstrap(metric, logs.exp(), labels))
    assert found["nll"] == pytest.approx(bootstrap(nll, logs, labels))


# --- bootstrap ---------------------------------------------------------------------------------


def mean(x: Tensor) -> float:
    return x.mean().item()


def test_bootstrap_ends_are_order_statistics_of_what_the_metric_returned() -> None:
    seen: list[float] = []

    def metric(x: Tensor) -> float:
        seen.append(mean(x))
        return seen[-1]

    x = torch.arange(40, dtype=torch.float64) ** 2
    value, low, high = bootstrap(metric, x, resamples=101, level=0.8)
    assert value == mean(x) == seen[-1]
    ranked = sorted(seen[:101])
    assert (low, high) == (ranked[10], ranked[90])  # 10 % and 90 % of the way along 101 values
    assert (
        bootstrap(mean, x, resamples=100, level=0.8)[1:]
        == (  # 9.9 and 89.1, outwards
            sorted(seen[:100])[9],
            sorted(seen[:100])[90],
        )
    )


def test_bootstrap_draws_rows_uniformly_with_replacement() -> None:
    rows, resamples, counts = 10, 2000, torch.zeros(10)
    distinct: list[float] = []

    def metric(x: Tensor) -> float:
        assert len(x) == rows
        counts.add_(x.bincount(minlength=rows))
        distinct.append(len(x.unique()))
        return 0.0

    bootstrap(metric, torch.arange(rows), resamples=resamples)
    counts -= 1  # the call on the data itself
    standard_error = math.sqrt(rows * resamples * 0.1 * 0.9)
    assert ((counts - resamples).abs() < 4 * standard_error).all()
    expected = rows * (1 - 0.9**rows)  # 6.51, of standard deviation below 1
    assert abs(sum(distinct[:-1]) / resamples - expected) < 4 / math.sqrt(resamples)


@pytest.mark.slow
def test_bootstrap_covers_a_known_mean_at_its_level() -> None:
    generator, trials, level = torch.Generator().manual_seed(1), 300, 0.8
    covered = 0
    for trial in range(trials):
        x = torch.randn(50, generator=generator, dtype=torch.float64)
        interval = bootstrap(mean, x, resamples=200, level=level, seed=trial)
        assert interval.low <= interval.value <= interval.high
        covered += interval.low <= 0 <= interval.high
    standard_error = math.sqrt(level * (1 - level) / trials)
    assert abs(covered / trials - level) < 4 * standard_error


def test_bootstrap_pairs_rows_or_draws_each_sample_apart() -> None:
    same: list[bool] = []

    def metric(a: Tensor, b: Tensor) -> float:
        same.append(torch.equal(a, b))
        return 0.0

    bootstrap(metric, torch.arange(20), torch.arange(20), resamples=50)
    assert all(same)
    same.clear()
    bootstrap(metric, torch.arange(20), torch.arange(20), resamples=50, paired=False)
    assert same == 50 * [False] + [True]  # the last call is on the data itself
    negatives, positives = torch.arange(30.0), torch.arange(10.0, 22.0)
    value, low, high = bootstrap(auroc, negatives, positives, paired=False, resamples=200)
    assert value == auroc(negatives, positives)
    assert 0 < low < value < high < 1


def test_bootstrap_is_a_function_of_its_seed_and_leaves_the_global_generator() -> None:
    log_probs, labels = example()
    state = torch.get_rng_state()
    first = bootstrap(nll, log_probs, labels, resamples=50, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert bootstrap(nll, log_probs, labels, resamples=50, seed=3) == first
    other = bootstrap(nll, log_probs, labels, resamples=50, seed=4)
    assert other.value == first.value
    assert other[1:] != first[1:]


# --- arguments ---------------------------------------------------------------------------------


def test_arguments_are_unchanged_and_may_require_gradients() -> None:
    log_probs, labels = example(rows=20)
    probs = log_probs.exp().requires_grad_()
    before = probs.detach().clone(), labels.clone()
    for metric in (error, brier, ece):
        assert type(metric(probs, labels)) is float
    assert not reliability_curve(probs, labels).confidence.requires_grad
    risk_coverage(probs[:, 0], labels > 2)
    assert type(auroc(probs[:, 0], probs[:, 1])) is float
    assert type(fpr_at_95_tpr(probs[:, 0], probs[:, 1])) is float
    assert type(bootstrap(lambda p: p.sum(), probs, resamples=2).value) is float
    assert torch.equal(probs, before[0])
    assert torch.equal(labels, before[1])


def test_probabilities_may_be_off_by_rounding() -> None:
    label = torch.tensor([0])
    assert error(torch.tensor([[1.00005, 0.0]]), label) == 0
    assert error(torch.tensor([[0.5, 0.4995]]), label) == 0
    assert nll(torch.tensor([[0.00005, -20.0]]), label) == pytest.approx(-0.00005)
    assert ece(torch.tensor([[0.25, 0.75]], dtype=torch.float16), label) == 0.75


P, Y = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 1])
LOGITS, S = torch.tensor([[0.9, 0.1], [2.0, -1.0]]), torch.tensor([0.1, 0.2])


def row(*values: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([values], dtype=torch.float32), torch.tensor([0])


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        # distributions
        (lambda: error(LOGITS, Y), "probs"),
        (lambda: brier(*row(0.5, 0.498)), "probs"),
        (lambda: ece(*row(1.00005, -5e-5)), "probs"),
        (lambda: ece(*row(1.0005, 0.0)), "probs"),
        (lambda: error(*row(math.inf, 0)), "probs"),
        (lambda: nll(P, Y), "log_probs"),
        (lambda: nll(*row(-1, -1)), "log_probs"),
        (lambda: nll(*row(2e-4, -20)), "log_probs"),
        (lambda: brier(*row(NAN, 0.6)), "probs"),
        (lambda: nll(*row(NAN, 0)), "log_probs"),
        (lambda: error(P[:0], Y[:0]), "probs"),
        (lambda: error(P[0], Y), "probs"),
        (lambda: error(torch.eye(2).long(), Y), "probs"),
        # labels
        (lambda: nll(P.log(), Y[:1]), "labels"),
        (lambda: brier(P, torch.eye(2).long()), "labels"),
        (lambda: error(P, Y.float()), "labels"),
        (lambda: error(P, Y.bool()), "labels"),
        (lambda: error(P, Y + 1), "labels"),
        (lambda: error(P, Y - 1), "labels"),
        (lambda: ece(P, Y, 0), "bins"),
        # scores
        (lambda: auroc(S[:0], S), "negatives"),
        (lambda: fpr_at_95_tpr(S, P), "positives"),
        (lambda: auroc(S, S * NAN), "positives"),
        (lambda: risk_coverage(S * NAN, Y), "uncertainty"),
        (lambda: risk_coverage(S, Y[:1]), "correct"),
        (lambda: risk_coverage(S, 7 * Y), "correct"),
        # bootstrap
        (lambda: bootstrap(mean), "samples"),
        (lambda: bootstrap(mean, S[:0]), "samples"),
        (lambda: bootstrap(mean, S[0]), "samples"),
        (lambda: bootstrap(auroc, S, S[:1]), "samples"),
        (lambda: bootstrap(lambda _: NAN, S), "metric"),
        (lambda: bootstrap(mean, S, resamples=0), "resamples"),
        (lambda: bootstrap(mean, S, level=95), "level"),
        (lambda: bootstrap(mean, S, level=1), "level"),
        (lambda: rmse(S, S[:, None]), "target"),
        (lambda: coverage(S, S, S * NAN), "target"),
        (lambda: crps(S[None], 0 * S[None], S), "stds"),
        (lambda: crps(S[None], S[None] + 1, S, S[None]), "weights"),
        (lambda: bootstrap(mean, S, level=0), "level"),
    ],
)
def test_an_error_has_four_parts(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)^Expected `{argument}` to be .+, but got .+[.] [A-Z].+[.]$"):
        call()


def test_every_public_function_has_a_doctest() -> None:
    functions = filter(inspect.isfunction, (getattr(metrics, name) for name in metrics.__all__))
    assert all(">>>" in (inspect.getdoc(function) or "") for function in functions)


# --- AUPR, AUGRC, other calibration errors, PIT ---------------------------------------------------


@given(SCORES, SCORES)
def test_aupr_is_scikit_learn_s_average_precision(negatives: Tensor, positives: Tensor) -> None:
    truth = np.repeat([0, 1], [len(negatives), len(positives)])
    expected = average_precision_score(truth, torch.cat([negatives, positives]).numpy())
    assert aupr(negatives, positives) == pytest.approx(expected, rel=1e-12)


def test_augrc_is_the_area_below_the_share_of_rows_answered_and_wrong() -> None:
    log_probs, labels = example()
    curve = risk_coverage(1 - log_probs.exp().max(1).values, log_probs.argmax(1) == labels)
    generalised = np.r_[0, (curve.risk * curve.coverage).numpy()]  # errors among the first i, over N
    expected = np.trapezoid(generalised, np.r_[0, curve.coverage.numpy()])
    assert augrc(log_probs.exp(), labels) == pytest.approx(expected, rel=1e-10)
    assert augrc(binary(0.9, 0.8), torch.tensor([0, 0])) == 0
    assert augrc(binary(0.9, 0.8), torch.tensor([1, 1])) == 0.5


def test_classwise_ece_is_the_mean_of_the_classes_own_gaps() -> None:
    log_probs, labels = example()
    probs, bins, expected = log_probs.exp(), 10, 0.0
    for k, low in itertools.product(range(5), np.arange(bins) / bins):
        inside = (probs[:, k] > low) & (probs[:, k] <= low + 1 / bins)
        if inside.any():
            gap = probs[inside, k].mean() - (labels[inside] == k).double().mean()
            expected += abs(float(gap)) * float(inside.double().mean()) / 5
    assert classwise_ece(probs, labels, bins) == pytest.approx(expected, rel=1e-10)
    with pytest.raises(ValueError, match="bins"):
        classwise_ece(probs, labels, 0)


def test_adaptive_ece_has_equally_many_rows_in_each_bin() -> None:
    log_probs, labels = example()
    confidence, guess = log_probs.exp().max(1)
    order = confidence.argsort()
    gaps = [abs(float((confidence[o] - (guess == labels)[o].double()).mean())) for o in order.chunk(10)]
    assert adaptive_ece(log_probs.exp(), labels, 10) == pytest.approx(np.mean(gaps), rel=1e-10)
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    rounded = (log_probs.exp() * 4).round().add(1)  # many ties
    probs = rounded / rounded.sum(1, keepdim=True)
    assert adaptive_ece(probs, labels) == pytest.approx(adaptive_ece(probs[shuffled], labels[shuffled]), rel=1e-12)
    assert adaptive_ece(binary(0.75, 0.75), torch.tensor([0, 1]), bins=15) == 0.25  # fewer rows than bins


def test_pit_is_the_mixture_s_distribution_function_at_the_target() -> None:
    random = np.random.default_rng(0)
    means, stds, target = random.normal(size=(3, 7)), random.uniform(0.5, 2, (3, 7)), random.normal(size=7)
    weights = np.repeat([[0.5], [0.3], [0.2]], 7, 1)
    np.testing.assert_allclose(pit(means, stds, target, weights), (weights * norm.cdf(target, means, stds)).sum(0))
    np.testing.assert_allclose(pit(means, stds, target), norm.cdf(target, means, stds).mean(0))
    with pytest.raises(ValueError, match="stds"):
        pit(means, -stds, target)


def test_arrays_and_lists_have_the_scores_of_tensors() -> None:
    log_probs, labels = example()
    probs, arrays = log_probs.exp(), (log_probs.exp().numpy(), labels.numpy())
    for metric in (error, brier, ece, classwise_ece, adaptive_ece, aurc, augrc):
        assert metric(*arrays) == metric(probs, labels)
    assert error(arrays[0].tolist(), labels.tolist()) == error(probs, labels)
    assert nll(log_probs.numpy(), arrays[1]) == nll(log_probs, labels)
    for metric in (auroc, aupr, fpr_at_95_tpr):
        assert metric(arrays[0][:, 0], arrays[0][:, 1]) == metric(probs[:, 0], probs[:, 1])
    low, high, target = np.zeros(4), np.ones(4), np.array([-1.0, 0.0, 0.5, 2.0])
    assert coverage(low, high, target) == 0.5
    assert rmse(low, high) == 1
    assert crps(low[None], high[None], target) == crps(*map(torch.tensor, (low[None], high[None], target)))
    assert bootstrap(error, *arrays, resamples=9) == bootstrap(error, probs, labels, resamples=9)
    assert score_intervals(arrays[0], log_probs.numpy(), arrays[1]) == score_intervals(probs, log_probs, labels)


GOOD: dict[str, Any] = {
    "probs": [[0.9, 0.1], [0.4, 0.6]],
    "log_probs": np.log([[0.9, 0.1], [0.4, 0.6]]),
    "labels": [0, 1],
    "negatives": [0.1, 0.2],
    "positives": np.array([0.3, 0.2]),
    "uncertainty": [0.1, 0.2],
    "correct": [True, False],
    "mean": [1.0, 2.0],
    "target": [1.0, 2.0],
    "low": [0.0, 0.0],
    "high": [3.0, 3.0],
    "means": [[1.0, 2.0]],
    "stds": [[1.0, 1.0]],
}
BAD = [
    None,
    object(),
    "x",
    [[1, 2], [3]],
    3.0,
    [],
    {},
    np.array([None]),
    torch.zeros(2, 2, 2),
    np.zeros((3, 2), complex),
]


@pytest.mark.parametrize("name", [name for name in metrics.__all__ if name[0].islower() and name != "bootstrap"])
def test_what_is_not_numbers_of_the_right_shape_is_named(name: str) -> None:
    metric = getattr(metrics, name)
    taken = [p.name for p in inspect.signature(metric).parameters.values() if p.default is p.empty]
    metric(*(GOOD[argument] for argument in taken))
    for wrong, bad in itertools.product(taken, BAD):
        with pytest.raises((TypeError, ValueError), match="`"):
            metric(*(bad if argument == wrong else GOOD[argument] for argument in taken))
