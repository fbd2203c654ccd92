"""`demo` and `bench`: what an iBNN brings, and what it costs, without any data of your own."""

from pathlib import Path
from typing import Annotated

import typer

from ibnn.app.cli.options import Json
from ibnn.app.cli.screen import Screen, check_out, misuse


def demo(
    screen: Screen,
    out: Annotated[Path, typer.Option(help="Folder for figures and results.json.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, weights, order and draws.")] = 0,
    json: Json = False,
) -> None:
    """Trains a plain network and an iBNN on embedded digits; prints a table and draws three figures. Start here."""
    with misuse():
        check_out("--out", out, folder=True)
    from ibnn.lab.demo import explain, run, table

    result = run(out, seed, quiet=screen.quiet)
    if json:
        screen.json(result)
        return
    screen.table(table(result))
    if not screen.quiet:
        files = ", ".join(str(out / name) for name in ("reliability.png", "digits.png", "entropy.png", "results.json"))
        print(f"{explain(result)}\n\nLook at: {files} ({result['seconds']:.0f} s)")


def bench(
    screen: Screen,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSON file of results; adds what is missing in it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small networks and batches; takes half a minute.")] = False,
    json: Json = False,
) -> None:
    """Measures time and memory of iBNNs and of installed rivals, relative to plain networks.

    Takes a quarter of an hour on two cores. A ratio of 1 means as fast, or as light, as the plain network.
    """
    from ibnn.lab.bench import QUICK, misses, rival_rows, rows
    from ibnn.lab.bench import bench as measure

    with misuse():
        if out is not None:
            check_out("--out", out)
    content = measure(out, size=QUICK if quick else None, note=screen.note)
    if json:
        screen.json(content)
        return
    found, above = rows(content["cells"]), misses(content["cells"])
    if quick:  # the limits are for the networks and batches of the full benchmark
        del found[1]
        above = []
    screen.table(found, title="iBNN to plain network: bytes kept for backward, seconds of the rest")
    for line in above:
        screen.note(f"above its limit: {line}")
    if quick or any(line.startswith("lenet") for line in above):
        screen.note("Overhead dominates in tiny networks and batches: large ones have ratios nearer to 1.")
    if quick:
        screen.note("Run `ibnn bench` without --quick to compare with the limits.")
    cell = content["cells"]["rivals"]
    screen.table(rival_rows(cell), title=f"{cell['net']}: methods to the plain network")
