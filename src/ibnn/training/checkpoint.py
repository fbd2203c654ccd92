"""Checkpoints of a run: sealed files of which the last few are kept. Nothing is unpickled."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ibnn.errors import DamagedError
from ibnn.files import sealed

log = logging.getLogger("ibnn")

KEPT = 2  # checkpoints of a run: should the last be damaged, there is one before it


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Saves a checkpoint and removes all but the last `KEPT` up to this step; later ones were found damaged."""
    path = folder / f"step-{step:09d}.safetensors"
    sealed.write_tensors(path, tensors, facts)
    for other in set(paths(folder)) - set([other for other in paths(folder) if other <= path][-KEPT:]):
        other.unlink()
    return path


def latest(folder: Path) -> sealed.Sealed | None:
    """Returns the newest undamaged checkpoint of a folder; damaged ones are named in the log."""
    for path in reversed(paths(folder)):
        try:
            return sealed.read_tensors(path)
        except DamagedError:
            log.warning("%s is damaged or truncated; using the one before it.", path)
    return None


def paths(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, the oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def pack_optimiser(optimiser: Optimizer, prefix: str) -> dict[str, Tensor]:
    """Returns an optimiser's state as named tensors (plain numbers as "name#")."""
    tensors = {}
    for number, entries in optimiser.state_dict()["state"].items():
        for name, value in entries.items():
            mark = "" if isinstance(value, Tensor) else "#"
            dtype = torch.float64 if isinstance(value, float) else None
            tensors[f"{prefix}/{number}/{name}{mark}"] = torch.as_tensor(value, dtype=dtype)
    return tensors


def unpack_optimiser(optimiser: Optimizer, prefix: str, tensors: Mapping[str, Tensor], groups: list[Any]) -> None:
    """Restores what `pack_optimiser` took, and the groups."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        if key.startswith(f"{prefix}/"):
            _, number, name = key.split("/", 2)
            state.setdefault(int(number), {})[name.rstrip("#")] = value.item() if name.endswith("#") else value
    optimiser.load_state_dict({"state": state, "param_groups": groups})
