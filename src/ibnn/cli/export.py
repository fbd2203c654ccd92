"""`export`: a finished run as one file that runs without ibnn."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ibnn.cli.answer import RunFolder, Samples, Seed, read
from ibnn.cli.screen import Json, Screen, check_out, misuse


def export(
    screen: Screen,
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; default model.onnx or model.pt2.")] = None,
    samples: Samples = None,
    seed: Seed = 0,
    format: Annotated[Literal["onnx", "torch"], typer.Option(help="For onnxruntime or torch.export.load.")] = "onnx",
    pixels: Annotated[
        bool, typer.Option("--pixels", help="The file takes images in [0, 1] and normalises them.")
    ] = False,
    json: Json = False,
) -> None:
    """Writes a run as one ONNX or torch file that answers as `ibnn predict` does, without ibnn.

    Without --pixels it takes images normalised as in training; the numbers are in its metadata.
    """
    from ibnn.asking.run import scale, stored_in
    from ibnn.baselines import Plain
    from ibnn.export import export as write
    from ibnn.network import IBNN

    out = out or Path("model.onnx" if format == "onnx" else "model.pt2")
    with misuse():
        check_out("--out", out)
    asked = read(folder, samples, seed)
    run = asked.run
    with misuse():
        asked.check_images()
    images = stored_in(folder)["shown/images"].float() / 255
    mean, std = scale(run.job.data)
    facts = {"run": run.result["name"], "classes": run.result["classes"]}
    facts |= {"normalisation": {"mean": mean, "std": std}}
    if not pixels:
        images = asked.normalised(images)
    assert isinstance(run.model, IBNN | Plain), "as all methods of jobs"
    with misuse():
        written = write(
            run.model,
            images,
            out,
            samples=asked.samples,
            seed=asked.seed,
            format=format,
            pixels=(mean, std) if pixels else None,
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
