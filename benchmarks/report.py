"""Measures bytes and ratios of times, prints a benchmark's result, and writes it to a file if one is named."""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from provenance import provenance


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the result to this file")
    return made


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median ratio of times that were taken in turns."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


def compared(pairs: Sequence[tuple[float, float]], ours: str, theirs: str) -> dict[str, float]:
    """Median ratio of pairs of seconds, and both medians in milliseconds, by name."""
    both = [list(column) for column in zip(*pairs, strict=True)]
    times = {name: round(1e3 * statistics.median(s), 3) for name, s in zip((ours, theirs), both, strict=True)}
    return {"ratio": ratio(*both), **times}


@contextmanager
def saved_bytes(known: Iterable[Tensor] = ()) -> Iterator[SimpleNamespace]:
    """Counts the bytes of distinct storages, but those of known tensors, that a block keeps for its backward pass."""
    own = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice
    saved = SimpleNamespace(bytes=0)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage
            saved.bytes += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def tell(result: dict[str, Any], path: Path | None, *packages: str) -> None:
    content = result | {"versions": provenance(*(packages or ("accelerate",)))}
    print(json.dumps(content, indent=1))
    if path:
        write(path, content)
