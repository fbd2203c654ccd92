"""`export`: a finished run as one file that runs without ibnn."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ibnn.app.cli.answer import RunFolder, Samples, Seed, TrustCode, read
from ibnn.app.cli.screen import Json, MisuseError, Screen, check_out, misuse
from ibnn.errors import complaint


def export(
    screen: Screen,
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; default model.onnx or model.pt2.")] = None,
    samples: Samples = None,
    seed: Seed = 0,
    format: Annotated[Literal["onnx", "torch"], typer.Option(help="For onnxruntime or torch.export.load.")] = "onnx",
    pixels: Annotated[
        bool, typer.Option("--pixels", help="Of images: the file takes them in [0, 1] and normalises them.")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Writes a run as one ONNX or torch file that answers as `ibnn predict` does, without ibnn.

    Of images: without --pixels the file takes them normalised as in training; the numbers are in its metadata.

    Of points and tables: the file takes rows of numbers in their own units, the columns in the order that its metadata
    tell. Its outputs are probabilities, total, aleatoric and epistemic; of a number to predict mean, std, aleatoric and
    epistemic.

    The methods ibnn, sgd, swa and ensemble can be exported; swag, dropout and vi cannot.
    """
    from ibnn.app.asking.run import scale, stored_in
    from ibnn.baselines import Plain
    from ibnn.files.export import export as write
    from ibnn.network import IBNN

    out = out or Path("model.onnx" if format == "onnx" else "model.pt2")
    with misuse():
        check_out("--out", out)
    asked = read(folder, samples, seed, trust_code)
    run = asked.run
    facts = {"run": run.result["name"], "classes": run.result["classes"]}
    normal = None
    if asked.units is not None:
        if pixels:
            got = f"given for a run of the points {run.job.data}"
            raise MisuseError(complaint("--pixels", "of a run of images", got, "Leave it out."))
        example = asked.units.made_up(3)
        facts |= {"columns": list(asked.units.columns), "target": run.job.target}
    else:
        example, normal = stored_in(folder)["shown/images"].float() / 255, scale(run.job.data)
        facts |= {"normalisation": dict(zip(("mean", "std"), normal, strict=True))}
        if not pixels:
            example = asked.normalised(example)
    assert isinstance(run.model, IBNN | Plain), "as all methods of jobs"
    with misuse():
        written = write(
            run.model,
            example,
            out,
            samples=asked.samples,
            seed=asked.seed,
            format=format,
            pixels=normal if pixels else None,
            metadata=facts,
        )
    if json:
        asking = {"samples": asked.samples, "seed": asked.seed}
        screen.json(written._asdict() | {"path": str(written.path), "format": format} | asking)
        return
    print(written.path)
    screen.note(
        f"{written.bytes:,} bytes, of which {written.draw_bytes:,} are draws; its answers differ from those of "
        f"`ibnn predict` by at most {written.difference:.1g}."
    )
