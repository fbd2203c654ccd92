"""`demo`, `plan` and `data`: what there is, before anything is trained."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ibnn.app.cli.screen import Json, Screen, check_out, misuse
from ibnn.app.cli.settings import check_net, parsed

Place = Annotated[
    Path | None, typer.Option("--data", file_okay=False, help="Where data sets are; default $IBNN_DATA or ./data.")
]


def _nets() -> list[str]:
    from ibnn import nets

    return list(nets.names())


def _sets() -> list[str]:
    from ibnn import data

    return list(data.names())


def demo(
    screen: Screen,
    out: Annotated[Path, typer.Option(help="Folder for figures and results.json.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Decides splits, weights, order and draws.")] = 0,
    json: Json = False,
) -> None:
    """Trains a plain network and an iBNN on embedded digits: a table and three figures. Start here."""
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


def plan(
    screen: Screen,
    net: Annotated[
        str | None,
        typer.Option(
            help="Name of a network, or package.module:function of this folder; without it all are listed.",
            autocompletion=_nets,
        ),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Of the network.", metavar="KEY=VALUE")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="10, or 1000 for those of ImageNet.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Layers to convert.", metavar="PATTERN")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Layers to leave out.", metavar="PATTERN")] = None,
    json: Json = False,
) -> None:
    """Shows what `ibnn.convert` would do to a network: layers, nodes, weights. Nothing is allocated.

    A network of your own is made by calling function(classes, **options).
    """
    import torch

    from ibnn import nets
    from ibnn.convert import plan as planned_by
    from ibnn.lab import sizes
    from ibnn.nets.own import is_own, make_own

    def count(name: str, **options: Any) -> int:
        return classes or (1000 if nets.input_shape(name, **options)[-1] == 224 else 10)

    if net is None:
        rows = []
        for name in nets.names():
            with torch.device("meta"):
                size = sizes.count(nets.make(name, count(name)))
            rows.append({"net": name, "input": list(nets.input_shape(name)), "classes": count(name), **size._asdict()})
        if json:
            screen.json(rows)
            return
        head = ["net", "input", "classes", "weights", "nodes", "weights per node"]
        cells = [[r["net"], "×".join(map(str, r["input"])), *(f"{r[k]:,.0f}" for k in list(r)[2:])] for r in rows]
        screen.table([head, *cells])
        screen.note("One of them in detail: ibnn plan --net NAME")
        return
    with misuse():
        options = parsed(option or [], "--option")
        check_net(net, options)
        if is_own(net):
            made = make_own(net, classes or 10, options)
        else:
            with torch.device("meta"):
                made = nets.make(net, count(net, **options), **options)
        planned = planned_by(made, include=include or None, exclude=exclude or None)
    if json:
        facts = {"net": net, "classes": (classes or 10) if is_own(net) else count(net, **options), "options": options}
        facts |= {"weights": planned.weights, "nodes": planned.nodes, "ratio": planned.weights / planned.nodes}
        parts = {"layers": planned.layers, "skipped": planned.skipped}
        screen.json(facts | {name: [vars(entry) for entry in part] for name, part in parts.items()})
    else:
        print(planned)


def data_list(screen: Screen, data: Place = None, json: Json = False) -> None:
    """Lists the data sets, and which of them are there."""
    from ibnn.data import status

    rows = status(data)
    if json:
        screen.json([row._asdict() for row in rows])
        return
    cells = [[r.name, "yes" if r.found else "no", f"{r.bytes / 1e6:,.1f}" if r.bytes else "–", r.where] for r in rows]
    screen.table([["name", "there", "MB", "where"], *cells])
    missing = [row.name for row in rows if not row.found]
    if missing:
        screen.note(f"To download: ibnn data get {missing[0]}")


def data_get(
    screen: Screen,
    names: Annotated[list[str], typer.Argument(help="Names of data sets.", autocompletion=_sets, metavar="NAME…")],
    data: Place = None,
    mirror: Annotated[str | None, typer.Option(help="Server with NAME/FILE; default $IBNN_MIRROR.")] = None,
    json: Json = False,
) -> None:
    """Downloads data sets and checks them; what is there already is left alone."""
    from ibnn.data import get, status
    from ibnn.data.download import server
    from ibnn.data.sets import KNOWN, known

    places = {row.name: row.where for row in status(data)}
    with misuse():
        server(mirror)
        for name in names:
            if name not in places:
                known(name)  # complains
    for name in names:
        if name in KNOWN:
            get(name, data, mirror=mirror, progress=not screen.quiet)
    where = {name: places[name] for name in names}
    if json:
        screen.json(where)
    else:
        print("\n".join(f"{name}: {place}" for name, place in where.items()))
