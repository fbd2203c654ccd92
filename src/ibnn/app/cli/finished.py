"""The commands `evaluate`, `report`, `export` and `serve`, which take a finished run."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from ibnn import check
from ibnn.app.cli.options import Data, Fallback, Json, Novelty, Risk, RunFolder, Samples, Seed, TrustCode
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse
from ibnn.app.cli.train import show
from ibnn.baselines import Plain
from ibnn.data import TABLES, DataSet, load
from ibnn.errors import complaint
from ibnn.files.export import export as write
from ibnn.monitoring import rows_needed
from ibnn.network import IBNN

if TYPE_CHECKING:
    from ibnn.app.predictor import Predictor


def read(
    folder: Path, samples: int | None, seed: int = 0, trust_code: bool = False, fallback: float | None = None
) -> "Predictor":
    """Reads a finished run; a folder without one is misuse."""
    from ibnn.app.predictor import Predictor

    with misuse():
        return Predictor.read(folder, samples, seed, fallback=fallback, trust_code=trust_code)


def check_shares(risk: float, novelty: float | None) -> None:
    """Raises for numbers that are not shares."""
    check.number("--risk", risk, above=0, most=1, remedy="Pass 0.05.")
    if novelty is not None:
        check.number("--novelty", novelty, least=0, below=1, remedy="Pass 0.01, or 0 for never.")


def worded(facts: dict[str, Any]) -> str:
    """Describes where a run abstains, and what that guarantees."""
    by = f"{facts['examples']:,} {facts['by']}"
    needed = rows_needed(facts["risk"], facts["confidence"])
    if facts["examples"] < needed:
        return (
            f"All abstain: a risk of {facts['risk']:g} takes {needed} held-out inputs without an error; there are {by}."
        )
    if not facts["coverage"]:
        return f"All abstain: by the {by}, no threshold keeps the error at or below {facts['risk']:g}."
    novel = f" or p-value ≤ {facts['novelty']:g}" if facts["novelty"] else ""
    return (
        f"Abstains where total > {facts['limit']:.4g}{novel}: this answers {facts['coverage']:.0%} of the {by}; with "
        f"{facts['confidence']:.0%} confidence at most {facts['bound']:.2%} of such answers are wrong "
        f"({facts['risk']:.2%} allowed)."
    )


def note_novelty(screen: Screen, predictor: "Predictor") -> None:
    """Says so if novel inputs are not told."""
    if predictor.reference is None:
        screen.note("Novelty detection is off: this run stored no reference data. Retrain to enable it.")


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
    from ibnn.lab.parts import make_data

    predictor = read(folder, samples, trust_code=trust_code)
    run, name = predictor.run, predictor.run.result["name"]
    other = _other(screen, data_set, data, predictor) if data_set is not None else None
    with misuse() if run.job.has_file else nullcontext():
        splits = make_data(run.job, data, predictor.units)
    whole = splits.whole
    if other is not None and isinstance(whole, DataSet):  # normalised as in training
        whole, name = replace(whole, name=other.name, test=other.test), f"{name} on {data_set}"
    found = measure(run.model, whole, splits.valid, samples=predictor.samples, data_folder=data).result
    for reading in (found, found.get("tempered", found)):
        for part in ("outsiders", "novelty"):
            reading.get(part, {}).pop(run.job.data, None)  # the training data are no outsiders
    result = {"name": name, "data": whole.name, **found, "costs": run.result["costs"]}
    screen.json(result) if json else show(screen, result)


def _other(screen: Screen, name: str, folder: Path | None, predictor: "Predictor") -> DataSet:
    """Returns another data set; raises unless its images and classes are like the run's."""
    from ibnn.lab.parts import check_data

    with misuse():
        if predictor.units is not None:
            got = f"one on the points {predictor.run.job.data}"
            raise ValueError(complaint("RUN", "a run on images", got, "Leave out --data-set."))
        check_data(name, folder)
        if name in TABLES:
            remedy = "Leave it out for the run's own set."
            raise ValueError(complaint("--data-set", "a set of images", f"the points {name}", remedy))
    other = load(name, folder, size=predictor.form.height)
    shape = tuple(other.test.rows(torch.tensor([0])).images.shape[1:])
    expected = f"{len(predictor.classes)} classes and images {tuple(predictor.form)}"
    if (got := f"{len(other.classes)} classes and images {shape}") != expected:
        raise MisuseError(complaint("--data-set", f"one of {expected}", got, "Leave it out for the run's own set."))
    if list(other.classes) != predictor.classes:
        screen.note(f"The classes of {name} have other names than those of {predictor.run.job.data}.")
    return other


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
    fallback: Fallback = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Writes a run as one ONNX or torch file that answers as `ibnn predict` does, without ibnn.

    Its outputs: probabilities, total, aleatoric and epistemic for classes; mean, std, aleatoric and epistemic for
    numbers; p_value, if the run stored reference data. Its metadata list them.

    For images: without --pixels the file takes images normalised as in training; its metadata have the numbers.

    For points and tables: the file takes rows of numbers in their original units, columns in the order given in its
    metadata.

    The methods ibnn, sgd, swa and ensemble can be exported; swag, dropout and vi cannot.
    """
    out = out or Path("model.onnx" if format == "onnx" else "model.pt2")
    check_out("--out", out)
    predictor = read(folder, samples, seed, trust_code, fallback)
    example, facts = _example(predictor, pixels)
    assert isinstance(predictor.run.model, IBNN | Plain), "as for all methods of jobs"
    draws: Any = {"samples": predictor.samples, "seed": predictor.seed, "fallback": fallback}
    normal = predictor.normalisation if pixels else None
    with misuse():
        written = write(predictor.run.model, example, out, format=format, pixels=normal, metadata=facts, **draws)
    screen.result(written._asdict() | {"path": str(written.path), "format": format} | draws, str(written.path), json)
    if not json:
        screen.note(
            f"{written.bytes:,} bytes, of which {written.draw_bytes:,} are draws; its answers differ from those of "
            f"`ibnn predict` by at most {written.difference:.1g}."
        )


def _example(predictor: "Predictor", pixels: bool) -> tuple[Tensor, dict[str, Any]]:
    """Returns inputs that show the file's shapes, and its metadata."""
    run = predictor.run
    facts = {"run": run.result["name"], "classes": run.result["classes"]}
    if predictor.units is not None:
        if pixels:
            got = f"given for a run on the points {run.job.data}"
            raise MisuseError(complaint("--pixels", "for a run on images", got, "Leave it out."))
        return predictor.units.made_up(3), facts | {"columns": list(predictor.units.columns), "target": run.job.target}
    images = predictor.test_answers["shown/images"].float() / 255
    facts |= {"normalisation": dict(zip(("mean", "std"), predictor.normalisation, strict=True))}
    return images if pixels else predictor.normalised(images), facts


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
    fallback: Fallback = None,
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
        check.share("--false-alarm", false_alarm, remedy="Pass 0.01.")
        check.number("--megabytes", megabytes, above=0, remedy="Pass 10.")
    from ibnn.app.serve import server
    from ibnn.app.serve.app import make_app
    from ibnn.app.serve.service import Service

    predictor = read(folder, samples, seed, trust_code, fallback)
    with misuse():
        at = server.listen(host, port)
    with at:
        with misuse():
            service = Service(predictor, risk=risk, novelty=novelty, false_alarm=false_alarm, data=data, state=state)
        facts = service.rule(risk, service.novelty)[1]
        never = f"Abstains where p-value ≤ {service.novelty:g}." if service.novelty else "Never abstains."
        screen.note(worded(facts) if facts else never)
        note_novelty(screen, predictor)
        if service.monitor is None:
            screen.note(f"Inputs are not monitored for a shift: {service.unwatched}.")
        ready = f"Serving at http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}/"
        app = make_app(service, megabytes=megabytes)
        server.serve(app, at, ready=lambda: print(ready, flush=True), drain=service.drain)
