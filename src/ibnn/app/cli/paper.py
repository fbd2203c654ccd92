"""`reproduce` and `report`: the paper's experiments, and pages about runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibnn.app.cli.screen import Json, MisuseError, Screen, check_out, misuse
from ibnn.app.cli.train import Data
from ibnn.errors import complaint

if TYPE_CHECKING:
    from ibnn.lab.reproduce import Experiment


def _names() -> list[str]:
    from ibnn.lab import reproduce

    return ["list", "all", *reproduce.names()]


def reproduce(
    screen: Screen,
    name: Annotated[str, typer.Argument(metavar="NAME|all|list", autocompletion=_names)] = "list",
    preset: Annotated[str, typer.Option(help="cpu (two cores) or paper (the full recipe).")] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; default the preset's.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="A name, or several with commas between; may be repeated. Default all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of results and figures.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Folder of run folders.")] = Path("runs"),
    data: Data = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny made data: does it run? The numbers mean nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Runs the paper's experiments; what is done already is not run again."""
    from ibnn.lab import reproduce as paper

    known = paper.names()
    if name == "list":
        if json:
            screen.json({each: paper.about(each) for each in known})
        else:
            screen.table([["name", "what it shows"], *([each, paper.about(each)] for each in known)])
        return
    with misuse():
        chosen = {each: paper.read(each, preset) for each in (known if name == "all" else [name])}
        wanted = {each: _wanted(methods, experiment) for each, experiment in chosen.items()}
        for each, experiment in chosen.items():
            experiment.only(wanted[each], seeds)
        for option, place in (("--out", out), ("--runs", runs)):
            check_out(option, place, folder=True)
    found = {}
    for each in chosen:
        options: dict[str, Any] = {"preset": preset, "seeds": seeds, "methods": wanted[each], "smoke": smoke}
        files, table = paper.reproduce(each, **options, runs=runs, out=out, data=data, quiet=screen.quiet)
        found[each] = {"files": list(map(str, files)), "table": table}
        if not json:
            screen.table(table, title=paper.about(each))
            screen.note("\n".join(f"wrote {file}" for file in files))
    if json:
        screen.json(found)


def _wanted(methods: list[str] | None, experiment: "Experiment") -> list[str] | None:
    """The methods named; names may have commas themselves."""
    known = {method["name"] for method in experiment.methods}
    named = [[text] if text in known else map(str.strip, text.split(",")) for text in methods or ()]
    return [name for some in named for name in some] or None


def report(
    screen: Screen,
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; what is no finished run is left out.", metavar="RUNS…")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page's file.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's heading.")] = "Calibration report",
    json: Json = False,
) -> None:
    """Writes one HTML page about one or several runs."""
    from ibnn.lab.report import write_report
    from ibnn.lab.runs import RunFolder

    with misuse():
        check_out("--out", out)
        for run in runs:
            if not run.exists():
                raise ValueError(complaint("RUNS", "run folders", f"no folder {run}", "Train first: ibnn train."))
        done = [run for run in runs if RunFolder(run).finished]
        if not done:
            got = f"none in {', '.join(map(str, runs))}"
            raise ValueError(complaint("RUNS", "folders of finished runs", got, "Let a run finish: ibnn train."))
    for run in runs:
        if run.is_dir() and run not in done:
            screen.note(f"Left out: {run}, which has not finished.")
    try:
        write_report(done, out, title=title)
    except FileNotFoundError as error:  # a folder without its answers
        raise MisuseError(str(error)) from error
    if json:
        screen.json({"report": str(out)})
    else:
        print(out)
