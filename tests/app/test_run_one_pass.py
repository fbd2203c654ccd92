"""`--one-pass` and the job's field: students of runs, numerically those of `ibnn.distil`."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import TINY, call, rows_of
from torch import nn

import ibnn
from ibnn import data
from ibnn.app.predictor import Predictor
from ibnn.files.saving import save_pretrained
from ibnn.lab import jobs, parts
from ibnn.lab.job import Job
from ibnn.lab.runs import RunFolder

FIELDS = {
    "net": "mlp",
    "net_options": {"inputs": 64, "hidden": 16},
    "data": "digits",
    "valid": 300,
    "samples": 2,
    "method_options": {"components": 2},
    "train": {"steps": 12},
    "seed": 3,
}


def by_hand(folder: Path) -> Any:
    run = jobs.read_run(folder)
    splits = parts.make_data(run.job)
    known = [splits.train, splits.valid]
    x = torch.cat([part.__getitems__(list(range(len(part))))[0] for part in known])  # type: ignore[union-attr, arg-type]
    return ibnn.distil(run.model, x, samples=2, seed=3, progress=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    jobs.run(Job(**FIELDS), folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "taught"
    jobs.run(Job(**FIELDS, one_pass=True), folder, quiet=True)
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", data.load("digits").test.images[:20, 0].numpy())  # type: ignore[union-attr]
    return tmp_path / "a.npy"


def test_a_job_and_a_command_distil_what_distil_does_by_hand(run: Path, taught: Path, images: Path) -> None:
    x = data.load("digits").normalise(torch.from_numpy(np.load(images))[:, None])
    expected = by_hand(taught).predict(x)
    told = call("predict", run, images, "--one-pass", "--json", "--risk", 0.9)
    assert "one-pass" in told.stderr  # it had none
    again = call("predict", run, images, "--one-pass", "--json", "--risk", 0.9)
    assert again.stdout == told.stdout
    assert "Distils" not in again.stderr
    job = call("predict", taught, images, "--one-pass", "--json", "--risk", 0.9)
    for found in (json.loads(told.stdout), json.loads(job.stdout)):
        assert [row["label"] for row in found["rows"]] == [str(label) for label in expected.labels.tolist()]
        for name in ("total", "aleatoric", "epistemic"):
            values = getattr(expected, name).tolist()
            assert [row[name] for row in found["rows"]] == pytest.approx(values, rel=1e-4, abs=1e-6)
        assert (found["samples"], found["risk"]["examples"], found["novelty"]["examples"]) == (1, 300, 300)
    assert json.loads(call("predict", run, images, "--json").stdout)["samples"] == 2  # the draws are still there


def test_the_result_has_both_scores(run: Path, taught: Path) -> None:
    plain, result = RunFolder(run).result, RunFolder(taught).result
    assert result["scores"] == plain["scores"]
    test = parts.make_data(Job(**FIELDS)).whole
    p = by_hand(taught).predict(test.normalise(test.test.images))  # type: ignore[union-attr]
    error = (p.labels != test.test.labels).double().mean().item()  # type: ignore[union-attr]
    nll = torch.nn.functional.nll_loss(p.probs.log(), test.test.labels).item()  # type: ignore[union-attr]
    assert result["one_pass"]["scores"]["error"] == pytest.approx(error)
    assert result["one_pass"]["scores"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert result["one_pass"]["agreement"]["rows"] > 0
    assert "one-pass/config.json" in result["sha256"]
    shown = call("train", "digits-mlp", "--out", taught, "--fresh", *TINY, "--set", "one_pass=true", "--quiet").stdout
    assert "test, one pass" in shown
    call("train", "digits-mlp", "--out", taught, "--fresh", *TINY, "--quiet")
    assert not (taught / "one-pass" / "config.json").exists()


def test_an_interrupted_distillation_leaves_the_run_as_it_was(
    run: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("one-pass"))

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "save_pretrained", stop)  # at the last moment
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    call("predict", copy, images, "--one-pass", code=130)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_read_only_run_is_distilled_in_memory(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("one-pass"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(jobs, "save_pretrained", refuse)  # root may write
    call("predict", copy, np_zeros(tmp_path), "--one-pass")
    assert not (copy / "one-pass").exists()


def np_zeros(folder: Path) -> Path:
    np.save(folder / "zeros.npy", np.zeros((1, 8, 8)))
    return folder / "zeros.npy"


@pytest.mark.slow
def test_export_is_a_file_of_plain_size(run: Path, images: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    told = json.loads(call("export", run, "--one-pass", "--pixels", "-o", tmp_path / "m.onnx", "--json").stdout)
    weights = sum(p.numel() for p in Predictor.read(run, one_pass=True).model.parameters())
    assert told["draw_bytes"] == 0
    call("export", run, "--pixels", "-o", tmp_path / "draws.onnx")
    assert 4 * weights < (tmp_path / "m.onnx").stat().st_size < 4 * weights + 60_000
    own, file = (
        rows_of(call("predict", *words, images, "--risk", 1).stdout)
        for words in ((run, "--one-pass"), (tmp_path / "m.onnx",))
    )
    for name in ("probability", "epistemic", "p_value"):
        assert [float(r[name]) for r in file] == pytest.approx([float(r[name]) for r in own], rel=1e-3, abs=1e-5)
    assert [row["label"] for row in file] == [row["label"] for row in own]
    assert "`--one-pass`" in call("predict", tmp_path / "draws.onnx", images, "--one-pass", code=2).stderr


def test_the_service_answers_in_one_pass(run: Path) -> None:
    from ibnn.app.serve.service import Service

    predictor = Predictor.read(run, one_pass=True)
    service = Service(predictor, risk=0.3)
    x = data.load("digits").test.images[:5].float() / 255  # type: ignore[union-attr]
    try:
        rows = service.ask(x).result(30)
        expected: Any = predictor.answer(x)
        assert [row["epistemic"] for row in rows] == pytest.approx(expected.epistemic.tolist(), rel=1e-4, abs=1e-6)
        assert service.health()["samples"] == 1
    finally:
        service.close()


def test_saved_students_answer_by_their_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    architecture = {"name": "mlp", "options": {"classes": 3, "inputs": 4, "hidden": 8}}
    model = ibnn.convert(ibnn.nets.make("mlp", classes=3, inputs=4, hidden=8), components=2, seed=0)
    save_pretrained(model, "saved", architecture=architecture)
    x = torch.randn(120, 4)
    np.save("a.npy", x[:5].numpy())
    assert "pass what was distilled" in call("predict", "saved", "a.npy", "--one-pass", code=2).stderr
    fast = ibnn.distil(model, x, epochs=1, progress=False)
    save_pretrained(fast, "fast", architecture=architecture)
    expected: Any = fast.predict(x[:5])
    rows = rows_of(call("predict", "fast", "a.npy").stdout)
    assert [float(row["probability"]) for row in rows] == pytest.approx(expected.probs.amax(1).tolist(), rel=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits-mlp", "--set", "method=sgd", "--set", "method_options={}"],
        ["train", "toy-regression"],  # 30 points
    ],
)
def test_jobs_that_cannot_be_distilled_are_refused_first(words: list[str], tmp_path: Path) -> None:
    assert "`one_pass`" in call(*words, "--set", "one_pass=true", "--out", tmp_path / "run", code=2).stderr
    assert not (tmp_path / "run").exists()


def test_draws_are_not_asked_of_one_pass(run: Path, images: Path) -> None:
    for option in ("--samples", "--seed"):
        assert option in call("predict", run, images, "--one-pass", option, 3, code=2).stderr


def test_numbers_and_ensembles_are_distilled(tmp_path: Path) -> None:
    fields = {"data": "toy-regression", "net": "mlp", "net_options": {"hidden": 8}, "examples": 200, "valid": 50}
    fields |= {"method_options": {"components": 1, "members": 2}, "train": {"steps": 3}, "one_pass": True}
    result = jobs.run(Job(**fields), tmp_path / "run", quiet=True)  # type: ignore[arg-type]
    assert {"nll", "rmse"} <= set(result["one_pass"]["scores"])
    (tmp_path / "a.csv").write_text("0.5\n1\n")
    rows = rows_of(call("predict", tmp_path / "run", tmp_path / "a.csv", "--one-pass").stdout)
    model = Predictor.read(tmp_path / "run", one_pass=True).model
    assert isinstance(model.net.net, nn.Module)
    expected = model.predict(torch.tensor([[0.5], [1.0]]))
    assert [float(row["mean"]) for row in rows] == pytest.approx(expected.mean[:, 0].tolist(), rel=1e-4)
