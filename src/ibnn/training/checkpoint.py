"""CHECKPOINTS: tensors and plain data in one safetensors file, atomic, checked, the last few kept.

The file's name carries the first half of its SHA-256, so that a file that is damaged, or was never finished, is known
by its name alone. Nothing is unpickled.
"""

import hashlib
import json
import logging
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer

from ibnn.files.atomic import write_atomically

log = logging.getLogger("ibnn")


class Checkpoint(NamedTuple):
    """What was saved at a step."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]

    def state(self, kind: str, names: Container[str] = ()) -> dict[str, Tensor]:
        """Returns the tensors of a kind ("model", "average", "best") by their own names.

        Runs from before `prior_std` was part of a model's state saved it beside: it is added if it is one of `names`.
        """
        found = {name.partition("/")[2]: v for name, v in self.tensors.items() if name.startswith(f"{kind}/")}
        progress = self.data["progress"]
        beside = (progress if kind == "model" else progress.get("best") or {}).get("prior_std")
        if found and beside and "prior_std" in names:
            found.setdefault("prior_std", torch.tensor(beside, dtype=torch.float64))
        return found


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
    """Returns the newest undamaged checkpoint of a folder; damaged ones are named in the log."""
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


def pack_optimiser(optimiser: Optimizer, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns an optimiser's state as named tensors and plain data."""
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


def unpack_optimiser(optimiser: Optimizer, prefix: str, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Restores what `pack_optimiser` took."""
    state: dict[int, dict[str, Any]] = {int(number): dict(entries) for number, entries in data["scalars"].items()}
    for key, value in tensors.items():
        if key.startswith(prefix + "/"):
            _, number, name = key.split("/", 2)
            state.setdefault(int(number), {})[name] = value
    optimiser.load_state_dict({"state": state, "param_groups": data["groups"]})
