"""ROWS of answers: written as CSV or JSON, computed in shards by several workers, and joined again."""

import csv
import json as jsons
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from ibnn.app.asking import finite, shards
from ibnn.app.asking.inputs import ALL, BATCH, Example, Reader, image_reader, read_points
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse
from ibnn.errors import complaint
from ibnn.files.atomic import replaced, write_atomically
from ibnn.lab.runs import RunFolder
from ibnn.monitoring.abstention import Threshold

if TYPE_CHECKING:
    from ibnn.app.asking.run import Asked

Row = dict[str, Any]


def reader(asked: "Asked", scale: float | None, note: Callable[[str], None]) -> Reader:
    """Returns a function that reads the run's kind of inputs."""
    if asked.units is None:
        return image_reader(asked.form, note, scale, asked.resize)
    if scale is not None:
        remedy = "Leave it out: points are taken as they are."
        raise MisuseError(complaint("--scale", "absent for a run on points", scale, remedy))
    return partial(read_points, units=asked.units, note=note)


def answered(asked: "Asked", stream: Iterator[Example], rule: Callable[[], Threshold]) -> Iterator[Row]:
    """Yields a row for each example, answered in batches."""
    while batch := list(islice(stream, BATCH)):
        found = asked.described(asked.answer(torch.stack([example.pixels for example in batch])), rule())
        yield from ({"file": of.file, "row": of.row} | row for of, row in zip(batch, found, strict=True))


def write(screen: Screen, result: dict[str, Any], out: Path | None, json: bool) -> None:
    """Writes a result, whose rows may be an iterator, to a file or to stdout."""
    as_json = json if out is None else out.suffix == ".json"
    if as_json:
        whole = finite(result | {"rows": list(result["rows"])})
        text = jsons.dumps(whole, indent=1, ensure_ascii=False) + "\n"
        print(text, end="") if out is None else write_atomically(out, text.encode())
        count = len(whole["rows"])
    elif out is None:
        count = _write_csv(result["rows"], sys.stdout)
    else:
        with replaced(out) as (temporary,), temporary.open("w", newline="", encoding="utf-8") as file:
            count = _write_csv(result["rows"], file)
    if out is not None:
        written = {"out": str(out), "rows": count} | {name: result[name] for name in ("risk", "novelty")}
        screen.json(written) if json else screen.note(f"wrote {out}")


def _write_csv(rows: Iterable[Row], file: TextIO) -> int:
    """Writes rows under the first one's names; returns how many."""
    rows, count = iter(rows), 0
    first = next(rows)
    writer = csv.DictWriter(file, list(first), lineterminator="\n")
    writer.writeheader()
    for row in chain([first], rows):
        writer.writerow({name: _cell(value) for name, value in row.items()})
        count += 1
    return count


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else value


# ------------------------------------------------------------------------------------------------------------- shards


def check_sharding(inputs: Sequence[Path], out: Path | None, folder: Path | None, join: Path | None) -> None:
    """Raises for options that do not go together."""
    if join is not None and (inputs or folder is not None):
        got = "INPUT" if inputs else "--shards"
        raise MisuseError(complaint("--join", "given without INPUT and --shards", got, "Compute first, then join."))
    if join is None and not inputs:
        raise MisuseError(complaint("INPUT", "files or folders", "none", "Pass what to predict, or --join FOLDER."))
    if folder is not None and out is not None:
        remedy = "Leave it out, and write the file with --join when all shards are there."
        raise MisuseError(complaint("--out", "absent with --shards", out, remedy))
    check_out("--shards", folder, folder=True)


