"""Outputs of other shapes than (B, C): classes last, parts of an output, several heads, huge ones."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peak import Peak
from torch import Tensor, nn

import ibnn
import ibnn.likelihood.running
import ibnn.network
from ibnn import Bernoulli, Categorical, Gaussian, Heads
from ibnn.baselines import Plain

B, T, C, D = 6, 5, 3, 4


class Tokens(nn.Module):
    """Class scores for every token, (B, T, C), or with the classes in axis 1."""

    def __init__(self, axis: int = -1, classes: int = C) -> None:
        super().__init__()
        self.axis, self.body, self.head = axis, nn.Linear(D, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu()).movedim(-1, self.axis)


def pair() -> tuple[ibnn.IBNN, ibnn.IBNN]:
    """The same network with its classes last and in axis 1."""
    torch.manual_seed(0)
    last, first = Tokens(-1), Tokens(1)
    first.load_state_dict(last.state_dict())
    return tuple(  # type: ignore[return-value]
        ibnn.convert(net, components=2, seed=0, likelihood=Categorical(axis=axis))
        for net, axis in ((last, -1), (first, 1))
    )


def data(rows: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, T, D, generator=generator), torch.randint(C, (rows, T), generator=generator)
    y[0, -2:] = -100
    return x, y


# ------------------------------------------------------------------------------------------------------ classes last


def test_classes_last_are_classes_in_axis_1_transposed() -> None:
    (last, first), (x, y) = pair(), data()
    losses = [model.train().elbo(x, y, n_data=28).loss for model in (last, first)]
    torch.testing.assert_close(*losses)
    a, b = last.predict(x, samples=2), first.predict(x, samples=2)
    assert (a.axis, b.axis, a.probs.shape, b.probs.shape) == (-1, 1, (B, T, C), (B, C, T))
    for name in ("probs", "log_probs", "standard_error"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name).movedim(1, -1))
    for name in ("total", "aleatoric", "between", "within", "labels"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))
    assert a.settled(0.02).tolist() == b.settled(0.02).tolist()
    assert last.likelihood.score(a, y) == pytest.approx(first.likelihood.score(b, y))
    torch.testing.assert_close(last.eval()(x), first.eval()(x).movedim(1, -1))
    assert last.predict(x, samples=4, tolerance=0.05).probs.shape == (B, T, C)


def test_a_token_s_answer_is_that_of_the_softmax_over_its_classes() -> None:
    (model, _), (x, y) = pair(), data()
    p = model.predict(x, samples=3)
    draws = model.draw_logits(x, 3)
    assert draws.shape == (6, B, T, C)
    expected = draws.double().softmax(-1).mean(0)
    torch.testing.assert_close(p.probs.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.total.double(), torch.special.entr(expected).sum(-1), rtol=1e-4, atol=1e-5)
    kept = y != -100
    nll = -expected[kept].gather(-1, y[kept][:, None]).log().mean()
    assert model.likelihood.score(p, y)["nll"] == pytest.approx(nll.item(), rel=1e-5)


def test_an_axis_that_targets_told_is_part_of_the_state() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    x, y = torch.randn(B, 4, 4, D), torch.randint(C, (B, 4, 4))
    model, other = (ibnn.convert(Last(), components=2, seed=0) for _ in range(2))
    assert "likelihood.axis" not in model.state_dict()
    model.elbo(x, y, n_data=B * 16)
    other.load_state_dict(model.state_dict())
    assert other.likelihood.axis == -1
    torch.testing.assert_close(other.predict(x).probs.sum(-1), torch.ones(B, 4, 4))


def test_metrics_take_the_axis_of_the_classes() -> None:
    probs, y = torch.randn(B, T, C).softmax(-1), torch.randint(C, (B, T))
    for metric in (ibnn.metrics.error, ibnn.metrics.brier, ibnn.metrics.ece):
        assert metric(probs, y, axis=-1) == metric(probs.flatten(0, 1), y.flatten())
    assert ibnn.metrics.nll(probs.log(), y, axis=-1) == ibnn.metrics.nll(probs.log().movedim(-1, 1), y)
    with pytest.raises(ValueError, match="classes on axis 1"):
        ibnn.metrics.error(probs, y)
    square, labels = torch.randn(B, C, C).softmax(-1), torch.randint(C, (B, C))
    with pytest.raises(ValueError, match="summing to"):  # as many tokens as classes
        ibnn.metrics.error(square, labels)
    for axis in (0, 3, -3):
        with pytest.raises(ValueError, match="Pass 1 or -1"):
            ibnn.metrics.error(probs, y, axis=axis)


def test_the_loss_over_tokens_is_the_mean_over_those_that_count() -> None:
    logits, (_, y) = torch.randn(B, T, C), data()
    for weight, smoothing in ((None, 0.0), (torch.tensor([1.0, 2.0, 0.5]), 0.1)):
        likelihood = Categorical(axis=-1, weight=weight, label_smoothing=smoothing)
        expected = F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=weight, label_smoothing=smoothing)
        torch.testing.assert_close(likelihood.terms(logits, y).loss, expected)
    assert likelihood.count(y) == B * T - 2


def test_targets_tell_where_the_classes_are() -> None:
    x, y = data(40)
    model = ibnn.convert(Tokens(), components=2, seed=0)
    with pytest.raises(ValueError, match=r"Categorical\(axis=-1\) if the classes come last"):
        model.predict(x)
    with pytest.raises(ValueError, match="Categorical"):
        model.eval()(x)
    model.train().elbo(x, y, n_data=200)
    assert model.likelihood.axis == -1
    assert model.predict(x).probs.shape == (40, T, C)
    calibrated = ibnn.convert(Tokens(), components=2, seed=0)
    ibnn.calibrate(calibrated, (x, y), samples=1)
    assert calibrated.likelihood.axis == -1
    assert ibnn.convert(Tokens(1), seed=0).elbo(x, y, n_data=200).loss.isfinite()


def test_an_axis_that_targets_leave_open_is_asked_for() -> None:
    x, y = torch.randn(B, C, D), torch.randint(C, (B, C))  # as many tokens as classes
    model = ibnn.convert(Tokens(), seed=0)
    with pytest.raises(ValueError, match="both possible"):
        model.elbo(x, y, n_data=100)
    images = torch.randn(2, B, C, 4, 4)
    assert Categorical().combine(images).shape == (B, C, 4, 4)  # of images the classes are in axis 1


def test_an_axis_of_one_place_is_not_taken_for_one_class() -> None:
    draws = torch.randn(2, 3, B, C, 1, 4)
    p = Categorical().summarise(draws)
    torch.testing.assert_close(p.probs, draws.softmax(3).mean((0, 1)))


@pytest.mark.parametrize("axis", [0, True, 1.0, "last"])
def test_an_axis_that_is_none_is_refused(axis: Any) -> None:
    with pytest.raises(ValueError, match="axis"):
        Categorical(axis=axis)


def test_wrong_targets_of_tokens_are_named() -> None:
    logits = torch.zeros(B, T, C)
    with pytest.raises(ValueError, match=r"of shape \(6, 5\), but got shape \(6, 4\)"):
        Categorical(axis=-1).check(logits, torch.zeros(B, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="labels from 0 to 3"):
        Categorical(axis=-1).check(logits, torch.full((B, T), 3).index_fill(0, torch.tensor([0]), 0))
    with pytest.raises(ValueError, match="axis 3"):
        Categorical(axis=3).terms(logits, torch.zeros(B, T, dtype=torch.long))


def test_fit_trains_a_token_classifier() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, T, D)
    y = x[..., :C].argmax(-1)
    model = ibnn.convert(Tokens(), components=2, seed=0)
    history = ibnn.fit(model, (x[:150], y[:150]), (x[150:], y[150:]), epochs=20, lr=0.05, quiet=True, seed=0)
    assert history.rows[-1]["valid_error"] < 0.2
    p = model.predict(x)
    assert ibnn.metrics.error(p.probs, y, axis=p.axis) < 0.2


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), "torch"])
def test_an_exported_token_classifier_answers_as_predict_does(tmp_path: Path, format: Any) -> None:
    model, x = pair()[0], data()[0]
    written = ibnn.export(model, x, tmp_path / "model", samples=2, format=format)
    assert written.difference < 1e-5


# ----------------------------------------------------------------------------------------------------- huge outputs


@pytest.mark.parametrize(("components", "samples"), [(3, 4), (4, 3), (1, 5), (4, 1), (1, 1)])
@pytest.mark.parametrize("likelihood", [Categorical(axis=-1), Categorical(axis=1), Bernoulli()])
@pytest.mark.parametrize("at_once", [1, 3, 5])
def test_draws_summed_up_as_they_come_give_the_same_answer(
    monkeypatch: pytest.MonkeyPatch, components: int, samples: int, likelihood: Any, at_once: int
) -> None:
    draws = 2 * torch.randn(components * samples, B, T, C, dtype=torch.float64)
    expected = likelihood.summarise(draws.unflatten(0, (components, samples)))
    monkeypatch.setattr(ibnn.likelihood.running, "HELD", 0)
    running = likelihood.running(components, samples)
    for part in draws.split(at_once):
        running.add(part)
    found = running.result()
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(found, name), value, equal_nan=True, rtol=1e-9, atol=1e-12)


def test_a_large_vocabulary_takes_the_memory_of_a_few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ibnn.likelihood.running, "HELD", 2**10)
    monkeypatch.setattr("ibnn.network.CACHE_ENTRIES", 2**10)
    torch.manual_seed(0)
    words, x = 2_000, torch.randn(2, T, D)
    model = ibnn.convert(Tokens(classes=words), components=4, seed=0, likelihood=Categorical(axis=-1))
    peaks = []
    for samples in (2, 8):
        with Peak([*model.parameters(), x]) as peak:
            model.predict(x, samples=samples)
        peaks.append(peak.bytes / (4 * 2 * T * words))  # in draws
    assert peaks[1] < 28  # held all at once, 32 draws take 160
    assert peaks[1] < peaks[0] + 9  # the draws of one component wait for their mirror images


# ------------------------------------------------------------------------------------------------ parts of an output


class Two(nn.Module):
    """Two heads in a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.age, self.sex = nn.Linear(D, 8), nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.body(x).relu()
        return {"heads": {"age": self.age(h), "sex": self.sex(h)}, "features": (h, SimpleNamespace(norm=h.sum(1)))}


