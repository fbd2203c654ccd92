"""Run folders: what is damaged is refused by name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ibnn.errors import DamagedError
from ibnn.files.saving import load
from ibnn.lab.job import Job
from ibnn.lab.jobs import read_run, run
from ibnn.lab.report import write_report
from ibnn.lab.runs import ANSWERS, CONFIG, HISTORY, JOB, MODEL, RESULT, RunFolder

TINY = Job(
    net="mlp",
    net_options={"inputs": 64, "hidden": 8, "layers": 1},
    data="digits",
    examples=200,
    method="sgd",
    samples=1,
    train={"steps": 2, "batch_size": 64},
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    run(TINY, folder, quiet=True)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def flip(path: Path) -> None:
    """Flips two bytes near the end: numbers of a tensor, which safetensors does not mind."""
    content = bytearray(path.read_bytes())
    content[-7] ^= 0x40
    content[-3] ^= 0x40
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(b"\xff\x00\x80" * 20)


@pytest.mark.parametrize("damage", [flip, cut, empty, noise])
@pytest.mark.parametrize("name", [MODEL, JOB, RESULT])
def test_what_is_damaged_is_not_read(name: str, damage: Callable[[Path], None], folder: Path) -> None:
    read_run(folder)
    damage(folder / name)
    with pytest.raises(DamagedError, match=re.escape(str(folder / name))):
        read_run(folder)


@pytest.mark.parametrize("damage", [flip, cut, empty, noise])
@pytest.mark.parametrize("name", [ANSWERS, HISTORY, JOB, RESULT])
def test_what_is_damaged_is_not_reported(name: str, damage: Callable[[Path], None], folder: Path) -> None:
    page = folder / "page.html"
    damage(folder / name)
    with pytest.raises(DamagedError, match=re.escape(str(folder / name))):
        write_report([folder], page)
    assert not page.exists()


def test_a_changed_score_is_noticed(folder: Path) -> None:
    content = json.loads((folder / RESULT).read_text())
    assert set(content["sha256"]) == {JOB, HISTORY, CONFIG, ANSWERS}
    content["scores"]["nll"] += 1e-9
    (folder / RESULT).write_text(json.dumps(content, indent=2) + "\n")
    with pytest.raises(DamagedError, match=RESULT):
        read_run(folder)


def test_the_model_of_another_run_is_refused(folder: Path, tmp_path: Path) -> None:
    run(TINY.but(seed=1), tmp_path / "other", quiet=True)
    for name in (CONFIG, MODEL):  # a whole and undamaged save
        shutil.copy(tmp_path / "other" / name, folder)
    with pytest.raises(DamagedError, match=CONFIG):
        read_run(folder)


def test_clearing_removes_what_a_run_wrote_and_nothing_else(folder: Path) -> None:
    home, mine = RunFolder(folder), {"notes.txt", "checkpoints/mine.pt"}
    for name in (*mine, "checkpoints/step-1-a.safetensors"):
        home.write(name, b"")
    home.clear()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == mine


@pytest.mark.parametrize("name", ["config.json", "history.csv", "checkpoints/step-1-a.safetensors"])
def test_files_of_no_run_are_neither_cleared_nor_replaced(name: str, tmp_path: Path) -> None:
    RunFolder(tmp_path).write(name, b"mine")
    RunFolder(tmp_path).clear()
    with pytest.raises(ValueError, match=f"which has {name} but no job.toml"):
        run(TINY, tmp_path, quiet=True)
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [b"mine"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    home = RunFolder(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=f"no folder {tmp_path / 'none'}"):
        home.require([JOB])
    home.write(JOB, b"")
    with pytest.raises(FileNotFoundError, match=r"without model\.safetensors and result\.json"):
        home.require([JOB, MODEL, RESULT])


def test_a_run_of_another_job_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder(tmp_path).write(JOB, TINY.to_toml().encode())  # begun, not finished
    with pytest.raises(ValueError, match=r"one of another job .*seed 0"):
        run(TINY.but(seed=1), tmp_path, quiet=True)
    assert Job.from_toml((tmp_path / JOB).read_text()) == TINY


def test_the_reference_is_read_with_the_run(tmp_path: Path) -> None:
    """Every tenth of 1,000 digits is held out, and ranked."""
    job = TINY.model_copy(update={"method": "ibnn", "examples": 1000})
    run(job, tmp_path / "run", quiet=True)
    model = read_run(tmp_path / "run").model
    again = load(tmp_path / "run")
    assert model.reference is not None
    assert model.reference.ranked == 100
    far = 50 * torch.rand(4, 1, 8, 8)
    assert torch.equal(model.predict(far).p_value, again.predict(far).p_value)
    assert model.predict(far).novel(0.02).all()
