"""The commands `evaluate`, `report`, `export` and `serve`, which take a finished run or another trained model."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import typer
from torch import Tensor

from ibnn.app.cli.options import Data, Device, Json, Model, Net, Novelty, Risk, Samples, Source, TrustCode
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse, require
from ibnn.app.cli.train import show
from ibnn.baselines import Plain
from ibnn.data import TABLES, DataSet, FileTable, Points, Table, load
from ibnn.errors import complaint
from ibnn.files.export import export as write
from ibnn.network import IBNN

if TYPE_CHECKING:
    from ibnn.app.predictor import Predictor

_DATA_SET = "Another data set with the same classes; an .npz file with x and y, as the network takes them."


def evaluate(
    screen: Screen,
    model: Model,
    data: Data = None,
    data_set: Annotated[str | None, typer.Option(help=_DATA_SET)] = None,
    samples: Samples = None,
    device: Device = None,
    net: Net = None,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Evaluates a model: error, NLL, ECE and Brier score, also on corrupted images and on other kinds of images.

    A run on points is evaluated on its test points alone; if it predicts a number, by NLL, RMSE and the coverage of
    90 % intervals. A run on a table of your own needs that table, unchanged, in the current folder or in --data.

    A folder of `save_pretrained` is evaluated on --data-set.
    """
    from ibnn.lab.evaluation import evaluate as measure
    from ibnn.lab.parts import make_data

    predictor = Source(model, samples, device=device, net=net, trust_code=trust_code).read()
    if not predictor.can_draw or (predictor.run is None and data_set is None):
        got = f"{model}, an .onnx file" if not predictor.can_draw else f"{model}, which names no data"
        remedy = "Pass --data-set with a saved model; export again from what the file was made of."
        raise MisuseError(complaint("MODEL", "a run, or a saved model and --data-set", got, remedy))
    other = None if data_set is None else _other(screen, data_set, data, predictor)
    run, name, costs = predictor.run, predictor.name, {}
    if run is None:
        assert other is not None
        whole, valid = other, None
    else:
        with misuse() if run.job.has_file else nullcontext():
            splits = make_data(run.job, data, run.units)
        whole, valid, costs = splits.whole, splits.valid, {"costs": run.result["costs"]}
        if isinstance(other, DataSet) and isinstance(whole, DataSet):  # normalised as in training
            whole = replace(whole, name=other.name, test=other.test)
        elif other is not None:
            whole = other
    found = measure(predictor.model, whole, valid, samples=predictor.samples, data_folder=data).result
    for reading in (found, found.get("tempered", found)):
        for part in ("outsiders", "novelty"):
            if run is not None:
                reading.get(part, {}).pop(run.job.data, None)  # the training data are no outsiders
    name += f" on {data_set}" if data_set is not None else ""
    result = {"name": name, "data": whole.name, **found, **costs}
    screen.json(result) if json else show(screen, result)


def _other(screen: Screen, name: str, folder: Path | None, predictor: "Predictor") -> DataSet | Table | FileTable:
    """Returns another data set; raises unless its inputs and classes are like the model's."""
    from ibnn.app.inputs import Pixels
    from ibnn.lab.parts import check_data

    if name.endswith(".npz"):
        with misuse():
            other: DataSet | Table | FileTable = _arrays(Path(name), predictor.classes)
    elif predictor.run is None and name in TABLES:
        other = TABLES[name]
    else:
        with misuse():
            if predictor.run is not None and not isinstance(predictor.kind, Pixels):
                got = f"one on the points {predictor.run.job.data}"
                raise ValueError(complaint("MODEL", "a run on images", got, "Leave out --data-set."))
            check_data(name, folder)
            if name in TABLES or name.endswith(".csv"):
                remedy = "Leave it out for the run's own set; save x and y of a table by numpy.savez."
                raise ValueError(complaint("--data-set", "a set of images, or an .npz file", name, remedy))
        shape: Any = tuple(getattr(predictor.kind, "form", None) or getattr(predictor.kind, "shape", None) or (0,))
        other = load(name, folder, size=shape[-1] if len(shape) > 1 else 224)
    _check_fits(screen, name, other, predictor)
    return other


