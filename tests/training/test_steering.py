import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fit_job import JOB, Stop, close, make_data, make_net, run, same
from reference import nll_reference
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import ibnn
from ibnn import fit
from ibnn.batches import as_source
from ibnn.likelihood import Categorical, Gaussian, Likelihood, temperature
from ibnn.training import session as checkpoint
from ibnn.training import steering
from ibnn.training.data import HeldOut

X, Y = make_data(600)
VALID = tuple(part[450:] for part in (X, Y))
TRAIN = tuple(part[:450] for part in (X, Y))
SHORT: dict[str, Any] = {"steps": 12, "batch_size": 90, "quiet": True}  # 5 or 6 steps an epoch, 9 looks


def make_model(kind: str = "linear", components: int = 2, **options: Any) -> ibnn.IBNN:
    return ibnn.convert(make_net(kind), components=components, seed=0, **options)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.3}, {"weight": torch.tensor([0.2, 1.0, 3.0])}])
def test_looks_compare_plain_losses(options: dict[str, Any]) -> None:
    """Where nothing is learnt, looks see and do the same whatever the loss smooths or weighs."""
    runs = []
    for likelihood in (Categorical(), Categorical(**options)):
        model = make_model(likelihood=likelihood)
        still: Any = {"lr": 1e-12, "latent_lr": 1e-12, "accumulate": 2, "samples": 2, "novelty": False}
        runs.append(fit(model, TRAIN, VALID, **still, **SHORT))
    for plain, look in zip(runs[0].looks, runs[1].looks, strict=True):
        assert look == pytest.approx(plain, rel=1e-4)
    assert runs[1]["nll"] == pytest.approx(runs[0]["nll"], rel=1e-4)
    assert abs(runs[1]["loss"][0] - runs[0]["loss"][0]) > 0.01


# ------------------------------------------------------------------------------------------------- the small laws


def test_look_steps_are_even_and_follow_some_training() -> None:
    steps = sorted(steering.look_steps(10_000))
    assert len(steps) == steering.LOOKS
    gaps = np.diff(steps)
    assert gaps.max() - gaps.min() <= 1
    for total in range(1, 60):
        assert all(1 <= step < total for step in steering.look_steps(total)), total  # something was seen before each


def test_the_kl_weighs_a_node_alike_for_any_number_of_data_and_nodes() -> None:
    """β·KL/N of equal posteriors at every node is the same, whatever N and the network."""
    found = []
    for width, n_data in ((4, 100), (64, 100), (64, 10_000)):
        model = ibnn.convert(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3)), components=1, seed=0)
        model.set_posterior(mean=1.2, std=0.1)
        found.append(steering.kl_weight(1.0, n_data=n_data, nodes=model.nodes) * model.kl().item() / n_data)
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_the_desired_change_has_the_right_sign() -> None:
    def change(
        likelihood: Likelihood = Categorical(),  # noqa: B008
        *,
        temperature: float = 1.0,
        training: float = 1.0,
        held_out: float = 1.0,
        t: float = 1.0,
    ) -> float:
        seen = {"temperature": temperature, "training_nll": training, "held_out_nll": held_out}
        return steering.desired_change(likelihood, seen, t)

    assert change() < 0  # it does not overfit
    assert change(t=0.1) > change()  # and has time to
    assert change(training=0.2) > 0  # it overfits
    assert change(temperature=2.0, training=1.3) == 0  # overconfident, but it does not overfit
    assert change(temperature=9.0, training=0.7) == pytest.approx(math.log(1 / 0.7))  # no further than the gap
    assert change(temperature=0.9) < change()
    gaussian = Gaussian()  # of densities a good fit has no gap, and gaps are differences
    assert change(gaussian, temperature=0.9, training=-1.0, held_out=-1.0) == pytest.approx(math.log(0.9))
    assert change(gaussian, training=-2.0, held_out=-1.0) > 0
    assert all(math.isfinite(change(**{name: 0.0})) for name in ("training", "held_out"))
    for name, values in (("temperature", (0.5, 0.9, 1.1)), ("training", (0.7, 0.55, 0.5, 0.45))):
        found = [change(**{"training": 0.6} | {name: value}) for value in values]
        assert found == sorted(set(found)), name


