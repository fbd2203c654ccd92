"""The command `predict`: answers for files, on one worker or several, written as CSV or JSON."""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from ibnn.app import finite, printable
from ibnn.app.cli.options import Data, Novelty, Risk, Source
from ibnn.app.cli.screen import Screen, check_out, misuse
from ibnn.app.inputs import batches, listed
from ibnn.files.atomic import write_atomically

Row = dict[str, Any]

_INPUTS = "Images, folders of images, .npy or .csv files; points as .npy or .csv files."


def predict(
    screen: Screen,
    source: Source,
    inputs: Annotated[list[Path], typer.Argument(help=_INPUTS, metavar="INPUT…", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: stdout.")] = None,
    risk: Risk = 0.05,
    novelty: Novelty = None,
    data: Data = None,
) -> None:
    """Labels images or rows with their uncertainty, and abstains where a label would be wrong too often.

    The guarantee of --risk holds with 95 % confidence, for inputs like the run's held-out ones; 5 % needs 59 of these.
    Novel inputs are withheld, too: those whose p-value is at most --novelty. The column `withheld` has the reason.

    Images are resized to the network's input. Columns of a .csv file go by name for a run on a table of your own. A
    saved model takes .npy files (N, …) or .csv rows of what its network takes. For numbers the answer is mean, std,
    90 % interval (low, high) and aleatoric and epistemic variance.

    A file that cannot be read gets no row: it is named on stderr, the others are answered, and the exit code is 1.
    Several workers share the work: accelerate launch --cpu --num_processes 4 -m ibnn predict RUN INPUT… -o out.csv
    """
    from ibnn.app.predictor import check_limits

    with misuse():
        check_limits(risk, novelty)
        check_out("--out", out)
        files = listed(inputs)
    predictor = source.read(screen, data)
    unread: list[str] = []
    answers: list[tuple[int, list[Row]]] = []
    with _workers() as (rank, world):
        screen = screen if rank == 0 else Screen(quiet=True)
        with misuse():
            level = predictor.novelty_level(novelty)
        held = predictor.held_out(data) if rank == 0 and risk < 1 else None
        decided = [predictor.rule(risk, level, held)]
        if world > 1:
            dist.broadcast_object_list(decided)
        rule, facts = decided[0]
        read = partial(predictor.kind.read, note=cache(screen.note))  # says each thing once
        for number, batch in batches(files, read, lambda error: unread.append(str(error)), rank, world):
            rows = predictor.described(predictor.answer(torch.stack([example.x for example in batch])), rule)
            answers.append((number, [{"file": e.file, "row": e.row} | row for e, row in zip(batch, rows, strict=True)]))
        found: Any = [(answers, unread)] * world if rank == 0 else None
        if world > 1:
            dist.gather_object((answers, unread), found)
    if rank > 0:
        return
    for text in dict.fromkeys(text for _, texts in found for text in texts):  # each worker reads every table
        screen.error(text)
    parts = sorted((part for own, _ in found for part in own), key=lambda part: part[0])
    if rows := [row for _, part in parts for row in part]:
        for line in predictor.notes(facts, level):
            screen.note(line)
        reasons, told = Counter(row.get("withheld") or "" for row in rows), None  # an empty one is for those given
        if "withheld" in rows[0]:
            withheld = ", ".join(f"{number:,} {reason}" for reason, number in sorted(reasons.items()) if reason)
            screen.note(f"Answers {reasons['']:,} of {len(rows):,} inputs; withheld: {withheld or 'none'}.")
        if predictor.ranked is not None:
            novel = sum(count for reason, count in reasons.items() if "novel" in reason)
            told = {"level": level, "examples": predictor.ranked, "novel": novel}
        result = {"run": predictor.name, "samples": predictor.samples, "seed": predictor.seed}
        _write(screen, result | {"risk": facts, "novelty": told, "rows": rows}, out)
    if not rows or any(texts for _, texts in found):
        raise typer.Exit(1)


@contextmanager
def _workers() -> Iterator[tuple[int, int]]:
    """Joins the workers that `accelerate launch` or torchrun started; yields this one's rank and their number."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=7))  # the first worker waits for the last
    try:
        yield (rank, world) if world > 1 else (0, 1)
    finally:
        if world > 1:
            dist.destroy_process_group()


def _write(screen: Screen, result: dict[str, Any], out: Path | None) -> None:
    file = io.StringIO(newline="")
    if screen.as_json:
        json.dump(finite(result), file, indent=1, ensure_ascii=False)
        file.write("\n")
    else:
        writer = csv.DictWriter(file, list(result["rows"][0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in result["rows"])
    if out is None:
        print(file.getvalue(), end="")
    else:
        write_atomically(out, file.getvalue().encode())
        screen.note(f"wrote {out}")


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        number = value.lstrip("+-").replace(".", "", 1).isdecimal()
        formula = value.startswith(("=", "+", "-", "@", "\t", "\r")) and not number  # a spreadsheet would compute it
        return printable(f"'{value}" if formula else value)
    if isinstance(value, list):
        return json.dumps(value)
    return f"{value:.6g}" if isinstance(value, float) else value
