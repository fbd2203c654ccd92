"""Writes files that carry their own checksum, and reads them only if they are exactly as they were written.

A sealed file is JSON, or safetensors with JSON in its header; neither can carry code. Its seal is the SHA-256 of the
whole file with zeros in place of the seal. Files are replaced atomically: a killed writer leaves the old file.
"""

import hashlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn.errors import DamagedError, complaint
from ibnn.files.atomic import replaced

REMEDY = "Copy it again from where it came from, or remove it."
_ZEROS = "0" * 64
_JSON = b'{\n  "seal": "'  # how each kind of file begins, up to its seal; in safetensors, after the header's length
_TENSORS = b'{"__metadata__":{"sealed":"'


class Sealed(NamedTuple):
    """The content of a sealed file of tensors."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors, and facts that JSON can hold, as one sealed safetensors file."""
    header = {"sealed": _ZEROS + json.dumps(facts)}
    with replaced(path) as (temporary,):
        extra("safetensors.torch").save_file(plain(tensors), temporary, metadata=header)
        _seal(temporary, 8, _TENSORS)


def read_tensors(path: Path, *, remedy: str = REMEDY) -> Sealed:
    """Returns what `write_tensors` wrote, on the CPU; raises a DamagedError with the remedy if a bit has changed."""
    _check_seal(path, 8, _TENSORS, remedy)
    try:
        with extra("safetensors").safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["sealed"][len(_ZEROS) :])
            return Sealed({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118
    except Exception as error:  # sealed by somebody else: whatever safetensors finds wrong with it
        raise _damaged(path, str(error), remedy) from error


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes facts as a sealed JSON file: an object whose first key is "seal"."""
    with replaced(path) as (temporary,):
        temporary.write_text(json.dumps({"seal": _ZEROS, **facts}, indent=2) + "\n", encoding="utf-8")
        _seal(temporary, 0, _JSON)


def read_json(path: Path, *, remedy: str = REMEDY) -> dict[str, Any]:
    """Returns what `write_json` wrote; raises a DamagedError with the remedy if a bit has changed."""
    _check_seal(path, 0, _JSON, remedy)
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # sealed by somebody else
        raise _damaged(path, str(error), remedy) from error
    del facts["seal"]
    return facts


def checksum(path: Path) -> str:
    """Returns the SHA-256 of a file, for another file to hold."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, sha256: str, *, remedy: str = REMEDY) -> None:
    """Raises a DamagedError unless a file has the checksum that another file holds."""
    if (actual := checksum(path)) != sha256:
        raise _damaged(path, f"SHA-256 {actual[:12]}…, not {sha256[:12]}…", remedy)


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns contiguous copies on the CPU, no two of which share memory, as safetensors needs them."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def extra(module: str) -> Any:
    """Imports an optional package that files need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "Run: pip install -c constraints.txt '.[hub]' in a clone of the repository."
        raise ImportError(complaint(module, "installed, to save and load", str(error), remedy)) from error


def _seal(path: Path, offset: int, start: bytes) -> None:
    """Writes the seal over its zeros."""
    _, actual = _seals(path, offset, start)
    with path.open("r+b") as file:
        file.seek(offset + len(start))
        file.write(actual.encode())


def _check_seal(path: Path, offset: int, start: bytes, remedy: str) -> None:
    present, actual = _seals(path, offset, start)
    if present != actual:
        raise _damaged(path, "another checksum than it was written with" if present else "no seal", remedy)


def _seals(path: Path, offset: int, start: bytes) -> tuple[str, str]:
    """Returns the seal that a file carries (empty if it does not begin with one) and the one that it should carry."""
    with path.open("rb") as file:
        head, present = file.read(offset + len(start)), file.read(len(_ZEROS))
        digest = hashlib.sha256(head + _ZEROS.encode())
        while block := file.read(1 << 20):
            digest.update(block)
    return present.decode("latin-1") if head[offset:] == start else "", digest.hexdigest()


def _damaged(path: Path, found: str, remedy: str) -> DamagedError:
    return DamagedError(f"{path} is damaged or was not written by ibnn: it has {found}. {remedy}")
