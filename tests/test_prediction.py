import copy
import dataclasses
import math
import re
from collections import UserDict
from typing import Any

import pytest
import torch
from peak import Peak
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ibnn
from ibnn.baselines import Ensemble, Plain
from ibnn.draws import _noise
from ibnn.inputs import evaluating, tensors

FIELDS = ("probs", "log_probs", "total", "aleatoric", "between", "within", "standard_error")


def make_model(**options: object) -> ibnn.IBNN:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.ReLU(), nn.Linear(7, 3))
    return ibnn.convert(net, components=3, seed=0, init_std=0.5, **options)  # type: ignore[arg-type]


def assert_same(a: ibnn.Prediction, b: ibnn.Prediction, fields: tuple[str, ...] = FIELDS) -> None:
    for name in fields:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-6, equal_nan=True)


def test_predict_averages_its_draws() -> None:
    model, x = make_model(), torch.randn(6, 5)
    p = model.predict(x, samples=4, seed=2)
    torch.testing.assert_close(p.probs, model.draw_logits(x, samples=4, seed=2).softmax(-1).mean(0))
    assert len(p) == 6


def test_chunks_loaders_and_rows_change_nothing() -> None:
    model, x = make_model(), torch.randn(23, 5)
    whole = model.predict(x)
    assert_same(model.predict(x, batch_size=4), whole)
    assert_same(model.predict(DataLoader(TensorDataset(x, torch.zeros(23)), batch_size=5)), whole)
    assert_same(
        model.predict(x[7:8]),
        type(whole)(
            *(
                getattr(whole, f)[7:8]
                for f in ("probs", "log_probs", "aleatoric", "between", "within", "standard_error")
            )
        ),
    )
    assert_same(model.predict(batch for batch in x.split(10)), whole)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_draws_are_the_raw_outputs_behind_a_prediction(likelihood: str) -> None:
    model, x = make_model(likelihood=likelihood), torch.randn(23, 5)
    expected = model.draw_logits(x, samples=4, seed=2).unflatten(0, (3, 4)).detach()
    model.likelihood.set_temperature(2.0)  # which raw outputs know nothing of
    loader = DataLoader(TensorDataset(x, torch.zeros(23)), batch_size=5)
    for inputs in (x, (x,), {"input": x}, loader, iter(x.split(10))):
        found = ibnn.draws(model, inputs, samples=4, seed=2, batch_size=7)
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
    torch.testing.assert_close(ibnn.draws(model, x, samples=4, seed=2, batch_size=None), expected)
    prediction = model.predict(x, samples=4, seed=2)
    for name, value in vars(model.likelihood.summarise(expected)).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(prediction, name), value)


def test_draws_of_methods_without_noise_are_one_each() -> None:
    both, x = pair(), torch.randn(4, 5)
    found = ibnn.draws(both, x, samples=6)
    torch.testing.assert_close(found, torch.stack([net(x) for net in both.net])[:, None].detach())


def test_draws_may_mask_classes_and_refuse_what_is_not_finite() -> None:
    x, mask = torch.randn(4, 5), torch.zeros(4, dtype=torch.bool)
    masked = ibnn.convert(Masked(), components=2, seed=0)
    assert ibnn.draws(masked, (x, mask))[..., 2].isneginf().all()
    x[2] = math.nan
    with pytest.raises(ValueError, match="NaN in row 2"):
        ibnn.draws(make_model(), x)
    with pytest.raises(ValueError, match="NaN or infinity for row 2"):
        ibnn.draws(make_model(), torch.where(x.isnan(), math.inf, x))
    with pytest.raises(ValueError, match="`samples` to be an integer of at least 1, but got 0"):
        ibnn.draws(make_model(), x, samples=0)


def test_predict_ignores_and_restores_every_module_s_mode() -> None:
    model, x = make_model(), torch.randn(6, 5)
    model.train()
    model.net[1].eval()  # a frozen BatchNorm
    statistics = model.net[1].running_mean.clone()
    modes = [module.training for module in model.modules()]
    training = model.predict(x)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.net[1].running_mean, statistics)
    assert torch.equal(training.probs, model.eval().predict(x).probs)


def test_modes_are_restored_after_an_error() -> None:
    model = make_model().train()
    with pytest.raises(ValueError, match="of 5 nodes"), evaluating(model):
        model.draw_logits(torch.randn(2, 4))
    assert model.training
    assert model.net[2].training


