"""Jobs: data in, run folder out, and back."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ibnn import metrics
from ibnn.jobs import METHODS, Job, make_data, make_method, merged, read_run, run

DIGITS = Job(
    net="mlp",
    net_options={"inputs": 64, "hidden": 16, "layers": 1},
    data="digits",
    examples=400,
    valid=200,
    samples=2,
    train={"epochs": 2, "batch_size": 64},
)
OPTIONS = {"ibnn": {"components": 2}, "dropout": {"rate": 0.1}, "ensemble": {"members": 2}, "swag": {"rank": 2}}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_is_read_back(method: str, tmp_path: Path) -> None:
    swa = {"swa": 0.4} if method.startswith("swa") else {}
    job = DIGITS.but(method=method, method_options=OPTIONS.get(method, {}), train=swa)
    result = run(job, tmp_path, quiet=True)
    again = read_run(tmp_path)
    assert again.job == job
    assert again.result == result == json.loads((tmp_path / "result.json").read_text())
    whole = make_data(job).whole
    answers = safetensors.torch.load_file(tmp_path / "answers.safetensors")
    prediction = again.model.predict(whole.normalise(whole.test.images), samples=2)  # type: ignore[union-attr]
    torch.testing.assert_close(prediction.probs, answers["probs"])  # type: ignore[attr-defined]
    assert result["scores"]["nll"] == pytest.approx(metrics.nll(answers["probs"].double().log(), answers["labels"]))
    assert result["costs"]["rows"] == 2 * 200 * (2 if method == "ensemble" else 1)
    forwards = {"sgd": 1, "swa": 1, "ensemble": 2, "ibnn": 4}.get(method, 2)
    assert result["costs"]["forwards"] == forwards
    assert result["costs"]["parameters"] == sum(p.numel() for p in again.model.parameters())
    assert result["costs"]["train_seconds"] > 0
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_finished_run_is_not_run_again_and_its_folder_is_its_own(tmp_path: Path) -> None:
    job = DIGITS.but(method="sgd")
    first = run(job, tmp_path, quiet=True)
    assert run(job, tmp_path, quiet=True) == first
    with pytest.raises(ValueError, match="one of another job"):
        run(job.but(seed=1), tmp_path, quiet=True)


def test_temperature_scaling_is_measured_beside(tmp_path: Path) -> None:
    result = run(DIGITS.but(method="sgd", train={"epochs": 20, "lr": 0.01}), tmp_path, quiet=True)
    assert result["temperature"] == 1.0
    assert result["tempered"]["temperature"] != 1.0
    assert result["tempered"]["scores"]["error"] == result["scores"]["error"]
    assert read_run(tmp_path).model.likelihood.temperature == 1.0
    assert "tempered" not in run(DIGITS.but(method="sgd", valid=0), tmp_path / "other", quiet=True)


def test_the_split_is_the_same_for_all_seeds() -> None:
    first, second = make_data(DIGITS), make_data(DIGITS.but(seed=5))
    assert torch.equal(first.train.data.images, second.train.data.images)  # type: ignore[union-attr]
    assert len(first.train) == 200
    assert first.valid is not None
    assert len(first.valid) == 200
    rows = {tuple(image.flatten().tolist()) for image in first.train.data.images}  # type: ignore[union-attr]
    held_out = {tuple(image.flatten().tolist()) for image in first.valid.data.images}  # type: ignore[union-attr]
    assert not rows & held_out


def test_seeds_decide_the_start() -> None:
    same, other = make_method(DIGITS, 10), make_method(DIGITS.but(seed=1), 10)
    assert torch.equal(same.net[1][0].weight, make_method(DIGITS, 10).net[1][0].weight)
    assert not torch.equal(same.net[1][0].weight, other.net[1][0].weight)
    members = make_method(DIGITS.but(method="ensemble", method_options={"members": 2}), 10).net
    assert not torch.equal(members[0][1][0].weight, members[1][1][0].weight)
    assert torch.equal(members[0][1][0].weight, same.net[1][0].weight)


def test_trained_weights_come_first(tmp_path: Path) -> None:
    job = DIGITS.but(first={"epochs": 3}, method_options={"components": 2}, train={"epochs": 1, "lr": 1e-9})
    before = job.before()
    assert before is not None
    result = run(job, tmp_path / "run", quiet=True)
    plain = read_run(tmp_path / before.key)
    assert plain.job.method == "sgd"
    torch.testing.assert_close(read_run(tmp_path / "run").model.net[1][0].weight, plain.model.net[1][0].weight)
    assert result["costs"]["rows"] == (3 + 1) * 200
    assert result["costs"]["train_seconds"] > plain.result["costs"]["train_seconds"]
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(plain.model.net.state_dict(), weights)
    job = DIGITS.but(method="sgd", weights=str(weights), train={"epochs": 1, "lr": 1e-9})
    run(job, tmp_path / "given", quiet=True)
    torch.testing.assert_close(read_run(tmp_path / "given").model.net[1][0].weight, plain.model.net[1][0].weight)


def test_toml_and_back() -> None:
    job = DIGITS.but(first={"epochs": 2, "schedule": {"kind": "cosine"}})
    assert Job.from_toml(job.to_toml()) == job
    assert Job.from_toml(job.to_toml()).key == job.key != DIGITS.key


def test_merging_changes_neither() -> None:
    base, changes = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merged(base, changes) == {"a": {"b": 1, "c": 2}}
    assert (base, changes) == ({"a": {"b": 1}}, {"a": {"c": 2}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"net": "lenett"}, "Did you mean 'lenet'"),
        ({"method": "ibn"}, "Did you mean 'ibnn'"),
        ({"train": {"lr": -1.0}}, "`lr`"),
        ({"train": {"epocs": 1}}, "Did you mean 'epochs'"),
        ({"vald": 3}, "Did you mean 'valid'"),
        ({"samples": 0}, "`samples`"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DIGITS.but(**changes)


def test_wrong_options_of_a_method_are_named() -> None:
    with pytest.raises(ValueError, match="method_options"):
        make_method(DIGITS.but(method="sgd", method_options={"rate": 1}), 10)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"job\.toml"):
        read_run(tmp_path)
