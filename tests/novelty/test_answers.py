"""Answers with p-values, the fallback to base rates, and what observing an input takes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import ibnn
from ibnn import baselines, nets
from ibnn.novelty import nodes
from ibnn.novelty.measure import measure


def test_the_split_is_that_of_the_draws_whatever_the_p_value(knowing):
    """Entropies of draws computed by hand, on inputs near and far, with and without a reference."""
    model, x = knowing
    inputs = torch.cat([x[:20], 3 * x[20:40], 100 * x[40:60]])
    probs = model.draw_logits(inputs).softmax(-1).unflatten(0, (2, 5)).detach().double()

    def entropy(p):
        return torch.special.entr(p).sum(-1)

    total, aleatoric = entropy(probs.mean((0, 1))), entropy(probs).mean((0, 1))
    between = total - entropy(probs.mean(1)).mean(0)
    for p in (model.predict(inputs), model.predict(inputs, novelty=False)):
        torch.testing.assert_close(p.probs.double(), probs.mean((0, 1)), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.total.double(), total, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(p.aleatoric.double(), aleatoric, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(p.between.double(), between, rtol=1e-3, atol=1e-5)
    assert (model.predict(inputs).p_value[40:] < 0.01).all()


def test_the_fallback_mixes_answers_below_its_level_with_the_base_rates(knowing):
    model, x = knowing
    inputs = torch.cat([x, 1.5 * x, 2 * x, 100 * x])
    plain, found = model.predict(inputs), model.predict(inputs, fallback=0.1)
    p, least, base = plain.p_value, 1 / (model.reference.ranked + 1), model.reference.base
    assert torch.equal(found.p_value, p)
    assert torch.equal(found.probs[p >= 0.1], plain.probs[p >= 0.1])
    assert ((p > least) & (p < 0.1)).any()  # or nothing is between
    w = ((p - least) / (0.1 - least)).clamp(0, 1)[:, None]
    torch.testing.assert_close(found.probs, w * plain.probs + (1 - w) * base)
    torch.testing.assert_close(found.total, torch.special.entr(found.probs).sum(1), rtol=1e-4, atol=1e-5)
    smallest = p < 1.5 * least
    torch.testing.assert_close(found.probs[smallest], base.expand(int(smallest.sum()), 2), rtol=1e-4, atol=1e-5)


def test_a_level_that_no_p_value_reaches_is_refused(knowing):
    model, x = knowing
    p = model.predict(x[:5])
    assert p.ranked == 150
    p.novel(1 / 151)
    for call in (lambda: p.novel(0.005), lambda: model.predict(x, fallback=0.005)):
        with pytest.raises(ValueError, match=r"at least 0\.0067 with 150 held-out inputs.*hold out 199"):
            call()


@pytest.fixture(scope="module")
def knowing():
    """A converted network with a reference of 150 rows, and others."""
    torch.manual_seed(0)
    model, x = ibnn.convert(nets.mlp(3, 2, hidden=8), components=2, init_std=0.4, seed=0), torch.randn(450, 3)
    y = (x[:, 0] > 0.4).long()
    ibnn.fit_novelty(model, (x[:150], y[:150]), (x[150:300], y[150:300]))
    return model, x[300:]


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
    expected = [measure(model, part).score for part in parts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: measure(model, part).score, parts))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