def test_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return (self.a(a) + self.b(b)) * scale

    model = ibnn.convert(Two(), components=2, seed=0)
    a, b = torch.randn(9, 4), torch.randn(9, 2)
    by_position = model.predict((a, b))
    assert_same(model.predict({"a": a, "b": b}), by_position)
    assert_same(model.predict({"a": a, "b": b}, batch_size=2), by_position)
    rows = [{"a": a[i], "b": b[i], "labels": 0} for i in range(9)]
    assert_same(model.predict(DataLoader(rows, batch_size=4)), by_position)
    pairs = [((a[i], b[i]), 0) for i in range(9)]
    assert_same(model.predict(DataLoader(pairs, batch_size=4)), by_position)
    triples = TensorDataset(a, b, torch.zeros(9))  # as fit reads them: the last entry is the target
    assert_same(model.predict(DataLoader(triples, batch_size=4)), by_position)
    assert_same(model.predict((a.numpy(), b.numpy())), by_position)
    assert_same(model.predict(UserDict(a=a, b=b)), by_position)
    torch.testing.assert_close(model.eval()(a, b=b), model(a, b))
    labels = torch.randint(3, (9,))
    assert model.elbo({"a": a, "b": b}, labels, n_data=9, samples=2).nll.isfinite()


def test_regression() -> None:
    model = ibnn.convert(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), likelihood="gaussian", seed=0)
    x = torch.randn(11, 2)
    p = model.predict(x, batch_size=3)
    draws = model.draw_logits(x)
    torch.testing.assert_close(p.mean, draws.mean(0))
    torch.testing.assert_close(p.epistemic, draws.var(0, correction=0), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(p.draw_means, draws)
    low, high = p.interval(0.9)
    assert (low < p.mean).all()
    assert (p.mean < high).all()
    model.eval_samples = 5
    torch.testing.assert_close(model.eval()(x), p.mean)
    model.eval_samples = 0
    torch.testing.assert_close(model(x), torch.stack([model.component(k)(x) for k in range(8)]).mean(0))


def test_memory_stays_bounded() -> None:
    model = make_model()
    seen = []
    model.net[0].register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    model.predict(torch.randn(100, 5), batch_size=16)
    assert max(seen) == 16


def test_prediction_moves_and_joins() -> None:
    p = make_model().predict(torch.randn(5, 5))
    joined = type(p).cat([p, p.to("cpu")])
    assert len(joined) == 10
    assert torch.equal(joined.total[5:], p.total)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        (torch.tensor([[0.0] * 5, [math.nan] * 5]), "input 0.*NaN in row 1"),
        (torch.full((3, 5, 2, 2), math.nan).to(memory_format=torch.channels_last), "NaN in row 0"),
        (torch.empty(0, 5), "at least one row"),
        (DataLoader(TensorDataset(torch.tensor([[0.0] * 5] * 5 + [[math.nan] * 5])), batch_size=2), "NaN in row 5"),
        (iter([]), "an empty loader"),
    ],
)
def test_bad_inputs(inputs: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_model().predict(inputs)


@pytest.mark.parametrize("argument", ["samples", "batch_size"])
def test_bad_sizes(argument: str) -> None:
    for value in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"`{argument}` .* got {value}"):
            make_model().predict(torch.randn(2, 5), **{argument: value})  # type: ignore[arg-type]


class Graph(nn.Module):
    """Rows are the nodes of a graph: each adds up its neighbours, given as an index of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.head(x + torch.zeros_like(x).index_add(0, edges[0], x[edges[1]]))
        return out


@pytest.mark.parametrize("rows", [6, 300])
def test_without_a_batch_size_no_batch_is_cut_or_copied(rows: int) -> None:
    model, x = ibnn.convert(Graph(), components=2, init_std=0.5, seed=0), torch.randn(rows, 5)
    edges = torch.stack([torch.arange(rows), torch.arange(rows).roll(1)])
    nets = [model.draw(component=k, index=s) for k in range(2) for s in range(5)]
    expected = torch.stack([net(x, edges) for net in nets]).softmax(-1).mean(0)
    torch.testing.assert_close(model.predict((x, edges), batch_size=None).probs, expected)
    if rows == 300:
        with pytest.raises(ValueError, match="batch_size=None"):
            model.predict((x, edges))


class Bounded(nn.Module):
    """Has a finite output for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.clamp(-1, 1))
        return out


