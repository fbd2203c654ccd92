import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ibnn
from ibnn import calibration
from ibnn.calibration import Calibration, calibrate, choose
from ibnn.files.saving import load
from ibnn.likelihood import Bernoulli, Categorical, Gaussian, Likelihood, Temperature, Terms


def problem(rows: int = 250, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """An overconfident classifier with BatchNorm and dropout, and labels that it does not know."""
    generator = torch.Generator().manual_seed(1 + seed)
    x = torch.randn(rows + 60, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator) + torch.randn(len(x), 3, generator=generator)).argmax(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3))
    optimiser = torch.optim.Adam(net.parameters(), 0.03)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(net(x[:60]), y[:60]).backward()
        optimiser.step()
    return net.eval(), x[60:], y[60:]


def quick(net: nn.Module, x: Any, y: Any, **options: Any) -> tuple[ibnn.IBNN, Calibration]:
    components, likelihood = options.pop("components", 4), options.pop("likelihood", "categorical")
    model = ibnn.convert(net, components=components, seed=0, likelihood=likelihood)
    return model, calibrate(model, (x, y), **options)


# ------------------------------------------------------------------------------------------------- the right choice


def test_the_scale_of_a_linear_regression_is_the_one_in_closed_form() -> None:
    """y ~ N(w·x, s² + a²·Σ(w x)²): the mixture over z is Gaussian, and its best a on given data is a line search."""
    x = torch.randn(400, 4)
    net = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 1.5]]))
        spread = (net.weight * x).square().sum(1, keepdim=True)
        y = net(x) + (1 + 0.5**2 * spread).sqrt() * torch.randn(400, 1)
    model = ibnn.convert(net, components=8, seed=0, likelihood=Gaussian(init_std=1.0))
    report = calibrate(model, (x, y))

    def nll(a: float) -> float:
        return -torch.distributions.Normal(net(x), (1 + a**2 * spread).sqrt()).log_prob(y).mean().item()

    grid = [0.005 * i for i in range(200)]
    best = min(grid, key=nll)
    assert 0.35 < best < 0.65
    found = min(report.curve, key=lambda point: point.nll).scale
    assert abs(math.log2(found / best)) <= 0.5  # neighbours on the grid are an octave apart
    assert nll(found) < nll(best) + 0.03
    assert nll(best) < nll(0.0) - 0.1  # so the test can fail
    assert report.curve[0].nll == pytest.approx(nll(0.0), abs=1e-4)


@pytest.mark.slow
def test_the_scale_of_a_classifier_is_that_of_a_dense_grid_of_public_draws() -> None:
    net, x, y = problem()
    _, report = quick(net, x, y, samples=16)
    other = ibnn.convert(net, components=4, seed=0)

    def nll(scale: float) -> float:
        other.set_posterior(mean=1.0, std=scale)
        with torch.no_grad():
            draws = other.draw_logits(x, 50, seed=7)
        logs = ((draws / t).softmax(-1).mean(0).log() for t in torch.logspace(-0.5, 1, 30).tolist())
        return min(F.nll_loss(log, y).item() for log in logs)

    grid = {a: nll(a) for a in torch.logspace(-1.5, 0.3, 25).tolist()}
    assert nll(report.scale) < min(grid.values()) + 0.005
    assert max(grid.values()) > min(grid.values()) + 0.1  # so the test can fail
    assert all(abs(point.tempered_nll - nll(point.scale)) < 0.02 for point in report.curve)


def test_scale_and_temperature_are_not_worse_than_temperature_scaling() -> None:
    net, x, y = problem()
    _, report = quick(net, x, y)
    assert report.after["nll"] <= report.temperature_scaling["nll"]
    assert report.temperature_scaling["nll"] < report.before["nll"] - 0.05
    assert all(point.tempered_nll <= point.nll for point in report.curve)