def _check_fits(screen: Screen, name: str, other: Any, predictor: "Predictor") -> None:
    """Answers the first input of a data set; raises if the model does not take it or knows other classes."""
    own, images = list(predictor.classes), isinstance(other, DataSet)
    x = other.test.rows(torch.tensor([0])).images if images else other.test.x[:1]
    expected, got = f"inputs {tuple(x.shape[1:])}", ""
    if predictor.run is not None and images:
        form = tuple(predictor.kind.form)  # type: ignore[union-attr]
        known = ((own, form), (other.classes, tuple(x.shape[1:])))
        expected, got = (f"{len(classes)} classes and images {shape}" for classes, shape in known)
        if expected == got:
            got = ""
    else:
        try:
            found: Any = predictor.answer(other.normalise(x) if images else x)
            count = found.probs.shape[1] if predictor.labels else 0
            if count != len(other.classes) and (images or count == 0 or int(other.test.y.max()) >= count):
                expected, got = f"{count} classes", f"{len(other.classes)}"
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            expected, got = "inputs that the network takes", f"{tuple(x.shape[1:])} ({str(error).splitlines()[0]})"
    if got:
        remedy = "Leave it out for a run's own set, or pass another one."
        raise MisuseError(complaint("--data-set", f"one of {expected}", got, remedy))
    if own and list(other.classes) != own and images:
        screen.note(f"The classes of {name} have other names than those of {predictor.name}.")


def _arrays(path: Path, classes: Any) -> FileTable:
    """Reads the inputs x and the targets y of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    except FileNotFoundError:
        raise FileNotFoundError(complaint("--data-set", "a file", f"no such {path}", "Check the name.")) from None
    except Exception as error:  # damaged headers make numpy raise whatever comes
        remedy = "Save it by numpy.savez(path, x=x, y=y)."
        raise ValueError(complaint(str(path), "an .npz file with arrays x and y", error, remedy)) from error
    if len(x) != len(y) or not len(x):
        raise ValueError(complaint(str(path), "as many x as y, at least one", (len(x), len(y)), "Correct it."))
    labels = not y.is_floating_point()
    points = Points(x.float() if x.is_floating_point() else x, y.long() if labels else y.float())
    names = tuple(classes) or tuple(map(str, range(int(y.max()) + 1))) if labels else ()
    return FileTable(path.name, (), names, points, points, "")


def report(
    screen: Screen,
    runs: Annotated[list[Path], typer.Argument(help="Run folders; unfinished runs are skipped.", metavar="RUNS…")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Calibration report",
    json: Json = False,
) -> None:
    """Writes one self-contained HTML page about one or more runs: scores, calibration, uncertainty, provenance."""
    require("matplotlib", "jinja2")
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
    source: Source,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: model.onnx or model.pt2.")] = None,
    format: Annotated[Literal["onnx", "torch"], typer.Option(help="For onnxruntime or torch.export.load.")] = "onnx",
    pixels: Annotated[bool, typer.Option("--pixels", help="The file takes images in [0, 1], not normalised.")] = False,
    example: Annotated[Path | None, typer.Option(help="A .npy or .csv file of inputs, for their shape.")] = None,
    json: Json = False,
) -> None:
    """Writes a model as one ONNX or torch file that answers as `ibnn predict` does, without ibnn.

    Its outputs: probabilities, total, aleatoric and epistemic for classes; mean, std, aleatoric and epistemic for
    numbers; p_value, if the model has reference data. Its metadata list them.

    For images: without --pixels the file takes images normalised as in training; its metadata have the numbers.

    For points and tables: the file takes rows of numbers in their original units, columns in the order given in its
    metadata. A saved model takes what its network takes; --example shows the shape, unless ibnn knows the network.

    The methods ibnn, sgd, swa and ensemble can be exported; swag, dropout and vi cannot.
    """
    out = out or Path("model.onnx" if format == "onnx" else "model.pt2")
    check_out("--out", out)
    if format == "onnx":
        require("onnx", "onnxscript", "onnxruntime")
    predictor = source.read()
    shown, facts = _example(predictor, pixels, example)
    assert isinstance(predictor.model, IBNN | Plain), "as for all that can be saved"
    draws: Any = {"samples": predictor.samples, "seed": predictor.seed, "fallback": source.fallback}
    kind: Any = predictor.kind
    with misuse():
        normal = (kind.mean, kind.std) if pixels else None
        written = write(predictor.model, shown, out, format=format, pixels=normal, metadata=facts, **draws)
    screen.result(written._asdict() | {"path": str(written.path), "format": format} | draws, str(written.path), json)
    if not json:
        screen.note(
            f"{written.bytes:,} bytes, of which {written.draw_bytes:,} are draws; its answers differ from those of "
            f"`ibnn predict` by at most {written.difference:.1g}."
        )


def _example(predictor: "Predictor", pixels: bool, path: Path | None) -> tuple[Tensor, dict[str, Any]]:
    """Returns inputs that show the file's shapes, and its metadata."""
    from ibnn.app.inputs import Pixels

    facts: dict[str, Any] = {"run": predictor.name, "classes": list(predictor.classes)}
    kind, run = predictor.kind, predictor.run
    with misuse():
        if not predictor.can_draw:
            raise ValueError(complaint("MODEL", "a run or a saved model", "a file that is exported", "Copy it."))
        if pixels and not isinstance(kind, Pixels):
            raise ValueError(complaint("--pixels", "for a run on images", f"given for {kind.word}", "Leave it out."))
        if isinstance(kind, Pixels):
            images = predictor.home.answers()["shown/images"].float() / 255  # type: ignore[union-attr]
            facts |= {"normalisation": {"mean": kind.mean, "std": kind.std}, "resize": kind.resize}
            return images if pixels else kind.prepared(images), facts
        if run is not None and run.units is not None:
            return run.units.made_up(3), facts | {"columns": list(run.units.columns), "target": run.job.target}
        if path is not None:
            return torch.stack([each.pixels for each in kind.reader(None, lambda _: None)(path)[:3]]), facts
        if (shape := getattr(kind, "shape", None)) is None:
            remedy = "Pass --example inputs.npy."
            raise ValueError(complaint("--example", "given: the folder does not hold shapes", None, remedy))
    return torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)), facts


