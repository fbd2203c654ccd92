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

from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically as write_atomically
from ibnn.training.recipe import Recipe

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


class Checkpoints:
    """The checkpoints of a run: where they are, and what tells whether they are of the same run.

    Args:
        folder: The run folder; None for a run without one.
        recipe: Its recipe.
        facts: What besides the recipe makes a run what it is.
    """

    def __init__(self, folder: Path | None, recipe: Recipe, facts: Mapping[str, Any]) -> None:
        self.folder, self.recipe, self.facts = folder, recipe, dict(facts)

    def clear(self) -> None:
        """Removes the checkpoints of the run and of its refit."""
        if self.folder is not None:
            clear(self.folder / "checkpoints")
            clear(self.folder / "refit" / "checkpoints")

    def find(self, *, required: bool) -> Checkpoint | None:
        """Returns the newest checkpoint, if there is one; raises if it is of another run, or missing and required."""
        saved = None if self.folder is None else latest(self.folder / "checkpoints")
        if saved is None and required:
            remedy = 'Pass resume="auto".'
            raise ValueError(complaint("run_dir", "a folder with a whole checkpoint", self.folder, remedy))
        if saved is not None:
            self._check_same_run(saved)
        return saved

    def _check_same_run(self, saved: Checkpoint) -> None:
        mine = self.recipe.model_dump() | self.facts
        theirs = Recipe.from_toml(saved.data["recipe"]).model_dump() | saved.data["facts"]
        changed = [name for name in mine if name in theirs and mine[name] != theirs[name]]
        if changed:
            names = ", ".join(f"{name} = {theirs[name]}" for name in changed)
            remedy = 'Use another run_dir, or resume="never" to start anew.'
            raise ValueError(complaint("run_dir", "a folder of the same run", f"one with {names}", remedy))

    def save(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any], **rest: Any) -> None:
        """Saves tensors and where the run is, with the recipe and the facts."""
        assert self.folder is not None, "only a run with a folder is saved"
        data = {"progress": progress, "recipe": self.recipe.to_toml(), "facts": self.facts, **rest}
        save(self.folder / "checkpoints", progress["step"], tensors, data, keep=self.recipe.keep)


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