def test_without_use_for_noise_it_is_temperature_scaling() -> None:
    """A linear classifier that is right but for its scale: noise only hurts."""
    x = torch.randn(2000, 2)
    logits = 2 * torch.stack([x[:, 0], -x[:, 0], x[:, 1]], 1)
    y = torch.distributions.Categorical(logits=logits).sample()
    net = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        net.weight.copy_(8 * torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]))
    _, report = quick(net, x, y)
    grid = torch.linspace(2, 8, 3001)
    with torch.no_grad():
        nlls = torch.stack([F.cross_entropy(net(x) / t, y) for t in grid])
    assert report.curve[0].temperature == pytest.approx(grid[nlls.argmin()].item(), rel=0.1)  # of a part of the rows
    assert report.temperature_scaling["nll"] == pytest.approx(nlls.min().item(), abs=1e-5)
    nearly = {point.scale: point.tempered_nll - report.curve[0].tempered_nll for point in report.curve}
    assert nearly[report.scale] < 0.001 + 1e-5  # what noise may cost
    assert report.scale < 0.15
    assert report.temperature == pytest.approx(grid[nlls.argmin()].item(), rel=0.05)


MORE = [pytest.param(rows, seed, marks=pytest.mark.slow) for rows, seed in ((20, 1), (60, 0), (200, 0))]


@pytest.mark.parametrize(("rows", "seed"), [(20, 0), (60, 2), (200, 3), (1000, 1), *MORE])
def test_it_never_ends_worse_than_temperature_scaling(rows: int, seed: int) -> None:
    net, x, y = problem(rows, seed)
    model, report = quick(net, x, y, seed=seed, samples=2)
    assert report.cross_nll[1] <= report.cross_nll[0]
    assert report.after["nll"] <= report.temperature_scaling["nll"]
    assert bool(report.reason) == (report.scale == 0)
    assert report.scale > 0 or report.cross_nll[0] == report.cross_nll[1]
    assert model.likelihood.score(model.predict(x, samples=2, seed=seed), y) == pytest.approx(report.after, abs=1e-5)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        both = net(x[order])[None], model.draw_logits(x[order], 2, seed)
    for draws, found in zip(both, report.cross_nll, strict=True):
        assert _crossed(draws, y[order]) == pytest.approx(found, rel=3e-3)


