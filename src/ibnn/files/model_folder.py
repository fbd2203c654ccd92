"""MODEL FOLDER: the two files of a saved model, its tensors as safetensors and everything else as config.json.

Nothing here unpickles: a file can hold wrong numbers, never code.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn._version import __version__
from ibnn.errors import complaint
from ibnn.files.atomic import replaced
from ibnn.files.sealed import extra

FORMAT_VERSION, CONFIG = 1, "config.json"
FILES = {False: "model.safetensors", True: "latents.safetensors"}  # by latents_only
_SHARED = {"latents_only", "likelihood", "tied", "fingerprint", "sha256"}  # keys that every config has


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes tensors and config so that an older save stays whole until both files are complete on disk.

    A process killed between the two renames leaves a pair that `read_tensors` refuses by its checksum.
    """
    save_file, file = extra("safetensors.torch").save_file, FILES[config["latents_only"]]
    check_replaceable(folder / CONFIG)
    kept, tied = _untied(tensors)
    header = {"format": "ibnn", "format_version": FORMAT_VERSION, "ibnn_version": __version__}
    with replaced(folder / file, folder / CONFIG) as (weights, description):
        save_file(kept, weights)
        content = header | config | {"tied": tied, "sha256": _sha256(weights)}
        description.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _untied(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors to write, no two of which share memory, and for each omitted name the one it is tied to."""
    first: dict[int, str] = {}
    tied = {name: kept for name, tensor in state.items() if (kept := first.setdefault(id(tensor), name)) != name}
    apart = {name: tensor.detach().cpu() for name, tensor in state.items() if name not in tied}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in apart.items()}, tied


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json; raises unless it is complete and of this format."""
    path, again = folder / CONFIG, "Copy or download it again."
    if not path.is_file():
        raise FileNotFoundError(complaint("directory", f"one with a {CONFIG}", repr(str(folder)), "Check the path."))
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(complaint(str(path), "JSON", f"a damaged file ({error})", again)) from error
    if not isinstance(config, dict) or config.get("format") != "ibnn":
        raise ValueError(complaint(str(path), "written by ibnn", "another file", "Pass the folder of a save."))
    if (version := config.get("format_version")) != FORMAT_VERSION:
        got, remedy = f"{version} (by ibnn {config.get('ibnn_version')})", "Upgrade: pip install -U ibnn."
        raise ValueError(complaint(str(path), f"of format version {FORMAT_VERSION}", got, remedy))
    return require(config, _SHARED, folder)


def require(config: dict[str, Any], keys: set[str], folder: Path) -> dict[str, Any]:
    """Returns a config; raises unless it has all keys."""
    if missing := sorted(keys - set(config)):
        got, remedy = f"one without {missing}", "Copy or download it again."
        raise ValueError(complaint(str(folder / CONFIG), "complete", got, remedy))
    return config


def read_tensors(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors, tied ones under all their names; raises unless the file has the saved checksum."""
    path = folder / FILES[config["latents_only"]]
    if not path.is_file():
        raise FileNotFoundError(complaint(str(path), f"there beside its {CONFIG}", "no such file", "Copy it too."))
    if (found := _sha256(path)) != config["sha256"]:
        got = f"a damaged file, or one of another save ({found[:12]}…)"
        raise ValueError(complaint(str(path), f"as saved (sha256 {config['sha256'][:12]}…)", got, "Copy it again."))
    load_file = extra("safetensors.torch").load_file
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:  # whatever safetensors finds wrong with it
        raise ValueError(complaint(str(path), "a safetensors file", str(error), "Get it from its author.")) from error
    return tensors | {name: tensors[kept] for name, kept in config["tied"].items()}


def check_replaceable(path: Path) -> None:
    """Raises if a config was written by another program."""
    if path.exists() and b'"format": "ibnn"' not in path.read_bytes():
        remedy = "Choose another place: a transformers model, for one, keeps its own file of that name."
        raise FileExistsError(complaint(str(path), "free or written by ibnn", "another program's file", remedy))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
