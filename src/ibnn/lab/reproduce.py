"""REPRODUCTION: the one runner of the paper's experiments.

Every experiment and preset has one JSON file of results, with the job, the costs and the provenance of each cell. Cells
with a result are not run again. Several processes may work on one grid: each takes cells that no other has taken.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from ibnn.errors import complaint
from ibnn.files.atomic import locked, read_json, write_atomically
from ibnn.lab import figures, sizes
from ibnn.lab.analysis import ANALYSES
from ibnn.lab.experiment import Cell, Experiment, about, content, names, read
from ibnn.lab.jobs import Job, run
from ibnn.lab.parts import made_data
from ibnn.lab.provenance import provenance
from ibnn.lab.runs import RunFolder
from ibnn.progress import Bar

__all__ = ["Experiment", "Reproduced", "Results", "about", "names", "read", "reproduce", "results"]

KEPT = (  # parts of result.json
    *("scores", "temperature", "tempered", "reliability", "corrupted", "gaussian", "salt", "outsiders", "novelty"),
    *("without fallback", "costs", "training"),
)


class Results:
    """A JSON file of cells by name; several processes may add to it."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.cells = self._stored()

    def _stored(self) -> dict[str, Any]:
        """Reads the cells of the file."""
        content = read_json(self.path) if self.path.exists() else {"cells": {}}
        if not isinstance(content, dict) or not isinstance(cells := content.get("cells"), dict):
            remedy = "Move the file away, or pass another --out."
            raise ValueError(complaint(str(self.path), "a file of results", "another one", remedy))
        return cells

    def of(self, experiment: Experiment) -> dict[str, Any]:
        """Returns the cells of an experiment as it is now, without stale ones."""
        named = {cell.name: cell.key for cell in experiment.cells()}
        return {name: cell for name, cell in self.cells.items() if named.get(name, "") == cell.get("key")}

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Adds a cell to the file, and to those that other processes have added."""
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            self.cells |= self._stored() | {name: result}
            write_atomically(self.path, (json.dumps(self.about | {"cells": self.cells}, indent=1) + "\n").encode())


def results(experiment: Experiment, out: Path) -> Results:
    """Returns the results of an experiment so far."""
    about = {"experiment": experiment.source, "preset": experiment.preset}
    about |= {"title": content(experiment.source)["title"], "paper": content(experiment.source)["paper"]}
    return Results(out / f"{experiment.source}-{experiment.preset}.json", about)


class Reproduced(NamedTuple):
    """The files written, results and figures, and the table, its header first."""

    files: list[Path]
    table: list[list[str]]


class Folders(TypedDict, total=False):
    """Folders of an experiment."""

    runs: Path  # run folders, by the hash of their job; experiments share them; default "runs"
    out: Path  # result files and figures; default "results"
    data: str | Path | None  # data sets; default as `ibnn.data.load`


class _Folders(NamedTuple):
    runs: Path = Path("runs")
    out: Path = Path("results")
    data: str | Path | None = None


def reproduce(
    name: str,
    *,
    preset: str = "cpu",
    seeds: int | None = None,
    methods: list[str] | None = None,
    smoke: bool = False,
    quiet: bool = False,
    **folders: Unpack[Folders],
) -> Reproduced:
    """Runs the cells of an experiment that have no result yet, and draws its figure.

    Args:
        name: One of `names`.
        preset: "cpu" (two cores) or "paper" (as the paper).
        seeds: How many seeds of everything; default the preset's.
        methods: Names of the methods to run; default all.
        smoke: Made-up data, two steps, small networks: does it run at all? The results mean nothing, and have files of
            their own.
        quiet: Shows nothing.
        **folders: `runs`, `out` and `data`, see `Folders`.
    """
    places = _Folders(**folders)
    whole = read(name, preset, smoke=smoke)
    experiment = whole.only(methods, seeds)
    left = list(experiment.cells())
    found = results(experiment, places.out)
    with Bar(f"{name} ({preset})", len(left), shown=not quiet) as bar:
        while left:
            later = []
            for cell in left:
                done = _attempt(cell, found, places, quiet)
                bar.advance() if done else later.append(cell)
            if len(later) == len(left):
                time.sleep(5)  # other processes run them
            left = later
    shown = whole.only(None, seeds) if seeds and seeds > whole.seeds else whole  # with earlier results
    cells = found.of(shown)
    written = [found.path] if found.path.exists() else []
    return Reproduced(written + figures.draw(shown, cells, places.out), figures.table(shown, cells))


def _attempt(cell: Cell, found: Results, places: _Folders, quiet: bool) -> bool:
    """Runs a cell unless it has a result; returns False if another process has taken it."""
    key = cell.key
    if found.cells.get(cell.name, {}).get("key") == key:
        return True
    folder = places.runs / key.partition("-")[0]  # cells of other experiments may share it
    with RunFolder(folder).lock(wait=False) as mine:
        if mine:
            found.add(cell.name, {"key": key, **_result(cell, folder, places.data, quiet)})
        return mine


def _result(cell: Cell, folder: Path, data: str | Path | None, quiet: bool) -> dict[str, Any]:
    """Computes the result of a cell."""
    experiment = cell.experiment
    if experiment.kind == "table1":
        return {"rows": [row._asdict() for row in sizes.table1()], "provenance": provenance()}
    job = Job(**cell.fields)
    splits = made_data(job) if experiment.smoke else None
    result = run(job, folder, data_folder=data, splits=splits, quiet=quiet, held=True)
    kept = {name: result[name] for name in KEPT if name in result}
    if experiment.analysis:
        analysed = ANALYSES[experiment.analysis](folder, data, splits)
        kept = {"scores": result["scores"], "costs": result["costs"], "analysis": analysed}
    return kept | {"job": result["job"], "provenance": result["provenance"]}
