"""Writes and reads the two files of a saved model: its tensors (safetensors) and config.json, which describes them.

config.json holds the checksum of the tensors and is the point of no return. New tensors wait beside the old ones until
it is in place. A save that is killed at any moment leaves the older model or the new one, whole.
"""

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ibnn._version import __version__
from ibnn.errors import DamagedError, complaint
from ibnn.files import sealed
from ibnn.files.atomic import locked, remove_leftovers, replaced

FORMAT_VERSION, CONFIG = 1, "config.json"
FILES = {False: "model.safetensors", True: "latents.safetensors"}  # by latents_only
_AGAIN = "Copy or download it again."


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes tensors and config; see the module for what a kill leaves."""
    save_file = sealed.extra("safetensors.torch").save_file
    if (folder / CONFIG).exists() and b'"format": "ibnn"' not in (folder / CONFIG).read_bytes():
        got, remedy = "another program's file", "Choose another folder."
        raise FileExistsError(complaint(str(folder / CONFIG), "free or written by ibnn", got, remedy))
    first: dict[int, str] = {}  # names of the tensors to write
    tied = {name: kept for name, tensor in tensors.items() if (kept := first.setdefault(id(tensor), name)) != name}
    header = {"format": "ibnn", "format_version": FORMAT_VERSION, "ibnn_version": __version__}
    path = folder / FILES[config["latents_only"]]
    with locked(folder / ".save.lock"):
        _finish(folder)
        with replaced(_waiting(path)) as (temporary,):
            save_file(sealed.plain({name: tensors[name] for name in first.values()}), temporary)
        content = header | config | {"tied": tied, "sha256": sealed.checksum(_waiting(path))}
        sealed.write_json(folder / CONFIG, content)
        os.replace(_waiting(path), path)


def _waiting(path: Path) -> Path:
    """Returns where new tensors wait for their config."""
    return path.with_name(f".{path.name}.new")


def _finish(folder: Path) -> None:
    """Finishes a save that was killed after its config was written; removes what other killed saves left."""
    remove_leftovers(folder, [CONFIG, *(_waiting(folder / file).name for file in FILES.values())])
    for path in (folder / file for file in FILES.values()):
        if _waiting(path).exists():
            try:
                sealed.verify(_waiting(path), sealed.read_json(folder / CONFIG).get("sha256", ""))
                os.replace(_waiting(path), path)
            except (FileNotFoundError, DamagedError):
                _waiting(path).unlink()


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json; raises unless it is as it was written and of this format."""
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(complaint("directory", f"one with a {CONFIG}", repr(str(folder)), "Check the path."))
    config = sealed.read_json(path, remedy=_AGAIN)
    if (version := config.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
        got, remedy = f"{version} (by ibnn {config.get('ibnn_version')})", "Pull a newer version of the repository."
        raise ValueError(complaint(str(path), f"of format version {FORMAT_VERSION}", got, remedy))
    sealed.extra("ibnn.files.schema").check_config(config, path)
    return config


def read_tensors(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors, tied ones under all their names; raises unless the file has the checksum of the config."""
    path = folder / FILES[config["latents_only"]]
    if not path.is_file() and not _waiting(path).is_file():
        raise FileNotFoundError(complaint(str(path), f"there beside its {CONFIG}", "no such file", "Copy it too."))
    if _waiting(path).is_file() and sealed.checksum(_waiting(path)) == config["sha256"]:
        path = _waiting(path)  # its save was killed before the last step
    sealed.verify(path, config["sha256"], remedy=f"{_AGAIN} It may also belong to another save than {CONFIG}.")
    try:
        tensors: dict[str, Tensor] = sealed.extra("safetensors.torch").load_file(path)
    except Exception as error:  # whatever safetensors finds wrong with it
        raise ValueError(complaint(str(path), "a safetensors file", str(error), "Get it from its author.")) from error
    if unknown := sorted(set(config["tied"].values()) - set(tensors)):
        raise ValueError(complaint(str(folder / CONFIG), "about tensors of the file", f"ties to {unknown}", _AGAIN))
    return tensors | {name: tensors[kept] for name, kept in config["tied"].items()}
