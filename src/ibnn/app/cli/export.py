"""`export`: a finished run as one file that runs without ibnn."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ibnn.app.cli.answer import read
from ibnn.app.cli.options import Json, RunFolder, Samples, Seed, TrustCode
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse
from ibnn.errors import complaint

if TYPE_CHECKING:
    from torch import Tensor

    from ibnn.app.asking.run import Asked


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
    from ibnn.baselines import Plain
    from ibnn.files.export import export as write
    from ibnn.network import IBNN

    out = out or Path("model.onnx" if format == "onnx" else "model.pt2")
    with misuse():
        check_out("--out", out)
    asked = read(folder, samples, seed, trust_code)
    example, facts = _example(asked, pixels)
    assert isinstance(asked.run.model, IBNN | Plain), "as for all methods of jobs"
    draws = {"samples": asked.samples, "seed": asked.seed}
    normal = asked.normalisation if pixels else None
    with misuse():
        written = write(asked.run.model, example, out, format=format, pixels=normal, metadata=facts, **draws)
    screen.result(written._asdict() | {"path": str(written.path), "format": format} | draws, str(written.path), json)
    if not json:
        screen.note(
            f"{written.bytes:,} bytes, of which {written.draw_bytes:,} are draws; its answers differ from those of "
            f"`ibnn predict` by at most {written.difference:.1g}."
        )


def _example(asked: "Asked", pixels: bool) -> tuple["Tensor", dict[str, Any]]:
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