class Masked(nn.Module):
    """Rules classes out: the last one, and where the second input says so all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        scores = self.head(x)
        scores[:, 2] = -math.inf
        return scores.masked_fill(out[:, None], -math.inf)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"tolerance": 0.05}])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_outputs_that_are_not_finite_are_refused_by_their_row(likelihood: str, options: dict[str, object]) -> None:
    if likelihood == "gaussian" and "tolerance" in options:
        return
    x = torch.randn(7, 5)
    x[4] = math.inf
    model = make_model(likelihood=likelihood)
    words = "`x` to be inputs that the network has finite outputs for, but got NaN or infinity for row "
    for inputs, row in ((x, 4), ({"input": x}, 4), (iter([x[:2], x[2:]]), 4), ((x[4:],), 0)):
        with pytest.raises(ValueError, match=f"{words}{row}\\."):
            model.predict(inputs, **options)  # type: ignore[arg-type]
    bounded = ibnn.convert(Bounded(), components=2, likelihood=likelihood, seed=0)
    found = bounded.predict(x, **options)  # type: ignore[arg-type]
    assert_same(found, bounded.predict(x.clamp(-1, 1), **options), FIELDS[2:])  # type: ignore[arg-type]


def test_masked_classes_are_fine_while_one_is_left() -> None:
    model = ibnn.convert(Masked(), components=2, seed=0)
    x, none = torch.randn(4, 5), torch.zeros(4, dtype=torch.bool)
    found = model.predict((x, none))
    assert torch.equal(found.probs[:, 2], torch.zeros(4))
    assert torch.allclose(found.probs.sum(1), torch.ones(4))
    with pytest.raises(ValueError, match="NaN or infinity for row 2"):
        model.predict((x, torch.arange(4) == 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    for name in ("net.4.weight", "net.1.running_var", "net.4.latent.mean"):
        model = make_model()
        model.set_posterior(std=0.0)  # ρ = −∞ is how that is said
        assert model.predict(torch.randn(3, 5)).probs.isfinite().all()
        model.state_dict()[name].view(-1)[1] = value
        if (name, value) == ("net.1.running_var", math.inf):  # divides by it: the outputs are finite
            continue
        with pytest.raises(ValueError, match=f"`model` to be of finite weights, but got NaN or infinity in '{name}'"):
            model.predict(torch.randn(3, 5))


class Rows(nn.Module):
    """Returns another number of rows than it takes."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.head, self.factor = nn.Linear(5, 3), factor

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x)
        return scores.repeat(self.factor, 1) if self.factor else scores.mean(0, keepdim=True)


@pytest.mark.parametrize("factor", [0, 2])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_other_rows_than_those_asked_for_are_refused(factor: int, likelihood: str) -> None:
    x, y = torch.randn(4, 5), torch.zeros(4).long() if likelihood == "categorical" else torch.zeros(4, 3)
    model = ibnn.convert(Rows(factor), components=2, likelihood=likelihood, seed=0)
    plain = Plain(Rows(factor), copy.deepcopy(model.likelihood))
    words = rf"answers each of the 4 rows of its input, but got an output of shape \({4 * factor or 1}, 3\)"
    for call in (model.predict, plain.predict):
        with pytest.raises(ValueError, match=words):
            call(x)
    for method in (model, plain):
        with pytest.raises(ValueError, match=words):
            method.train().elbo(x, y, n_data=100)  # type: ignore[operator]


def images() -> ibnn.IBNN:
    return ibnn.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)))


def pair() -> Ensemble:
    return Ensemble([nn.Linear(5, 3), nn.Linear(5, 3)])


def gets(layer: str, wanted: str, got: str) -> str:
    return re.escape(f"layer {layer} gets an input of shape {wanted}, but got shape {got}")


