"""ANSWERS of a finished run: `evaluate` and `predict`, `report` as a page, `export` as a file, `serve` over HTTP."""

import csv
import io
import json as jsons
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from ibnn.abstention import Threshold
from ibnn.app.asking import finite
from ibnn.app.asking.inputs import BATCH, examples, image_reader, listed, read_points
from ibnn.app.cli.options import Data, Json, Novelty, Risk, RunFolder, Samples, Seed, TrustCode
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse
from ibnn.app.cli.train import show
from ibnn.baselines import Plain
from ibnn.data import TABLES, DataSet, load
from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.files.export import export as write
from ibnn.network import IBNN

if TYPE_CHECKING:
    from ibnn.app.asking.run import Asked


def read(folder: Path, samples: int | None, seed: int = 0, trust_code: bool = False) -> "Asked":
    """Reads a finished run; a folder without one is misuse."""
    from ibnn.app.asking.run import Asked

    with misuse():
        return Asked.read(folder, samples, seed, trust_code=trust_code)


def check_shares(risk: float, novelty: float | None) -> None:
    """Raises for numbers that are not shares."""
    if not 0 < risk <= 1:
        raise ValueError(complaint("--risk", "above 0 and at most 1", risk, "Pass 0.05."))
    if novelty is not None and not 0 <= novelty < 1:
        raise ValueError(complaint("--novelty", "at least 0 and below 1", novelty, "Pass 0.01, or 0 for never."))


def worded(facts: dict[str, Any]) -> str:
    """Describes where a run abstains, and what that guarantees."""
    by = f"{facts['examples']:,} {facts['by']}"
    if not facts["coverage"]:
        return f"All abstain: by the {by}, no threshold keeps the error at or below {facts['risk']:g}."
    novel = f" or novelty ≤ {facts['novelty']:g}" if facts["novelty"] else ""
    return (
        f"Abstains where total > {facts['limit']:.4g}{novel}: this answers {facts['coverage']:.0%} of the {by}; with "
        f"{facts['confidence']:.0%} confidence at most {facts['bound']:.2%} of such answers are wrong "
        f"({facts['risk']:.2%} allowed)."
    )


def note_novelty(screen: Screen, asked: "Asked", level: float) -> None:
    """Says so if novel inputs are not told."""
    if asked.reference is None:
        screen.note("Novel inputs are not told: the run has no reference data. Train it again for that.")
    elif level and level < asked.least_p_value:
        held = len(asked.reference.scores)
        words = f"with {held:,} ranked held-out inputs, p-values go down to {asked.least_p_value:.2g}"
        screen.note(f"No input is withheld as novel at {level:g}: {words}. Pass a larger --novelty.")


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
    other = _other(screen, data_set, data, asked) if data_set is not None else None
    with misuse() if run.job.has_file else nullcontext():
        splits = make_data(run.job, data, asked.units)
    whole = splits.whole
    if other is not None and isinstance(whole, DataSet):  # normalised as in training
        whole, name = replace(whole, name=other.name, test=other.test), f"{name} on {data_set}"
    found = measure(run.model, whole, splits.valid, samples=asked.samples, data_folder=data).result
    for reading in (found, found.get("tempered", found)):
        for part in ("outsiders", "novelty"):
            reading.get(part, {}).pop(run.job.data, None)  # the training data are no outsiders
    result = {"name": name, "data": whole.name, **found, "costs": run.result["costs"]}
    screen.json(result) if json else show(screen, result)