def test_noise_that_is_worse_than_temperature_scaling_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve goes on until noise is clearly too much: were its end chosen, the check would drop it and say so."""
    monkeypatch.setattr(calibration, "choose", lambda losses, counts, part: len(losses) - 1)
    net, x, y = problem(400)
    model, report = quick(net, x, y)
    assert report.scale == 0
    assert f"Noise of scale {report.curve[-1].scale:.3g} is no better" in report.reason
    assert report.reason in str(report)
    assert report.after == report.temperature_scaling
    assert report.cross_nll[0] == report.cross_nll[1]
    assert model.predict(x, novelty=False).epistemic.max() < 1e-6


def _crossed(draws: Tensor, y: Tensor) -> float:
    return crossed_rows(draws, y).mean().item()


def crossed_rows(draws: Tensor, y: Tensor) -> Tensor:
    """Losses of each half at the temperature, of a grid, of the lowest cost for the other half; e-folds cost 5 nats."""
    half, log_t = len(y) // 2, math.log(2) * torch.linspace(-2, 5, 701)  # one of them is 0
    tempered, price = draws / log_t.exp()[:, None, None, None], 5 * log_t.abs()  # (T, J, N, C)
    log_probs = tempered.log_softmax(-1).logsumexp(1) - math.log(len(draws))
    losses = -log_probs[:, range(len(y)), y]  # (T, N)
    first, second = losses[:, :half], losses[:, half:]
    return torch.cat([first[(second.sum(1) + price).argmin()], second[(first.sum(1) + price).argmin()]])


def test_few_labels_leave_the_network_as_it_is() -> None:
    """Thirty labels that are all answered right ask for T → 0, the rows alone for noise or none; nothing changes."""
    net, x, _ = problem(60)
    with torch.no_grad():
        y, before = net(x).argmax(1), net(x).log_softmax(1)
    model, report = quick(net, x[:30], y[:30])
    assert (report.scale, report.temperature) == (0, 1)
    assert report.fitted_temperature < 0.5
    assert report.after == report.before
    assert "too few to support it" in str(report)
    torch.testing.assert_close(model.predict(x).log_probs, before)


def test_choose_by_hand() -> None:
    counts = torch.ones(4)
    zero, low = torch.tensor([2.0, 2.0, 2.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    noisy = torch.tensor([1.0, 1.0, 1.0, 1.4])  # 0.1 ± 0.1 worse
    sure = torch.tensor([1.1, 1.1, 1.1, 1.11])  # 0.1 ± 0.0025 worse
    costly = torch.tensor([0.0, 4.0, 0.0, 3.0])  # 0.75 ± 1.0 worse: three quarters of the gain
    assert choose([zero, low, noisy], counts) == 2
    assert choose([zero, low, sure], counts) == 1
    assert choose([zero, low, costly], counts) == 1
    tied = torch.tensor([1.0, 1.0, 0.8, 1.3])  # 0.025 ± 0.103 worse
    assert choose([low, tied], counts) == 1
    assert choose([low, noisy], counts) == 0
    assert choose([zero, torch.full((4,), math.nan)], counts) == 0


@pytest.mark.parametrize("kind", ["categorical", "dense", "bernoulli", "gaussian"])
def test_group_losses_agree_with_the_score(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 10, 4, 2, 2) if kind == "dense" else (2, 3, 10, 4)
    draws = torch.randn(shape, generator=generator)
    likelihood: Likelihood = {"bernoulli": Bernoulli(), "gaussian": Gaussian()}.get(kind, Categorical(ignore_index=2))
    likelihood.temperature.fill_(1.7)
    y = torch.randint(4, (10, *shape[4:]), generator=generator)
    if kind in ("bernoulli", "gaussian"):
        y = torch.rand(10, 4, generator=generator).round() if kind == "bernoulli" else torch.randn(10, 4)
    with torch.no_grad():
        losses, counts = likelihood.losses(draws, y)
    assert len(losses) == 10
    assert int(counts.sum()) == likelihood.count(y)
    mean = float(losses.sum() / counts.sum())
    assert mean == pytest.approx(likelihood.score(likelihood.summarise(draws), y)["nll"], rel=1e-5)


# ---------------------------------------------------------------------------------------------- what changes, what not


def test_weights_statistics_modes_and_generators_stay() -> None:
    net, x, y = problem()
    model = ibnn.convert(net, components=2, seed=0)
    model.train()
    model.net[3].eval()
    modes = [module.training for module in model.net.modules()]
    latents = {id(p) for latent in model.latents.values() for p in latent.parameters()}
    before = {n: t.clone() for n, t in model.net.state_dict(keep_vars=True).items() if id(t) not in latents}
    generator = torch.get_rng_state()
    calibrate(model, (x, y))
    state = model.net.state_dict()
    assert len(before) == 9
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert [module.training for module in model.net.modules()] == modes
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert int(model.examples) == 0
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not model.likelihood.temperature.requires_grad


@pytest.mark.slow
def test_calibrating_twice_gives_the_same_and_the_seed_counts() -> None:
    net, x, y = problem(80)
    (first, a), (second, b), (_, other) = (quick(net, x, y, seed=s) for s in (3, 3, 4))
    assert a == b
    assert all(torch.equal(v, second.state_dict()[n]) for n, v in first.state_dict().items())
    assert a.curve[0].scale == other.curve[0].scale == 0
    assert a.curve[1].nll != other.curve[1].nll  # of other draws
    assert calibrate(first, (x, y), seed=3) == a  # what it was calibrated to before leaves no trace


def test_eval_mode_and_predict_give_the_reported_scores() -> None:
    net, x, y = problem()
    model, report = quick(net, x, y, samples=3, seed=5)
    with torch.no_grad():
        log_probs = model.eval()(x)
    assert F.nll_loss(log_probs, y).item() == pytest.approx(report.after["nll"], abs=1e-5)
    prediction = model.predict(x, samples=3, seed=5)
    assert model.likelihood.score(prediction, y) == pytest.approx(report.after, abs=1e-5)
    assert float(model.likelihood.temperature) == pytest.approx(report.temperature)
    assert list(report.std) == ["0", "4"]
    assert model.latents["0"].std.mean().item() == pytest.approx(report.std["0"], rel=1e-4)
    plain = F.cross_entropy(net(x), y).item()
    assert report.before["nll"] == pytest.approx(plain, abs=1e-5)


def test_trained_latents_keep_their_means_and_are_scaled() -> None:
    net, x, y = problem()
    model = ibnn.convert(net, components=2, init_std=0.2, seed=0)
    model.examples.fill_(1000)
    mean, std = (t.clone() for t in model.posterior())
    with torch.no_grad():
        came = model.likelihood.score(model.predict(x), y)
    report = calibrate(model, (x, y))
    assert torch.equal(model.posterior().mean, mean)
    assert torch.allclose(model.posterior().std, report.scale * std, rtol=1e-3, atol=1e-6)
    assert report.before == pytest.approx(came, abs=1e-5)
    with torch.no_grad():
        mean_probs = torch.stack([model.component(k)(x) for k in range(2)])
        tempered = (mean_probs / report.curve[0].temperature).softmax(-1).mean(0).log()
    assert report.temperature_scaling["nll"] == pytest.approx(F.nll_loss(tempered, y).item(), abs=1e-5)


def test_untrained_latents_are_centred_on_the_network() -> None:
    net, x, y = problem()
    model = ibnn.convert(net, components=2, init_std=0.5, seed=0)
    calibrate(model, (x, y))
    assert torch.equal(model.posterior().mean, torch.ones(2, 30))


@pytest.mark.parametrize("when", ["check", "late"])
def test_a_failure_leaves_everything_as_it_was(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = problem()
    model = ibnn.convert(net, components=2, init_std=0.5, seed=0)
    model.likelihood.temperature.fill_(1.5)
    before = copy.deepcopy(model.state_dict())
    if when == "late":
        monkeypatch.setattr(calibration, "Calibration", _fails)
    else:
        y = y + 1
    with pytest.raises((ValueError, KeyError)):
        calibrate(model, (x, y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.eval_samples, model.eval_seed) == (1, 0)
    assert model.fresh
    assert torch.equal(model.eval().net(x), net(x))  # outside of passes: as before conversion


def _fails(**_: Any) -> None:
    raise KeyError("late")


def test_a_failed_second_calibration_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = problem()
    model, _ = quick(net, x, y)
    before, answer = copy.deepcopy(model.state_dict()), model.predict(x[:5])
    assert answer.conformal is not None
    monkeypatch.setattr(calibration, "Calibration", _fails)
    with pytest.raises(KeyError):
        calibrate(model, (x + 1, y), samples=3)
    after, again = model.state_dict(), model.predict(x[:5])
    assert list(after) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert torch.equal(again.set(0.9), answer.set(0.9))
    assert torch.equal(again.p_value, answer.p_value)


def test_saves_keep_the_calibration(tmp_path: Path) -> None:
    net, x, y = problem()
    model, _ = quick(net, x, y, samples=2)
    for latents_only in (False, True):
        model.save_pretrained(tmp_path / str(latents_only), latents_only=latents_only)
        again = load(tmp_path / str(latents_only), net)
        assert float(again.likelihood.temperature) == float(model.likelihood.temperature) != 1.0
        assert torch.equal(again.eval()(x), model.eval()(x))
    assert torch.equal(load(tmp_path / "True", net, copy=False).eval()(x), model(x))


# ------------------------------------------------------------------------------------------------------- kinds of input


@pytest.mark.slow
def test_arrays_datasets_and_loaders_give_the_same() -> None:
    net, x, y = problem(100)
    data = TensorDataset(x, y)
    kinds = [(x, y), (x.numpy(), np.asarray(y)), data, DataLoader(data, batch_size=256, shuffle=True)]
    reports = []
    for kind in kinds:
        model = ibnn.convert(net, components=2, seed=0)
        reports.append(calibrate(model, kind))
    assert all(report == reports[0] for report in reports[1:])
    small = calibrate(ibnn.convert(net, components=2, seed=0), (x, y), batch_size=50)
    assert small.after["nll"] == pytest.approx(reports[0].after["nll"], abs=1e-4)


class Named(nn.Module):
    """Takes inputs by name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, features: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.net(features) * scale
        return out