def test_noise_follows_the_desired_change_within_bounds() -> None:
    found = [steering.next_std(0.3, wanted) for wanted in np.linspace(-2, 2, 81)]
    assert found == sorted(found)
    assert steering.next_std(0.3, 0.0) == 0.3
    assert steering.next_std(steering.MAX_STD, 1.0) == steering.MAX_STD
    assert steering.next_std(steering.MIN_STD, -1.0) == steering.MIN_STD


# ------------------------------------------------------------------------------------------------ held-out data


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 600

    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


NOT_STEERED = {
    "few": (tuple(part[:499] for part in (X, Y)), None, "no held-out data, and only 499 examples"),
    "sampler": (
        DataLoader(TensorDataset(X, Y), batch_size=90, sampler=WeightedRandomSampler([1.0] * 600, 600)),
        None,
        "no held-out data, and none can be split off where a sampler or iterable decides",
    ),
    "iterable": (DataLoader(Stream(), batch_size=90), None, "none can be split off where a sampler or iterable"),
    "valid": ((X, Y), (X[:99], Y[:99]), "only 99 held-out examples"),
}


@pytest.mark.parametrize("case", NOT_STEERED)
def test_what_cannot_be_steered_has_beta_1_and_says_so(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    train, valid, reason = NOT_STEERED[case]
    options = {"steps": 7, "batch_size": 90}
    auto, fixed = make_model(), make_model()
    history = fit(auto, train, valid, **options)
    said = capsys.readouterr().err
    assert said.splitlines()[1].startswith('beta = 1 stands in for "auto": ')
    assert reason in said
    assert history.looks == ()
    assert (auto.prior_std, auto.likelihood.temperature) == (0.3, 1)
    assert fit(fixed, train, valid, **options, beta=1.0, quiet=True).rows == history.rows
    assert capsys.readouterr().err == ""
    assert same(auto, fixed)


def test_nothing_is_said_when_quiet_or_steered(capsys: pytest.CaptureFixture[str]) -> None:
    fit(make_model(), (X[:90], Y[:90]), steps=1, quiet=True)
    assert capsys.readouterr().err == ""
    fit(make_model(), TRAIN, VALID, steps=1)
    assert "stands in" not in capsys.readouterr().err


def test_auto_trains_on_the_rest_and_a_fixed_beta_on_everything() -> None:
    auto = fit(make_model(), (X, Y), epochs=1, batch_size=600, quiet=True).rows[0]
    assert auto["loss"] == pytest.approx(auto["nll"] + auto["beta"] * auto["kl"] / 500, rel=1e-6)
    fixed = fit(make_model(), (X, Y), epochs=1, batch_size=600, quiet=True, beta=1.0, beta_warmup=0.0).rows[0]
    assert fixed["loss"] == pytest.approx(fixed["nll"] + fixed["kl"] / 600, rel=1e-6)
    assert "valid_nll" in auto
    assert "valid_nll" not in fixed
    rows = []
    for beta in ("auto", 1.0):
        model = make_model()
        fit(model, (X, Y), epochs=2, batch_size=100, quiet=True, beta=beta)
        rows.append(int(model.examples))
    assert rows == [1000, 1200]


def test_the_callers_n_data_is_shared_out_with_the_rows() -> None:
    """β is proportional to N: 500 of 600 rows are trained on where some are held out, and all where none are."""
    runs = [fit(make_model(), *data, n_data=600, **SHORT | {"steps": 1}) for data in (((X, Y),), (TRAIN, VALID))]
    assert runs[0]["beta"][0] / runs[1]["beta"][0] == pytest.approx(500 / 600)


# ------------------------------------------------------------------------------------------------------ a look


def test_unsteered_looks_leave_a_run_of_fixed_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    """With s held still and no temperature, "auto" is a fixed β that has risen by the first look."""
    monkeypatch.setattr(steering, "next_std", lambda prior_std, change: prior_std)
    monkeypatch.setattr(steering, "supported_temperature", lambda *arguments: 1.0)
    auto, fixed = make_model(), make_model(prior_std=0.3 * steering.START)
    a = fit(auto, TRAIN, VALID, **SHORT)
    beta = steering.KL_WEIGHT * 450 / auto.nodes
    b = fit(fixed, TRAIN, VALID, beta=beta, beta_warmup=steering.WARM, **SHORT)
    assert len(a.looks) == 9
    close(auto, fixed, rtol=1e-4, atol=1e-5)
    for row, other in zip(a.rows, b.rows, strict=True):
        assert row == pytest.approx(other | {"prior_std": 0.3 * steering.START}, rel=1e-4)


def test_a_look_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step an epoch: rows and looks check each other; without latent steps σ is moved by s alone."""
    monkeypatch.setattr(steering, "BUDGET", 1e9)  # all held-out rows are asked, as in a long run
    model = make_model()
    before = model.posterior().std.clone()
    states: dict[int, dict[str, Tensor]] = {}
    history = fit(
        model, TRAIN, VALID, epochs=10, batch_size=450, lr=0.05, latent_lr=0.0, quiet=True,
        callbacks=[lambda row, m: states.__setitem__(row["step"], {k: v.clone() for k, v in m.state_dict().items()})],
    )  # fmt: skip
    assert [look["step"] for look in history.looks] == sorted(steering.look_steps(10)) == list(range(2, 10))
    start = 0.3 * steering.START
    s, last, before_that = start, 0, math.inf
    for turn, look in enumerate(history.looks):
        step = int(look["step"])
        assert look["training_nll"] == pytest.approx(np.mean(history["nll"][last:step]), rel=1e-6)
        plain = make_model()
        plain.load_state_dict(states[step])  # after the step before the look
        draws = plain.draw_logits(VALID[0], samples=2, seed=turn).unflatten(0, (2, 2)).detach()
        mean = draws.softmax(-1).mean((0, 1)).log()[None, None]
        best = temperature.best_temperature(plain.likelihood, mean, VALID[1])
        assert look["temperature"] == pytest.approx(best, rel=1e-3)
        assert look["held_out_nll"] == pytest.approx(nll_reference(Categorical(), mean, VALID[1], best), rel=1e-5)
        change = steering.desired_change(plain.likelihood, look, step / 10)
        s, last = steering.next_std(s, min(change, max(0, before_that))), step
        before_that = change
        assert look["prior_std"] == s
    assert history["prior_std"] == [start, start, *(look["prior_std"] for look in history.looks)]
    assert model.prior_std == s != start
    weaker = [
        factor for factor in steering.SHRINKAGES if torch.allclose(model.posterior().std, before * (s / start * factor))
    ]
    assert len(weaker) == 1


def test_looks_keep_to_a_budget() -> None:
    for training in (40_000, 45_000, 90_000, 400_000, 10**7):
        plan = steering.look_budget(training)
        assert plan.looks * plan.rows * steering.DRAWS <= steering.BUDGET * training
        least = steering.END_ROWS[0]
        assert plan.end_rows == least or plan.end_rows * steering.END_DRAWS <= steering.END * training
    assert steering.look_budget(300_000, calibrated=True).end_rows > steering.look_budget(300_000).end_rows


@pytest.mark.slow
def test_a_calibrated_start_ends_with_more_held_out_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(steering.Steering, "settle", lambda self: asked.append(self.plan.end_rows))
    for calibrate in (False, True):
        fit(make_model(), TRAIN, VALID, recipe="pretrained", calibrate=calibrate, **SHORT)
    assert asked[1] > asked[0]


@pytest.mark.parametrize("components", [1, 3, 16])
def test_looks_take_turns_and_cost_the_same_for_any_number_of_components(components: int) -> None:
    model = make_model(components=components)
    held_out = HeldOut(model, as_source((X, Y), batch_size=256, shuffled=False), torch.device("cpu"), seed=0)
    steered = steering.Steering(model, held_out, total=100, batch_size=90)
    (a, a_targets), (b, b_targets) = (steered._draws(4, 120, turn=turn) for turn in (0, 1))
    each = max(4 // components, 1)
    assert a.shape[:3] == b.shape[:3] == (min(components, 4), each, 120)
    assert steered.state.looked == 2 * min(components, 4) * each * 120
    assert not torch.equal(a_targets, b_targets)  # other examples
    _, rows = held_out.source.split(120, 1)
    chosen = [4, 5, 6, 7] if components == 16 else list(range(components))
    if components == 3:
        chosen = [1, 2, 0]
    every = model.draw_logits(rows.data[0], samples=each, seed=1).unflatten(0, (components, each))
    torch.testing.assert_close(b, every[chosen].detach())


@pytest.mark.slow
def test_an_underconfident_network_ends_with_less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise pinned far too high in training is weakened at the end, by one of the factors, and the NLL with it."""
    monkeypatch.setattr(steering, "next_std", lambda prior_std, change: 1.5)
    clean = (torch.randn(600, 6, generator=generator(3)), torch.zeros(600, dtype=torch.long))
    clean = (clean[0], (clean[0][:, 0] > 0).long())
    options: dict[str, Any] = {"epochs": 60, "batch_size": 100, "quiet": True, "latent_lr": 0.0, "lr": 1e-2}
    model, kept = make_model(), make_model()
    fit(model, clean, clean, **options)
    monkeypatch.setattr(steering, "SHRINKAGES", (1.0,))
    fit(kept, clean, clean, **options)
    ratio = model.posterior().std / kept.posterior().std
    assert any(torch.allclose(ratio, torch.full_like(ratio, factor)) for factor in (0.7, 0.5, 0.35, 0.25))
    nlls = [m.likelihood.score(m.predict(clean[0]), clean[1])["nll"] for m in (model, kept)]
    assert nlls[0] < nlls[1]


def test_temperatures_are_relative_to_the_one_there_is() -> None:
    """A network whose logits are twice as large and divided by T = 2 is looked at with the same eyes."""
    plain, scaled = make_model(), make_model()
    with torch.no_grad():
        for parameter in (scaled.net[2].weight, scaled.net[2].bias):
            parameter.mul_(2)
    scaled.likelihood.temperature.fill_(2.0)
    looks = [fit(m, TRAIN, VALID, steps=2, batch_size=90, lr=1e-9, quiet=True).looks for m in (plain, scaled)]
    assert len(looks[0]) == 1
    assert looks[1][0] == pytest.approx(looks[0][0], rel=1e-3)
    assert abs(looks[0][0]["temperature"] - 1) > 0.05


# ------------------------------------------------------------------------------------------- what it is good for


def coins(rows: int, seed: int, flipped: float) -> tuple[Tensor, Tensor]:
    """A line in eight dimensions parts two classes, some labels are wrong."""
    x = torch.randn(rows, 8, generator=generator(seed))
    y = (x[:, 0] + x[:, 1] > 0).long()
    return x, torch.where(torch.rand(rows, generator=generator(seed + 50)) < flipped, 1 - y, y)


def make_coins(width: int, **options: Any) -> ibnn.IBNN:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
    return ibnn.convert(net, components=2, seed=0, **options)


TOY: dict[str, Any] = {"steps": 100, "batch_size": 50, "lr": 0.01, "evaluate_every": 1000, "quiet": True}


def scores(model: ibnn.IBNN, flipped: float) -> tuple[float, float]:
    """Test NLL, and how far mean confidence is from accuracy."""
    x, y = coins(3000, 3, flipped)
    answer: Any = model.predict(x)
    confidence = answer.probs.max(1).values.mean().item()
    return ibnn.metrics.nll(answer.log_probs, y), abs(confidence - 1 + ibnn.metrics.error(answer.probs, y))


def settled(model: ibnn.IBNN, valid: tuple[Tensor, Tensor]) -> float:
    """The temperature that fixed weights would be settled with."""
    draws = (
        model.draw_logits(valid[0], samples=steering.END_DRAWS // model.components)
        .unflatten(0, (model.components, -1))
        .detach()
    )
    return temperature.supported_temperature(model.likelihood.at(1.0), draws, valid[1])


@pytest.mark.slow
def test_few_noisy_labels_ask_for_more_noise() -> None:
    train, valid = coins(100, 1, 0.25), coins(200, 2, 0.25)
    auto, plain = make_coins(64), make_coins(64)
    history = fit(auto, train, valid, **TOY)
    fit(plain, train, valid, beta=1.0, **TOY)
    assert auto.prior_std == history.looks[-1]["prior_std"] > 1
    assert scores(auto, 0.25)[1] < 0.5 * scores(plain, 0.25)[1]
    assert scores(auto, 0.25)[0] < scores(plain, 0.25)[0] - 0.1


@pytest.mark.slow
def test_the_best_of_a_grid_is_nearly_reached() -> None:
    """Nine tenths of the gain; the noise of the grid is fixed, has the same KL weight, and may be settled, too."""
    train, valid = coins(300, 1, 0.15), coins(300, 2, 0.15)
    auto = make_coins(64)
    fit(auto, train, valid, **TOY | {"steps": 300})
    raw, mended = [], []
    for s in (0.02, 0.1, 0.3, 0.6, 1.0, 1.5):
        fixed = make_coins(64, prior_std=s)
        beta = steering.KL_WEIGHT * 300 / fixed.nodes
        fit(fixed, train, valid, beta=beta, beta_warmup=steering.WARM, **TOY | {"steps": 300})
        raw.append(scores(fixed, 0.15)[0])
        fixed.likelihood.temperature.fill_(settled(fixed, valid))
        mended.append(scores(fixed, 0.15)[0])
    assert max(raw) > min(raw) + 0.1  # the grid has something to choose from
    best = min(raw + mended)
    assert scores(auto, 0.15)[0] < best + 0.1 * (max(raw) - best)


def test_plenty_of_clean_labels_ask_for_less_noise() -> None:
    model = make_coins(4)
    history = fit(model, coins(2000, 1, 0.0), coins(200, 2, 0.0), **TOY | {"steps": 80, "lr": 0.02})
    assert model.prior_std == history.looks[-1]["prior_std"] < 0.15
    assert all(look["training_nll"] > 0.6 * look["held_out_nll"] for look in history.looks)


# ------------------------------------------------------------------------------------------- the end of training


def test_the_temperature_found_acts_and_is_saved(tmp_path: Path) -> None:
    model = make_coins(64)
    fit(model, coins(100, 1, 0.25), coins(200, 2, 0.25), **TOY | {"steps": 40})
    found = model.likelihood.temperature.item()
    assert found != 1
    x = coins(20, 3, 0.0)[0]
    warm, answer = model(x), model.predict(x)
    draws = model.draw_logits(x).detach()
    expected = (draws / found).softmax(-1).mean(0)
    torch.testing.assert_close(answer.probs, expected)
    torch.testing.assert_close(warm.exp(), (model.draw_logits(x, samples=1) / found).softmax(-1).mean(0))
    model.save_pretrained(tmp_path)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    loaded = ibnn.load(tmp_path, net)
    assert loaded.prior_std == model.prior_std != pytest.approx(0.3 * steering.START)
    assert loaded.likelihood.temperature == found
    assert torch.equal(loaded.eval()(x), warm)


def test_the_temperature_at_the_end_is_that_of_the_held_out_draws() -> None:
    model = make_coins(64)
    valid = coins(200, 2, 0.25)
    fit(model, coins(100, 1, 0.25), valid, **TOY | {"steps": 20})
    assert model.likelihood.temperature.item() == pytest.approx(settled(model, valid), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "components"),
    [
        ("gaussian", 1),
        ("bernoulli", 3),
        pytest.param("gaussian", 3, marks=pytest.mark.slow),
        pytest.param("bernoulli", 1, marks=pytest.mark.slow),
    ],
)
def test_every_task_is_steered(kind: str, components: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    model = ibnn.convert(net, components=components, likelihood=kind, seed=0)
    y = 2 * X[:, :2] + 0.1 * torch.randn(600, 2) if kind == "gaussian" else (X[:, :2] > 0).float()
    history = fit(model, (X, y), steps=60, batch_size=100, lr=0.05, quiet=True)
    assert len(history.looks) == steering.MIN_LOOKS
    assert all(math.isfinite(value) for look in history.looks for value in look.values())
    assert model.prior_std == history.looks[-1]["prior_std"] != pytest.approx(0.3 * steering.START)
    assert history["valid_nll"][-1] < history["valid_nll"][0] - 0.1


@pytest.mark.parametrize("extra", [{"ema": 0.9}, {"swa": 0.5}], ids=str)
def test_averages_are_settled(extra: dict[str, float]) -> None:
    """The temperature is that of the average, not of the last weights."""
    model = make_coins(64)
    valid = coins(200, 2, 0.25)
    history = fit(model, coins(100, 1, 0.25), valid, **TOY | {"steps": 20, "evaluate_every": 1}, **extra)
    assert model.likelihood.temperature.item() == pytest.approx(settled(model, valid), rel=1e-4)
    assert model.prior_std == history.looks[-1]["prior_std"]


@pytest.mark.slow
def test_patience_goes_back_to_the_prior_of_the_best(tmp_path: Path) -> None:
    data = coins(100, 1, 0.25), coins(200, 2, 0.25)
    options = TOY | {"steps": 400, "evaluate_every": 1, "patience": 60, "run_dir": tmp_path}
    model, again = make_coins(64), make_coins(64)
    history = fit(model, *data, **options)
    assert history.stopped == "patience"
    assert history.looks
    assert model.prior_std == history.best["prior_std"] != history.rows[-1]["prior_std"]
    assert model.likelihood.temperature.item() == pytest.approx(settled(model, data[1]), rel=1e-4)
    fit(again, *data, **options)
    assert same(model, again)
    assert again.prior_std == model.prior_std


# ---------------------------------------------------------------------------------------- same bits, and resume


def test_same_seed_same_bits_other_seed_another_part() -> None:
    a, b, c = (make_model("full") for _ in range(3))
    looks = [
        fit(a, (X, Y), **SHORT).looks,
        fit(b, TensorDataset(X, Y), **SHORT).looks,
        fit(c, (X, Y), seed=1, **SHORT).looks,
    ]
    assert same(a, b)
    assert looks[0] == looks[1]
    assert a.prior_std == b.prior_std
    assert looks[0] != looks[2]


def test_accumulation_sees_the_same() -> None:
    whole, pieces = make_model(), make_model()
    a, b = (fit(m, (X, Y), accumulate=n, **SHORT).looks for m, n in ((whole, 1), (pieces, 2)))
    close(whole, pieces, rtol=1e-4, atol=1e-5)
    assert len(a) == len(b) == 9
    for look, other in zip(a, b, strict=True):
        assert other == pytest.approx(look, rel=1e-3)


def stop_at(step: int) -> Any:
    def stop(row: dict[str, Any], model: ibnn.IBNN) -> None:
        if row["step"] >= step:
            raise Stop

    return stop


@pytest.mark.parametrize(
    "extra",
    [{}, {"ema": 0.9}, {"patience": 50}],
    ids=str,
)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, extra: dict[str, Any]) -> None:
    options = SHORT | {"checkpoint_every": 1, "evaluate_every": 1} | extra
    whole, parts = make_model("full"), make_model("full")
    expected = fit(whole, TRAIN, VALID, **options)
    for step in (5, 10):
        with pytest.raises(Stop):
            fit(make_model("full"), TRAIN, VALID, run_dir=tmp_path, callbacks=[stop_at(step)], **options)
    history = fit(parts, TRAIN, VALID, run_dir=tmp_path, **options)
    assert history.rows == expected.rows
    assert history.looks == expected.looks
    assert parts.prior_std == whole.prior_std
    assert same(whole, parts)


@pytest.mark.parametrize("dataset", [False, True])
def test_every_checkpoint_leads_to_the_same_end(tmp_path: Path, dataset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGKILL at any step: before, at and after looks; also where the part held out is split off anew."""
    data = (TensorDataset(X, Y),) if dataset else (TRAIN, VALID)
    monkeypatch.setattr(checkpoint, "KEPT", 100)  # all of them
    options = SHORT | {"checkpoint_every": 1}
    whole = make_model("full")
    expected = fit(whole, *data, run_dir=tmp_path / "whole", **options)
    saved = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert len(saved) == 12
    for path in saved[1::4] + saved[-1:]:
        folder = tmp_path / path.stem
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copy(path, folder / "checkpoints")
        model = make_model("full")
        history = fit(model, *data, run_dir=folder, **options)
        assert history.looks == expected.looks
        assert history.rows == expected.rows
        assert same(model, whole)
        assert model.prior_std == whole.prior_std


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_model(), make_model()
    a = fit(first, (X, Y), run_dir=tmp_path, **SHORT)
    monkeypatch.setattr(Optimizer, "step", None)
    monkeypatch.setattr(steering.Steering, "settle", None)
    b = fit(second, (X, Y), run_dir=tmp_path, **SHORT)
    assert a == b
    assert same(first, second)
    assert first.prior_std == second.prior_std != pytest.approx(0.3 * steering.START)
    with pytest.raises(ValueError, match=r"`run_dir` .*one with beta = auto, "):
        fit(make_model(), (X, Y), run_dir=tmp_path, beta=1.0, **SHORT)


def test_a_finished_run_in_a_read_only_folder_is_read(tmp_path: Path) -> None:
    """Neither files nor folders change, so that none needs to be writable."""
    first, second = make_model(), make_model()
    a = fit(first, (X, Y), run_dir=tmp_path, **SHORT)
    everything = [tmp_path, *tmp_path.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in everything}
    for path in everything:
        path.chmod(0o555)
    b = fit(second, (X, Y), run_dir=tmp_path, **SHORT)
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before
    assert a == b
    assert same(first, second)


def test_a_run_stopped_before_its_first_look_keeps_its_prior(tmp_path: Path) -> None:
    """However the model is converted that takes it up: the state has the latents of the first one."""
    whole, other = make_model(prior_std=0.3), make_model(prior_std=0.1)
    options = SHORT | {"steps": 26, "checkpoint_every": 3}
    expected = fit(whole, TRAIN, VALID, **options)
    with pytest.raises(Stop):
        fit(make_model(prior_std=0.3), TRAIN, VALID, run_dir=tmp_path, callbacks=[stop_at(1)], **options)
    assert fit(other, TRAIN, VALID, run_dir=tmp_path, **options).looks == expected.looks
    assert same(whole, other)


# -------------------------------------------------------------------------------------------------- several workers


@pytest.mark.slow
def test_two_workers_are_steered_as_one_is(tmp_path: Path) -> None:
    options = ["--net=linear", "--epochs=3", "--batch_size=48", "--samples=2", "--rows=360"]
    assert run(tmp_path / "one.pt", *options).wait(120) == 0
    launcher = ["torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(
        [sys.executable, "-m", *launcher, JOB, str(tmp_path / "two.pt"), f"--run_dir={tmp_path / 'run'}", *options],
        check=True, env=os.environ | environment, timeout=300, capture_output=True,
    )  # fmt: skip
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "two.pt"))
    assert len(one["looks"]) == len(two["looks"]) > 5
    for a, b in zip(one["looks"], two["looks"], strict=True):
        for name, rel in (("step", 0), ("training_nll", 1e-4), ("held_out_nll", 1e-4), ("prior_std", 2e-3)):
            assert b[name] == pytest.approx(a[name], rel=rel), name
        assert b["temperature"] == pytest.approx(a["temperature"], rel=5e-3)  # NLLs in float32 are flat to that
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert b == pytest.approx(a, rel=2e-3)
    assert two["prior_std"] == pytest.approx(one["prior_std"], rel=2e-3)
    for name, value in one["state"].items():
        torch.testing.assert_close(two["state"][name], value, rtol=1e-3, atol=1e-3, msg=name)
    torch.testing.assert_close(two["probs"], one["probs"], rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- units


def make_images() -> tuple[tuple[Tensor, Tensor], ibnn.IBNN]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    return (X.repeat(1, 6).reshape(-1, 1, 6, 6), Y), ibnn.convert(net, components=2, seed=0, draws="both")


def test_units_are_steered_with_the_channels() -> None:
    data, model = make_images()
    stds: list[list[float]] = []

    def note(row: dict[str, float], model: ibnn.IBNN) -> None:
        stds.append([*model.unit_std.tolist(), model.prior_std])

    history = fit(model, data, **SHORT, evaluate_every=1, callbacks=[note])
    depth = math.sqrt(4 / 2)  # two of its three layers have noise
    assert model.prior_factors.tolist() == pytest.approx([0.03 * depth, 0.5 * depth, depth])
    s = history.looks[-1]["prior_std"]
    assert stds[0][0] == stds[0][2] == 0.0
    assert stds[-1][1] == pytest.approx(stds[-1][3] * depth)  # units have that of s once their noise has risen
    assert any(model.unit_std[1].item() == pytest.approx(s * depth * factor) for factor in steering.SHRINKAGES)


def test_a_run_with_units_goes_on_to_the_bit(tmp_path: Path) -> None:
    data, whole = make_images()
    fit(whole, data, **SHORT)

    def stop(row: dict[str, float], model: ibnn.IBNN) -> None:
        raise Stop

    _, parted = make_images()
    with pytest.raises(Stop):
        fit(parted, data, **SHORT, run_dir=tmp_path, callbacks=[stop])
    _, parted = make_images()
    fit(parted, data, **SHORT, run_dir=tmp_path)
    assert same(whole, parted)
    assert whole.unit_std[1] > 0


def test_latents_with_less_noise_start_nearer_to_one() -> None:
    _, model = make_images()
    before = model.posterior()
    mean, std = before.mean.clone(), before.std.clone()
    steering.start_divided(model)
    part = torch.tensor([0.03 * math.sqrt(2)] * 1 + [0.5 * math.sqrt(2)] * 8 + [1.0] * (model.nodes - 9))
    torch.testing.assert_close(model.posterior().mean, 1 + (mean - 1) * part)
    torch.testing.assert_close(model.posterior().std, std * part)
    _, channel = make_images()
    channel.draws = "channel"
    steering.start_divided(channel)
    assert torch.equal(channel.posterior().mean, mean)


def test_a_fixed_beta_gives_units_their_prior() -> None:
    data, model = make_images()
    fit(model, data, **SHORT, beta=1.0)
    assert model.unit_std.tolist() == pytest.approx([0.0, 0.3 * math.sqrt(4 / 2), 0.0])
    _, channel = make_images()
    channel.draws = "channel"
    fit(channel, data, **SHORT, beta=1.0)
    assert channel.prior_factors.tolist() == [1.0] * 3


@pytest.mark.parametrize("how", ["calibrated", "again"])
def test_units_of_a_model_with_noise_start_from_it(how: str) -> None:
    data, model = make_images()
    stds: list[float] = []
    if how == "again":
        fit(model, data, **SHORT)
    else:  # as `calibrate=True` leaves it
        found = steering.start_calibrated(model, as_source(data, batch_size=100), seed=0, progress=False)
        depth = math.sqrt(4 / 2)
        assert model.prior_std == pytest.approx(max(found.scale / depth, steering.MIN_STD))
        assert model.prior_factors.tolist() == pytest.approx([0.03 * depth, 0.5 * depth, depth])
        assert model.unit_std[1] >= steering.LEAST_STD
        model.examples.add_(1)  # trained, so that it is not divided anew
    before, s = model.unit_std.tolist(), model.prior_std
    fit(
        model,
        data,
        **SHORT,
        evaluate_every=1,
        callbacks=[lambda row, m: stds.append(m.unit_std[1].item() / m.prior_std)],
    )
    assert before[1] > 0
    assert stds == pytest.approx([before[1] / s] * len(stds))  # steered by the same factor, without a rise


def test_a_run_does_not_go_on_with_other_draws(tmp_path: Path) -> None:
    data, model = make_images()
    fit(model, data, **SHORT, run_dir=tmp_path)
    _, other = make_images()
    other.draws = "channel"
    with pytest.raises(ValueError, match=r"run_dir.*same run.*draws = both"):
        fit(other, data, **SHORT, run_dir=tmp_path)