@pytest.mark.parametrize(
    ("make", "x", "match"),
    [
        (make_model, torch.randn(4, 6), gets("'0' (Linear)", "(rows, 5)", "(4, 6). Pass inputs of the size")),
        (make_model, torch.randn(5), gets("'0' (Linear)", "(rows, 5)", "(5,). Pass a batch, x[None] for one row")),
        (make_model, {"input": torch.randn(4, 2)}, gets("'0' (Linear)", "(rows, 5)", "(4, 2)")),
        (lambda: Plain(nn.Linear(5, 3)), torch.randn(4, 6), gets("'(net)' (Linear)", "(rows, 5)", "(4, 6)")),
        (pair, torch.randn(4, 6), gets("'(net)' (Linear)", "(rows, 5)", "(4, 6)")),
        (images, torch.randn(2, 1, 8, 8), gets("'0' (Conv2d)", "(rows, 3, …, …)", "(2, 1, 8, 8)")),
        (images, torch.randn(3, 8, 8), gets("'0' (Conv2d)", "(rows, 3, …, …)", "(3, 8, 8). Pass a batch")),
        (images, torch.randn(2, 3, 9, 9), gets("'2' (Linear)", "(rows, 144)", "(2, 3, 9, 9), which gives it (2, 196)")),
        (lambda: ibnn.convert(nn.GRU(5, 4)), torch.randn(2, 7, 6), gets("'(net)' (GRU)", "(…, 5)", "(2, 7, 6)")),
    ],
)  # fmt: skip
def test_inputs_of_the_wrong_size_are_refused_with_the_layer_they_do_not_fit(make: Any, x: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        make().predict(x)
    assert caught.value.__cause__ is not None  # what torch said stays to be read
    rows = len(next(tensors(x)))
    with pytest.raises(ValueError, match=match):
        make().train().elbo(x, torch.zeros(rows).long(), n_data=100)


@pytest.mark.parametrize(
    ("net", "x"), [(nn.Linear(5, 3), torch.randn(4, 1)), (nn.Conv1d(5, 3, 1), torch.randn(4, 1, 2))]
)
def test_inputs_of_one_node_are_not_spread_over_all(net: nn.Module, x: Tensor) -> None:
    model = ibnn.convert(net, components=1, seed=0)
    for call in (model.eval(), lambda x: model.predict(x, samples=1), lambda x: model.train()(x)):
        with pytest.raises(ValueError, match=r"layer .*, but got shape \(4, 1"):
            call(x)


def test_errors_of_the_network_itself_stay_as_they_are() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of its own", self.head(x).shape)

    with pytest.raises(RuntimeError, match="of its own"):
        ibnn.convert(Fails(), seed=0).predict(torch.randn(2, 5))


# --------------------------------------------------------------------------------------------- the same answers faster


class Tokens(nn.Module):
    """Linear layers on (B, T, D), with a second input that has no batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.head((self.inner(x).relu() + shift).mean(1))


class Mixing(nn.Module):
    """Rows that see each other: statistics of the batch, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x)))


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().transpose(0, 1).mean(1))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(2 * 7 * 7, 3))


def by_hand(model: ibnn.IBNN, inputs: tuple[Tensor, ...], samples: int) -> Tensor:
    """The reference: plain networks with z in their weights, one after the other."""
    nets = [model.draw(component=k, index=s) for k in range(model.components) for s in range(samples)]
    return torch.stack([net(*inputs) for net in nets])


def rows_seen(model: ibnn.IBNN) -> list[int]:
    """Notes the batch lengths that the head of a net meets from now on."""
    seen: list[int] = []
    list(model.net.children())[-1].register_forward_pre_hook(lambda layer, args: seen.append(len(args[0])))
    return seen