def test_inputs_by_name() -> None:
    net, x, y = problem()
    rows = [{"features": f, "scale": torch.ones(1), "labels": label} for f, label in zip(x, y, strict=True)]
    model = ibnn.convert(Named(net), components=2, seed=0)
    report = calibrate(model, DataLoader(rows, batch_size=256))  # type: ignore[arg-type]
    assert report.before["nll"] == pytest.approx(F.cross_entropy(net(x), y).item(), abs=1e-5)


def test_bernoulli() -> None:
    net, x, y = problem(120)
    yes = F.one_hot(y, 3).float()
    model, report = quick(net, x, yes, likelihood="bernoulli")
    assert report.after["nll"] < report.before["nll"]
    logit = model.eval()(x)
    assert F.binary_cross_entropy_with_logits(logit, yes).item() == pytest.approx(report.after["nll"], abs=1e-4)


def test_gaussian_noise_is_scaled_to_the_errors() -> None:
    """A network of zero error but for the noise, whose learnt noise is ten times too small: T is its ratio."""
    x = torch.randn(1000, 3)
    net = nn.Linear(3, 2)
    y = net(x).detach() + 0.5 * torch.randn(1000, 2)
    model, report = quick(net, x, y, likelihood=Gaussian(init_std=0.05))
    assert report.curve[0].temperature == pytest.approx((y - net(x)).square().mean().sqrt().item() / 0.05, rel=0.1)
    assert report.after["nll"] == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 0.25), abs=0.1)
    prediction = model.predict(x)
    assert -prediction.log_prob(y).mean().item() == pytest.approx(report.after["nll"], abs=1e-4)