@dataclass(frozen=True)
class Sharding:
    """Inputs to answer in shards, by this worker and others."""

    asked: "Asked"
    folder: Path
    files: list[Path]
    read: Reader
    threshold: Threshold
    facts: dict[str, Any]  # what answers depend on, beside the run and the inputs
    result: dict[str, Any]  # what is told about them when they are joined

    def run(self, screen: Screen) -> bool:
        """Computes this worker's shards that are not there; returns whether all of its files could be read."""
        with misuse():
            worker = shards.Worker.here()
        checksum = RunFolder(self.asked.folder).checksum()
        cuts, key = shards.cut(self.files), shards.key(self.facts | {"checksum": checksum}, self.files)
        with misuse():
            shards.begin(self.folder, {"key": key, "checksum": checksum, "shards": len(cuts), **self.result})
        mine = range(worker.rank, len(cuts), worker.world)
        left = [number for number in mine if not shards.has(self.folder, number, key)]
        who = f"worker {worker.rank + 1} of {worker.world}, " if worker.world > 1 else ""
        screen.note(f"{who}{self.folder}: {len(mine) - len(left):,} of {len(mine):,} shards were there.")
        whole = True
        for count, number in enumerate(left, 1):
            unread: list[str] = []
            rows = list(answered(self.asked, self._examples(cuts[number], unread), lambda: self.threshold))
            shards.write(self.folder, number, key, rows, unread)
            for text in unread:
                screen.error(text)
            whole = whole and not unread
            screen.note(f"{who}shard {number}, {len(rows):,} rows: {count:,} of {len(left):,} done.")
        return whole

    def _examples(self, pieces: Sequence[shards.Piece], unread: list[str]) -> Iterator[Example]:
        """Yields the examples of a shard; collects the errors of what cannot be read, and goes on."""
        for piece in pieces:
            try:
                yield from self.read(piece.file, ALL if piece.stop is None else slice(piece.start, piece.stop))
            except (ValueError, OSError) as error:
                unread.append(str(error))


def sharded(
    screen: Screen,
    asked: "Asked",
    files: list[Path],
    folder: Path,
    scale: float | None,
    rule: tuple[Threshold, dict[str, Any] | None],
) -> bool:
    """Computes this worker's shards of the answers for files; returns whether all of its files could be read."""
    noted: set[str] = set()

    def note(text: str) -> None:
        if text not in noted:  # a file may be read in several parts
            screen.note(text)
        noted.add(text)

    draws = {"samples": asked.samples, "seed": asked.seed}
    told = None if asked.reference is None else {"level": rule[0].novelty, "examples": len(asked.reference.scores)}
    result = {"run": asked.run.result["name"], **draws, "risk": rule[1], "novelty": told}
    facts = draws | {"scale": scale, "rule": rule[0]._asdict(), "risk": rule[1]}
    return Sharding(asked, folder, files, reader(asked, scale, note), rule[0], facts, result).run(screen)


def join(screen: Screen, folder: Path, run: Path, out: Path | None, json: bool) -> bool:
    """Writes the answers of all shards in the order of the inputs; returns whether all files could be read."""
    with misuse():
        plan, parts = shards.joined(folder, RunFolder(run).checksum())
    unread: list[str] = []
    withheld: Counter[str] = Counter()
    told = plan["novelty"]

    def rows() -> Iterator[Row]:
        for part in parts:
            unread.extend(part.unread)
            withheld.update(row.get("withheld") or "" for row in part.rows)
            if told is not None:
                told["novel"] = sum(number for reason, number in withheld.items() if "novel" in reason)
            yield from part.rows

    stream = rows()
    first = next(stream, None)
    if first is not None:
        result = {name: plan[name] for name in ("run", "samples", "seed", "risk", "novelty")}
        write(screen, result | {"rows": chain([first], stream)}, out, json)
        if "withheld" in first:
            screen.note(summary(withheld))
    for text in unread:
        screen.error(text)
    return first is not None and not unread


def summary(reasons: Counter[str]) -> str:
    """Says how many answers are withheld, by reason; an empty one is for those given."""
    withheld = [f"{number:,} {reason}" for reason, number in sorted(reasons.items()) if reason]
    return f"Answers {reasons['']:,} of {reasons.total():,} inputs; withheld: {', '.join(withheld) or 'none'}."
