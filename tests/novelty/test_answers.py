"""Answers that know how novel their inputs are: what is epistemic then, and what observing an input takes."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import ibnn
from ibnn import baselines, nets
from ibnn.novelty import fitting, nodes
from ibnn.novelty.measure import fallen_back, known_share, measure

P_VALUES = [1.0, 0.4, 0.1, 0.01, 1e-9]


@pytest.mark.parametrize("p", [0.001, 0.02, 0.2, 0.36, 0.4, 0.9])
def test_the_known_share_is_the_least_bayes_factor(p):
    """Novel inputs' p-values of density ξ p^(ξ − 1), 0 < ξ ≤ 1: the factor 1 / density at its least, over a grid."""
    xi = torch.linspace(1e-4, 1, 100_001, dtype=torch.float64)
    factors = 1 / (xi * p ** (xi - 1))
    found = known_share(torch.tensor(p, dtype=torch.float64).log())
    torch.testing.assert_close(found, factors.min(), rtol=1e-6, atol=0)


def test_the_known_share_of_an_input_beyond_all_bounds_is_nothing():
    assert known_share(torch.tensor([-math.inf, -1e4])).tolist() == pytest.approx([0, 0], abs=1e-30)


@pytest.mark.parametrize("fallback", [0.001, 0.05])
def test_the_split_of_a_class_answer(fallback):
    draws = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    likelihood, base = ibnn.Categorical(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    plain, p = likelihood.summarise(draws), torch.tensor(P_VALUES).double()
    found = fallen_back(likelihood, plain, p.log(), fallback, base)
    w = (p / fallback).clamp_max(1)[:, None]
    probs = w * plain.probs + (1 - w) * base
    torch.testing.assert_close(found.probs, probs)
    torch.testing.assert_close(found.total, -(probs * probs.log()).sum(1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.aleatoric, w[:, 0] * known_share(p.log()) * plain.aleatoric)
    assert all((part >= 0).all() for part in (found.aleatoric, found.between, found.within))
    assert torch.equal(found.epistemic[0], plain.epistemic[0])  # not novel: that of the draws
    assert torch.equal(found.between[1], plain.between[1])
    assert found.aleatoric[4] < 1e-6


def test_identical_members_and_no_novelty_have_no_epistemic_part():
    draws = torch.randn(1, 1, 5, 4).expand(2, 3, 5, 4)
    likelihood, base = ibnn.Categorical(), torch.full((4,), 0.25)
    found = fallen_back(
        likelihood, likelihood.summarise(draws), torch.tensor([0.5, 1, 0.9, 0.4, 0.1]).log(), 0.01, base
    )
    assert found.epistemic[:4].abs().max() < 1e-6
    assert found.epistemic[4] > 0.1


def test_the_split_of_a_number_keeps_its_variance():
    draws = torch.randn(2, 3, 5, 1, generator=torch.Generator().manual_seed(0)).double()
    likelihood, base = ibnn.Gaussian(init_std=0.5).double(), torch.tensor([2.0, 3.0]).double()
    plain, log_p = likelihood.summarise(draws), torch.tensor(P_VALUES).double().log()
    found = fallen_back(likelihood, plain, log_p, 1e-3, base)
    torch.testing.assert_close(found.variance[:4], plain.variance[:4])
    torch.testing.assert_close(found.aleatoric[:4], known_share(log_p)[:4, None] * plain.aleatoric[:4])
    torch.testing.assert_close(found.std[4], torch.tensor([3.0]).double(), rtol=1e-4, atol=0)
    assert torch.equal(found.mean[:4], plain.mean[:4])


def test_every_head_is_split():
    torch.manual_seed(0)
    heads = ibnn.Heads({"a": ibnn.Categorical(), "b": ibnn.Gaussian()})
    target = heads.pack({"a": torch.tensor([0, 0, 0, 1, 1, 2]), "b": torch.randn(6, 1)})
    p = heads.summarise(heads.read({"a": torch.randn(6, 3), "b": torch.randn(6, 1)})[None, None])
    found = fallen_back(heads, p, torch.full((6,), 0.05).log(), 0.01, heads.base_rates(target))
    share = known_share(torch.tensor(0.05).log())
    for name in ("a", "b"):
        torch.testing.assert_close(found[name].aleatoric, share * p[name].aleatoric)
        torch.testing.assert_close(found[name].total, p[name].total)


# ------------------------------------------------------------------------------------------------------- observing


@pytest.mark.parametrize(
    ("shape", "axis", "places"), [((7, 3, 5, 4), 0, [2, 3]), ((5, 9, 4), 0, [1]), ((6, 8, 4), 1, [0])]
)
@pytest.mark.parametrize("at_once", [1, 100, 10**6])
def test_moments_a_few_rows_at_a_time(shape, axis, places, at_once, monkeypatch):
    monkeypatch.setattr(nodes, "AT_ONCE", at_once)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 100
    mean, std = nodes._moments(x, axis, places)
    torch.testing.assert_close(mean, x.double().mean(places).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(std, x.double().std(places, correction=0).float(), rtol=1e-5, atol=0)


def fitted():
    torch.manual_seed(0)
    model, x = baselines.Plain(nets.mlp(3, 2, hidden=8)), torch.randn(300, 3)
    ibnn.fit_novelty(model, x)
    return model, x


def test_a_layer_put_in_anothers_place_is_found():
    model, x = fitted()
    expected = measure(model, x).p_value
    number, layer = next((n, m) for n, m in enumerate(model.net) if isinstance(m, nn.Linear))
    model.net[number] = nn.Linear(3, 8)
    model.net[number].load_state_dict(layer.state_dict())
    assert torch.equal(measure(model, x).p_value, expected)


def test_threads_do_not_see_each_others_inputs():
    model, x = fitted()
    parts = [x[:100], 5 * x[:40], x[100:], x[:7]] * 10
    expected = [measure(model, part).log_tail for part in parts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: measure(model, part).log_tail, parts))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# ---------------------------------------------------------------------------------------------------- few held out


def test_the_level_where_few_are_held_out_follows_from_what_known_inputs_would_pay():
    """Answers of probability q for the right one of four classes: a mean loss of the mixtures at uniform weights."""
    q, base, target = 0.97, torch.full((4,), 0.25), torch.zeros(60).long()
    rest = (1 - q) / 3
    log_probs = torch.tensor([q, rest, rest, rest]).log().expand(60, 4)
    likelihood = ibnn.Categorical()
    answer = likelihood.summarise(log_probs[None, None])
    found = fitting._affordable(likelihood, answer, target, torch.zeros(60), base)
    lost = [math.log(q) - math.log(w * q + (1 - w) * 0.25) for w in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert found == pytest.approx(0.005 * -math.log(q) / (sum(lost) / 5) / 4, rel=1e-4)
    bad = likelihood.summarise(torch.tensor([rest, q, rest, rest]).log().expand(60, 4)[None, None])
    assert fitting._affordable(likelihood, bad, target, torch.zeros(60), base) == 0.001 / 4  # the base rates are better
