"""How long `fit` trains by default, what it says, and what a failed run leaves."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn import Recipe, fit
from ibnn.baselines import Plain
from ibnn.training import recipe as recipes


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default lengths of 20 to 40 steps."""
    for name, value in {"EPOCHS": 2, "LEAST": 20, "MOST": 40, "EVALUATIONS": 10, "WAIT": 3}.items():
        monkeypatch.setattr(recipes, name, value)


def rows(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def make(likelihood: Any = "categorical", outputs: int = 2) -> ibnn.IBNN:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))
    return ibnn.convert(net, components=2, likelihood=likelihood)


@pytest.mark.parametrize(
    ("per_epoch", "held_out", "fields", "expected"),
    [
        (469, True, {}, (14070, 0, 0, 1)),  # 60,000 images: 30 epochs
        (100, True, {}, (3000, 0, 0, 1)),
        (1, True, {}, (3000, 2000, 12, 50)),
        (7, True, {}, (3003, 2000, 12, 8)),
        (7, False, {}, (2002, 0, 0, 5)),
        (80, False, {}, (2400, 0, 0, 1)),
        (7, True, {"ema": 0.9}, (3003, 0, 0, 8)),
        (7, True, {"patience": 2}, (3003, 0, 2, 8)),
        (7, True, {"epochs": 5}, (35, 0, 0, 1)),
        (7, True, {"steps": 5, "patience": 4}, (5, 0, 4, 1)),
    ],
)
def test_the_default_length_follows_the_data(
    per_epoch: int, held_out: bool, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert Recipe(**fields).length(per_epoch, held_out=held_out) == expected


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("method", [make, lambda: Plain(ibnn.revert(make()))], ids=["ibnn", "plain"])
def test_few_rows_are_trained_on_until_held_out_rows_stop_improving(method: Any) -> None:
    """Random labels: the held-out NLL soon rises, so the run stops at the least number of steps, at its best."""
    x, y = rows(60)
    labels = torch.randint(2, (60,), generator=torch.Generator().manual_seed(1))
    model = method()
    history = fit(model, (x[:30], labels[:30]), (x[30:], labels[30:]), batch_size=10, lr=0.1, quiet=True)
    assert history.stopped == "patience"
    assert 20 <= history.rows[-1]["step"] < 42
    assert history["valid_nll"][-1] > history.best["valid_nll"]
    assert fit(method(), (x, y), batch_size=10, quiet=True).rows[-1]["step"] == 24  # nothing held out


@pytest.mark.usefixtures("short")
def test_a_default_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(row: dict[str, Any], model: Any) -> None:
        if row["step"] >= 20:
            raise Stop

    train, valid = rows(30), rows(120, seed=1)
    options: dict[str, Any] = {"batch_size": 10, "quiet": True, "novelty": False}
    whole, parts = make(), make()
    expected = fit(whole, train, valid, **options)
    with pytest.raises(Stop) as stopped:
        fit(parts, train, valid, run_dir=tmp_path, callbacks=[stop], **options)
    assert "last step" in stopped.value.__notes__[0]
    history = fit(make(), train, valid, run_dir=tmp_path, **options)
    assert history == expected
    resumed = make()
    fit(resumed, train, valid, run_dir=tmp_path, **options)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


@pytest.mark.usefixtures("short")
def test_what_is_held_out_and_how_long_it_trains_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    fit(make(), rows(600), novelty=False)
    said = capsys.readouterr().err
    assert "Training on 500 rows; 100 of 600 rows are held out. Length: at least 20 and at most 40 steps" in said


def test_a_run_that_is_too_short_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    short = fit(make(), rows(60), rows(60, seed=1), epochs=10, novelty=False)
    assert short.falling
    assert "still falling" in capsys.readouterr().err
    assert "still falling" in str(short)
    assert not ibnn.fit(make(), rows(60), rows(60, seed=1), epochs=300, batch_size=10, lr=0.02, evaluate_every=10,
                        novelty=False, quiet=True).falling  # fmt: skip


def test_a_history_prints_a_summary_and_draws_itself() -> None:
    history = fit(make(), rows(60), rows(30, seed=1), epochs=2, quiet=True, novelty=False)
    assert len(str(history).splitlines()) == 3
    assert "60 rows for 2 epochs, 2 steps" in str(history)
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = history.plot()
    assert [list(line.get_ydata()) for line in axes.lines] == [history["nll"], history["valid_nll"]]
    pyplot.close(axes.figure)


def test_trackers_that_are_missing_are_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ibnn.training.engine.get_available_trackers", list)
    model = make()
    with pytest.raises(ValueError, match="`trackers` to be installed"):
        fit(model, rows(60), run_dir=tmp_path, trackers=("wandb",), epochs=1, quiet=True)
    with pytest.raises(ValueError, match="trackers"):
        fit(model, rows(60), run_dir=tmp_path, trackers=("wandbb",), epochs=1, quiet=True)
    assert int(model.examples) == 0


def test_validating_on_the_training_rows_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    x, y = rows(60)
    for valid in ((x, y), (x.clone(), y.clone())):
        caplog.clear()
        fit(make(), (x, y), valid, epochs=1, quiet=True, novelty=False)
        assert "`valid` shares rows with `train`" in caplog.text
    caplog.clear()
    fit(make(), (x, y), rows(60, seed=1), epochs=1, quiet=True, novelty=False)
    assert not caplog.text


@pytest.mark.parametrize("method", [make, lambda: Plain(ibnn.revert(make()))], ids=["ibnn", "plain"])
def test_a_run_that_fails_before_its_first_step_changes_nothing(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = method()
    fit(model, rows(60), epochs=1, quiet=True, novelty=False)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("ibnn.training.loop._Run._step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(model, rows(600), seed=5, quiet=True)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("method", [make, lambda: Plain(ibnn.revert(make()))], ids=["ibnn", "plain"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_run_that_fails_later_restores_noise_and_the_count_of_examples(method: Any, trained: bool) -> None:
    def fail(row: dict[str, Any], model: Any) -> None:
        raise KeyError

    model = method()
    if trained:
        fit(model, rows(60), epochs=1, quiet=True, novelty=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError) as failed:
        fit(model, rows(600), callbacks=[fail], epochs=3, batch_size=20, quiet=True)
    assert "last step" in failed.value.__notes__[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}


def test_a_run_that_is_interrupted_keeps_the_noise_that_fits_its_weights() -> None:
    def interrupt(row: dict[str, Any], model: Any) -> None:
        raise KeyboardInterrupt

    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        fit(model, rows(600), callbacks=[interrupt], epochs=3, quiet=True)
    assert int(model.examples) == 500
    assert model.prior_std != before["prior_std"]


def numbers(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Targets of 10⁴ ± 5,000, of which a linear function of the inputs explains all but ± 500."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 4, generator=g)
    return x, 1e4 + 5000 * x[:, :1] + 500 * torch.randn(number, 1, generator=g)


@pytest.mark.parametrize("noise", ["learnt", "predicted"])
def test_large_targets_are_learnt_and_answered_in_their_units(noise: Any, tmp_path: Path) -> None:
    model = make(ibnn.Gaussian(noise=noise), outputs=1 if noise == "learnt" else 2)
    history = fit(model, numbers(200), numbers(100, seed=1), steps=400, batch_size=50, lr=0.02, quiet=True)
    x, y = numbers(300, seed=2)
    answer = model.predict(x)
    assert (answer.mean - y).square().mean().sqrt() < 1000
    assert history.best["valid_rmse"] < 1000
    low, high = answer.interval(0.9)
    assert 0.8 < float(((y >= low) & (y <= high)).float().mean()) < 1
    score = model.likelihood.score(answer, y)["nll"]
    closed = torch.distributions.Normal(answer.draw_means, answer.draw_stds).log_prob(y).logsumexp(0)
    closed = closed - torch.tensor(float(len(answer.draw_means))).log()
    assert score == pytest.approx(-closed.mean().item(), rel=1e-4)
    model.save_pretrained(tmp_path / "model")
    loaded = ibnn.load(tmp_path / "model", net=ibnn.revert(make(outputs=1 if noise == "learnt" else 2)))
    assert torch.equal(loaded.predict(x).mean, answer.mean)


def test_a_network_that_predicts_raw_targets_keeps_its_units() -> None:
    x, y = numbers(200)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
        net[1].weight.copy_(torch.tensor([[5000.0, 0, 0, 0]]))
        net[1].bias.fill_(1e4)
    model = ibnn.convert(net, likelihood=ibnn.Gaussian(init_std=500.0))
    fit(model, (x, y), steps=1, quiet=True, novelty=False)
    likelihood: Any = model.likelihood
    assert (likelihood.location.item(), likelihood.scale.item()) == (0.0, 1.0)
    assert likelihood.log_std.exp().item() == pytest.approx(500, rel=0.1)