def two(**options: Any) -> ibnn.IBNN:
    torch.manual_seed(0)
    return ibnn.convert(Two(), components=2, seed=0, **options)


@pytest.mark.parametrize("logits", ["heads.sex", lambda output: output["heads"]["sex"]])
def test_logits_says_which_part_of_the_output_is_predicted(logits: Any) -> None:
    model, x = two(logits=logits), torch.randn(B, D)
    assert set(model.train()(x)) == {"heads", "features"}
    p = model.predict(x, samples=2)
    draws = torch.stack([model.draw(k, s)(x)["heads"]["sex"] for k in range(2) for s in range(2)])
    torch.testing.assert_close(p.probs, draws.softmax(-1).mean(0))
    assert model.elbo(x, torch.zeros(B, dtype=torch.long), n_data=B).loss.isfinite()


def test_a_path_goes_through_keys_numbers_and_attributes() -> None:
    x = torch.randn(B, D)
    model = two(logits="features.1.norm", likelihood="gaussian")
    assert model.predict(x).mean.shape == (B,)
    with pytest.raises(ValueError, match=r"'heads\.height', but got \['age', 'sex'\]"):
        two(logits="heads.height").predict(x)
    with pytest.raises(TypeError, match=r'logits="path\.to\.it"'):
        two().predict(x)
    for wrong in (3, ""):
        with pytest.raises(TypeError, match="a path or a function"):
            two(logits=wrong)


