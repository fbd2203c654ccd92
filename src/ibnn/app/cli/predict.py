"""The command `predict`: answers for files, on one worker or several, written as CSV or JSON."""

import csv
import json as jsons
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast

import torch
import torch.distributed as dist
import typer

from ibnn import check
from ibnn.app import finite, printable
from ibnn.app.cli.options import Data, Json, Novelty, Risk, Source
from ibnn.app.cli.screen import Screen, check_out, misuse
from ibnn.app.inputs import batches, listed
from ibnn.errors import complaint
from ibnn.files.atomic import replaced, write_atomically

Row = dict[str, Any]
T = TypeVar("T")

_INPUTS = "Images, folders of images, .npy or .csv files; points as .npy or .csv files."
_SCALE = "Value of white in .csv and .npy files; default: 255 for uint8 in .npy, else 1."


def predict(
    screen: Screen,
    source: Source,
    inputs: Annotated[list[Path], typer.Argument(help=_INPUTS, metavar="INPUT…", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file; default: stdout.")] = None,
    risk: Risk = 0.05,
    novelty: Novelty = None,
    scale: Annotated[float | None, typer.Option(help=_SCALE)] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Labels images or rows with their uncertainty, and abstains where a label would be wrong too often.

    The guarantee of --risk holds with 95 % confidence, and only for inputs like the run's held-out ones. It is slightly
    optimistic if these inputs also steered the training. With fewer held-out inputs than it needs (59 for 5 %), no
    answer is withheld as uncertain.

    Novel inputs are withheld, too: those whose p-value (column `p_value`) is at most --novelty. Of inputs like the
    held-out ones at most that share is. The column `withheld` has the reason; the exit code stays 0.

    Images are resized to the network's input; transparent parts become white, 16-bit greys become 8-bit. A file that
    cannot be read gets no row: it is named on stderr, the others are answered, and the exit code is 1.

    A run that predicts a number returns its mean, std, 90 % interval (low, high) and aleatoric and epistemic variance,
    and only novel inputs are withheld. For a run on a table of your own, columns of a .csv file go by name; unused ones
    are reported. A saved model takes .npy files (N, …) or .csv rows of what its network takes.

    Several workers share the work and give the same answers: accelerate launch --cpu --num_processes 4 -m ibnn
    predict RUN INPUT… -o out.csv
    """
    from ibnn.app.predictor import check_limits

    with misuse():
        check_limits(risk, novelty)
        if out is not None and out.suffix not in (".csv", ".json"):
            raise ValueError(complaint("--out", "a .csv or .json file", out, "Pass -o out.csv."))
        check_out("--out", out)
        if scale is not None:
            check.number("--scale", scale, above=0, remedy="Pass 255 for bytes.")
        files = listed(inputs)
    predictor = source.read()
    unread: list[str] = []
    answers: list[tuple[int, list[Row]]] = []
    with _workers() as (rank, world):
        screen = screen if rank == 0 else Screen(quiet=True)
        with misuse():
            level = predictor.novelty_level(novelty)
            reader = predictor.kind.reader(scale, screen.note)
        find_rule = partial(predictor.rule, risk, level, lambda: predictor.held_out(data))
        rule = cache(lambda: _from_main(find_rule, rank, world))
        if world > 1:
            rule()  # all workers wait for it
        for number, batch in batches(files, reader, lambda error: unread.append(str(error)), rank=rank, world=world):
            found = predictor.answer(torch.stack([example.pixels for example in batch]))
            rows = predictor.described(found, rule()[0])
            answers.append((number, [{"file": e.file, "row": e.row} | row for e, row in zip(batch, rows, strict=True)]))
        answers, unread = _gathered(answers, rank, world), _gathered(unread, rank, world)
    if rank > 0:
        return
    for text in dict.fromkeys(unread):  # each worker reads every table
        screen.error(text)
    rows = [row for _, part in sorted(answers, key=lambda each: each[0]) for row in part]
    if rows:
        facts = rule()[1]
        for line in predictor.notes(facts, level):
            screen.note(line)
        withheld = Counter(row.get("withheld") or "" for row in rows)
        if "withheld" in rows[0]:
            screen.note(_summary(withheld))
        told = None
        if predictor.ranked is not None:
            novel = sum(count for reason, count in withheld.items() if "novel" in reason)
            told = {"level": level, "examples": predictor.ranked, "novel": novel}
        result = {"run": predictor.name, "samples": predictor.samples, "seed": predictor.seed}
        _write(screen, result | {"risk": facts, "novelty": told, "rows": rows}, out, json)
    if unread or not rows:
        raise typer.Exit(1)


@contextmanager
def _workers() -> Iterator[tuple[int, int]]:
    """Joins the workers that `accelerate launch` or torchrun started; yields this one's rank and their number."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield 0, 1
        return
    dist.init_process_group("gloo", timeout=timedelta(days=7))  # the first worker waits for the last
    try:
        yield rank, world
    finally:
        dist.destroy_process_group()


def _from_main(compute: Callable[[], T], rank: int, world: int) -> T:
    """Returns on all workers what the first one computes."""
    values = [compute() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(values)
    return cast(T, values[0])


def _gathered(own: list[T], rank: int, world: int) -> list[T]:
    """Returns the entries of all workers on the first one."""
    if world == 1:
        return own
    parts: Any = [None] * world if rank == 0 else None
    dist.gather_object(own, parts)
    return [entry for part in parts or [own] for entry in part]


def _summary(reasons: Counter[str]) -> str:
    """Says how many answers are withheld, by reason; an empty one is for those given."""
    withheld = [f"{number:,} {reason}" for reason, number in sorted(reasons.items()) if reason]
    return f"Answers {reasons['']:,} of {reasons.total():,} inputs; withheld: {', '.join(withheld) or 'none'}."


def _write(screen: Screen, result: dict[str, Any], out: Path | None, json: bool) -> None:
    """Writes a result to a file, or to stdout."""
    if json if out is None else out.suffix == ".json":
        text = jsons.dumps(finite(result), indent=1, ensure_ascii=False) + "\n"
        print(text, end="") if out is None else write_atomically(out, text.encode())
    elif out is None:
        _write_csv(result["rows"], sys.stdout)
    else:
        with replaced(out) as (temporary,), temporary.open("w", newline="", encoding="utf-8") as file:
            _write_csv(result["rows"], file)
    if out is not None:
        written = {"out": str(out), "rows": len(result["rows"]), "risk": result["risk"], "novelty": result["novelty"]}
        screen.json(written) if json else screen.note(f"wrote {out}")


def _write_csv(rows: list[Row], file: TextIO) -> None:
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        number = value.lstrip("+-").replace(".", "", 1).isdecimal()
        formula = value.startswith(("=", "+", "-", "@", "\t", "\r")) and not number  # a spreadsheet would compute it
        return printable(f"'{value}" if formula else value)
    if isinstance(value, list):
        return jsons.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else value
