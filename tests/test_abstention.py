"""The rule that withholds answers: its bound, its promise, novel inputs, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

import ibnn
from ibnn.monitoring.abstention import LEVELS, Threshold, threshold, upper_bound


def beta_bound(errors: int, count: int, miss: float) -> float:
    """Clopper and Pearson's bound as a quantile of the beta distribution."""
    return 1.0 if errors == count else float(stats.beta.ppf(1 - miss, errors + 1, count - errors))


@pytest.mark.parametrize(("errors", "count"), [(0, 1), (0, 59), (1, 20), (7, 50), (49, 50), (50, 50)])
@pytest.mark.parametrize("miss", [0.05, 0.0025])
def test_upper_bound_is_a_quantile_of_the_beta_distribution(errors: int, count: int, miss: float) -> None:
    assert upper_bound(errors, count, miss) == pytest.approx(beta_bound(errors, count, miss), abs=1e-12)
    if errors == 0:
        assert upper_bound(0, count, miss) == pytest.approx(1 - miss ** (1 / count))  # closed form


@pytest.mark.parametrize("risk", [0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("ties", [False, True])
def test_threshold_against_a_slow_reference(risk: float, ties: bool) -> None:
    doubt = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wrong = torch.rand(300, generator=torch.Generator().manual_seed(2)) < doubt**3 * 0.6
    doubt = (doubt * 8).round() if ties else doubt
    found = threshold(doubt, wrong, risk)
    ordered = sorted(zip(doubt.tolist(), wrong.tolist(), strict=True))
    limits = [ordered[300 * level // LEVELS - 1][0] for level in range(LEVELS, 0, -1)]
    sets = [(limit, [bad for value, bad in ordered if value <= limit]) for limit in limits]
    tried = [s for m, s in enumerate(sets, 1) if beta_bound(0, len(s[1]), 0.05 / m) <= risk]  # could pass at all
    passing = [
        (limit, len(given) / 300)
        for limit, given in tried
        if beta_bound(sum(given), len(given), 0.05 / len(tried)) <= risk
    ]
    best = max(passing, default=(-math.inf, 0.0))
    assert (found.limit, found.coverage) == best
    assert found.bound <= risk or not found.coverage


def test_the_promise_is_kept() -> None:
    """Of 400 thresholds at most 5 % (+ 4 standard errors) have a true risk above what was allowed."""
    generator, broken = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        doubt = torch.rand(200, generator=generator, dtype=torch.float64)
        wrong = torch.rand(200, generator=generator) < doubt * 0.4
        limit = threshold(doubt, wrong, 0.1).limit
        broken += limit > 0 and 0.2 * min(limit, 1.0) > 0.1  # the mean of 0.4 u over u < limit
    assert broken <= 400 * 0.05 + 4 * math.sqrt(400 * 0.05 * 0.95)


def answers(rows: int, seed: int = 0, **fields: Any) -> tuple[ibnn.CategoricalPrediction, torch.Tensor]:
    """Predictions of the sign of a number, and noisy labels."""
    x, noise = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed))
    found = ibnn.Categorical().summarise(torch.stack([-3 * x, 3 * x], 1)[None, None])
    return replace(found, **fields), (x + 0.3 * noise > 0).long()


def test_abstain_is_the_threshold_of_totals() -> None:
    p, y = answers(600)
    rule = ibnn.abstain(p, y, risk=0.05)
    assert rule == threshold(p.total, p.labels != y, 0.05)
    assert rule.novelty == 0.0
    withheld = rule(p)
    assert torch.equal(withheld, p.total > rule.limit)
    assert 1 - withheld.float().mean().item() == pytest.approx(rule.coverage)
    assert int((p.labels != y)[~withheld].sum()) == rule.errors
    assert rule.reasons(p) == ["uncertain" if each else None for each in withheld.tolist()]
    assert ibnn.abstain(p, y, risk=0.2).coverage > rule.coverage
    assert ibnn.abstain(p, y, risk=0.05, confidence=0.5).coverage >= rule.coverage


def test_novel_inputs_are_withheld_and_not_counted() -> None:
    novelty = torch.linspace(0.001, 1, 600)
    p, y = answers(600, p_value=novelty)
    rule = ibnn.abstain(p, y)  # 0.01 by default, for there are p-values
    novel = novelty <= 0.01
    assert 0 < int(novel.sum()) < 10
    assert rule.novelty == 0.01
    assert torch.equal(rule(p), novel | (p.total > rule.limit))
    given = ~rule(p)
    assert (rule.coverage, rule.errors) == (given.double().mean().item(), int((p.labels != y)[given].sum()))
    large = [
        m
        for m in range(1, LEVELS + 1)
        if 0.95 ** int((~novel & (p.total <= p.total.sort().values[599 - 30 * (m - 1)])).sum()) <= 0.05 / m
    ]
    assert rule.bound == pytest.approx(beta_bound(rule.errors, int(given.sum()), 0.05 / len(large)))
    words = {
        (False, False): None,
        (False, True): "uncertain",
        (True, False): "novel",
        (True, True): "novel and uncertain",
    }
    pairs = zip(novel.tolist(), (p.total > rule.limit).tolist(), strict=True)
    assert rule.reasons(p) == [words[pair] for pair in pairs]
    assert set(rule.reasons(p)) == set(words.values())
    assert ibnn.abstain(p, y, novelty=0) == ibnn.abstain(replace(p, p_value=None), y)


def test_a_p_value_at_the_level_is_novel() -> None:
    """10 / 200 in single precision is above 0.05 in double precision."""
    p, _ = answers(1, p_value=torch.tensor([10 / 200]))
    assert float(p.p_value) > 0.05  # type: ignore[arg-type]
    assert Threshold(math.inf, 1.0, 0, 1.0, 0.05).reasons(p) == ["novel"]


@pytest.mark.parametrize(("risk", "needed"), [(0.05, 59), (0.01, 299)])
def test_a_risk_needs_rows_even_without_an_error(risk: float, needed: int) -> None:
    p = ibnn.Categorical().summarise(torch.tensor([[[[9.0, 0.0]]]]).expand(1, 1, needed, 2))
    rule = ibnn.abstain(p, torch.zeros(needed), risk)
    assert (rule.coverage, rule.errors) == (1.0, 0)
    assert rule.bound == pytest.approx(1 - 0.05 ** (1 / needed))
    with pytest.raises(ValueError, match=f"target.*{needed}"):
        ibnn.abstain(p.rows(torch.arange(needed - 1)), torch.zeros(needed - 1), risk)


@pytest.mark.parametrize("shape", [(600,), (600, 1)])
def test_one_logit_is_answered_like_two(shape: tuple[int, ...]) -> None:
    two, y = answers(600)
    logits = two.log_probs[:, 1] - two.log_probs[:, 0]
    one = ibnn.Bernoulli().summarise(logits.reshape(1, 1, *shape))
    rule, expected = ibnn.abstain(one, y, 0.05), ibnn.abstain(two, y, 0.05)
    assert (rule.coverage, rule.errors) == (expected.coverage, expected.errors)
    assert torch.equal(rule(one), expected(two))
    assert ibnn.abstain(one, y.reshape(shape), 0.05) == rule


def test_numbers_are_withheld_as_novel_only() -> None:
    found = ibnn.Gaussian().summarise(torch.randn(2, 3, 4, 1))
    rule = Threshold(math.inf, 1.0, 0, 1.0, novelty=0.02)
    assert rule(replace(found, p_value=torch.tensor([0.01, 0.02, 0.03, 1]))).tolist() == [True, True, False, False]
    with pytest.raises(RuntimeError, match="reference data"):
        rule(found)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"risk": 0}, "risk"),
        ({"risk": 1.0}, "risk"),
        ({"confidence": 1.5}, "confidence"),
        ({"novelty": -0.1}, "novelty"),
        ({"target": torch.zeros(3)}, "target"),
        ({"p": torch.zeros(3)}, "p"),
        ({"p": ibnn.Bernoulli().summarise(torch.zeros(1, 1, 20, 3))}, "p"),
        ({"p": ibnn.Categorical().summarise(torch.zeros(1, 1, 0, 3))}, "p"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], argument: str) -> None:
    p, y = answers(20)
    with pytest.raises(ValueError, match=f"`{argument}`"):
        ibnn.abstain(**{"p": p, "target": y} | change)


def test_novelty_that_is_not_known_cannot_be_asked_for() -> None:
    p, y = answers(20)
    with pytest.raises(RuntimeError, match="fit_novelty"):
        ibnn.abstain(p, y, novelty=0.01)
