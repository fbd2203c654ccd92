"""Weights sharded over two workers (gloo, CPU) train as on one; checkpoints and the end are gathered."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp_job
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ibnn
from ibnn.training import checkpoint, shard, sharding


def test_one_worker_shards_nothing() -> None:
    model = ibnn.convert(nn.Sequential(nn.Linear(2, 2)), components=2)
    with pytest.raises(ValueError, match=r"`workers`.*torchrun"):
        shard(model)
    assert not sharding.is_sharded(model)
    with sharding.whole(model):  # nothing to do
        sharding.reshard(model)


def start(folder: Path, stop: int, kind: str, *, port: int) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    words = [sys.executable, *launch, fsdp_job.__file__, str(folder), str(stop), kind]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def result(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    return rows, load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", fsdp_job.KINDS)
def test_two_workers_do_what_one_does(kind: str, tmp_path: Path) -> None:
    history = fsdp_job.train(model := fsdp_job.make(), tmp_path / "one", kind)
    assert history is not None
    start(tmp_path / "two", 0, kind, port=29551)
    rows, tensors = result(tmp_path / "two")
    for ours, theirs in zip(rows, history.rows, strict=True):
        for name in ("loss", "nll", "kl", "valid_nll"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4), name
    for name, value in model.state_dict().items():
        if name in tensors and name.startswith(("net.", "likelihood.")):
            torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-4)
    again = ibnn.load(tmp_path / "two" / "model", ibnn.revert(fsdp_job.make()))  # gathered: one process reads it
    assert again.nodes == model.nodes


@pytest.mark.slow
def test_a_stopped_run_goes_on_sharded(tmp_path: Path) -> None:
    kind = "fixed"
    start(tmp_path / "whole", 0, kind, port=29552)
    start(tmp_path / "parts", 3, kind, port=29553)
    assert not (tmp_path / "parts" / "rows.json").exists()
    saved = checkpoint.latest(tmp_path / "parts" / "checkpoints")
    assert saved is not None
    assert saved.tensors["model/net.0.weight"].shape == (16, 6)  # gathered
    start(tmp_path / "parts", 0, kind, port=29554)
    (rows, tensors), (expected, state) = result(tmp_path / "parts"), result(tmp_path / "whole")
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    assert all(torch.equal(tensors[name], state[name]) for name in state)
