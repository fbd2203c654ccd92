"""Checkpoints of a run: sealed files of which the last few are kept. Nothing is unpickled.

Sharded weights are gathered for a checkpoint, so that a run may go on with another number of workers, or with one.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    until = [other for other in paths(folder) if other <= path]
    remove(folder, but=until[-KEPT:])
    return path


def remove(folder: Path, but: Sequence[Path] = ()) -> None:
    """Removes the checkpoints of a folder."""
    for path in set(paths(folder)) - set(but):
        path.unlink()


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
