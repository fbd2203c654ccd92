"""Answers in shards: the same bits for any number of workers, continued after failures, joined in order."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from ibnn import data
from ibnn.app.asking import shards
from ibnn.app.asking.inputs import BATCH
from ibnn.app.cli.app import app

TINY = ["--set", "train.steps=2", "--set", "method_options.components=2", "--set", "net_options.hidden=8"]
TINY += ["--set", "samples=2", "--quiet"]


def call(*words: object, code: int = 0, rank: int = 0, world: int = 1) -> Any:
    env = {"NO_COLOR": "1", "COLUMNS": "200"} | ({"RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {})
    result = CliRunner(env=env).invoke(app, list(map(str, words)), prog_name="ibnn")
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("runs") / f"digits-{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        call("train", "digits-mlp", *TINY, "--set", f"seed={seed}", "--out", folder)
    return folders


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Images, a long array and a table; in shards of three rows."""
    monkeypatch.setattr(shards, "ROWS", 3)
    test = data.load("digits").test
    assert isinstance(test, data.Split)
    pixels = test.images[:17, 0].numpy()
    for number in range(2):
        Image.fromarray(pixels[number]).save(tmp_path / f"{number}.png")
    np.save(tmp_path / "a.npy", pixels[2:12])
    lines = [",".join(repr(float(value) / 255) for value in image.flatten()) for image in pixels[12:]]
    (tmp_path / "b.csv").write_text("\n".join(lines) + "\n")
    return [tmp_path / name for name in ("0.png", "1.png", "a.npy", "b.csv")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_cutting() -> None:
    images = [Path(f"{number}.png") for number in range(shards.ROWS + 1)]
    assert [len(part) for part in shards.cut(images)] == [shards.ROWS, 1]
    assert shards.ROWS % BATCH == 0  # so that rows are in the same batches as without shards


def test_arrays_are_cut_by_their_headers(inputs: list[Path]) -> None:
    found = shards.cut(inputs)
    array, table = inputs[2:]
    assert found == [
        [(inputs[0], 0, None), (inputs[1], 0, None), (array, 0, 1)],
        [(array, 1, 4)],
        [(array, 4, 7)],
        [(array, 7, 10)],
        [(table, 0, None)],
    ]
    array.write_bytes(b"damaged")
    assert shards.cut(inputs)[1:] == [[(array, 0, None)], [(table, 0, None)]]


def test_any_number_of_workers_writes_the_same_bits(runs: list[Path], inputs: list[Path], tmp_path: Path) -> None:
    words = ("predict", runs[0], *inputs, "--shards")
    told = call(*words, tmp_path / "one").stderr
    assert "0 of 5 shards were there" in told
    for rank in (2, 0, 1):  # in any order
        told = call(*words, tmp_path / "three", rank=rank, world=3).stderr
        assert f"worker {rank + 1} of 3" in told
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert len(contents(tmp_path / "one")) == 6
    call("predict", runs[0], "--join", tmp_path / "one", "-o", tmp_path / "out.csv")
    found, expected = rows_of((tmp_path / "out.csv").read_text()), rows_of(call("predict", *words[1:-1]).stdout)
    assert len(found) == 17
    assert list(found[0]) == list(expected[0])
    for a, b in zip(found, expected, strict=True):
        for name in a:
            number = name in ("probability", "total", "aleatoric", "epistemic", "novelty")
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-4, abs=1e-6) if number else a[name] == b[name]
    joined = json.loads(call("predict", runs[0], "--join", tmp_path / "one", "--json").stdout)
    whole = json.loads(call("predict", *words[1:-1], "--json").stdout)
    assert {name: joined[name] for name in joined if name != "rows"} == {n: whole[n] for n in whole if n != "rows"}
    assert [(row["file"], row["row"]) for row in joined["rows"]] == [(row["file"], row["row"]) for row in whole["rows"]]
    assert rows_of(call("predict", runs[0], "--join", tmp_path / "one").stdout) == found


def test_it_continues_with_what_is_missing_or_damaged(runs: list[Path], inputs: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    words = ("predict", runs[0], *inputs, "--shards", folder)
    call(*words)
    before, times = contents(folder), {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    missing, damaged = shards.place(folder, 1), shards.place(folder, 3)
    missing.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-8])
    message = call("predict", runs[0], "--join", folder, code=2).stderr
    assert "1 missing: 1" in message
    call(*words, rank=1, world=2)
    assert contents(folder) == before
    changed = {path.name for path in folder.iterdir() if path.stat().st_mtime_ns != times[path.name]}
    assert changed == {missing.name, damaged.name}
    assert "5 of 5 shards were there" in call(*words).stderr
    assert "RANK=5 and WORLD_SIZE=2" in call(*words, rank=5, world=2, code=2).stderr


