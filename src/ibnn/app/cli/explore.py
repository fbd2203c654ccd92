"""The commands `demo`, `plan`, `data list` and `data get`, which need no data or job of your own."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ibnn import check, nets
from ibnn.app.cli.options import NewData
from ibnn.app.cli.screen import Screen, check_out, misuse, require
from ibnn.app.cli.train import parsed
from ibnn.convert import plan as planned
from ibnn.data import download, sets
from ibnn.lab.imported_net import is_import_path, make_net


def demo(
    screen: Screen,
    out: Annotated[Path, typer.Option(help="Folder for figures and results.json.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, weights, order and draws.")] = 0,
) -> None:
    """Trains a plain network and an iBNN on embedded digits; prints two tables and draws two figures. Start here."""
    check_out("--out", out, folder=True)
    require("matplotlib", "sklearn")
    from ibnn.lab.demo import novelty_table, run, table

    screen.note("Trains two networks on 80 digits; this takes some seconds.")
    torch.set_num_threads(1)  # for networks this small, more only wait for each other
    result = run(out, seed)
    if screen.as_json:
        return screen.json(result)
    screen.table(table(result))
    screen.table(novelty_table(result))
    if not screen.quiet:
        files = f"{out / 'reliability.png'}, {out / 'novelty.png'}, {out / 'results.json'}"
        print(f"In brackets: 95 % bootstrap intervals. Look at: {files} ({result['seconds']:.0f} s)")


_NET = f"One of {', '.join(nets.names())}, or package.module:function in the current folder."
_Patterns = list[str] | None


def plan(
    screen: Screen,
    net: Annotated[str, typer.Option(help=_NET, autocompletion=nets.names)],
    option: Annotated[_Patterns, typer.Option(help="Option of the network.", metavar="KEY=VALUE")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Default: 10, or 1000 for ImageNet networks.")] = None,
    include: Annotated[_Patterns, typer.Option(help="Layers to convert.", metavar="PATTERN")] = None,
    exclude: Annotated[_Patterns, typer.Option(help="Layers to leave out.", metavar="PATTERN")] = None,
) -> None:
    """Shows what `ibnn.convert` would do to a network: layers, nodes, weights. Allocates nothing.

    A network of your own is created by function(classes, **options).
    """
    with misuse():
        options: Any = parsed(option or [], "--option")
        if is_import_path(net):
            made = make_net(net, classes or 10, options)
        else:
            count = classes or (1000 if nets.input_shape(net, **options)[-1] == 224 else 10)
            with torch.device("meta"):
                made = nets.make(net, count, **options)
        found = planned(made, include=include or None, exclude=exclude or None)
    if not screen.as_json:
        return print(found)
    facts = {"net": net, "options": options, "weights": found.weights, "nodes": found.nodes}
    parts = {"layers": found.layers, "skipped": found.skipped}
    screen.json(facts | {name: [vars(entry) for entry in part] for name, part in parts.items()})


def data_list(screen: Screen, data: NewData = None) -> None:
    """Lists the data sets, and which of them are present."""
    rows = sets.status(data)
    if screen.as_json:
        return screen.json([row._asdict() for row in rows])
    cells = [[r.name, "yes" if r.found else "no", f"{r.bytes / 1e6:,.1f}" if r.bytes else "–", r.where] for r in rows]
    screen.table([["name", "present", "MB", "where"], *cells])
    if missing := [row.name for row in rows if not row.found]:
        screen.note(f"To download: ibnn data get {missing[0]}")


def data_get(
    screen: Screen,
    names: Annotated[list[str], typer.Argument(help="Names of data sets.", autocompletion=sets.names, metavar="NAME…")],
    data: NewData = None,
    mirror: Annotated[str | None, typer.Option(help="Server with NAME/FILE; default: $IBNN_MIRROR.")] = None,
) -> None:
    """Downloads data sets and checks them; keeps those that are present."""
    places = {row.name: row.where for row in sets.status(data)}
    with misuse():
        download.server(mirror)
        for name in names:
            check.choice("name", name, places)
    for name in names:
        if name in sets.KNOWN:
            download.get(name, data, mirror=mirror, progress=not screen.quiet)
    where = {name: places[name] for name in names}
    screen.result(where, "\n".join(f"{name}: {place}" for name, place in where.items()))
