"""The commands `evaluate`, `report`, `export` and `serve`, which take a finished run or another trained model."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
from torch import Tensor

from ibnn.app.cli.options import Data, Device, Json, Model, Net, Novelty, Risk, Samples, Source, TrustCode
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse, require
from ibnn.app.cli.train import show
from ibnn.baselines import Plain
from ibnn.data import TABLES, DataSet, FileTable, Points, load
from ibnn.errors import complaint
from ibnn.files.export import export as write
from ibnn.lab.runs import RunFolder
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

    Points are evaluated on test points alone, numbers by NLL, RMSE and the coverage of 90 % intervals. A run on a table
    of your own needs that table, unchanged, in the current folder or in --data. A saved model needs --data-set.
    """
    from ibnn.lab.evaluation import evaluate as measure
    from ibnn.lab.parts import make_data

    predictor = Source(model, samples, device=device, net=net, trust_code=trust_code).read(screen)
    run, name = predictor.run, predictor.name
    if not isinstance(predictor.model, torch.nn.Module) or (run is None and data_set is None):
        remedy = "Pass --data-set with a saved model; an .onnx file cannot be evaluated: pass what it was made of."
        raise MisuseError(complaint("MODEL", "a run, or a saved model and --data-set", model, remedy))
    whole: Any = None if data_set is None else _other(screen, data_set, data, predictor)
    valid, costs = None, {}
    if run is not None:
        with misuse() if run.job.has_file else nullcontext():
            splits: Any = make_data(run.job, data, run.units)
        other, valid, costs = splits.whole if whole is None else whole, splits.valid, {"costs": run.result["costs"]}
        both = isinstance(other, DataSet) and isinstance(splits.whole, DataSet)  # then normalised as in training
        whole = replace(splits.whole, name=other.name, test=other.test) if both else other
    found = measure(cast(Any, predictor.model), whole, valid, samples=predictor.samples, data_folder=data).result
    if run is not None:
        for reading in (found, found.get("tempered", {})):
            for part in ("outsiders", "novelty"):
                reading.get(part, {}).pop(run.job.data, None)  # the training data are no outsiders
    name += f" on {data_set}" if data_set is not None else ""
    result = {"name": name, "data": whole.name, **found, **costs}
    screen.json(result) if json else show(screen, result)


def _other(screen: Screen, name: str, folder: Path | None, predictor: "Predictor") -> Any:
    """Returns another data set; raises unless its inputs and classes are like the model's."""
    from ibnn.lab.parts import check_data

    form, other = getattr(predictor.kind, "form", None), cast(Any, None)
    with misuse():
        if name.endswith(".npz"):
            other = _arrays(Path(name), predictor.classes)
        elif predictor.run is not None and form is None:
            got = f"one on the points {predictor.run.job.data}"
            raise ValueError(complaint("MODEL", "a run on images", got, "Leave out --data-set."))
        elif predictor.run is None and name in TABLES:
            other = TABLES[name]
        elif name in TABLES or name.endswith(".csv"):
            remedy = "Leave it out for the run's own set; save x and y of a table by numpy.savez."
            raise ValueError(complaint("--data-set", "a set of images, or an .npz file", name, remedy))
        else:
            check_data(name, folder)
    shape: Any = form or getattr(predictor.kind, "shape", None) or (0,)
    if other is None:
        other = load(name, folder, size=shape[-1] if len(shape) > 1 else 224)
    images = isinstance(other, DataSet)
    x = other.test.rows(torch.tensor([0])).images if images else other.test.x[:1]
    try:
        if images and form is not None and x.shape[1:] != torch.Size(form):
            raise ValueError(f"not {tuple(form)}")
        found: Any = predictor.answer(x if not images else x / 255 if form is not None else other.normalise(x))
        count = found.probs.shape[1] if predictor.labels else 0
        if count != len(other.classes) and (images or count == 0 or int(other.test.y.max()) >= count):
            raise ValueError(f"{len(other.classes)} classes, not {count}")
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        got = f"one of inputs {tuple(x.shape[1:])} ({str(error).splitlines()[0]})"
        remedy = "Leave it out for a run's own set, or pass another one."
        raise MisuseError(complaint("--data-set", "one like that of the training", got, remedy)) from error
    if predictor.classes and list(other.classes) != list(predictor.classes) and images:
        screen.note(f"The classes of {name} have other names than those of {predictor.name}.")
    return other