def test_the_part_is_saved_with_the_model(tmp_path: Path) -> None:
    x = torch.randn(B, D)
    model = two(logits="heads.sex")
    model.save_pretrained(tmp_path / "path")
    again = ibnn.load(tmp_path / "path", Two())
    assert torch.equal(again.predict(x).probs, model.predict(x).probs)
    function = two(logits=lambda output: output["heads"]["sex"])
    function.save_pretrained(tmp_path / "function")
    with pytest.raises(ValueError, match=r"`logits`.*function"):
        ibnn.load(tmp_path / "function", Two())
    again = ibnn.load(tmp_path / "function", Two(), logits=function.logits)
    assert torch.equal(again.predict(x).probs, model.predict(x).probs)


# ------------------------------------------------------------------------------------------------------ several heads

KINDS = {"age": "gaussian", "sex": "categorical"}


def people(rows: int = 40) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, D, generator=generator)
    age = x[:, :1] + 0.3 * torch.randn(rows, 1, generator=generator)
    return x, {"age": age, "sex": (x[:, 1] + 0.5 * torch.randn(rows, generator=generator) > 0).long()}


def test_every_head_has_its_own_prediction() -> None:
    model, (x, y) = two(likelihood=KINDS, logits="heads"), people()
    p = model.predict(x, samples=3)
    for name, kind in KINDS.items():
        alone = two(likelihood=kind, logits=f"heads.{name}").predict(x, samples=3)
        for field, value in vars(alone).items():
            torch.testing.assert_close(getattr(p[name], field), value)
    assert len(p) == 40
    torch.testing.assert_close(p.rows(torch.tensor([3]))["age"].mean, p["age"].mean[3:4])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=16)
    torch.testing.assert_close(model.predict(loader, samples=3)["sex"].probs, p["sex"].probs)
    combined = model.eval()(x)
    torch.testing.assert_close(combined["sex"].exp(), model.predict(x, samples=1)["sex"].probs)
    scores = model.likelihood.score(p, y)
    assert set(scores) == {"nll", "age.nll", "age.rmse", "sex.nll", "sex.error", "sex.ece"}
    assert scores["nll"] == pytest.approx((scores["age.nll"] + scores["sex.nll"]) / 2)


