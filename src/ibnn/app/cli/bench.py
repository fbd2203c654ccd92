"""`bench`: what an iBNN costs beside its plain network, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from ibnn.app.cli.screen import Json, Screen, check_out, misuse


def bench(
    screen: Screen,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A JSON file; goes on with what it lacks.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small networks and batches, half a minute.")] = False,
    json: Json = False,
) -> None:
    """Measures time and memory of iBNNs, and of rivals that are installed, to those of plain networks.

    A quarter of an hour on two cores. Ratios: 1 is as fast and as light as the plain network.
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
    if quick:  # the bars are for the networks and batches of the whole bench
        del found[1]
        above = []
    screen.table(found, title="iBNN to plain network: bytes kept for backward, seconds of the rest")
    for line in above:
        screen.note(f"above its bar: {line}")
    if quick or any(line.startswith("lenet") for line in above):
        screen.note("Tiny networks and batches are bound by overhead: large ones have ratios nearer to 1.")
    if quick:
        screen.note("Run `ibnn bench` without --quick to compare with the bars.")
    cell = content["cells"]["rivals"]
    screen.table(rival_rows(cell), title=f"{cell['net']}: methods to the plain network")
