"""`data list` and `data get`: the data sets on this machine."""

from typing import Annotated

import typer

from ibnn.app.cli.options import Json, NewData
from ibnn.app.cli.screen import Screen, misuse


def _sets() -> list[str]:
    from ibnn import data

    return list(data.names())


def data_list(screen: Screen, data: NewData = None, json: Json = False) -> None:
    """Lists the data sets, and which of them are present."""
    from ibnn.data import status

    rows = status(data)
    if json:
        screen.json([row._asdict() for row in rows])
        return
    cells = [[r.name, "yes" if r.found else "no", f"{r.bytes / 1e6:,.1f}" if r.bytes else "–", r.where] for r in rows]
    screen.table([["name", "present", "MB", "where"], *cells])
    if missing := [row.name for row in rows if not row.found]:
        screen.note(f"To download: ibnn data get {missing[0]}")


def data_get(
    screen: Screen,
    names: Annotated[list[str], typer.Argument(help="Names of data sets.", autocompletion=_sets, metavar="NAME…")],
    data: NewData = None,
    mirror: Annotated[str | None, typer.Option(help="Server with NAME/FILE; default: $IBNN_MIRROR.")] = None,
    json: Json = False,
) -> None:
    """Downloads data sets and checks them; keeps those that are present."""
    from ibnn.data import get, status
    from ibnn.data.download import server
    from ibnn.data.sets import KNOWN, known

    places = {row.name: row.where for row in status(data)}
    with misuse():
        server(mirror)
        for name in names:
            if name not in places:
                known(name)  # raises
    for name in names:
        if name in KNOWN:
            get(name, data, mirror=mirror, progress=not screen.quiet)
    where = {name: places[name] for name in names}
    screen.result(where, "\n".join(f"{name}: {place}" for name, place in where.items()), json)
