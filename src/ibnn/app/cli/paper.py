"""`reproduce` and `report`: the paper's experiments, and a page about runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibnn.app.cli.options import Data, Json
from ibnn.app.cli.screen import MisuseError, Screen, check_out, misuse
from ibnn.errors import complaint

if TYPE_CHECKING:
    from ibnn.lab.reproduce import Experiment


def _names() -> list[str]:
    from ibnn.lab import reproduce

    return ["list", "all", *reproduce.names()]


_METHODS = "Names separated by commas; may be repeated. Default: all."


def reproduce(
    screen: Screen,
    name: Annotated[str, typer.Argument(metavar="NAME|all|list", autocompletion=_names)] = "list",
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
        check_out("--out", out, folder=True)
        check_out("--runs", runs, folder=True)
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
    """Returns the named methods; a name may itself contain commas."""
    known = {method["name"] for method in experiment.methods}
    named = [[text] if text in known else map(str.strip, text.split(",")) for text in methods or ()]
    return [name for some in named for name in some] or None


def report(
    screen: Screen,
    runs: Annotated[list[Path], typer.Argument(help="Run folders; unfinished runs are skipped.", metavar="RUNS…")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Calibration report",
    json: Json = False,
) -> None:
    """Writes one self-contained HTML page about one or more runs: scores, calibration, uncertainty, provenance."""
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
            screen.note(f"Skipped: {run}, which has not finished.")
    try:
        write_report(done, out, title=title)
    except FileNotFoundError as error:  # a folder without its answers
        raise MisuseError(str(error)) from error
    screen.result({"report": str(out)}, str(out), json)
