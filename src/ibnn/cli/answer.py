"""`evaluate` and `predict`: what a finished run answers."""

import csv
import io
import json as jsons
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ibnn.cli.abstain import Threshold, threshold
from ibnn.cli.inputs import Example, Form, examples, listed
from ibnn.cli.screen import Json, Screen, finite, misuse
from ibnn.cli.settings import check_set
from ibnn.cli.train import Data, show
from ibnn.errors import complaint

if TYPE_CHECKING:
    from torch import Tensor

    from ibnn.data import DataSet
    from ibnn.jobs import Run
    from ibnn.prediction import CategoricalPrediction

BATCH = 250
HELD_OUT = 2000  # validation images that decide where to abstain
CONFIDENCE = 0.95

RunFolder = Annotated[Path, typer.Argument(help="A run folder that `ibnn train` has finished.", metavar="RUN")]


def evaluate(
    screen: Screen,
    folder: RunFolder,
    data: Data = None,
    data_set: Annotated[str | None, typer.Option(help="Another data set of the same classes.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Draws per component; default the job's.")] = None,
    json: Json = False,
) -> None:
    """Evaluates a run again: error, NLL, ECE, Brier; corrupted images; images of another kind."""
    from ibnn.data import load
    from ibnn.evaluation import evaluate as measure
    from ibnn.jobs import make_data

    run = read(folder)
    if data_set is not None:
        with misuse():
            check_set(data_set, data)
    splits = make_data(run.job, data)
    whole = splits.whole
    if data_set is not None:
        other = load(data_set, data)
        with misuse():
            _same(_shape(other), _shape(whole), len(other.classes), len(whole.classes))
        if other.classes != whole.classes:
            screen.note(f"The classes of {data_set} have other names than those of {run.job.data}.")
        whole = replace(whole, test=other.test)  # normalised as in training
    found = measure(run.model, whole, splits.valid, samples=samples or run.job.samples, data_folder=data).result
    result = {"name": run.result["name"], "data": data_set or run.job.data, **found}
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
    inputs: Annotated[list[Path], typer.Argument(help="Images, folders of them, .npy or .csv.", metavar="INPUT…")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file; default stdout.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Draws per component.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Decides the draws.")] = 0,
    risk: Annotated[
        float, typer.Option(help="Abstains so that at most this share of the given answers is wrong; 1 never does.")
    ] = 0.05,
    data: Data = None,
    json: Json = False,
) -> None:
    """Labels images, says how uncertain each label is, and abstains where it would be wrong too often.

    The promise of --risk holds with 95 % confidence for images like the run's held-out ones, not for others.
    """
    with misuse():
        if not 0 < risk <= 1:
            raise ValueError(complaint("--risk", "above 0 and at most 1", risk, "Pass 0.05."))
        if out is not None and out.suffix not in (".csv", ".json"):
            raise ValueError(complaint("--out", "a .csv or .json file", out, "Pass -o out.csv."))
        files = listed(inputs)
    run = read(folder)
    ask = _Asked(run, samples, seed)
    stream = examples(files, _form(folder), screen.note)
    rows: list[dict[str, Any]] = []
    while batch := list(islice(stream, BATCH)):
        rows += ask.rows(batch)
    limit, facts = _limit(screen, folder, ask, risk, data)
    rows = [row | {"abstain": row["total"] > limit} for row in rows]
    result = {"run": run.result["name"], "samples": samples, "seed": seed, "risk": facts, "rows": rows}
    as_json = json if out is None else out.suffix == ".json"
    text = jsons.dumps(finite(result), indent=1, ensure_ascii=False) + "\n" if as_json else _csv(rows)
    if out is None:
        print(text, end="")
    else:
        from ibnn.checkpoint import write_atomically

        write_atomically(out, text.encode())
        screen.json({"out": str(out), "rows": len(rows), "risk": facts}) if json else screen.note(f"wrote {out}")