def test_the_loss_of_heads_is_the_mean_over_all_their_targets() -> None:
    model, (x, y) = two(likelihood=KINDS, logits="heads"), people()
    y["sex"][:10] = -100  # not known
    model.set_posterior(mean=1.0, std=0.0)
    output = model.net(x)["heads"]
    age = 0.5 * (y["age"] - output["age"]).square() + 0.5 * math.log(2 * math.pi)
    sex = F.cross_entropy(output["sex"], y["sex"], reduction="sum")
    terms = model.train().elbo(x, y, n_data=70)
    torch.testing.assert_close(terms.nll, (age.sum() + sex) / 70)
    torch.testing.assert_close(terms.loss, terms.nll + model.kl() / 70)
    assert model.likelihood.count(model.likelihood.pack(y)) == 70


def test_heads_are_trained_calibrated_and_saved(tmp_path: Path) -> None:
    x, y = people(400)
    train, valid = ((x[part], {n: v[part] for n, v in y.items()}) for part in (slice(300), slice(300, None)))
    model = two(likelihood=KINDS, logits="heads")
    history = ibnn.fit(model, train, valid, epochs=15, lr=0.02, quiet=True, seed=0)
    assert history.rows[-1]["valid_age.rmse"] < 0.6
    assert len(set(model.likelihood.relative.tolist())) == 2  # each head at its own temperature
    assert history.rows[-1]["valid_sex.error"] < 0.35
    rows = [(row, {"age": y["age"][i], "sex": y["sex"][i]}) for i, row in enumerate(x)]
    loader = torch.utils.data.DataLoader(rows, batch_size=64)
    ibnn.fit(model, loader, epochs=1, beta=1.0, quiet=True)
    ibnn.calibrate(model, valid, samples=2)
    model.save_pretrained(tmp_path)
    again = ibnn.load(tmp_path, Two())
    for name, field in (("age", "std"), ("sex", "probs")):
        assert torch.equal(getattr(again.predict(x)[name], field), getattr(model.predict(x)[name], field))


