"""ANSWERS of a finished run: `evaluate` and `predict`, `report` as a page, `export` as a file, `serve` over HTTP."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from ibnn.app.asking.inputs import examples, listed
from ibnn.app.cli.options import Data, Json, Novelty, Risk, RunFolder, Samples, Seed, TrustCode
from ibnn.app.cli.rows import answered, check_sharding, reader, sharded, summary
from ibnn.app.cli.rows import join as join_shards
from ibnn.app.cli.rows import write as write_rows
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse
from ibnn.app.cli.train import show
from ibnn.baselines import Plain
from ibnn.data import TABLES, DataSet, load
from ibnn.errors import complaint
from ibnn.files.export import export as write
from ibnn.monitoring.abstention import Threshold
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
    other = load(name, folder, size=asked.form.height)
    shape = tuple(other.test.rows(torch.tensor([0])).images.shape[1:])
    expected = f"{len(asked.classes)} classes and images {tuple(asked.form)}"
    if (got := f"{len(other.classes)} classes and images {shape}") != expected:
        raise MisuseError(complaint("--data-set", f"one of {expected}", got, "Leave it out for the run's own set."))
    if list(other.classes) != asked.classes:
        screen.note(f"The classes of {name} have other names than those of {asked.run.job.data}.")
    return other


_INPUTS = "Images, folders of images, .npy or .csv files; points as .npy or .csv files."
_SHARDS = "Writes answers here, in parts, for more inputs than fit in memory; continues what is there."
_JOIN = "Writes the answers in this folder of --shards as one file, in the order of the inputs."
_SCALE = "Value of white in .csv and .npy files; default: 255 for uint8 in .npy, else 1."


def predict(
    screen: Screen,
    folder: RunFolder,
    inputs: Annotated[list[Path] | None, typer.Argument(help=_INPUTS, metavar="INPUT…", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file; default: stdout.")] = None,
    samples: Samples = None,
    seed: Seed = 0,
    risk: Risk = 0.05,
    novelty: Novelty = None,
    scale: Annotated[float | None, typer.Option(help=_SCALE)] = None,
    shards: Annotated[Path | None, typer.Option(help=_SHARDS, metavar="FOLDER")] = None,
    join: Annotated[Path | None, typer.Option(help=_JOIN, metavar="FOLDER")] = None,
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

    Many inputs, many workers: torchrun --nproc-per-node 4 -m ibnn predict RUN INPUT… --shards FOLDER, and when all are
    done: ibnn predict RUN --join FOLDER -o out.csv. The same command continues after a failure; the number of workers
    changes nothing in the answers.
    """
    with misuse():
        _check_predict(out, risk, novelty, scale)
        check_sharding(inputs or [], out, shards, join)
        files = listed(inputs or [])
    asked = read(folder, samples, seed, trust_code)
    if join is not None:
        whole = join_shards(screen, join, folder, out, json)
    else:
        whole = _answer(screen, asked, files, (out, json), shards, (risk, novelty, scale, data))
    if not whole:
        raise typer.Exit(1)


def _answer(
    screen: Screen,
    asked: "Asked",
    files: list[Path],
    to: tuple[Path | None, bool],
    shards: Path | None,
    options: tuple[float, float | None, float | None, Path | None],
) -> bool:
    """Answers for files, in shards if there is a folder for them; returns whether all could be read."""
    risk, novelty, scale, data = options
    with misuse():
        level = asked.novelty_level(novelty)
    rule = cache(lambda: asked.rule(risk, level, lambda: asked.held_out(data)))
    if shards is not None:
        return sharded(screen, asked, files, shards, scale, rule())
    rows, unread = _rows(screen, asked, files, scale, lambda: rule()[0])
    if rows:
        facts = rule()[1]
        if facts is not None:
            screen.note(worded(facts))
        told = _told(screen, asked, level, rows)
        result = {"run": asked.run.result["name"], "samples": asked.samples, "seed": asked.seed, "risk": facts}
        write_rows(screen, result | {"novelty": told, "rows": rows}, *to)
    return bool(rows) and not unread


def _told(screen: Screen, asked: "Asked", level: float, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Sums up what is withheld; returns what is known of novelty."""
    note_novelty(screen, asked, level)
    reasons = Counter(row.get("withheld") or "" for row in rows)
    if "withheld" in rows[0]:
        screen.note(summary(reasons))
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
    unread: list[Exception] = []
    stream = examples(files, reader(asked, scale, screen.note), unread.append)
    rows = list(answered(asked, stream, rule))
    for error in unread:
        screen.error(str(error))
    return rows, bool(unread)


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