def _other(screen: Screen, name: str, folder: Path | None, asked: "Asked") -> DataSet:
    """Returns another data set; raises unless its images and classes are like the run's."""
    from ibnn.lab.jobs import check_data

    with misuse():
        if asked.units is not None:
            got = f"one on the points {asked.run.job.data}"
            raise ValueError(complaint("RUN", "a run on images", got, "Leave out --data-set."))
        check_data(name, folder)
        if name in TABLES:
            remedy = "Leave it out for the run's own set."
            raise ValueError(complaint("--data-set", "a set of images", f"the points {name}", remedy))
    other = load(name, folder)
    shape = tuple(other.test.rows(torch.tensor([0])).images.shape[1:])
    expected = f"{len(asked.classes)} classes and images {tuple(asked.form)}"
    if (got := f"{len(other.classes)} classes and images {shape}") != expected:
        raise MisuseError(complaint("--data-set", f"one of {expected}", got, "Leave it out for the run's own set."))
    if list(other.classes) != asked.classes:
        screen.note(f"The classes of {name} have other names than those of {asked.run.job.data}.")
    return other


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
    novelty: Novelty = None,
    scale: Annotated[float | None, typer.Option(help=_SCALE)] = None,
    data: Data = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Labels images or rows with their uncertainty, and abstains where a label would be wrong too often.

    The guarantee of --risk holds with 95 % confidence, and only for inputs like the run's held-out ones. It is slightly
    optimistic if these inputs also steered the training.

    Novel inputs are withheld, too: those whose p-value (column `novelty`) is at most --novelty. Of inputs like the
    held-out ones at most that share is. The column `withheld` has the reason; the exit code stays 0. Older runs cannot
    tell.

    Images are resized to the network's input; transparent parts become white, 16-bit greys become 8-bit. A file that
    cannot be read gets no row: it is named on stderr, the others are answered, and the exit code is 1.

    A run that predicts a number returns its mean, std, 90 % interval (low, high) and aleatoric and epistemic variance,
    and only novel inputs are withheld. For a run on a table of your own, columns of a .csv file go by name; unused ones
    are reported.
    """
    with misuse():
        _check_predict(out, risk, novelty, scale)
        files = listed(inputs)
    asked = read(folder, samples, seed, trust_code)
    with misuse():
        level = asked.novelty_level(novelty)
    rule = cache(lambda: asked.rule(risk, level, lambda: asked.held_out(data)))
    rows, unread = _rows(screen, asked, files, scale, lambda: rule()[0])
    if rows:
        facts = rule()[1]
        if facts is not None:
            screen.note(worded(facts))
        told = _told(screen, asked, level, rows)
        result = {"run": asked.run.result["name"], "samples": asked.samples, "seed": seed, "risk": facts}
        _write(screen, result | {"novelty": told, "rows": rows}, out, json)
    if unread or not rows:
        raise typer.Exit(1)


def _told(screen: Screen, asked: "Asked", level: float, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Sums up what is withheld; returns what is known of novelty."""
    note_novelty(screen, asked, level)
    reasons = Counter(row.get("withheld") for row in rows)
    if "withheld" in rows[0]:
        withheld = [f"{number:,} {reason}" for reason, number in sorted(reasons.items(), key=str) if reason]
        screen.note(f"Answers {reasons[None]:,} of {len(rows):,} inputs; withheld: {', '.join(withheld) or 'none'}.")
    if asked.reference is None:
        return None
    novel = sum("novel" in reason for reason in reasons.elements() if reason)
    return {"level": level, "examples": len(asked.reference.scores), "novel": novel}


def _check_predict(out: Path | None, risk: float, novelty: float | None, scale: float | None) -> None:
    check_shares(risk, novelty)
    if out is not None and out.suffix not in (".csv", ".json"):
        raise ValueError(complaint("--out", "a .csv or .json file", out, "Pass -o out.csv."))
    check_out("--out", out)
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(complaint("--scale", "a positive number", scale, "Pass 255 for bytes."))