def test_heads_that_are_all_classes_are_steered() -> None:
    x, y = people(300)
    y["age"] = (y["age"] > 0).float()
    model = two(likelihood={"age": "bernoulli", "sex": "categorical"}, logits="heads")
    train, valid = ((x[part], {n: v[part] for n, v in y.items()}) for part in (slice(200), slice(200, None)))
    history = ibnn.fit(model, train, valid, epochs=4, lr=0.02, batch_size=50, quiet=True)
    assert len(history.looks) > 3
    assert history.rows[-1]["valid_age.error"] < 0.5
    p = model.predict(x[:3])
    assert p["sex"].set(0.9).shape == p["sex"].probs.shape
    assert p["age"].set(0.9).shape == (*p["age"].probs.shape, 2)


def test_calibration_gives_every_head_its_own_temperature() -> None:
    torch.manual_seed(0)
    x = torch.randn(2000, D)
    net = Two()
    with torch.no_grad():
        out = net(x)["heads"]
        y = {"age": out["age"] + 3 * torch.randn(2000, 1), "sex": out["sex"].softmax(1).multinomial(1)[:, 0]}
    model = ibnn.convert(net, components=1, seed=0, likelihood=KINDS, logits="heads")  # noise of 1 where it is 3
    ibnn.calibrate(model, (x, y), samples=2)
    (_, age), (_, sex) = model.likelihood.each()
    assert float(age.temperature) == pytest.approx(3.0, rel=0.1)
    assert float(sex.temperature) == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), "torch"])
def test_exported_heads_answer_as_predict_does(tmp_path: Path, format: Any) -> None:
    model, (x, _) = two(likelihood=KINDS, logits="heads"), people()
    written = ibnn.export(model, x, tmp_path / "model", samples=2, format=format)
    assert written.difference < 1e-5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, x, y: m.elbo(x, y["age"].tolist(), n_data=80), r"a dict with \['age', 'sex'\]"),
        (lambda m, x, y: m.elbo(x, {"age": y["age"]}, n_data=80), r"but got \['age'\]"),
        (lambda m, x, y: m.elbo(x, y | {"sex": y["sex"] + 5}, n_data=80), "Head 'sex': Expected `y`"),
        (lambda m, x, y: m.elbo(x, y | {"sex": y["sex"][:3]}, n_data=80), "as many rows in every head"),
    ],
)
def test_wrong_targets_of_heads_are_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(two(likelihood=KINDS, logits="heads"), *people())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sex": torch.full((40,), 0.6)}, "Head 'sex': .*integer class indices"),
        ({"sex": torch.ones(40, dtype=torch.bool)}, "Head 'sex': .*integer class indices"),
        ({"age": torch.ones(40, 1, dtype=torch.long)}, "Head 'age': .*floating point"),
    ],
)
def test_targets_of_heads_keep_their_dtypes_checked(changes: dict[str, Tensor], words: str) -> None:
    x, y = people()
    with pytest.raises(TypeError, match=words):
        two(likelihood=KINDS, logits="heads").elbo(x, y | changes, n_data=80)


def test_heads_of_tokens_may_have_other_lengths_in_validation() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.size = nn.Linear(D, C), nn.Linear(D, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"type": self.kind(x), "values": self.size(x.mean(1))}  # names that modules have, too

    likelihood = {"type": Categorical(axis=-1), "values": "gaussian"}
    model = ibnn.convert(Both(), components=2, seed=0, likelihood=likelihood)
    train, valid = (
        (torch.randn(30, n, D), {"type": torch.randint(C, (30, n)), "values": torch.randn(30, 1)}) for n in (5, 7)
    )
    history = ibnn.fit(model, train, valid, epochs=1, beta=1.0, quiet=True)
    assert math.isfinite(history.rows[-1]["valid_type.nll"])
    with pytest.raises(ValueError, match="of one shape where sizes are alike"):
        model.likelihood.pack({"type": torch.zeros(2, 4, dtype=torch.long), "values": torch.zeros(2, 2)})