_HOST = "Address to listen on; the default accepts connections from this machine only."
_FALSE_ALARM = "Probability that the shift monitor ever raises an alarm although nothing has shifted."
_STATE = "File that keeps the shift monitor's state between starts."


def serve(
    screen: Screen,
    source: Source,
    host: Annotated[str, typer.Option(help=_HOST)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    risk: Risk = 0.05,
    novelty: Novelty = None,
    false_alarm: Annotated[float, typer.Option(help=_FALSE_ALARM)] = 0.01,
    state: Annotated[Path | None, typer.Option(help=_STATE)] = None,
    megabytes: Annotated[float, typer.Option(help="Largest request that is accepted.")] = 10,
    data: Data = None,
) -> None:
    """Serves a model over HTTP: /predict, /health, /metrics, and a page at / to try it.

    A run takes images or rows. A saved model takes {"inputs": [...]}, nested lists of what its network takes; so does
    an .onnx file, unless it holds how images are normalised, or names of columns.

    Ctrl-C or SIGTERM ends it after the requests in flight are answered. There is no password: before others can reach
    it, put a proxy in front that asks for one.
    """
    require("fastapi", "uvicorn", "prometheus_client", "python_multipart", "jinja2")
    from ibnn.app.predictor import check_limits
    from ibnn.app.serve.start import start

    with misuse():
        check_limits(risk, novelty, false_alarm, megabytes)
        check_out("--state", state)
    predictor = source.read()
    options: dict[str, Any] = {"risk": risk, "novelty": novelty, "false_alarm": false_alarm}
    start(predictor, host, port, megabytes, screen.note, misuse, **options, data=data, state=state)
