"""The commands `evaluate`, `report`, `export` and `serve`, which take a finished run or another trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
from torch import Tensor

from ibnn.app.cli.options import Data, Novelty, Risk, Source, Trained
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse, require
from ibnn.app.cli.train import show
from ibnn.baselines import Plain
from ibnn.data import FileTable, Points
from ibnn.errors import complaint
from ibnn.files.export import export as write
from ibnn.lab.runs import RunFolder
from ibnn.network import IBNN

if TYPE_CHECKING:
    from ibnn.app.predictor import Predictor


_TEST = "An .npz file with inputs x, as the network takes them, and targets y: what a saved model is evaluated on."


def evaluate(
    screen: Screen,
    source: Trained,
    data: Data = None,
    test: Annotated[Path | None, typer.Option(help=_TEST)] = None,
) -> None:
    """Evaluates a run, or a saved model on --test: error, NLL, ECE and Brier score; a run also on changed images.

    Points are evaluated on test points alone, numbers by NLL, RMSE and the coverage of 90 % intervals. A run on a table
    of your own needs that table, unchanged, in the current folder or in --data.
    """
    from ibnn.lab.evaluation import evaluate as measure
    from ibnn.lab.parts import make_data

    predictor = source.read(screen)
    run = predictor.run
    if not isinstance(predictor.model, torch.nn.Module) or (run is None) == (test is None):
        remedy = "Pass --test with a saved model, and not with a run; of an .onnx file pass what it was made of."
        raise MisuseError(complaint("MODEL", "a run, or a saved model and --test", source.model, remedy))
    with misuse(ValueError):
        whole: Any = _arrays(test, predictor.classes) if test else None
        splits: Any = None if run is None else make_data(run.job, data, run.units)
    valid, whole = (None, whole) if splits is None else (splits.valid, splits.whole)
    found = measure(cast(Any, predictor.model), whole, valid, samples=predictor.samples, data_folder=data).result
    result = {"name": predictor.name, "data": whole.name, **found}
    if run is not None:
        result["costs"] = run.result["costs"]
    screen.json(result) if screen.as_json else show(screen, result)


def _arrays(path: Path, classes: Any) -> FileTable:
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    except Exception as error:  # damaged headers make numpy raise whatever comes
        raise ValueError(complaint("--test", "an .npz file with x and y", error, "Save it by numpy.savez.")) from error
    if len(x) != len(y) or not len(x):
        raise ValueError(complaint("--test", "as many x as y, at least one", (len(x), len(y)), "Correct it."))
    labels = not y.is_floating_point()
    points = Points(x.float() if x.is_floating_point() else x, y.long() if labels else y.float())
    names = tuple(classes) or tuple(map(str, range(int(y.max()) + 1))) if labels else ()
    return FileTable(path.name, (), names, points, points, "")


def report(
    screen: Screen,
    runs: Annotated[list[Path], typer.Argument(help="Run folders; unfinished runs are skipped.", metavar="RUNS…")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Calibration report",
) -> None:
    """Writes one self-contained HTML page about one or more runs: scores, calibration, uncertainty, provenance."""
    require("matplotlib", "jinja2")
    from ibnn.lab.report import write_report

    check_out("--out", out)
    done = [run for run in runs if RunFolder(run).finished]
    for run in runs:
        if run not in done:
            screen.note(f"Skipped: {run}, which is no folder of a finished run.")
    if not done:
        raise MisuseError(complaint("RUNS", "folders of finished runs", ", ".join(map(str, runs)), "Run ibnn train."))
    with misuse(FileNotFoundError):  # a folder without its answers
        write_report(done, out, title=title)
    screen.result({"report": str(out)}, str(out))


def export(
    screen: Screen,
    source: Source,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: model.onnx or model.pt2.")] = None,
    format: Annotated[Literal["onnx", "torch"], typer.Option(help="For onnxruntime or torch.export.load.")] = "onnx",
    pixels: Annotated[bool, typer.Option("--pixels", help="The file takes images in [0, 1], not normalised.")] = False,
    example: Annotated[Path | None, typer.Option(help="A .npy or .csv file of inputs, for their shape.")] = None,
    data: Data = None,
) -> None:
    """Writes a model as one ONNX or torch file that answers as `ibnn predict` does, without ibnn.

    Its outputs: probabilities, total, aleatoric and epistemic for classes; mean, std, aleatoric and epistemic for
    numbers; p_value, if the model has reference data. Its metadata list them.

    Without --pixels the file takes images normalised as in training; its metadata have the numbers. It takes rows of a
    table in their own units. A saved model takes what its network takes, of which --example shows the shape. The
    methods ibnn, sgd, swa and ensemble can be exported; swag, dropout and vi cannot.
    """
    out = out or Path("model.onnx" if format == "onnx" else "model.pt2")
    check_out("--out", out)
    if format == "onnx":
        require("onnx", "onnxscript", "onnxruntime")
    predictor = source.read(screen, data)
    shown, facts = _example(predictor, pixels, example)
    assert isinstance(predictor.model, IBNN | Plain), "as for all that can be saved"
    draws: Any = {"samples": predictor.samples, "seed": predictor.seed, "fallback": source.fallback}
    kind: Any = predictor.kind
    with misuse():
        normal = (kind.mean, kind.std) if pixels else None
        written = write(predictor.model, shown, out, format=format, pixels=normal, metadata=facts, **draws)
    screen.result(written._asdict() | {"path": str(written.path), "format": format} | draws, str(written.path))
    if not screen.as_json:
        screen.note(
            f"{written.bytes:,} bytes, of which {written.draw_bytes:,} are draws; its answers differ from those of "
            f"`ibnn predict` by at most {written.difference:.1g}."
        )


def _example(predictor: "Predictor", pixels: bool, path: Path | None) -> tuple[Tensor, dict[str, Any]]:
    """Returns inputs that show the file's shapes, and its metadata."""
    facts: dict[str, Any] = {"run": predictor.name, "classes": list(predictor.classes)}
    kind: Any = predictor.kind
    run, is_image = predictor.run, hasattr(kind, "resize")
    with misuse():
        if not isinstance(predictor.model, torch.nn.Module):
            raise ValueError(complaint("MODEL", "a run or a saved model", "a file that is exported", "Copy it."))
        if pixels and not is_image:
            raise ValueError(complaint("--pixels", "for a run on images", "another model", "Leave it out."))
        if run is not None and is_image:
            images = run.home.answers()["shown/images"].float() / 255
            facts |= {"normalisation": {"mean": kind.mean, "std": kind.std}, "resize": kind.resize}
            return images if pixels else kind.prepared(images), facts
        if run is not None and run.units is not None:
            return run.units.made_up(3), facts | {"columns": list(run.units.columns), "target": run.job.target}
        if path is None:
            raise ValueError(complaint("--example", "given for a saved model", None, "Pass --example inputs.npy."))
        return torch.stack([each.x for each in kind.read(path, lambda _: None)[:3]]), facts