def test_heads_after_inference_mode() -> None:
    model, (x, _) = two(likelihood=KINDS, logits="heads").eval(), people()
    with torch.inference_mode():
        model(x)
    model.load_state_dict(model.state_dict())


def test_wrong_heads_are_refused() -> None:
    with pytest.raises(TypeError, match="heads"):
        Heads({})
    with pytest.raises(ValueError, match="Did you mean 'gaussian'"):
        ibnn.convert(Two(), likelihood={"age": "gausian"})
    assert isinstance(two(likelihood={"age": Gaussian(noise="learnt"), "sex": "bernoulli"}).likelihood, Heads)


# ------------------------------------------------------------------------------------------------------ ways to call it


def test_inputs_by_keyword_come_as_a_dict() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(D, C)

        def forward(self, *, values: Tensor, scale: Tensor) -> Tensor:
            return self.fc(values * scale)

    model, inputs = ibnn.convert(Named(), seed=0), {"values": torch.randn(B, D), "scale": torch.rand(B, 1)}
    expected = model.predict(inputs)
    outputs = [model.draw(component=k, index=s)(**inputs) for k in range(8) for s in range(5)]
    torch.testing.assert_close(expected.probs, torch.stack(outputs).softmax(-1).mean(0))
    assert torch.equal(ibnn.predict(model, inputs).probs, expected.probs)
    plain = Plain(Named())
    torch.testing.assert_close(plain.predict(inputs).probs, plain.net(**inputs).softmax(-1))
    with pytest.raises(TypeError, match="sample"):
        model.predict(inputs, sample=3)


def test_a_joint_prediction_is_a_mapping_of_heads() -> None:
    model, (x, _) = two(likelihood=KINDS, logits="heads"), people()
    p = model.predict(x)
    assert list(p) == list(p.keys()) == list(KINDS)
    assert "age" in p
    assert "x" not in p
    assert dict(p)["age"] is p["age"]
    assert len(p) == len(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64])
@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, C)), nn.Linear(D, C).double()])
def test_numbers_of_any_dtype_are_answered_alike(dtype: torch.dtype, net: nn.Module) -> None:
    model, x = ibnn.convert(net, components=2, seed=0), torch.randint(9, (300, D))
    own = next(net.parameters()).dtype
    expected = model.predict(x.to(own), samples=3).probs
    for given in (x.to(dtype), x.to(dtype).numpy()):
        assert torch.equal(model.predict(given, samples=3).probs, expected)
    loss = model.train().elbo(x.to(dtype), torch.zeros(300, dtype=torch.long), n_data=300).loss
    model.reseed(0)
    again = model.elbo(x.to(own), torch.zeros(300, dtype=torch.long), n_data=300).loss
    model.reseed(0)
    torch.testing.assert_close(model.elbo(x.to(dtype), torch.zeros(300, dtype=torch.long), n_data=300).loss, again)
    assert loss.isfinite()


def test_a_compiled_network_is_converted_before() -> None:
    with pytest.raises(TypeError, match="Convert first, then compile"):
        ibnn.convert(torch.compile(nn.Linear(3, 2)))


def test_shapes_of_outputs_are_not_remembered_for_ever() -> None:
    likelihood = Heads({"a": Gaussian()})
    for width in range(1, 2000):
        likelihood.read({"a": torch.zeros(1, width)})
    assert len(likelihood._shapes["output"]) <= 1024
    assert likelihood.terms(torch.zeros(1, 1999), likelihood.pack({"a": torch.zeros(1, 1999)})).count == 1999
