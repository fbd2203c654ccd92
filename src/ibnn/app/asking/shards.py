"""SHARDS: answers for inputs that no machine could hold at once, computed by any number of workers, in any order.

Inputs are cut into shards of consecutive rows by their files alone, so that every worker, and a later run with another
number of them, cuts alike, and every row is answered in the same batch. A shard's answers are one safetensors file,
written whole or not at all; plan.json, beside them, tells what they are answers to.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ibnn.app.asking.inputs import BATCH
from ibnn.errors import complaint
from ibnn.files.atomic import read_json, write_atomically

ROWS = 40 * BATCH  # of a shard, at most; a .csv file is a shard, however long
PLAN = "plan.json"

Row = dict[str, Any]


class Piece(NamedTuple):
    """Some rows of a file; all of them if `stop` is None."""

    file: Path
    start: int = 0
    stop: int | None = None


class Worker(NamedTuple):
    """Which of several workers this process is."""

    rank: int
    world: int

    @classmethod
    def here(cls) -> "Worker":
        """Returns what torchrun or accelerate launch say; without them, the only worker."""
        rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
            got, remedy = f"RANK={rank} and WORLD_SIZE={world}", "Set both, or neither."
            raise ValueError(complaint("RANK", "a whole number from 0 to WORLD_SIZE − 1", got, remedy))
        return cls(int(rank), int(world))


def cut(files: Sequence[Path]) -> list[list[Piece]]:
    """Cuts files into shards. Of an .npy file only the header is read, of others nothing."""
    shards: list[list[Piece]] = []
    room = 0
    for file in files:
        kind = file.suffix.lower()
        rows = _length(file) if kind == ".npy" else 1
        if kind == ".csv" or rows is None:  # of unknown length, or not to be read: its shard says so
            shards.append([Piece(file)])
            room = 0
            continue
        start = 0
        while start < rows:
            if room == 0:
                shards.append([])
                room = ROWS
            stop = min(rows, start + room)
            shards[-1].append(Piece(file, start, stop) if kind == ".npy" else Piece(file))
            room -= stop - start
            start = stop
    return shards


def _length(file: Path) -> int | None:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        return len(array) or None
    except (ValueError, EOFError, OSError, TypeError):
        return None


def key(facts: Mapping[str, Any], files: Sequence[Path]) -> str:
    """Returns a name for all that answers depend on: facts of the run and the options, names and sizes of files."""
    found = hashlib.sha256(json.dumps([facts, ROWS, BATCH], sort_keys=True).encode())
    for file in files:
        found.update(b"\n" + os.fsencode(file) + f"\0{_size(file)}".encode())
    return found.hexdigest()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # its shard says so
        return -1


def begin(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes the plan of a folder, or checks that it is the one to continue."""
    path = folder / PLAN
    if not path.exists():
        if any(folder.glob("shard-*.safetensors")):
            got = f"{folder}, which has shards but no {PLAN}"
            raise ValueError(complaint("--shards", "an empty folder, or one to continue", got, "Pass another folder."))
        write_atomically(path, (json.dumps(plan, indent=1) + "\n").encode())
        return
    before = read_json(path)
    if before.get("key") != plan["key"]:
        got = f"{folder}, of another run, other inputs or other options"
        remedy = "Pass another folder, or the run, inputs and options that it was begun with."
        raise ValueError(complaint("--shards", "an empty folder, or one to continue", got, remedy))


def place(folder: Path, number: int) -> Path:
    """Returns where a shard is written."""
    return folder / f"shard-{number:07d}.safetensors"


def has(folder: Path, number: int, key: str) -> bool:
    """Whether a shard is there, whole, and of this plan."""
    try:
        return bool(_loaded(folder, number)[0]["key"] == key)
    except (OSError, safetensors.SafetensorError, KeyError, ValueError):
        return False


def _loaded(folder: Path, number: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the facts and tensors of a shard; raises if their checksum is wrong."""
    with safetensors.safe_open(place(folder, number), "pt") as file:
        facts = json.loads((file.metadata() or {})["answers"])
        tensors = {name: file.get_tensor(name) for name in facts["columns"]}
    if facts.pop("sha256") != _checksum(facts, tensors):
        got, remedy = "a damaged or changed file (its checksum differs)", "Remove it, and compute it again."
        raise ValueError(complaint(str(place(folder, number)), "as it was written", got, remedy))
    return facts, tensors


def _checksum(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(facts).encode())
    for tensor in tensors.values():
        found.update(tensor.numpy().data)
    return found.hexdigest()


def write(folder: Path, number: int, key: str, rows: Sequence[Row], unread: Sequence[str]) -> None:
    """Writes a shard: numbers as they are, words by their place in a list, None where a file has one row as −1."""
    tensors: dict[str, Tensor] = {}
    words: dict[str, list[Any]] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if all(type(value) is float for value in values):
            tensors[name] = torch.tensor(values, dtype=torch.float64)
        elif name == "row":
            tensors[name] = torch.tensor([-1 if value is None else value for value in values])
        else:
            words[name] = sorted(set(values), key=repr)
            places = {word: place for place, word in enumerate(words[name])}
            tensors[name] = torch.tensor([places[value] for value in values])
    facts = {"key": key, "columns": list(tensors), "words": words, "unread": list(unread)}
    facts["sha256"] = _checksum(facts, tensors)
    metadata = {"answers": json.dumps(facts)}  # one entry: safetensors writes several in any order
    write_atomically(place(folder, number), safetensors.torch.save(tensors, metadata=metadata))


class Shard(NamedTuple):
    """What a shard holds."""

    rows: list[Row]
    unread: list[str]  # errors of files that could not be read


def read(folder: Path, number: int) -> Shard:
    """Reads a shard."""
    facts, tensors = _loaded(folder, number)
    columns, words = {name: tensor.tolist() for name, tensor in tensors.items()}, facts["words"]
    for name, values in columns.items():
        if name in words:
            columns[name] = [words[name][value] for value in values]
        elif name == "row":
            columns[name] = [None if value < 0 else value for value in values]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Shard(rows, facts["unread"])


def joined(folder: Path, checksum: str) -> tuple[dict[str, Any], Iterator[Shard]]:
    """Returns the plan of a folder and its shards in order; raises before the first if they are not all there."""
    if not (folder / PLAN).is_file():
        remedy = "Compute the shards first: ibnn predict RUN INPUT… --shards FOLDER."
        raise ValueError(complaint("--join", "a folder of shards", f"{folder} without {PLAN}", remedy))
    plan: dict[str, Any] = read_json(folder / PLAN)
    if plan["checksum"] != checksum:
        got = f"those of another model, from the run {plan['run']}"
        raise ValueError(complaint("--join", "shards of the given run", got, "Pass the run they were computed with."))
    missing = [number for number in range(plan["shards"]) if not place(folder, number).exists()]
    if missing:
        some = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        remedy = "Run the command that computes them again, with any number of workers: it computes what is missing."
        raise ValueError(complaint("--join", f"{plan['shards']:,} shards", f"{len(missing):,} missing: {some}", remedy))
    wrong = [number for number in range(plan["shards"]) if not has(folder, number, plan["key"])]
    if wrong:
        got = f"{place(folder, wrong[0]).name}, which is damaged or of another run, other inputs or other options"
        remedy = "Remove it, and run the command that computes shards again."
        raise ValueError(complaint("--join", "shards of one run", got, remedy))
    return plan, (read(folder, number) for number in range(plan["shards"]))
