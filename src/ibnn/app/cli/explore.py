"""EXPLORE: `demo`, `plan`, `bench`, `data list`, `data get` and `reproduce`: no data or job of your own is needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import nn

from ibnn import nets
from ibnn.app.cli.options import Data, Json, NewData
from ibnn.app.cli.screen import Screen, check_out, misuse
from ibnn.app.cli.train import parsed
from ibnn.convert import plan as planned_by
from ibnn.data import download, sets
from ibnn.lab import sizes
from ibnn.lab.imported_net import is_import_path, make_net

if TYPE_CHECKING:
    from ibnn.lab.reproduce import Experiment


def demo(
    screen: Screen,
    out: Annotated[Path, typer.Option(help="Folder for figures and results.json.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, weights, order and draws.")] = 0,
    json: Json = False,
) -> None:
    """Trains a plain network and an iBNN on embedded digits; prints tables and draws four figures. Start here."""
    check_out("--out", out, folder=True)
    from ibnn.lab.demo import explain, novelty_table, run, table

    result = run(out, seed, quiet=screen.quiet)
    if json:
        return screen.json(result)
    screen.table(table(result))
    screen.table(novelty_table(result))
    if not screen.quiet:
        names = (*(f"{name}.png" for name in ("reliability", "digits", "entropy", "novelty")), "results.json")
        files = ", ".join(str(out / name) for name in names)
        print(f"{explain(result)}\n\nLook at: {files} ({result['seconds']:.0f} s)")


def bench(
    screen: Screen,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSON file of results; adds what is missing in it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small networks and batches; takes half a minute.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A part of cells' names (lenet, step, lenet / step); may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Measures time and memory of iBNNs and of installed rivals, relative to plain networks.

    Takes half an hour on two cores, --only lenet two minutes. A ratio of 1 means as fast, or as light.
    """
    from ibnn.lab.bench import QUICK, misses, rival_rows, rows
    from ibnn.lab.bench import bench as measure

    check_out("--out", out)
    content = measure(out, size=QUICK if quick else None, only=only or (), note=screen.note)
    if json:
        return screen.json(content)
    found, above = rows(content["cells"]), misses(content["cells"])
    if quick:  # the limits are for the networks and batches of the full benchmark
        above = []
    screen.table(found, title="iBNN to plain network: bytes kept for backward, seconds of the rest")
    for line in above:
        screen.note(f"above its limit: {line}")
    if quick or any(line.startswith("lenet") for line in above):
        screen.note("Overhead dominates in tiny networks and batches: large ones have ratios nearer to 1.")
    if quick:
        screen.note("Run `ibnn bench` without --quick to compare with the limits.")
    if (cell := content["cells"].get("rivals")) is not None:
        screen.table(rival_rows(cell), title=f"{cell['net']}: methods to the plain network")


_NET = "Name of a network, or package.module:function in the current folder; lists all networks if omitted."
_Patterns = list[str] | None


