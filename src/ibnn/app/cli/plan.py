"""`plan`: what converting a network would do."""

from typing import Annotated, Any

import typer

from ibnn.app.cli.options import Json
from ibnn.app.cli.screen import Screen, misuse
from ibnn.app.cli.settings import check_net, parsed


def _nets() -> list[str]:
    from ibnn import nets

    return list(nets.names())


_NET = "Name of a network, or package.module:function in the current folder; lists all networks if omitted."
_Patterns = list[str] | None


def plan(
    screen: Screen,
    net: Annotated[str | None, typer.Option(help=_NET, autocompletion=_nets)] = None,
    option: Annotated[_Patterns, typer.Option(help="Option of the network.", metavar="KEY=VALUE")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Default: 10, or 1000 for ImageNet networks.")] = None,
    include: Annotated[_Patterns, typer.Option(help="Layers to convert.", metavar="PATTERN")] = None,
    exclude: Annotated[_Patterns, typer.Option(help="Layers to leave out.", metavar="PATTERN")] = None,
    json: Json = False,
) -> None:
    """Shows what `ibnn.convert` would do to a network: layers, nodes, weights. Allocates nothing.

    A network of your own is created by function(classes, **options).
    """
    from ibnn.convert import plan as planned_by

    if net is None:
        _list(screen, classes, json)
        return
    with misuse():
        options = parsed(option or [], "--option")
        check_net(net, options)
        count = classes or _classes(net, options)
        planned = planned_by(_made(net, count, options), include=include or None, exclude=exclude or None)
    if not json:
        print(planned)
        return
    facts = {"net": net, "classes": count, "options": options}
    facts |= {"weights": planned.weights, "nodes": planned.nodes, "ratio": planned.weights / planned.nodes}
    parts = {"layers": planned.layers, "skipped": planned.skipped}
    screen.json(facts | {name: [vars(entry) for entry in part] for name, part in parts.items()})


def _classes(net: str, options: dict[str, Any]) -> int:
    """Returns the default number of classes: 1000 for networks that take ImageNet's images."""
    from ibnn import nets
    from ibnn.nets.own import is_own

    return 1000 if not is_own(net) and nets.input_shape(net, **options)[-1] == 224 else 10


def _made(net: str, classes: int, options: dict[str, Any]) -> Any:
    import torch

    from ibnn import nets
    from ibnn.nets.own import is_own, make_own

    if is_own(net):
        return make_own(net, classes, options)
    with torch.device("meta"):
        return nets.make(net, classes, **options)


def _list(screen: Screen, classes: int | None, json: bool) -> None:
    from ibnn import nets
    from ibnn.lab import sizes

    rows: list[dict[str, Any]] = []
    for name in nets.names():
        count = classes or _classes(name, {})
        size = sizes.count(_made(name, count, {}))
        rows.append({"net": name, "input": list(nets.input_shape(name)), "classes": count, **size._asdict()})
    if json:
        screen.json(rows)
        return
    head = ["net", "input", "classes", "weights", "nodes", "weights per node"]
    cells = [[r["net"], "×".join(map(str, r["input"])), *(f"{r[k]:,.0f}" for k in list(r)[2:])] for r in rows]
    screen.table([head, *cells])
    screen.note("One of them in detail: ibnn plan --net NAME")
