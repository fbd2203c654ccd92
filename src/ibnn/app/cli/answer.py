"""`evaluate` and `predict`: what a finished run answers."""

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

from ibnn.app.asking.inputs import Example, examples, listed, points
from ibnn.app.cli.screen import Json, MisuseError, Screen, check_out, finite, misuse
from ibnn.app.cli.settings import check_set
from ibnn.app.cli.train import Data, show
from ibnn.errors import complaint

if TYPE_CHECKING:
    from ibnn.app.asking.run import Asked
    from ibnn.data import DataSet

BATCH = 250  # examples read at once

RunFolder = Annotated[Path, typer.Argument(help="A run folder that `ibnn train` has finished.", metavar="RUN")]
Samples = Annotated[int | None, typer.Option(min=1, help="Draws per component; default the job's.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides the draws.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Imports a network of your own, which the run names, from this folder.")
]


def evaluate(
    screen: Screen,
    folder: RunFolder,
    data: Data = None,
    data_set: Annotated[str | None, typer.Option(help="Another data set of the same classes.")] = None,
    samples: Samples = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Evaluates a run again: error, NLL, ECE, Brier; corrupted images; images of another kind.

    Of points, the test points alone; of a number to predict NLL, RMSE and the share inside 90 % intervals. A run on a
    table of your own needs that table, unchanged, in the current folder or in --data.
    """
    from ibnn.data import TABLES, DataSet, load
    from ibnn.lab.evaluation import evaluate as measure
    from ibnn.lab.jobs import make_data

    asked = read(folder, samples, trust_code=trust_code)
    run = asked.run
    if data_set is not None:
        with misuse():
            if asked.units is not None:
                got = f"one of the points {run.job.data}"
                raise ValueError(complaint("RUN", "one of images", got, "Leave out --data-set."))
            check_set(data_set, data)
            if data_set in TABLES:
                remedy = "Leave it out for the run's own."
                raise ValueError(complaint("--data-set", "a set of images", f"the points {data_set}", remedy))
    with misuse() if run.job.has_file else nullcontext():
        splits = make_data(run.job, data, asked.units)
    whole = splits.whole
    if data_set is not None:
        other = load(data_set, data)
        assert isinstance(whole, DataSet), "a run of images"
        with misuse():
            _same(_shape(other), _shape(whole), len(other.classes), len(whole.classes))
        if other.classes != whole.classes:
            screen.note(f"The classes of {data_set} have other names than those of {run.job.data}.")
        whole = replace(whole, name=data_set, test=other.test)  # normalised as in training
    found = measure(run.model, whole, splits.valid, samples=asked.samples, data_folder=data).result
    for reading in (found, found.get("tempered", found)):
        reading.get("outsiders", {}).pop(run.job.data, None)  # what was trained on is no outsider
    name = run.result["name"] + (f" on {data_set}" if data_set else "")
    result = {"name": name, "data": whole.name, **found, "costs": run.result["costs"]}
    screen.json(result) if json else show(screen, result)


def _shape(data: "DataSet") -> tuple[int, ...]:
    import torch

    return tuple(data.test.rows(torch.tensor([0])).images.shape[1:])


def _same(shape: tuple[int, ...], wanted: tuple[int, ...], classes: int, wanted_classes: int) -> None:
    if (shape, classes) != (wanted, wanted_classes):
        expected, got = f"one of {wanted_classes} classes and images {wanted}", f"{classes} classes and images {shape}"
        raise ValueError(complaint("--data-set", expected, got, "Leave it out for the run's own."))


def predict(
    screen: Screen,
    folder: RunFolder,
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Images, folders of them, .npy or .csv; points as .npy or .csv.", metavar="INPUT…"),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file; default stdout.")] = None,
    samples: Samples = None,
    seed: Seed = 0,
    risk: Annotated[
        float, typer.Option(help="Abstains so that at most this share of the given answers is wrong; 1 never does.")
    ] = 0.05,
    scale: Annotated[
        float | None,
        typer.Option(help="Value of white in .csv and .npy files: 255 for bytes; default 1, of uint8 in .npy 255."),
    ] = None,
    data: Data = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Labels images, says how uncertain each label is, and abstains where it would be wrong too often.

    The promise of --risk holds with 95 % confidence for images like the run's held-out ones, not for others; it is a
    little optimistic where those images also steered the training.

    Images are brought to the network's size and channels, what is transparent on white, greys of 16 bits scaled to 8. A
    file that cannot be read has no row: it is named on stderr, the others are answered, and the exit code is 1.

    Where a run predicts a number, it says mean, std, the 90 % interval (low, high) and the aleatoric and epistemic
    variance, and never abstains. For a run on a table of your own, a .csv file has its columns by name, in any order;
    other columns are not used, which is said.
    """
    with misuse():
        check_risk(risk)
        if out is not None and out.suffix not in (".csv", ".json"):
            raise ValueError(complaint("--out", "a .csv or .json file", out, "Pass -o out.csv."))
        if out is not None:
            check_out("--out", out)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(complaint("--scale", "a positive number", scale, "Pass 255 for bytes."))
        files = listed(inputs)
    asked = read(folder, samples, seed, trust_code)
    if asked.units and scale is not None:
        remedy = "Leave it out: points are taken as they are."
        raise MisuseError(complaint("--scale", "absent for a run of points", scale, remedy))
    unread: list[Exception] = []
    stream = (
        points(files, asked.units, screen.note, unread.append)
        if asked.units
        else examples(files, asked.form, screen.note, unread.append, scale)
    )
    rows: list[dict[str, Any]] = []
    while batch := list(islice(stream, BATCH)):
        rows += _rows(asked, batch)
    for error in unread:
        screen.error(str(error))
    if not rows:
        raise typer.Exit(1)
    never = risk == 1 or not asked.classes
    limit, facts = (math.inf, None) if never else asked.limit(risk, asked.held_out(data))
    if facts is not None:
        screen.note(worded(facts))
    if asked.classes:
        rows = [row | {"abstain": row["total"] > limit} for row in rows]
    result = {"run": asked.run.result["name"], "samples": asked.samples, "seed": seed, "risk": facts, "rows": rows}
    as_json = json if out is None else out.suffix == ".json"
    text = jsons.dumps(finite(result), indent=1, ensure_ascii=False) + "\n" if as_json else _csv(rows)
    if out is None:
        print(text, end="")
    else:
        from ibnn.files.atomic import write_atomically

        write_atomically(out, text.encode())
        screen.json({"out": str(out), "rows": len(rows), "risk": facts}) if json else screen.note(f"wrote {out}")
    if unread:
        raise typer.Exit(1)


def _rows(asked: "Asked", batch: list[Example]) -> list[dict[str, Any]]:
    import torch

    found = asked.described(asked.answer(torch.stack([example.pixels for example in batch])))
    return [{"file": of.file, "row": of.row} | row for of, row in zip(batch, found, strict=True)]


def read(folder: Path, samples: int | None, seed: int = 0, trust_code: bool = False) -> "Asked":
    """A finished run to be asked; a folder without one is misuse."""
    from ibnn.app.asking.run import Asked

    with misuse():
        return Asked.read(folder, samples, seed, trust_code=trust_code)


def check_risk(risk: float) -> None:
    """Complains of a share that is none."""
    if not 0 < risk <= 1:
        raise ValueError(complaint("--risk", "above 0 and at most 1", risk, "Pass 0.05."))


def worded(facts: dict[str, Any]) -> str:
    """Where it abstains, and what that promises."""
    by = f"{facts['examples']:,} {facts['by']}"
    if not facts["coverage"]:
        return f"All abstain: no threshold keeps the error at or below {facts['risk']:g} by the {by}."
    return (
        f"Abstains where total > {facts['limit']:.4g}: so {facts['coverage']:.0%} of the {by} are answered, and with "
        f"{facts['confidence']:.0%} confidence at most {facts['bound']:.2%} of such answers are wrong "
        f"({facts['risk']:.2%} were allowed)."
    )


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_cells, rows))
    return text.getvalue()


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: f"{value:.6g}" if isinstance(value, float) else ("yes" if value else "no") if name == "abstain" else value
        for name, value in row.items()
    }