def _rows(
    screen: Screen, asked: "Asked", files: list[Path], scale: float | None, rule: Callable[[], Threshold]
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the answers for all files, and whether some could not be read; reports these."""
    units, note = asked.units, screen.note
    if units and scale is not None:
        remedy = "Leave it out: points are taken as they are."
        raise MisuseError(complaint("--scale", "absent for a run on points", scale, remedy))
    unread: list[Exception] = []
    reader = partial(read_points, units=units, note=note) if units else image_reader(asked.form, note, scale)
    stream, rows = examples(files, reader, unread.append), []
    while batch := list(islice(stream, BATCH)):
        found = asked.described(asked.answer(torch.stack([example.pixels for example in batch])), rule())
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
    write_atomically(out, text.encode())
    written = {"out": str(out), "rows": len(result["rows"])} | {n: result[n] for n in ("risk", "novelty")}
    screen.json(written) if json else screen.note(f"wrote {out}")


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


def report(
    screen: Screen,
    runs: Annotated[list[Path], typer.Argument(help="Run folders; unfinished runs are skipped.", metavar="RUNS…")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Calibration report",
    json: Json = False,
) -> None:
    """Writes one self-contained HTML page about one or more runs: scores, calibration, uncertainty, provenance."""
    from ibnn.lab.report import write_report
    from ibnn.lab.runs import RunFolder as Home

    with misuse():
        check_out("--out", out)
        for run in runs:
            if not run.exists():
                raise ValueError(complaint("RUNS", "run folders", f"no folder {run}", "Train first: ibnn train."))
        done = [run for run in runs if Home(run).finished]
        if not done:
            got = f"none in {', '.join(map(str, runs))}"
            raise ValueError(complaint("RUNS", "folders of finished runs", got, "Let a run finish: ibnn train."))
    for run in runs:
        if run.is_dir() and run not in done:
            screen.note(f"Skipped: {run}, which has not finished.")
    with misuse((FileNotFoundError,)):  # a folder without its answers
        write_report(done, out, title=title)
    screen.result({"report": str(out)}, str(out), json)


def export(
    screen: Screen,
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: model.onnx or model.pt2.")] = None,
    samples: Samples = None,
    seed: Seed = 0,
    format: Annotated[Literal["onnx", "torch"], typer.Option(help="For onnxruntime or torch.export.load.")] = "onnx",
    pixels: Annotated[bool, typer.Option("--pixels", help="The file takes images in [0, 1], not normalised.")] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Writes a run as one ONNX or torch file that answers as `ibnn predict` does, without ibnn.

    For images: without --pixels the file takes images normalised as in training; its metadata have the numbers.

    For points and tables: the file takes rows of numbers in their original units, columns in the order given in its
    metadata. It returns probabilities, total, aleatoric and epistemic; for a predicted number mean, std, aleatoric and
    epistemic.

    The methods ibnn, sgd, swa and ensemble can be exported; swag, dropout and vi cannot.
    """
    out = out or Path("model.onnx" if format == "onnx" else "model.pt2")
    check_out("--out", out)
    asked = read(folder, samples, seed, trust_code)
    example, facts = _example(asked, pixels)
    assert isinstance(asked.run.model, IBNN | Plain), "as for all methods of jobs"
    draws: Any = {"samples": asked.samples, "seed": asked.seed}
    normal = asked.normalisation if pixels else None
    with misuse():
        written = write(asked.run.model, example, out, format=format, pixels=normal, metadata=facts, **draws)
    screen.result(written._asdict() | {"path": str(written.path), "format": format} | draws, str(written.path), json)
    if not json:
        screen.note(
            f"{written.bytes:,} bytes, of which {written.draw_bytes:,} are draws; its answers differ from those of "
            f"`ibnn predict` by at most {written.difference:.1g}."
        )


def _example(asked: "Asked", pixels: bool) -> tuple[Tensor, dict[str, Any]]:
    """Returns inputs that show the file's shapes, and its metadata."""
    run = asked.run
    facts = {"run": run.result["name"], "classes": run.result["classes"]}
    if asked.units is not None:
        if pixels:
            got = f"given for a run on the points {run.job.data}"
            raise MisuseError(complaint("--pixels", "for a run on images", got, "Leave it out."))
        return asked.units.made_up(3), facts | {"columns": list(asked.units.columns), "target": run.job.target}
    images = asked.test_answers["shown/images"].float() / 255
    facts |= {"normalisation": dict(zip(("mean", "std"), asked.normalisation, strict=True))}
    return images if pixels else asked.normalised(images), facts


_HOST = "Address to listen on; the default accepts connections from this machine only."
_FALSE_ALARM = "Probability that the shift monitor ever raises an alarm although nothing has shifted."
_STATE = "File that keeps the shift monitor's state between starts."


def serve(
    screen: Screen,
    folder: RunFolder,
    host: Annotated[str, typer.Option(help=_HOST)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    samples: Samples = None,
    seed: Seed = 0,
    risk: Risk = 0.05,
    novelty: Novelty = None,
    false_alarm: Annotated[float, typer.Option(help=_FALSE_ALARM)] = 0.01,
    state: Annotated[Path | None, typer.Option(help=_STATE)] = None,
    megabytes: Annotated[float, typer.Option(help="Largest request that is accepted.")] = 10,
    data: Data = None,
    trust_code: TrustCode = False,
) -> None:
    """Serves a run over HTTP: /predict, /health, /metrics, and a page at / to try it with an image or a row.

    Ctrl-C or SIGTERM ends it after the requests in flight are answered. There is no password: before others can reach
    it, put a proxy in front that asks for one.
    """
    with misuse():
        check_shares(risk, novelty)
        check_out("--state", state)
        if not 0 < false_alarm < 1:
            raise ValueError(complaint("--false-alarm", "between 0 and 1", false_alarm, "Pass 0.01."))
        if not 0 < megabytes < math.inf:
            raise ValueError(complaint("--megabytes", "positive and finite", megabytes, "Pass 10."))
    from ibnn.app.serve import server
    from ibnn.app.serve.app import make_app
    from ibnn.app.serve.service import Service

    asked = read(folder, samples, seed, trust_code)
    with misuse():
        at = server.listen(host, port)
    with at:
        with misuse():
            service = Service(asked, risk=risk, novelty=novelty, false_alarm=false_alarm, data=data, state=state)
        facts = service.rule(risk, service.novelty)[1]
        never = f"Abstains where novelty ≤ {service.novelty:g}." if service.novelty else "Never abstains."
        screen.note(worded(facts) if facts else never)
        note_novelty(screen, asked, service.novelty)
        if service.monitor is None:
            screen.note(f"Inputs are not monitored for a shift: {service.unwatched}.")
        ready = f"Serving at http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}/"
        server.serve(make_app(service, megabytes=megabytes), at, ready=lambda: print(ready, flush=True))
