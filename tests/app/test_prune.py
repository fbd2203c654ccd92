"""`ibnn prune`: a run in, a thinner run out, which all other commands take."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_cli import TINY, call, rows_of

from ibnn.lab.jobs import read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    call("train", "digits-mlp", *TINY, "--out", folder, "--quiet")
    return folder


@pytest.fixture(scope="module")
def thin(run: Path) -> Path:
    result = call("prune", run, "--epochs", 1)
    assert "│ multiply–adds    │" in result.stdout
    assert "│ held-out error % │" in result.stdout
    assert "│ held-out NLL     │" in result.stdout
    assert f"Next: ibnn report {run}-0.5" in result.stderr
    return run.with_name("digits-0.5")


@pytest.mark.slow
def test_a_pruned_run_is_asked_like_any_other(run: Path, thin: Path, tmp_path: Path) -> None:
    found = json.loads(call("prune", run, "--epochs", 1, "--json").stdout)  # which has finished
    before, after = found["pruned"]["sizes"]
    assert after["products"] <= before["products"] / 2
    assert after["weights"] == sum(
        p.numel() for name, p in read_run(thin).model.named_parameters() if ".latent." not in name
    )
    assert read_run(run).job.prune is None
    again = json.loads(call("evaluate", thin, "--json").stdout)
    assert again["scores"] == pytest.approx(found["scores"])
    np.save(tmp_path / "a.npy", np.zeros((2, 8, 8)))
    assert len(rows_of(call("predict", thin, tmp_path / "a.npy").stdout)) == 2
    assert "mlp 50%" in Path(call("report", thin, run, "-o", tmp_path / "page.html").stdout.strip()).read_text()


@pytest.mark.slow
def test_a_pruned_run_is_exported(thin: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    call("export", thin, "-o", tmp_path / "m.onnx", "--pixels", "--samples", 2)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    probabilities, *_ = session.run(None, {"x": np.zeros((1, 1, 8, 8), np.float32)})
    np.save(tmp_path / "a.npy", np.zeros((1, 8, 8)))
    row = rows_of(call("predict", thin, tmp_path / "a.npy", "--samples", 2, "--risk", 1, "--novelty", 0).stdout)[0]
    assert probabilities.max() == pytest.approx(float(row["probability"]), abs=1e-2)  # novelty moves it a little


@pytest.mark.slow
def test_runs_on_points_are_pruned(tmp_path: Path) -> None:
    call("train", "toy-regression", *TINY, "--out", tmp_path / "curve", "--quiet")
    result = call("prune", tmp_path / "curve", "--keep", 0.6, "--epochs", 1, "--out", tmp_path / "thin")
    assert "│ multiply–adds │" in result.stdout
    assert read_run(tmp_path / "thin").model.predict(np.zeros((1, 1), np.float32)).mean.shape == (1, 1)


def test_help_teaches() -> None:
    words = " ".join(call("prune", "--help").stdout.split())
    for part in ("Example: ibnn prune runs/digits-mlp", "Share of the multiply–adds", "an error names the layers"):
        assert part in words
    assert "ibnn prune runs/digits-mlp --keep 0.5" in call("--help").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "no folder nowhere"),
        ("RUN --keep 0", "`--keep`"),
        ("RUN --keep 1.5", "`--keep`"),
        ("RUN --keep nan", "`--keep`"),
        ("RUN --epochs 0", "--epochs"),
        ("RUN --out file", "`--out`"),
        ("RUN --keep 0.4 --out THIN", "one of another job"),
        ("THIN --keep 0.4", "a run that was not pruned before, but got one that kept 50%"),
    ],
)
def test_wrong_usage_is_2(
    words: str, message: str, run: Path, thin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    result = call("prune", *words.replace("RUN", str(run)).replace("THIN", str(thin)).split(), code=2)
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_runs_that_cannot_be_pruned(run: Path, tmp_path: Path) -> None:
    plain = ["--set", "method=sgd", "--set", "method_options={}", "--out", tmp_path / "plain", "--quiet"]
    call("train", "toy-regression", "--set", "train.steps=2", *plain)
    assert "but got sgd. Train one: ibnn train" in call("prune", tmp_path / "plain", code=2).stderr
    too_little = call("prune", run, "--keep", 0.001, "--out", tmp_path / "thin", code=1)
    assert "the least for this network" in too_little.stderr
    assert "(is the network's output)" in too_little.stderr