_HOST = "Address to listen on; the default accepts connections from this machine only."
_FALSE_ALARM = "Probability that the shift monitor ever raises an alarm although nothing has shifted."


def serve(
    screen: Screen,
    source: Source,
    host: Annotated[str, typer.Option(help=_HOST)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    risk: Risk = 0.05,
    novelty: Novelty = None,
    false_alarm: Annotated[float, typer.Option(help=_FALSE_ALARM)] = 0.01,
    megabytes: Annotated[float, typer.Option(help="Largest request that is accepted.")] = 10,
    data: Data = None,
) -> None:
    """Serves a model over HTTP: POST /predict and GET /health.

    A run takes images or rows, and so does an .onnx file of one. Other models take {"inputs": [...]}, nested lists of
    what the network takes. Ctrl-C or SIGTERM ends it after the requests in flight are answered. There is no password:
    before others can reach it, put a proxy in front that asks for one.
    """
    require("starlette", "uvicorn", "python_multipart")
    from ibnn.app.predictor import check_limits
    from ibnn.app.serve.start import start

    with misuse():
        check_limits(risk, novelty, false_alarm, megabytes)
    predictor = source.read(screen, data)
    with misuse():
        predictor.novelty_level(novelty)
    options: dict[str, Any] = {"risk": risk, "novelty": novelty, "false_alarm": false_alarm}
    start(predictor, host, port, megabytes, screen.note, **options, data=data)