def test_dense_outputs_and_ignored_pixels() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    with torch.no_grad():
        net[2].weight.mul_(20)
    x, y = torch.randn(40, 2, 5, 5), torch.randint(3, (40, 5, 5))
    y[:, 0] = -100
    model, report = quick(net, x, y)
    assert report.after["nll"] < report.before["nll"]
    with torch.no_grad():
        assert F.nll_loss(model.eval()(x), y).item() == pytest.approx(report.after["nll"], abs=1e-4)


class Own(Likelihood):
    """A user's likelihood, which has what is required and no more."""

    def __init__(self, *, tempered: bool) -> None:
        super().__init__()
        self.inner, self.tempered = Categorical(), tempered

    def _own(self, temperature: Temperature) -> Temperature:
        return self._resolve(temperature) if self.tempered else 1.0

    def check(self, output: Tensor, target: Tensor) -> None:
        self.inner.check(output, target)

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        return self.inner.terms(output, target, self._own(temperature))

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Tensor:
        return self.inner.combine(draws, self._own(temperature))

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> ibnn.Prediction:
        return self.inner.summarise(draws, self._own(temperature))

    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        return self.inner.score(prediction, target)


def test_a_likelihood_of_the_users_own() -> None:
    net, x, y = problem(100)
    _, report = quick(net, x, y, likelihood=Own(tempered=False))
    assert report.temperature == 1.0
    assert report.after["nll"] < report.before["nll"] - 0.05


@pytest.mark.slow
def test_a_likelihood_of_the_users_own_is_tempered() -> None:
    net, x, y = problem(50)
    own, report = quick(net, x, y, likelihood=Own(tempered=True))
    assert report.curve[0].temperature == pytest.approx(quick(net, x, y)[1].curve[0].temperature, rel=1e-5)
    assert report.temperature != 1.0
    draws = ibnn.draws(own, x, samples=2)
    expected = Categorical().summarise(draws, 2.5)
    for found in (own.likelihood.summarise(draws, 2.5), own.likelihood.running(4, 2, temperature=2.5).summarise(draws)):
        torch.testing.assert_close(found.probs, expected.probs)
    torch.testing.assert_close(own.likelihood.terms(draws[0, 0], y, 2.5).nll, F.cross_entropy(draws[0, 0] / 2.5, y))
    assert float(own.likelihood.temperature) == pytest.approx(report.temperature)


