import copy
import inspect
import itertools
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fit_job import JOB, Stop, close, make_data, make_net, run, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

import ibnn
from ibnn import Recipe, fit
from ibnn.batches import as_source
from ibnn.likelihood import Temperature, Terms
from ibnn.training import session as checkpoint
from ibnn.training.recipe import Schedule

X, Y = make_data()
OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 32, "samples": 2, "quiet": True}


def make_model(kind: str = "full", components: int = 4) -> ibnn.IBNN:
    return ibnn.convert(make_net(kind), components=components, seed=0)


# ---------------------------------------------------------------------------------------------------- what a step is


def test_fit_is_algorithm_1_written_out() -> None:
    """An independent loop of ~15 lines gives the same weights and latents."""
    recipe = Recipe(
        epochs=2, batch_size=32, samples=2, clip=0.5, weight_decay=0.01, optimiser="sgd", lr=0.1,
        beta=1.0,
    )  # fmt: skip
    model, slow = make_model("linear"), make_model("linear")
    fit(model, (X[:160], Y[:160]), recipe=recipe, quiet=True)
    slow.reseed(0)
    groups = slow.parameter_groups(0.1, 0.01, 0.01)
    weights = torch.optim.SGD([groups[0]], momentum=0.9, nesterov=True)
    latents = torch.optim.AdamW([groups[1]])
    batches = [
        share for epoch in (0, 1) for share in ibnn.batches.as_source((X[:160], Y[:160]), batch_size=32).epoch(0, epoch)
    ]
    for step, share in enumerate(batches):
        t = (step + 0.5) / len(batches)
        weights.param_groups[0]["lr"] = 0.1 * recipe.schedule.factor(t)
        loss = slow.elbo(share.x, share.y, n_data=160, samples=2, beta=recipe.beta_at(t)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(groups[0]["params"], 0.5)
        torch.nn.utils.clip_grad_norm_(groups[1]["params"], 0.5)
        for optimiser in (weights, latents):
            optimiser.step()
            optimiser.zero_grad()
    assert len(batches) == 10
    close(model, slow)


def test_accumulation_changes_nothing_but_memory() -> None:
    whole, pieces = make_model("linear"), make_model("linear")
    fit(whole, (X[:160], Y[:160]), **OPTIONS)
    fit(pieces, (X[:160], Y[:160]), accumulate=4, **OPTIONS)
    close(whole, pieces, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulation_weighs_ignored_and_weighted_targets_right(weighted: bool) -> None:
    y = Y[:160].clone()
    y[::3] = -100
    weight = torch.tensor([0.2, 1.0, 3.0]) if weighted else None
    models = [
        ibnn.convert(make_net("linear"), components=8, likelihood=ibnn.Categorical(weight=weight), seed=0)
        for _ in range(2)
    ]
    rows = [
        fit(model, (X[:160], y), accumulate=pieces, epochs=2, batch_size=20, lr=0.01, quiet=True).rows
        for model, pieces in zip(models, (1, 3), strict=True)
    ]
    close(*models, rtol=1e-4, atol=1e-5)
    assert rows[1][-1] == pytest.approx(rows[0][-1], rel=1e-4)


def test_one_step_moves_the_weights() -> None:
    model = make_model("linear")
    before = model.net[0].weight.clone()
    fit(model, (X, Y), epochs=1, batch_size=203, quiet=True)
    assert not torch.equal(model.net[0].weight, before)


@pytest.mark.parametrize(("lr", "rate"), [(1e-3, 0.02), (0.05, 0.05)])
def test_learnt_noise_has_a_rate_of_its_own(lr: float, rate: float) -> None:
    model = ibnn.convert(nn.Linear(3, 1), likelihood=ibnn.Gaussian(), components=1)
    fit(
        model,
        (torch.randn(50, 3), torch.randn(50, 1)),
        steps=1,
        lr=lr,
        schedule=Schedule(),
        quiet=True,
    )
    assert abs(model.likelihood.log_std.item()) == pytest.approx(rate, rel=1e-3)  # Adam's first step is its rate


def test_only_converted_networks_are_trained() -> None:
    with pytest.raises(
        TypeError, match=r"`model` to be made by ibnn.convert, or one of ibnn.baselines, but got Sequential"
    ):
        fit(make_net("linear"), (X, Y))  # type: ignore[arg-type]


def test_it_learns_and_reports() -> None:
    model = make_model()
    rows: list[dict[str, Any]] = []
    history = fit(
        model,
        (X[:160], Y[:160]),
        (X[160:], Y[160:]),
        epochs=40,
        lr=0.01,
        quiet=True,
        callbacks=[lambda row, m: rows.append(row)],
    )
    assert history["valid_nll"][-1] < 0.5 * history["valid_nll"][0]
    assert list(history.rows) == rows
    assert history.best == min(rows, key=lambda row: row["valid_nll"])
    assert history.stopped == "finished"
    last = rows[-1]
    prediction = model.predict(X[160:], samples=1)
    assert last["valid_nll"] == pytest.approx(ibnn.metrics.nll(prediction.log_probs, Y[160:]), rel=1e-5)
    assert last["beta"] == 1.0
    assert rows[0]["beta"] < rows[20]["beta"] < 1
    now = str(ibnn.diagnose(model, inputs=X[160:]))  # it may add that the few held-out rows made no reference
    assert now.startswith(history.summary)
    assert ", epistemic share " in history.summary


def test_the_global_generators_are_given_back() -> None:
    model = make_model()
    state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    fit(model, (X, Y), **OPTIONS)
    assert torch.equal(state, torch.get_rng_state())
    assert (numpy_state[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert python_state == random.getstate()


def test_same_seed_same_model_other_seed_another() -> None:
    a, b, c = (make_model() for _ in range(3))
    fit(a, (X, Y), **OPTIONS)
    torch.manual_seed(123)
    fit(b, TensorDataset(X, Y), **OPTIONS)
    fit(c, (X, Y), seed=1, **OPTIONS)
    assert same(a, b)
    assert not same(a, c)


def test_kl_counts_all_targets_once() -> None:
    model = make_model()
    history = fit(model, (X, Y), epochs=1, batch_size=203, beta_warmup=0.0, quiet=True)
    row = history.rows[0]
    assert row["loss"] == pytest.approx(row["nll"] + row["kl"] / 203, rel=1e-6)
    loader = DataLoader(TensorDataset(X, Y), batch_size=203)
    again = fit(make_model(), loader, epochs=1, beta_warmup=0.0, quiet=True, n_data=1000).rows[0]
    assert again["loss"] == pytest.approx(again["nll"] + again["kl"] / 1000, rel=1e-6)


def test_regression_and_numpy() -> None:
    model = ibnn.convert(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), components=2, likelihood="gaussian"
    )
    y = (2 * X[:, :1] + 0.1 * torch.randn(203, 1)).double().numpy()
    history = fit(model, (X.numpy(), y), (X.numpy(), y), epochs=12, lr=0.03, batch_size=32, quiet=True)
    assert history["valid_rmse"][-1] < 0.5 * history["valid_rmse"][0]


def test_learnt_noise_is_found_in_a_small_table_s_few_steps() -> None:
    """At the weights' rate of 1e-3 log σ would have moved by at most 0.25 from 0; it should be at log 0.1 = −2.3."""
    model = ibnn.convert(nn.Linear(6, 1), components=2, likelihood="gaussian", prior_std=0.01, init_std=0.0, seed=0)
    model.set_posterior(std=0.01)
    with torch.no_grad():
        model.net.weight.copy_(torch.eye(6)[:1])
        model.net.bias.zero_()
    y = X[:, :1] + 0.1 * torch.randn(203, 1)
    fit(model, (X, y), steps=250, beta=1.0, quiet=True)
    with torch.no_grad():
        residual = (y - model.net(X)).square().mean().sqrt().item()
    assert model.likelihood.log_std.exp().item() == pytest.approx(residual, rel=0.1)


@pytest.mark.bf16
def test_mixed_precision_keeps_float32_parameters() -> None:
    model = make_model("linear")
    history = fit(model, (X[:160], Y[:160]), (X[160:], Y[160:]), precision="bf16", **OPTIONS)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    exact = fit(make_model("linear"), (X[:160], Y[:160]), (X[160:], Y[160:]), **OPTIONS)
    assert history["valid_nll"][-1] == pytest.approx(exact["valid_nll"][-1], rel=0.05)


def test_a_frozen_backbone_stays_as_it_was() -> None:
    model = make_model("linear")
    before = copy.deepcopy(model.net.state_dict())
    for name, parameter in model.net.named_parameters():
        parameter.requires_grad_("latent" in name)
    fit(model, (X, Y), **OPTIONS)
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, before[name]) == ("latent" not in name), name


# -------------------------------------------------------------------------------------------- stopping, averaging


def test_patience_goes_back_to_the_best() -> None:
    model = make_model()
    history = fit(
        model, (X[:40], Y[:40]), (X[160:], Y[160:]), epochs=200, lr=0.05, patience=3, batch_size=8, quiet=True
    )
    assert history.stopped == "patience"
    assert len(history.rows) < 200
    best = min(history["valid_nll"])
    assert history["valid_nll"].index(best) == len(history.rows) - 4
    assert ibnn.metrics.nll(model.predict(X[160:], samples=1).log_probs, Y[160:]) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("options", [{"ema": 0.8}, {"swa": 0.3}], ids=["ema", "swa"])
def test_averages_of_the_weights(options: dict[str, float]) -> None:
    model = make_model()
    states: list[dict[str, torch.Tensor]] = []
    history = fit(
        model,
        (X, Y),
        epochs=4,
        batch_size=203,
        quiet=True,
        callbacks=[lambda r, m: states.append(copy.deepcopy(m.state_dict()))],
    )
    assert len(history.rows) == 4
    averaged = make_model()
    fit(averaged, (X, Y), epochs=4, batch_size=203, quiet=True, **options)
    # one step an epoch: the states after each step are known
    name = "net.0.weight"
    values = [state[name] for state in states]
    if "ema" in options:
        mean = values[0]
        for count, value in enumerate(values[1:], start=2):
            decay = min(0.8, count / (9 + count))
            mean = decay * mean + (1 - decay) * value
    else:
        mean = torch.stack(values[1:]).mean(0)  # steps 2, 3, 4 come after 0.3 of training
    torch.testing.assert_close(averaged.state_dict()[name], mean)
    norm = averaged.net[1]
    assert norm.momentum == 0.1
    if "swa" in options:  # statistics estimated anew from the one batch of the data
        assert norm.num_batches_tracked == 1


# ------------------------------------------------------------------------------------------------------ divergence


def test_divergence_names_step_parameter_and_remedy_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    model = make_model("linear")

    def poison(row: dict[str, Any], m: ibnn.IBNN) -> None:
        if row["epoch"] == 2:
            m.net[2].weight.data[0, 0] = float("inf")

    with pytest.raises(ibnn.DivergedError, match=r"step 10: .*net.2.weight.*Lower lr=0.001 or latent_lr=0.01.*kept in"):
        fit(
            model,
            (X[:160], Y[:160]),
            run_dir=tmp_path,
            epochs=5,
            batch_size=32,
            quiet=True,
            callbacks=[poison],
            checkpoint_every=7,
        )
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.facts["progress"]["step"] == 7
    assert all(tensor.isfinite().all() for tensor in found.tensors.values())


def test_bad_targets_are_named_before_training() -> None:
    y = Y.clone()
    y[5] = 7
    with pytest.raises(ValueError, match="labels from 0 to 7"):
        fit(make_model(), (X, y), epochs=1, batch_size=203, quiet=True)


def test_overflow_is_divergence() -> None:
    model = make_model("linear")
    model.net[2].weight.data.fill_(3e38)
    with pytest.raises(ibnn.DivergedError, match=r"step 0: the loss is (nan|inf)"):
        fit(model, (X, Y), epochs=1, batch_size=203, quiet=True)


class Pairs(Dataset[Any]):
    """Has no tensors to look at beforehand."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.read = x, y, 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Any:
        self.read += 1
        return self.x[row], self.y[row]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader", "sampler"])
def test_training_data_that_are_not_finite_are_named(kind: str, value: float) -> None:
    x, y = X.repeat(3, 1), Y.repeat(3)
    row = int(torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[300])  # not held out with seed 0
    x[row, 2] = value
    data: Any = (x, y) if kind == "tensors" else Pairs(x, y)
    if kind == "loader":
        data = DataLoader(data, batch_size=16, shuffle=True)
    if kind == "sampler":
        data = DataLoader(data, batch_size=16, sampler=WeightedRandomSampler([1.0] * len(x), len(x), replacement=False))
    model = make_model("linear")
    place = f"row {row}" if kind == "tensors" else "the batch of step"
    with pytest.raises(ValueError, match=rf"`train` to be .*, but got (NaN|inf).* in {place}"):
        fit(model, data, epochs=1, batch_size=16, quiet=True)
    x[row, 2] = 0.0
    fit(model, (x, y), epochs=1, quiet=True)  # gradients of the failed run are not in the way


# -------------------------------------------------------------------------------------------- before the first step


def changed(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[-1] = value
    return x


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("valid", "match"),
    [
        ((X, changed(Y, 7)), "labels from 0 to 7"),
        ((changed(X, float("nan")), Y), "`valid` to be free of NaN, but got NaN in row 202"),
        ((X[:, :4], Y), r"`valid` to be such that layer '0' \(Linear\) gets .* \(rows, 6\), but got shape \(\d+, 4\)"),
        ((X, Y.float()), "integer class indices"),
    ],
)
def test_bad_validation_data_are_refused_before_the_first_step(valid: Any, match: str, wrapped: bool) -> None:
    model = make_model("linear").train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=match):
        fit(model, (X, Y), Pairs(*valid) if wrapped else valid, **OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"train": (X[:, :4], Y)}, r"`train` to be such that layer '0' .*\(rows, 6\), but got shape"),
        ({"train": (X[:, 0], Y)}, r"`train` .*\(rows, 6\), but got shape \(32,\)\. Pass a batch"),
        ({"train": (X, changed(Y, -1))}, "labels from -1 to 2"),
        ({"train": (X, ["cat"] * 203)}, "targets are a tensor or array, but got a list of str. .*numbered from 0"),
        ({"train": (X, np.array(["cat"] * 203))}, "`train` .* whose targets are numbers.*Number the classes from 0"),
        ({"train": (np.array([["a"]] * 203), Y)}, "`train` .* whose inputs are numbers"),
        ({"train": [(x, "cat") for x in X]}, "a Dataset, a DataLoader or a pair"),
        ({"train": Pairs(X, ["cat"] * 203)}, r"`batch` .*targets as a tensor, but got a list whose targets are a \w+"),
        ({"n_data": 0}, "`n_data` to be an integer of at least 1, but got 0"),
        ({"n_data": -5}, "`n_data` .* -5"),
        ({"n_data": True}, "`n_data` .* True"),
        ({"n_data": 203.0}, r"`n_data` .* 203\.0"),
        ({"callbacks": print}, r"`callbacks` to be a list of functions.*callbacks=\[function\]"),
        ({"callbacks": ["print"]}, "`callbacks` to be a list of functions"),
        ({"resume": "yes"}, "`resume`"),
        ({"recipe": 3}, "`recipe` to be a Recipe or the name of one, but got 3"),
        ({"learning_rate": 0.1}, "unexpected keyword argument 'learning_rate'"),
        ({"lr": -1.0}, "`lr`"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_the_first_step(arguments: dict[str, Any], match: str) -> None:
    model = make_model("linear").train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=match):
        fit(model, **({"train": (X, Y)} | OPTIONS | arguments))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_a_run_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"`run_dir`.*file\."):
            fit(make_model("linear"), (X, Y), run_dir=place, **OPTIONS)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("training", [True, False])
def test_a_run_that_fails_leaves_modes_and_kl_as_they_were(training: bool) -> None:
    model = make_model().train(training)
    next(m for m in model.net.modules() if not list(m.children())).training = not training
    modes = [module.training for module in model.modules()]

    def fails(row: dict[str, Any], model: ibnn.IBNN) -> None:
        raise KeyError("late")

    with pytest.raises(KeyError, match="late"):
        fit(model, (X, Y), callbacks=[fails], kl="pairwise", **OPTIONS)
    assert [module.training for module in model.modules()] == modes
    assert model.kl_kind == "components"


def test_checks_change_no_bit_and_take_one_look_at_validation_data() -> None:
    valid = Pairs(X[:40], Y[:40])
    one, other = make_model(), make_model()
    torch.manual_seed(5)
    fit(one, (X, Y), valid, **(OPTIONS | {"beta": 1.0}))
    assert valid.read == 40 * (1 + 3 + 1)  # before the first step, after each of three epochs, and by the doctor
    torch.manual_seed(6)
    fit(other, (X, Y), (X[:40], Y[:40]), **(OPTIONS | {"beta": 1.0}))
    assert same(one, other)


# ------------------------------------------------------------------------------------------------------------ resume


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first, second = make_model(), make_model()
    a = fit(first, (X, Y), run_dir=tmp_path, **OPTIONS)
    b = fit(second, (X, Y), run_dir=tmp_path, **OPTIONS)
    assert a.rows == b.rows
    assert same(first, second)
    assert (tmp_path / "history.csv").read_text().count("\n") == 4
    assert Recipe.from_toml(tmp_path / "recipe.toml") == Recipe(
        epochs=3,
        batch_size=32,
        samples=2,
        beta=1.0,  # what "auto" stands for with so few examples
    )


def test_another_recipe_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    fit(make_model(), (X, Y), run_dir=tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match=r"`run_dir` .*one with lr = 0.001"):
        fit(make_model(), (X, Y), run_dir=tmp_path, lr=0.5, **OPTIONS)
    with pytest.raises(ValueError, match=r"one with examples = 203, n_data = 203, other data"):
        fit(make_model(), (X[:100], Y[:100]), run_dir=tmp_path, **OPTIONS)
    fit(make_model(), (X, Y), run_dir=tmp_path, lr=0.5, resume=False, **OPTIONS)


@pytest.mark.parametrize("part", ["inputs", "targets", "valid"])
@pytest.mark.parametrize("wrap", [tuple, lambda pair: TensorDataset(*pair)], ids=["tensors", "dataset"])
def test_other_data_of_the_same_size_in_the_same_folder_are_refused(tmp_path: Path, part: str, wrap: Any) -> None:
    train, valid = [X[:150], Y[:150]], [X[150:], Y[150:]]
    fit(make_model(), wrap(train), wrap(valid), run_dir=tmp_path, **OPTIONS)
    fit(make_model(), wrap(train), wrap(valid), run_dir=tmp_path, **OPTIONS)
    if part == "inputs":
        train[0] = train[0] + 1
    elif part == "targets":
        train[1] = (train[1] + 1) % 3
    else:
        valid[1] = (valid[1] + 1) % 3
    with pytest.raises(ValueError, match=r"`run_dir` .*other data.*resume=False"):
        fit(make_model(), wrap(train), wrap(valid), run_dir=tmp_path, **OPTIONS)
    fit(make_model(), wrap(train), wrap(valid), run_dir=tmp_path, resume=False, **OPTIONS)


class Held(Dataset[Any]):
    """Holds its targets, as the data sets of torchvision do."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.targets, self.classes = x, y.tolist(), ["a"] * len(y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.targets[row]


@pytest.mark.parametrize("wrap", [TensorDataset, Held, lambda x, y: Subset(Held(x, y), range(150))])
def test_one_other_target_of_a_dataset_that_holds_them_is_seen(wrap: Any) -> None:
    y = Y.clone()
    before, again = (as_source(wrap(X, y), batch_size=16).fingerprint() for _ in range(2))
    y[71] = (y[71] + 1) % 3  # of the 64 rows that are loaded it is none
    assert before == again != as_source(wrap(X, y), batch_size=16).fingerprint()


def test_checkpoints_of_a_run_whose_old_ones_are_all_damaged_are_kept(tmp_path: Path) -> None:
    options = OPTIONS | {"checkpoint_every": 2}
    fit(make_model(), (X, Y), run_dir=tmp_path, **options)
    for path in checkpoint.paths(tmp_path / "checkpoints"):
        path.write_bytes(path.read_bytes()[:-1])

    def stop(row: dict[str, Any], model: ibnn.IBNN) -> None:
        raise Stop

    with pytest.raises(Stop):
        fit(make_model(), (X, Y), run_dir=tmp_path, callbacks=[stop], **options)
    assert checkpoint.latest(tmp_path / "checkpoints") is not None


def test_a_second_process_waits_for_the_first_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first holds the lock until it is released here; the second then goes on with its run."""

    def stop(row: dict[str, Any], model: ibnn.IBNN) -> None:
        raise Stop

    fit(expected := make_model(), (X, Y), **OPTIONS)
    with pytest.raises(Stop):
        fit(make_model(), (X, Y), run_dir=tmp_path, callbacks=[stop], **OPTIONS)
    hold = "import sys; from pathlib import Path; from ibnn.files.atomic import locked\n"
    hold += "with locked(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    lock = str(tmp_path / "checkpoints" / ".lock")
    with subprocess.Popen([sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdout.readline()
        release = threading.Timer(0.5, first.stdin.close)
        release.start()
        with caplog.at_level(logging.WARNING, logger="ibnn"):
            fit(second := make_model(), (X, Y), run_dir=tmp_path, **OPTIONS)
    assert release.finished.is_set()
    assert f"process {first.pid}" in caplog.text
    assert same(expected, second)


def test_every_field_of_the_recipe_is_an_argument_of_fit() -> None:
    parameters = inspect.signature(fit).parameters
    assert set(Recipe.model_fields) <= set(parameters)
    assert not [p for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


class Jittered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random transforms, from each of the generators that people use."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6) + random.random() + np.random.rand()  # noqa: NPY002
        return X[index] + 0.1 * noise, Y[index]


def make_train(kind: str) -> Any:
    data = TensorDataset(X[:160], Y[:160])
    return {
        "tensors": (X[:160], Y[:160]),
        "dataset": data,
        "transforms": Jittered(),
        "weighted": DataLoader(data, batch_size=32, sampler=WeightedRandomSampler([1.0] * 160, 160)),
    }[kind]


@pytest.mark.parametrize(
    ("data", "extra"),
    [
        *(("tensors", extra) for extra in ({}, {"ema": 0.9}, {"swa": 0.2}, {"patience": 50})),
        *((data, {}) for data in ("dataset", "transforms", "weighted")),
        ("transforms", {"workers": 1}),
    ],
    ids=str,
)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, data: str, extra: dict[str, Any]) -> None:
    train = make_train(data)
    valid = (X[160:], Y[160:])
    options = OPTIONS | {"epochs": 4, "checkpoint_every": 3} | extra
    whole, parts = make_model(), make_model()
    expected = fit(whole, train, valid, **options)

    def stop(row: dict[str, Any], m: ibnn.IBNN) -> None:
        raise Stop

    for _ in range(3):  # each attempt gets to the end of one more epoch, and is taken up in the middle of it
        with pytest.raises(Stop):
            fit(make_model(), train, valid, run_dir=tmp_path, callbacks=[stop], **options)
    history = fit(parts, train, valid, run_dir=tmp_path, **options)
    assert history.rows == expected.rows
    assert same(whole, parts)


def kill_and_resume(tmp_path: Path, kills: int, epochs: int) -> None:
    options = (f"--epochs={epochs}", "--batch_size=16", "--checkpoint_every=7")
    assert run(tmp_path / "whole.pt", *options).wait(120) == 0
    expected = torch.load(tmp_path / "whole.pt", weights_only=True)
    rng = random.Random(0)
    saved: set[Path] = set()
    for _ in range(kills):
        # Half a second an epoch: it is not over before it is killed, however fast the machine and busy this process.
        process = run(tmp_path / "parts.pt", f"--run_dir={tmp_path / 'run'}", *options, "--delay=0.5")
        while set((tmp_path / "run").glob("checkpoints/step-*")) <= saved and process.poll() is None:
            time.sleep(0.01)  # until this attempt has saved something
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL, "the run ended before it could be killed"
        saved = set((tmp_path / "run").glob("checkpoints/step-*"))
    assert run(tmp_path / "parts.pt", f"--run_dir={tmp_path / 'run'}", *options).wait(120) == 0
    found = torch.load(tmp_path / "parts.pt", weights_only=True)
    assert found["rows"] == expected["rows"]
    assert all(torch.equal(found["state"][name], value) for name, value in expected["state"].items())


@pytest.mark.slow
def test_sigkill_and_resume(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=2, epochs=20)


@pytest.mark.slow
def test_ten_random_kills(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=10, epochs=80)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_finish_the_step_save_and_say_how_to_go_on(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts, handler = make_model(), make_model(), signal.getsignal(number)
    expected = fit(whole, (X, Y), **OPTIONS)
    calls = itertools.count()

    def interrupt(*_: object) -> None:
        if torch.is_grad_enabled() and next(calls) == 3:  # passes without a gradient check the data
            os.kill(os.getpid(), number)

    hook = parts.net.register_forward_hook(interrupt)
    with pytest.raises(SystemExit) as stop:  # in the middle of the fourth step
        fit(parts, (X, Y), run_dir=tmp_path, **OPTIONS)
    hook.remove()
    assert stop.value.code == 128 + number
    said = f"Stopped at step 4 of 21; saved in {tmp_path}: the same call goes on from there.\n"
    assert capsys.readouterr().err == said
    assert signal.getsignal(number) is handler
    assert checkpoint.latest(tmp_path / "checkpoints") is not None
    assert fit(parts, (X, Y), run_dir=tmp_path, **OPTIONS).rows == expected.rows
    assert same(whole, parts)


# ------------------------------------------------------------------------------------------------- several workers


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_workers_train_what_one_trains(tmp_path: Path, launcher: str) -> None:
    """Same global batches, same draws (batch shares are multiples of K), unequal last batch included."""
    options = ["--net=linear", "--epochs=3", "--batch_size=48", "--samples=2"]  # 160 rows: 48, 48, 48, 16
    assert run(tmp_path / "one.pt", *options).wait(120) == 0
    command = {
        "torchrun": ["torch.distributed.run", "--nproc-per-node=2", "--standalone"],
        "accelerate": [
            "accelerate.commands.launch",
            "--cpu",
            "--num_processes=2",
            "--num_machines=1",
            "--mixed_precision=no",
            "--dynamo_backend=no",
            "--main_process_port=0",
        ],
    }[launcher]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(
        [sys.executable, "-m", *command, JOB, str(tmp_path / "two.pt"), f"--run_dir={tmp_path / 'run'}", *options],
        check=True, env=environment, timeout=300, capture_output=True,
    )  # fmt: skip
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "two.pt"))
    for name, value in one["state"].items():
        torch.testing.assert_close(two["state"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(two["probs"], one["probs"], rtol=1e-4, atol=1e-5)
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert b == pytest.approx(a, rel=1e-3)


def test_trackers_write_to_the_run_folder(tmp_path: Path) -> None:
    fit(make_model(), (X, Y), run_dir=tmp_path, trackers=("tensorboard",), **OPTIONS)
    assert list(tmp_path.rglob("events.out.tfevents*"))


def test_a_gradient_whose_norm_overflows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient may be finite where the norm of all is not."""
    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", lambda *_: torch.tensor(float("inf")))
    with pytest.raises(ibnn.DivergedError, match="the gradient's norm is inf"):
        fit(make_model("linear"), (X, Y), steps=2, batch_size=203, quiet=True)


def test_infinity_in_validation_data_is_found_before_the_first_step() -> None:
    model, x = make_model(), X[:40].clone()
    x[3, 0] = math.inf
    with pytest.raises(ValueError, match="`valid` to be free of infinity, but got infinity in row 3"):
        fit(model, (X, Y), (x, Y[:40]), **OPTIONS)
    assert int(model.examples) == 0


def test_the_doctor_fails_no_run_of_a_likelihood_of_your_own() -> None:
    @dataclass(frozen=True)
    class Rate(ibnn.Prediction):
        rate: Tensor

    class Poisson(ibnn.Likelihood):
        def check(self, output: Tensor, target: Tensor) -> None:
            pass

        def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
            return Terms.plain((output.exp() - target * output).mean(), target)

        def combine(self, draws: Tensor, temperature: Temperature = None) -> Tensor:
            return draws.exp().mean(0)

        def summarise(self, draws: Tensor, temperature: Temperature = None) -> Rate:
            return Rate(draws.exp().mean((0, 1)))

        def score(self, prediction: Rate, target: Tensor) -> dict[str, float]:
            return {"nll": (prediction.rate - target * prediction.rate.log()).mean().item()}

    model = ibnn.convert(torch.nn.Linear(X.shape[1], 1), components=2, likelihood=Poisson(), seed=0)
    assert fit(model, (X, torch.ones(len(X), 1)), epochs=1, beta=1.0, quiet=True).rows