class _Asked(NamedTuple):
    """A run and how it is asked."""

    run: "Run"
    samples: int
    seed: int

    def answer(self, x: "Tensor") -> "CategoricalPrediction":
        """For normalised images."""
        from ibnn.prediction import CategoricalPrediction
        from ibnn.prediction import predict as ask

        found = ask(self.run.model, x, samples=self.samples, seed=self.seed, batch_size=BATCH)
        assert isinstance(found, CategoricalPrediction), "jobs are of classes"
        return found

    def rows(self, batch: list[Example]) -> list[dict[str, Any]]:
        """What is written of a batch."""
        import torch

        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in scale(self.run.job.data))
        found = self.answer((torch.stack([example.pixels for example in batch]) - mean) / std)
        numbers = {"probability": found.probs.amax(1)}
        numbers |= {name: getattr(found, name) for name in ("total", "aleatoric", "epistemic")}
        return [
            {"file": example.file, "row": example.row, "label": self.run.result["classes"][int(found.labels[i])]}
            | {name: float(values[i]) for name, values in numbers.items()}
            for i, example in enumerate(batch)
        ]


def scale(data: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation that a set is normalised by, whether it is here or not."""
    from ibnn.data.sets import KNOWN, PHOTOGRAPHS

    return (KNOWN[data].mean, KNOWN[data].std) if data in KNOWN else PHOTOGRAPHS


def read(folder: Path) -> "Run":
    """A finished run; a folder without one is misuse."""
    from ibnn.jobs import read_run

    with misuse():
        return read_run(folder)


def stored_in(folder: Path) -> dict[str, "Tensor"]:
    """What a run answered on its test set."""
    import safetensors.torch

    path = folder / "answers.safetensors"
    if not path.is_file():
        raise FileNotFoundError(complaint("RUN", f"one with {path.name}", folder, "Train it again: --fresh."))
    return safetensors.torch.load_file(path)


def _form(folder: Path) -> Form:
    """Of the images that the run was trained on."""
    return Form(*stored_in(folder)["shown/images"].shape[1:])


def _limit(
    screen: Screen, folder: Path, ask: _Asked, risk: float, data: Path | None
) -> tuple[float, dict[str, Any] | None]:
    """The entropy above which nothing is answered, and what is said of it."""
    if risk == 1:
        return math.inf, None
    doubt, wrong, source = _labelled(folder, ask, data)
    found = threshold(doubt, wrong, risk, confidence=CONFIDENCE)
    facts = {"risk": risk, "confidence": CONFIDENCE, "by": source, "examples": len(doubt), **found._asdict()}
    screen.note(_worded(found, risk, f"{len(doubt):,} {source}"))
    return found.limit, facts


def _worded(found: Threshold, risk: float, by: str) -> str:
    if not found.coverage:
        return f"All abstain: no threshold keeps the error at or below {risk:g} by the {by}."
    return (
        f"Abstains where total > {found.limit:.4g}: so {found.coverage:.0%} of the {by} are answered, and with "
        f"{CONFIDENCE:.0%} confidence at most {found.bound:.2%} of such answers are wrong ({risk:.2%} were allowed)."
    )


def _labelled(folder: Path, ask: _Asked, data: Path | None) -> tuple["Tensor", "Tensor", str]:
    """Doubt of answers whose labels are known, whether they were wrong, and of what they are."""
    import torch

    from ibnn.jobs import make_data

    try:
        valid = make_data(ask.run.job, data).valid if ask.run.job.valid else None
    except (FileNotFoundError, ModuleNotFoundError):  # the data are not here
        valid = None
    if valid is None:
        stored = stored_in(folder)
        doubt = stored["aleatoric"] + stored["between"] + stored["within"]
        return doubt, stored["probs"].argmax(1) != stored["labels"], "test answers of the run folder"
    index = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))[:HELD_OUT]
    parts = [valid.__getitems__(part) for part in index.sort().values.split(BATCH)]
    found = [(ask.answer(x), y) for x, y in parts]
    wrong = torch.cat([answer.labels != y for answer, y in found])
    return torch.cat([answer.total for answer, _ in found]), wrong, "validation images"


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
