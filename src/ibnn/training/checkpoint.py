"""CHECKPOINTS: tensors and plain data in one safetensors file, atomic, checked, the last few kept.

The file's name carries the first half of its SHA-256, so that a file that is damaged, or was never finished, is known
by its name alone. Nothing is unpickled.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ibnn.files.atomic import write_atomically as write_atomically

log = logging.getLogger("ibnn")


class Checkpoint(NamedTuple):
    """What was saved at a step."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], data: Mapping[str, Any], *, keep: int) -> Path:
    """Saves a checkpoint and removes all but the last `keep`."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = safetensors.torch.save(whole, metadata={"data": json.dumps(data)})
    path = folder / f"step-{step:09d}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors"
    write_atomically(path, content)
    for old in _paths(folder)[:-keep]:
        old.unlink()
    return path


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a folder; a damaged one is named in the log and passed over."""
    for path in reversed(_paths(folder)):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest()[:32] != path.stem.rpartition("-")[2]:
            log.warning("%s is damaged or truncated; using the one before it.", path)
            continue
        with safetensors.safe_open(path, "pt") as file:
            data = json.loads(file.metadata()["data"])
        return Checkpoint(safetensors.torch.load(content), data)
    return None


def clear(folder: Path) -> None:
    """Removes all checkpoints of a folder."""
    for path in _paths(folder):
        path.unlink()


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*-*.safetensors"))


def pack_optimiser(optimiser: torch.optim.Optimizer, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as named tensors and plain data."""
    state = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}/{number}/{name}"] = value
            else:
                scalars.setdefault(str(number), {})[name] = value
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def unpack_optimiser(
    optimiser: torch.optim.Optimizer, prefix: str, tensors: Mapping[str, Tensor], data: Mapping[str, Any]
) -> None:
    """Restores what `pack_optimiser` took."""
    state: dict[int, dict[str, Any]] = {int(number): dict(entries) for number, entries in data["scalars"].items()}
    for key, value in tensors.items():
        if key.startswith(prefix + "/"):
            _, number, name = key.split("/", 2)
            state.setdefault(int(number), {})[name] = value
    optimiser.load_state_dict({"state": state, "param_groups": data["groups"]})
