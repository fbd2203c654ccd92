"""Sealed files: round trips, damage of every kind, and writers that are killed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ibnn.errors import DamagedError
from ibnn.files import sealed

pytest.importorskip("safetensors")

TENSORS = {"a": torch.arange(6.0).view(2, 3).T, "ü/b": torch.tensor([True, False]), "empty": torch.zeros(0, 2)}
FACTS = {"step": 3, "nested": {"seal": "x", "std": 0.1}, "text": 'quoted "é" \\ \n', "none": None}
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "tensors": (lambda path: sealed.write_tensors(path, TENSORS, FACTS), sealed.read_tensors),
    "json": (lambda path: sealed.write_json(path, FACTS), sealed.read_json),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_tensors_and_facts_come_back_and_any_reader_of_safetensors_can_open_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    sealed.write_tensors(tmp_path / "new/a", TENSORS, FACTS)
    tensors, facts = sealed.read_tensors(tmp_path / "new/a")
    assert facts == FACTS
    for found in (tensors, load_file(tmp_path / "new/a")):
        assert found.keys() == TENSORS.keys()
        assert all(
            torch.equal(found[name], TENSORS[name]) and found[name].dtype == TENSORS[name].dtype for name in found
        )


def test_facts_come_back_and_the_file_is_plain_json(tmp_path: Path) -> None:
    sealed.write_json(tmp_path / "a", FACTS)
    assert sealed.read_json(tmp_path / "a") == FACTS
    content = json.loads((tmp_path / "a").read_text())
    assert len(content.pop("seal")) == 64
    assert content == FACTS


def test_equal_content_gives_equal_bytes(kind: str, tmp_path: Path) -> None:
    for name in "ab":
        KINDS[kind][0](tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_flipped_bit_is_found(kind: str, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    path = tmp_path / "a"
    write(path)
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in (1, 128):
            damaged = bytearray(content)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            with pytest.raises(DamagedError):
                read(path)


def test_every_truncation_and_addition_is_found(kind: str, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    path = tmp_path / "a"
    write(path)
    content = path.read_bytes()
    for wrong in (*(content[:length] for length in range(len(content))), content + b" ", content[1:], b"{}"):
        path.write_bytes(wrong)
        with pytest.raises(DamagedError):
            read(path)


def test_a_missing_file_is_missing_and_damage_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sealed.read_json(tmp_path / "nowhere")
    sealed.write_json(tmp_path / "a.json", {})
    with pytest.raises(DamagedError, match=r"a\.json.*Start again\."):
        sealed.read_tensors(tmp_path / "a.json", remedy="Start again.")


def test_a_checksum_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"content")
    sealed.verify(path, sealed.checksum(path))
    path.write_bytes(b"contend")
    with pytest.raises(DamagedError, match=r"Train again\."):
        sealed.verify(path, sealed.checksum(Path(__file__)), remedy="Train again.")


def _write_and_die(kind: str, path: Path, step: int) -> None:
    """Writes other content and is killed at a numbered call of the operating system's functions for files."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return call

    os.replace, os.fsync = counted(os.replace), counted(os.fsync)
    if kind == "json":
        sealed.write_json(path, {"step": 4})
    else:
        sealed.write_tensors(path, {"a": torch.ones(2)}, {"step": 4})


def test_a_kill_at_any_step_leaves_the_old_file_or_the_new_one(kind: str, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    path, steps = tmp_path / "a", []
    for step in range(4):
        write(path)
        process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(kind, path, step))
        process.start()
        process.join(60)
        found = read(path)
        steps.append((found if kind == "json" else found.facts)["step"])
        assert process.exitcode == (0 if step == 3 else -signal.SIGKILL)
    assert steps == [3, 3, 4, 4]  # killed before fsync, before the rename, before the folder's fsync, not at all


def test_the_module_imports_without_safetensors() -> None:
    code = "import sys, ibnn.files.sealed; sys.exit('safetensors' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
