"""CHECKPOINT: chains on disk, as one file that is replaced in one step. Nothing in it is unpickled."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.files.sealed import extra
from ibnn.sampling.moves import State

FILE = "chains.safetensors"


def save(folder: Path, state: State, kept: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Writes the chains, what is kept of them, and what makes them what they are."""
    tensors = {f"state.{name}": value for name, value in state._asdict().items()} | kept
    whole = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    write_atomically(folder / FILE, extra("safetensors.torch").save(whole, metadata={"facts": json.dumps(facts)}))


def load(folder: Path, facts: dict[str, Any], device: torch.device) -> tuple[State, dict[str, Tensor]] | None:
    """Returns what `save` wrote, None if there is nothing; raises if it is of other chains."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with extra("safetensors").safe_open(path, "pt") as file:
            saved = json.loads(file.metadata()["facts"])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fields = {name: tensors.pop(f"state.{name}") for name in State._fields}
    except Exception as error:  # whatever safetensors finds wrong with it, or one of an earlier version
        remedy = "Remove the file to start anew."
        raise ValueError(
            complaint(str(path), "chains that ibnn.sample wrote", f"a damaged file ({error})", remedy)
        ) from error
    changed = [name for name in facts if saved.get(name) != facts[name]]
    if changed:
        names = ", ".join(f"{name} = {saved.get(name)}" for name in changed)
        raise ValueError(
            complaint("run_dir", "a folder of the same chains", f"one with {names}", "Use another folder.")
        )
    on_cpu = {"at", "step", "seen", "dual", "accepted", "divergent"}
    return State(**{name: value if name in on_cpu else value.to(device) for name, value in fields.items()}), tensors
