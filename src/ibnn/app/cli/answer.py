"""`evaluate` and `predict`: the answers of a finished run."""

import csv
import io
import json as jsons
import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibnn.app.asking.inputs import examples, image_reader, listed, point_reader
from ibnn.app.cli.options import Data, Json, Risk, RunFolder, Samples, Seed, TrustCode
from ibnn.app.cli.screen import MisuseError, Screen, check_out, finite, misuse
from ibnn.app.cli.train import show
from ibnn.errors import complaint

if TYPE_CHECKING:
    from ibnn.app.asking.run import Asked
    from ibnn.data import DataSet

BATCH = 250  # examples read at once


def evaluate(
    screen: Screen,
    folder: RunFolder,
    data: Data = None,
    data_set: Annotated[str | None, typer.Option(help="Another data set with the same classes.")] = None,
    samples: Samples = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Evaluates a run again: error, NLL, ECE and Brier score, also on corrupted images and on other kinds of images.

    A run on points is evaluated on its test points alone; if it predicts a number, by NLL, RMSE and the coverage of
    90 % intervals. A run on a table of your own needs that table, unchanged, in the current folder or in --data.
    """
    from ibnn.lab.evaluation import evaluate as measure
    from ibnn.lab.jobs import make_data

    asked = read(folder, samples, trust_code=trust_code)
    run, name = asked.run, asked.run.result["name"]
    if data_set is not None:
        _check_other(data_set, data, asked)
    with misuse() if run.job.has_file else nullcontext():
        splits = make_data(run.job, data, asked.units)
    whole = splits.whole
    if data_set is not None:
        whole, name = _other(screen, data_set, data, whole), f"{name} on {data_set}"
    found = measure(run.model, whole, splits.valid, samples=asked.samples, data_folder=data).result
    for reading in (found, found.get("tempered", found)):
        reading.get("outsiders", {}).pop(run.job.data, None)  # the training data are no outsiders
    result = {"name": name, "data": whole.name, **found, "costs": run.result["costs"]}
    screen.json(result) if json else show(screen, result)


def _check_other(name: str, folder: Path | None, asked: "Asked") -> None:
    from ibnn.data import TABLES
    from ibnn.lab.jobs import check_data

    with misuse():
        if asked.units is not None:
            got = f"one on the points {asked.run.job.data}"
            raise ValueError(complaint("RUN", "a run on images", got, "Leave out --data-set."))
        check_data(name, folder)
        if name in TABLES:
            remedy = "Leave it out for the run's own set."
            raise ValueError(complaint("--data-set", "a set of images", f"the points {name}", remedy))


def _other(screen: Screen, name: str, folder: Path | None, trained_on: Any) -> "DataSet":
    """Returns another data set, normalised as in training, with its own test images."""
    from ibnn.data import DataSet, load

    other = load(name, folder)
    assert isinstance(trained_on, DataSet), "a run on images"
    expected, got = (f"{len(each.classes)} classes and images {_shape(each)}" for each in (trained_on, other))
    if expected != got:
        remedy = "Leave it out for the run's own set."
        raise MisuseError(complaint("--data-set", f"one of {expected}", got, remedy))
    if other.classes != trained_on.classes:
        screen.note(f"The classes of {name} have other names than those of {trained_on.name}.")
    return replace(trained_on, name=name, test=other.test)


def _shape(data: "DataSet") -> tuple[int, ...]:
    import torch

    return tuple(data.test.rows(torch.tensor([0])).images.shape[1:])


_INPUTS = "Images, folders of images, .npy or .csv files; points as .npy or .csv files."
_SCALE = "Value of white in .csv and .npy files; default: 255 for uint8 in .npy, else 1."


def predict(
    screen: Screen,
    folder: RunFolder,
    inputs: Annotated[list[Path], typer.Argument(help=_INPUTS, metavar="INPUT…")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file; default: stdout.")] = None,
    samples: Samples = None,
    seed: Seed = 0,
    risk: Risk = 0.05,
    scale: Annotated[float | None, typer.Option(help=_SCALE)] = None,
    data: Data = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Labels images or rows with their uncertainty, and abstains where a label would be wrong too often.

    The guarantee of --risk holds with 95 % confidence, and only for inputs like the run's held-out ones. It is slightly
    optimistic if these inputs also steered the training.

    Images are resized to the network's input; transparent parts become white, 16-bit greys become 8-bit. A file that
    cannot be read gets no row: it is named on stderr, the others are answered, and the exit code is 1.

    A run that predicts a number returns its mean, std, 90 % interval (low, high) and aleatoric and epistemic variance,
    and never abstains. For a run on a table of your own, columns of a .csv file go by name; unused ones are reported.
    """
    with misuse():
        _check_predict(out, risk, scale)
        files = listed(inputs)
    asked = read(folder, samples, seed, trust_code)
    rows, unread = _rows(screen, asked, files, scale)
    if rows:
        never = risk == 1 or not asked.classes
        limit, facts = (math.inf, None) if never else asked.limit(risk, asked.held_out(data))
        if facts is not None:
            screen.note(worded(facts))
        if asked.classes:
            rows = [row | {"abstain": row["total"] > limit} for row in rows]
        result = {"run": asked.run.result["name"], "samples": asked.samples, "seed": seed, "risk": facts, "rows": rows}
        _write(screen, result, out, json)
    if unread or not rows:
        raise typer.Exit(1)


def _check_predict(out: Path | None, risk: float, scale: float | None) -> None:
    check_risk(risk)
    if out is not None and out.suffix not in (".csv", ".json"):
        raise ValueError(complaint("--out", "a .csv or .json file", out, "Pass -o out.csv."))
    if out is not None:
        check_out("--out", out)
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(complaint("--scale", "a positive number", scale, "Pass 255 for bytes."))


def _rows(screen: Screen, asked: "Asked", files: list[Path], scale: float | None) -> tuple[list[dict[str, Any]], bool]:
    """Returns the answers for all files, and whether some could not be read; reports these."""
    import torch

    if asked.units and scale is not None:
        remedy = "Leave it out: points are taken as they are."
        raise MisuseError(complaint("--scale", "absent for a run on points", scale, remedy))
    unread: list[Exception] = []
    reader = point_reader(asked.units, screen.note) if asked.units else image_reader(asked.form, screen.note, scale)
    stream, rows = examples(files, reader, unread.append), []
    while batch := list(islice(stream, BATCH)):
        found = asked.described(asked.answer(torch.stack([example.pixels for example in batch])))
        rows += [{"file": of.file, "row": of.row} | row for of, row in zip(batch, found, strict=True)]
    for error in unread:
        screen.error(str(error))
    return rows, bool(unread)


def _write(screen: Screen, result: dict[str, Any], out: Path | None, json: bool) -> None:
    as_json = json if out is None else out.suffix == ".json"
    text = jsons.dumps(finite(result), indent=1, ensure_ascii=False) + "\n" if as_json else _csv(result["rows"])
    if out is None:
        print(text, end="")
        return
    from ibnn.files.atomic import write_atomically

    write_atomically(out, text.encode())
    if json:
        screen.json({"out": str(out), "rows": len(result["rows"]), "risk": result["risk"]})
    else:
        screen.note(f"wrote {out}")


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else value


def read(folder: Path, samples: int | None, seed: int = 0, trust_code: bool = False) -> "Asked":
    """Reads a finished run; a folder without one is misuse."""
    from ibnn.app.asking.run import Asked

    with misuse():
        return Asked.read(folder, samples, seed, trust_code=trust_code)


def check_risk(risk: float) -> None:
    """Raises for a number that is not a share."""
    if not 0 < risk <= 1:
        raise ValueError(complaint("--risk", "above 0 and at most 1", risk, "Pass 0.05."))


def worded(facts: dict[str, Any]) -> str:
    """Describes where a run abstains, and what that guarantees."""
    by = f"{facts['examples']:,} {facts['by']}"
    if not facts["coverage"]:
        return f"All abstain: by the {by}, no threshold keeps the error at or below {facts['risk']:g}."
    return (
        f"Abstains where total > {facts['limit']:.4g}: this answers {facts['coverage']:.0%} of the {by}; with "
        f"{facts['confidence']:.0%} confidence at most {facts['bound']:.2%} of such answers are wrong "
        f"({facts['risk']:.2%} allowed)."
    )