NETS = {
    "convolutions": (convolutional, lambda rows: (torch.randn(rows, 2, 8, 8),), True),
    "tokens": (Tokens, lambda rows: (torch.randn(rows, 7, 5), torch.randn(7, 6)), True),
    "mixed rows": (Mixing, lambda rows: (torch.randn(rows, 5),), False),
    "sequence first": (SequenceFirst, lambda rows: (torch.randn(rows, 6, 5),), True),
}


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 40])
@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_draws_as_rows_and_in_weights_are_the_draws(name: str, rows: int) -> None:
    make, inputs, independent = NETS[name]
    torch.manual_seed(rows)
    model, x = ibnn.convert(make().double(), components=3, init_std=0.5, seed=0), inputs(rows)
    x = tuple(t.double() for t in x)
    if name == "mixed rows" and rows == 1:
        return  # no statistics of one value
    expected = by_hand(model, x, 5)
    options = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(model.draw_logits(x), expected, **options)
    torch.testing.assert_close(model.draw_logits(x, batch_size=32), expected, **options)
    seen = rows_seen(model)
    torch.testing.assert_close(model.draw_logits(x, batch_size=32), expected, **options)
    at_once = -(-15 // -(-15 // max(32 // rows, 1)))  # in nearly equal parts
    fast = independent and rows <= 16 and (name, rows) != ("tokens", 7)  # where `shift` looks like a batch
    assert seen == ([rows * min(at_once, 15 - i) for i in range(0, 15, at_once)] if fast else [rows] * 15)
    torch.testing.assert_close(
        model.draw_logits(x, 2, first=3), expected.view(3, 5, *expected.shape[1:])[:, 3:].flatten(0, 1)
    )


class Few(nn.Linear):
    """Takes at most 100 rows."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 100:
            raise ValueError("too many rows")
        return super().forward(x)


@torch.no_grad()
def test_a_network_that_refuses_many_rows_gets_fewer_draws_at_once_for_that_call_alone() -> None:
    model, x = ibnn.convert(nn.Sequential(nn.Linear(5, 4), Few(4, 3)), components=4, seed=0), torch.randn(12, 5)
    model.draw_logits(x[:2], 5, batch_size=256)
    seen = rows_seen(model)
    model.draw_logits(x, 5, batch_size=256)  # 20 draws of 12 rows are more
    assert seen == [240, *[12] * 20]
    seen.clear()
    model.draw_logits(x[:2], 5, batch_size=256)
    assert seen == [40]


@torch.no_grad()
def test_rows_of_draws_are_as_many_as_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = (
        ibnn.convert(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), components=4, seed=0),
        torch.randn(2, 5),
    )
    whole = model.draw_logits(x, 2)
    for entries, expected in ((2**24, [16]), (24 * 3, [6, 6, 4]), (24, [2] * 8), (10, [2] * 8)):  # 24 = 2 · (5 + 7)
        monkeypatch.setattr("ibnn.network.CACHE_ENTRIES", entries)
        model.draw_logits(x, 2, batch_size=100)
        seen = rows_seen(model)
        torch.testing.assert_close(model.draw_logits(x, 2, batch_size=100), whole)
        assert seen == expected


def test_noise_is_kept_for_the_next_input_and_never_mistaken() -> None:
    def make() -> ibnn.IBNN:
        return ibnn.convert(nn.Sequential(nn.Conv2d(5, 6, 3), nn.Flatten(1)), components=3, seed=0)

    model, x = make(), torch.randn(1, 5, 3, 3)
    with torch.inference_mode():
        first = model.draw_logits(x, 2)
    model.draw_logits(x, 2).sum().backward()  # not an inference tensor
    assert torch.equal(model.draw_logits(x, 2), first)
    assert model.draw_latents(2).words is model.draw_latents(2).words
    changes = ({"seed": 1}, {"first": 1}, {"samples": 3}, {"components": [2, 0]}, {})
    fresh = []
    for options in changes:
        _noise.cache_clear()
        fresh.append(model.draw_latents(**{"samples": 2, **options}))
    for options, expected in zip(changes, fresh, strict=True):
        again = model.draw_latents(**{"samples": 2, **options})
        assert torch.equal(again.words, expected.words)
        assert torch.equal(again.z, expected.z)
    model.set_posterior(std=0.3)  # moves the draws, not their noise
    torch.testing.assert_close(model.draw_logits(x, 3)[2], model.draw(component=0, index=2)(x))


def test_weights_are_multiplied_where_that_is_cheaper_and_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))  # 42 and 24 weights, biases included
    model = ibnn.convert(net, components=3, seed=0).eval()
    own, linear = list(model.net.parameters()), torch.nn.functional.linear
    folded: list[bool] = []

    def noting(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        folded.append(not isinstance(weight, nn.Parameter))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", noting)
    with torch.no_grad():
        model.draw_logits(torch.randn(4, 5), samples=1)  # 20 and 28 inputs
        assert folded == 3 * [False, True]
        folded.clear()
        model.draw_logits(torch.randn(9, 5), samples=1)
        assert folded == 3 * [True, True]
    folded.clear()
    model.draw_logits(torch.randn(9, 5), samples=1).sum().backward()  # weights have gradients to get
    assert not any(folded)

    def failing(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if not isinstance(weight, nn.Parameter):
            raise KeyboardInterrupt
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", failing)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model.draw_logits(torch.randn(9, 5), samples=1)
    assert all(a is b for a, b in zip(own, model.net.parameters(), strict=True))
    assert all(latent.current() == (None, None) for latent in model.latents.values())


# ------------------------------------------------------------------------------------------------------ bounded memory


SETTLED = pytest.param({"samples": 2, "tolerance": 0.05}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, SETTLED], ids=str)
def test_a_hundred_thousand_inputs_take_the_memory_of_a_chunk_and_of_their_answers(options: dict[str, object]) -> None:
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    model, x = ibnn.convert(net, components=2, seed=0), torch.randn(100_000, 4)
    options = {"samples": 1, "batch_size": 500, **options}
    peaks, sizes = [], []
    for rows in (1_000, 100_000):
        with Peak([*model.parameters(), x]) as peak:
            found = model.predict(x[:rows], **options)
        peaks.append(peak.bytes)
        sizes.append(sum(value.nbytes for value in vars(found).values() if isinstance(value, torch.Tensor)))
    activations = 500 * 64 * 4
    assert peaks[1] - 2 * sizes[1] < peaks[0] < 2 * sizes[0] + 8 * activations  # twice: while answers are joined
    part = model.predict(x[-7:], samples=options["samples"], tolerance=options.get("tolerance"))
    assert_same(found.rows(torch.arange(99_993, 100_000)), part)


# ---------------------------------------------------------------------------------------------- answers that settle


def test_settled_answers_are_those_of_as_many_draws() -> None:
    model, x = make_model(), torch.randn(60, 5) * torch.linspace(0.01, 6, 60)[:, None]
    model.set_posterior(std=0.4)
    p = model.predict(x, samples=9, tolerance=0.02, batch_size=25)
    used = p.draws // 3
    assert set(used.tolist()) >= {1, 2, 9}
    assert (used >= 1).all()
    assert (used <= 9).all()
    assert p.settled(0.02)[used < 9].all()
    for samples in range(1, 10):
        fixed = model.predict(x, samples=samples)
        here = used == samples
        for name in FIELDS:
            torch.testing.assert_close(getattr(p, name)[here], getattr(fixed, name)[here], rtol=1e-4, atol=1e-6)
        if samples < 9:  # nobody left late
            assert not fixed.settled(0.02 * 0.999)[used > samples].any()
        assert fixed.draws is None


def test_settled_answers_at_the_ends() -> None:
    model, x = make_model(), torch.randn(7, 5)
    model.set_posterior(mean=1.0)
    assert (model.predict(x, tolerance=1.0).draws == 3).all()
    assert (model.predict(x, tolerance=1e-12, samples=4).draws == 12).all()
    assert_same(model.predict(x, tolerance=1e-12), model.predict(x))
    auto = model.predict(x, samples="auto")
    assert_same(auto, model.predict(x, samples=5, tolerance=0.1))
    joined = type(auto).cat([auto, auto]).to("cpu")
    assert torch.equal(joined.draws[7:], auto.draws)
    loader = DataLoader(TensorDataset(x, torch.zeros(7)), batch_size=3)
    assert torch.equal(model.predict(loader, samples="auto").draws, auto.draws)


def test_yes_no_answers_settle_when_all_their_labels_have() -> None:
    model, x = make_model(likelihood="bernoulli"), torch.randn(30, 5)
    model.set_posterior(std=0.4)
    p = model.predict(x, samples=6, tolerance=0.04)
    early = p.draws < 18
    assert early.any()
    assert (p.standard_error[early] < 0.04).all()


def test_an_answer_is_settled_when_its_error_is_small_and_its_label_clear() -> None:
    probs = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.45, 0.05], [0.9, 0.1, 0.0], [0.5, 0.45, 0.05]])
    errors = torch.tensor([[0.01, 0.01, 0.0], [0.01, 0.01, 0.0], [0.06, 0.06, 0.0], [0.03, 0.03, 0.0]])
    zero = torch.zeros(4)
    p = ibnn.CategoricalPrediction(probs, probs.log(), zero, zero, zero, errors)
    assert p.settled(0.05).tolist() == [True, True, False, False]
    dense = ibnn.CategoricalPrediction(*(v.T[None] for v in (probs, probs.log())), *[zero[None]] * 3, errors.T[None])
    assert dense.settled(0.05).tolist() == [False]  # not all its pixels are
    yes = ibnn.BernoulliPrediction(probs, probs.log(), *[zero] * 3, errors, (-probs).log1p())
    assert yes.settled(0.05).tolist() == [True, False, False, False]
    one = ibnn.CategoricalPrediction(probs[:1, :1], probs[:1, :1].log(), *[zero[:1]] * 3, errors[:1, :1])
    assert one.settled(0.05).tolist() == [True]  # of a single class


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tolerance": 0.0}, "`tolerance`"),
        ({"tolerance": 0.1, "samples": 1}, "`tolerance`"),
        ({"tolerance": 0.1, "batch_size": None}, "`tolerance`"),
        ({"samples": "many"}, "`samples`"),
    ],
)
def test_bad_tolerances(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_model().predict(torch.randn(2, 5), **options)


def test_a_tolerance_is_for_classifiers() -> None:
    model = ibnn.convert(nn.Linear(2, 1), likelihood="gaussian", seed=0)
    with pytest.raises(TypeError, match="`tolerance` to be given for a classifier only, but got GaussianPrediction"):
        model.predict(torch.randn(3, 2), tolerance=0.1)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_minus_infinity_is_no_answer_of_a_number(likelihood: str) -> None:
    model, x = ibnn.convert(nn.Linear(2, 1), components=2, likelihood=likelihood, seed=0), torch.zeros(3, 2)
    model.net.weight.data.fill_(1.0)
    x[1] = -math.inf
    with pytest.raises(ValueError, match="NaN or infinity for row 1"):
        model.predict(x)


def test_half_precision_inputs_are_answered_in_the_network_s_dtype() -> None:
    model, x = ibnn.convert(nn.Linear(4, 3), components=2, seed=0), torch.randn(5, 4).bfloat16()
    assert torch.equal(model.predict(x).probs, model.predict(x.float()).probs)


# ----------------------------------------------------------------------------------------------- printing and tables


def test_a_prediction_prints_a_summary_and_becomes_a_table() -> None:
    draws = torch.randn(2, 3, 5, 4)
    p: Any = ibnn.Categorical().summarise(draws)
    assert str(p).splitlines()[0] == "CategoricalPrediction for 5 inputs"
    assert f"nats: total {p.total.mean():.3g}, aleatoric {p.aleatoric.mean():.3g}" in str(p)
    assert f"{p.probs.amax(1).mean():.3g}" in str(p)
    table = p.to_pandas()
    assert table["label"].tolist() == p.labels.tolist()
    assert table["prob.3"].tolist() == p.probs[:, 3].tolist()
    assert "p_value" not in table
    known: Any = dataclasses.replace(p, p_value=torch.linspace(0.1, 0.5, 5), ranked=9)
    assert known.to_pandas()["p_value"].tolist() == known.p_value.tolist()
    assert "0.1 to 0.5" in str(known)
    number: Any = ibnn.Gaussian().summarise(draws[..., :1])
    assert list(number.to_pandas()) == ["mean", "std", "total", "aleatoric", "epistemic"]
    assert "squared units" in str(number)
    both = ibnn.prediction.JointPrediction({"kind": p, "size": number})
    assert both.to_pandas()["size.mean"].tolist() == number.mean[:, 0].tolist()
    assert ("kind" in both, dict(both)["size"] is number) == (True, True)
    with pytest.raises(ValueError, match="shape"):
        ibnn.Categorical(axis=1).summarise(torch.randn(1, 2, 5, 4, 3)).to_pandas()


def test_predict_before_fit_or_calibrate_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = ibnn.convert(nn.Linear(4, 3), components=2, seed=0), torch.randn(5, 4)
    state = copy.deepcopy(model.state_dict())
    for _ in range(2):
        model.predict(x)
    assert [record.message.split(":")[0] for record in caplog.records] == ["predict"]
    caplog.clear()
    loaded = ibnn.convert(nn.Linear(4, 3), components=2)
    loaded.load_state_dict(state)
    by_hand = ibnn.convert(nn.Linear(4, 3), components=2)
    by_hand.set_posterior(std=0.1)
    for other in (loaded, by_hand):
        other.predict(x)
    assert not caplog.records


def test_wrapped_and_plain_networks_are_refused_by_name() -> None:
    net, x = torch.nn.Linear(3, 2), torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"`method`.*\.module"):
        ibnn.prediction.predict(torch.nn.DataParallel(ibnn.convert(net)), x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`method`.*convert"):
        ibnn.prediction.predict(net, x)  # type: ignore[arg-type]