def plan(
    screen: Screen,
    net: Annotated[str | None, typer.Option(help=_NET, autocompletion=nets.names)] = None,
    option: Annotated[_Patterns, typer.Option(help="Option of the network.", metavar="KEY=VALUE")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Default: 10, or 1000 for ImageNet networks.")] = None,
    include: Annotated[_Patterns, typer.Option(help="Layers to convert.", metavar="PATTERN")] = None,
    exclude: Annotated[_Patterns, typer.Option(help="Layers to leave out.", metavar="PATTERN")] = None,
    where: Annotated[str, typer.Option(help="Nodes that have latents: input, output or both.")] = "input",
    bias_latents: Annotated[str, typer.Option(help="Latents on biases: none, layer (one each) or node.")] = "none",
    json: Json = False,
) -> None:
    """Shows what `ibnn.convert` would do to a network: layers, nodes, weights. Allocates nothing.

    A network of your own is created by function(classes, **options).
    """
    if net is None:
        return _list(screen, classes, json)
    with misuse():
        options = parsed(option or [], "--option")
        count = classes or _classes(net, options)
        chosen: Any = {"include": include or None, "exclude": exclude or None}
        chosen |= {"where": where, "bias_latents": bias_latents}
        planned = planned_by(_made(net, count, options), **chosen)
    if not json:
        return print(planned)
    facts = {"net": net, "classes": count, "options": options, "where": where, "bias_latents": bias_latents}
    facts |= {"weights": planned.weights, "nodes": planned.nodes, "ratio": planned.weights / planned.nodes}
    parts = {"layers": planned.layers, "skipped": planned.skipped}
    screen.json(facts | {name: [vars(entry) for entry in part] for name, part in parts.items()})


def _classes(net: str, options: dict[str, Any]) -> int:
    """Returns the default number of classes: 1000 for networks that take ImageNet's images."""
    return 1000 if not is_import_path(net) and nets.input_shape(net, **options)[-1] == 224 else 10


def _made(net: str, classes: int, options: dict[str, Any]) -> nn.Module:
    if is_import_path(net):
        return make_net(net, classes, options)
    with torch.device("meta"):
        return nets.make(net, classes, **options)


def _list(screen: Screen, classes: int | None, json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in nets.names():
        count = classes or _classes(name, {})
        size = sizes.count(_made(name, count, {}))
        rows.append({"net": name, "input": list(nets.input_shape(name)), "classes": count, **size._asdict()})
    if json:
        return screen.json(rows)
    head = ["net", "input", "classes", "weights", "nodes", "weights per node"]
    cells = [[r["net"], "×".join(map(str, r["input"])), *(f"{r[k]:,.0f}" for k in list(r)[2:])] for r in rows]
    screen.table([head, *cells])
    screen.note("One of them in detail: ibnn plan --net NAME")


def data_list(screen: Screen, data: NewData = None, json: Json = False) -> None:
    """Lists the data sets, and which of them are present."""
    rows = sets.status(data)
    if json:
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
    json: Json = False,
) -> None:
    """Downloads data sets and checks them; keeps those that are present."""
    places = {row.name: row.where for row in sets.status(data)}
    with misuse():
        download.server(mirror)
        for name in names:
            if name not in places:
                sets.known(name)  # raises
    for name in names:
        if name in sets.KNOWN:
            download.get(name, data, mirror=mirror, progress=not screen.quiet)
    where = {name: places[name] for name in names}
    screen.result(where, "\n".join(f"{name}: {place}" for name, place in where.items()), json)


def _experiments() -> list[str]:
    from ibnn.lab import reproduce

    return ["list", "all", *reproduce.names()]


_METHODS = "Names separated by commas; may be repeated. Default: all."


def reproduce(
    screen: Screen,
    name: Annotated[str, typer.Argument(metavar="NAME|all|list", autocompletion=_experiments)] = "list",
    preset: Annotated[str, typer.Option(help="cpu (for two cores) or paper (the full experiment).")] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default: the preset's.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help=_METHODS)] = None,
    out: Annotated[Path, typer.Option(help="Folder for results and figures.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Folder for run folders.")] = Path("runs"),
    data: Data = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tests the code on tiny synthetic data.")] = False,
    json: Json = False,
) -> None:
    """Runs the paper's experiments; finished parts are not run again."""
    from ibnn.lab import reproduce as paper

    about = {each: paper.about(each) for each in paper.names()}
    if name == "list":
        return screen.json(about) if json else screen.table([("name", "what it shows"), *about.items()])
    with misuse():
        chosen = {each: paper.read(each, preset) for each in (about if name == "all" else [name])}
        wanted = {each: _wanted(methods, experiment) for each, experiment in chosen.items()}
        for each, experiment in chosen.items():
            experiment.only(wanted[each], seeds)
        check_out("--out", out, folder=True)
        check_out("--runs", runs, folder=True)
    found = {}
    for each in chosen:
        options: dict[str, Any] = {"preset": preset, "seeds": seeds, "methods": wanted[each], "smoke": smoke}
        files, table = paper.reproduce(each, **options, runs=runs, out=out, data=data, quiet=screen.quiet)
        found[each] = {"files": list(map(str, files)), "table": table}
        if not json:
            screen.table(table, title=about[each])
            screen.note("\n".join(f"wrote {file}" for file in files))
    if json:
        screen.json(found)


def _wanted(methods: list[str] | None, experiment: "Experiment") -> list[str] | None:
    """Returns the named methods; a name may itself contain commas."""
    known = {method["name"] for method in experiment.methods}
    named = [[text] if text in known else map(str.strip, text.split(",")) for text in methods or ()]
    return [name for some in named for name in some] or None