def _arrays(path: Path, classes: Any) -> FileTable:
    """Reads the inputs x and the targets y of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
    except FileNotFoundError:
        raise FileNotFoundError(complaint("--data-set", "a file", f"no such {path}", "Check the name.")) from None
    except Exception as error:  # damaged headers make numpy raise whatever comes
        raise ValueError(complaint(str(path), "an .npz file with x and y", error, "Save it by numpy.savez.")) from error
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

    check_out("--out", out)
    with misuse():
        for run in runs:
            if not run.exists():
                raise ValueError(complaint("RUNS", "run folders", f"no folder {run}", "Train first: ibnn train."))
        done = [run for run in runs if RunFolder(run).finished]
        if not done:
            raise ValueError(
                complaint("RUNS", "folders of finished runs", ", ".join(map(str, runs)), "Run ibnn train.")
            )
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
    data: Data = None,
    json: Json = False,
) -> None:
    """Writes a model as one ONNX or torch file that answers as `ibnn predict` does, without ibnn.

    Its outputs: probabilities, total, aleatoric and epistemic for classes; mean, std, aleatoric and epistemic for
    numbers; p_value, if the model has reference data. Its metadata list them.

    Without --pixels the file takes images normalised as in training; its metadata have the numbers. It takes rows of a
    table in their own units. A saved model takes what its network takes; --example shows the shape, unless ibnn knows
    the network. The methods ibnn, sgd, swa and ensemble can be exported; swag, dropout and vi cannot.
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
    screen.result(written._asdict() | {"path": str(written.path), "format": format} | draws, str(written.path), json)
    if not json:
        screen.note(
            f"{written.bytes:,} bytes, of which {written.draw_bytes:,} are draws; its answers differ from those of "
            f"`ibnn predict` by at most {written.difference:.1g}."
        )


def _example(predictor: "Predictor", pixels: bool, path: Path | None) -> tuple[Tensor, dict[str, Any]]:
    """Returns inputs that show the file's shapes, and its metadata."""
    facts: dict[str, Any] = {"run": predictor.name, "classes": list(predictor.classes)}
    kind: Any = predictor.kind
    run, is_image, shape = predictor.run, hasattr(kind, "form"), getattr(kind, "shape", None)
    with misuse():
        if not isinstance(predictor.model, torch.nn.Module):
            raise ValueError(complaint("MODEL", "a run or a saved model", "a file that is exported", "Copy it."))
        if pixels and not is_image:
            raise ValueError(complaint("--pixels", "for a run on images", f"given for {kind.word}", "Leave it out."))
        if is_image:
            images = predictor.home.answers()["shown/images"].float() / 255  # type: ignore[union-attr]
            facts |= {"normalisation": {"mean": kind.mean, "std": kind.std}, "resize": kind.resize}
            return images if pixels else kind.prepared(images), facts
        if run is not None and run.units is not None:
            return run.units.made_up(3), facts | {"columns": list(run.units.columns), "target": run.job.target}
        if path is not None:
            return torch.stack([each.x for each in kind.read(path, lambda _: None)[:3]]), facts
        if shape is None:
            raise ValueError(complaint("--example", "given for this folder", None, "Pass --example inputs.npy."))
    return torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)), facts


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
    """Serves a model over HTTP: /predict, /health and /metrics.

    A run takes images or rows, and so does an .onnx file of one. Other models take {"inputs": [...]}, nested lists of
    what the network takes. Ctrl-C or SIGTERM ends it after the requests in flight are answered. There is no password:
    before others can reach it, put a proxy in front that asks for one.
    """
    require("starlette", "uvicorn", "prometheus_client", "python_multipart")
    from ibnn.app.predictor import check_limits
    from ibnn.app.serve.start import start

    with misuse():
        check_limits(risk, novelty, false_alarm, megabytes)
    predictor = source.read(screen, data)
    options: dict[str, Any] = {"risk": risk, "novelty": novelty, "false_alarm": false_alarm}
    start(predictor, host, port, megabytes, screen.note, misuse, **options, data=data)