@pytest.mark.parametrize(("rank", "world"), [("5", "2"), ("2", "2"), ("-1", "2"), ("x", "2"), ("0", ""), ("1", None)])
def test_ranks_outside_the_world_are_refused(rank: str, world: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=f"`RANK` to be a whole number from 0 .* but got RANK={rank} and"):
        shards.Worker.here()


def test_changed_numbers_and_words_are_noticed(tmp_path: Path) -> None:
    rows = [{"file": "a.png", "row": None, "label": "cat", "total": 0.5}]
    path = shards.place(tmp_path, 0)
    shards.write(tmp_path, 0, "key", rows, [])
    whole = path.read_bytes()
    assert shards.has(tmp_path, 0, "key")
    assert shards.read(tmp_path, 0).rows == rows
    for damaged in (whole[:-2] + bytes([whole[-2] ^ 64, whole[-1]]), whole.replace(b"cat", b"dog")):
        path.write_bytes(damaged)
        assert not shards.has(tmp_path, 0, "key")
        with pytest.raises(ValueError, match=r"shard-0000000.safetensors` to be as it was written"):
            shards.read(tmp_path, 0)


def test_shards_of_something_else_are_refused(runs: list[Path], inputs: list[Path], tmp_path: Path) -> None:
    folder, other = tmp_path / "shards", tmp_path / "other"
    words = ("predict", runs[0], *inputs, "--shards", folder)
    call(*words)
    before = contents(folder)
    for change in (("predict", runs[1], *inputs), words[:-3], (*words[:-2], "--seed", 1), (*words[:-2], "--risk", 0.2)):
        assert "of another run, other inputs or other options" in call(*change, "--shards", folder, code=2).stderr
    assert "another model, from the run" in call("predict", runs[1], "--join", folder, code=2).stderr
    call(*words[:-1], other, "--seed", 1)
    shards.place(folder, 2).write_bytes(shards.place(other, 2).read_bytes())
    assert (
        "shard-0000002.safetensors, which is damaged or of another"
        in call("predict", runs[0], "--join", folder, code=2).stderr
    )
    call(*words)
    assert contents(folder) == before
    (folder / shards.PLAN).unlink()
    assert "shards but no plan.json" in call(*words, code=2).stderr
    assert "without plan.json" in call("predict", runs[0], "--join", folder, code=2).stderr


def test_files_that_cannot_be_read_are_named_again_by_join(
    runs: list[Path], inputs: list[Path], tmp_path: Path
) -> None:
    inputs[0].write_bytes(b"no image")
    result = call("predict", runs[0], *inputs, "--shards", tmp_path / "shards", code=1)
    assert "0.png" in result.stderr
    result = call("predict", runs[0], "--join", tmp_path / "shards", code=1)
    assert "0.png" in result.stderr
    assert len(rows_of(result.stdout)) == 16


def test_a_dangling_link_does_not_stop_the_others(runs: list[Path], inputs: list[Path], tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    inputs[0].rename(photos / "a.png")
    (photos / "b.png").symlink_to("gone.png")
    assert "b.png" in call("predict", runs[0], photos, "--shards", tmp_path / "shards", code=1).stderr
    assert len(rows_of(call("predict", runs[0], "--join", tmp_path / "shards", code=1).stdout)) == 1


def test_file_names_need_not_be_utf8() -> None:
    names = [Path(os.fsdecode(name)) for name in (b"\xff.png", b"\xfe.png")]
    assert shards.key({}, names[:1]) != shards.key({}, names[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "`INPUT`"),
        (("--join", "a", "--shards", "b"), "`--join`"),
        (("a.npy", "--join", "a"), "`--join`"),
        (("a.npy", "--shards", "a", "-o", "b.csv"), "`--out`"),
    ],
)
def test_options_that_do_not_go_together(words: tuple[str, ...], message: str, runs: list[Path]) -> None:
    assert message in call("predict", runs[0], *words, code=2).stderr


def test_shards_hold_plain_tensors(runs: list[Path], inputs: list[Path], tmp_path: Path) -> None:
    """Whoever needs no CSV reads them with safetensors alone."""
    import safetensors.torch

    call("predict", runs[0], *inputs, "--shards", tmp_path / "shards")
    found = safetensors.torch.load_file(shards.place(tmp_path / "shards", 2))
    assert found["row"].tolist() == [4, 5, 6]
    assert found["probability"].dtype == torch.float64
    assert found["probability"].shape == (3,)


@pytest.mark.slow
def test_torchrun(runs: list[Path], inputs: list[Path], tmp_path: Path) -> None:
    call("predict", runs[0], *inputs, "--shards", tmp_path / "one")  # of three rows each, there of 10,000
    whole = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29547", "-m", "ibnn"]
    words = [*whole, "predict", *map(str, (runs[0], *inputs)), "--shards", str(tmp_path / "two")]
    subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300)
    found, expected = (rows_of(call("predict", runs[0], "--join", tmp_path / n).stdout) for n in ("two", "one"))
    assert [row["label"] for row in found] == [row["label"] for row in expected]