class SequenceFirst(nn.Module):
    """Its layers see (length, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(2, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x.view(len(x), 3, 2).transpose(0, 1)).relu()
        scores: Tensor = 5 * self.last(hidden.mean(0))
        return scores


def test_layers_that_do_not_see_the_batch_first() -> None:
    _, x, y = problem(100)
    model, report = quick(SequenceFirst(), x, y)
    assert report.after["nll"] < report.before["nll"]
    with torch.no_grad():
        assert F.nll_loss(model.eval()(x), y).item() == pytest.approx(report.after["nll"], abs=1e-4)


# ----------------------------------------------------------------------------------------------------------- the report


def test_report() -> None:
    net, x, y = problem()
    _, report = quick(net, x, y)
    assert report.rows == 250
    scales = [point.scale for point in report.curve]
    assert scales == sorted(scales)
    assert scales[0] == 0.0
    assert report.scale in scales
    text = str(report)
    for number in (report.before["nll"], report.after["ece"], report.temperature_scaling["error"], *report.cross_nll):
        assert f"{number:.4f}" in text
    assert report.cross_nll[0] == pytest.approx(report.temperature_scaling["nll"], abs=0.02)
    assert report.cross_nll[0] >= report.temperature_scaling["nll"] - 1e-6


def test_a_network_that_ends_in_a_softmax_is_warned_of() -> None:
    net, x, y = problem(60)
    with pytest.warns(UserWarning, match="softmax"):
        quick(nn.Sequential(net, nn.Softmax(1)), x, y)


def test_the_header_of_heads_does_not_run_together() -> None:
    _, report = quick(*problem(60))
    long = dataclasses.replace(
        report, **{k: {"nll": 1.0, "category.error": 0.5} for k in ("before", "temperature_scaling", "after")}
    )
    assert str(long).splitlines()[0].split() == ["nll", "category.error"]
    assert str(long).splitlines()[1].split() == ["before", "1.0000", "0.5000"]


def test_refusals() -> None:
    net, x, y = problem(60)
    model = ibnn.convert(net, seed=0)
    nan = x.clone()
    nan[7, 0] = math.nan
    infinite = x.clone()
    infinite[7, 0] = math.inf
    for argument, valid, words in (
        (net, (x, y), "Convert it first"),
        (model, (x[:10], y[:10]), "at least 20"),
        (model, (x[:0], y[:0]), "at least one row"),
        (model, (nan, y), "NaN in row 7"),
        (model, (infinite, y), "NaN or infinity in the network's outputs"),
        (model, (x, y + 1), "labels from 1 to 3"),
        (model, (x, torch.full_like(y, -100)), "`valid` to be data of at least 20 labels, but got 0. .* ignored"),
        (model, (x, torch.where(torch.arange(60) < 19, y, -100)), "at least 20 labels, but got 19"),
        (model, (x[:, :4], y), r"layer '0' \(Linear\) gets an input of shape \(rows, 6\), but got shape \(60, 4\)"),
        (model, (x[:, 0], y), r"of shape \(rows, 6\), but got shape \(60,\)"),
        (ibnn.convert(nn.Linear(6, 1)), (x, y * 0), 'likelihood="bernoulli"'),
        (model, (x, y.float()), "integer class indices"),
        (model, (x, y[:-1]), "as many inputs as targets"),
        (model, x, "a Dataset, a DataLoader or a pair"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            calibrate(argument, valid)  # type: ignore[arg-type]
    for options in ({"samples": 0}, {"batch_size": True}, {"seed": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            calibrate(model, (x, y), **options)  # type: ignore[arg-type]
