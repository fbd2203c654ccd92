"""REPRODUCTION: the paper's experiments as data (`experiments/*.toml`) and the one runner of them all.

An experiment is a grid of settings × methods × seeds; a cell of it is a `Job`. What a cell gave is written to one JSON
file an experiment and preset, with the job, the costs and the provenance; a cell that is there is not run again.
Several processes may work on the same grid: each takes cells that no other has taken.
"""

import json
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ibnn.errors import complaint, nearest
from ibnn.files.atomic import locked, read_json, write_atomically
from ibnn.lab.jobs import Job, merged, run
from ibnn.lab.runs import RunFolder
from ibnn.progress import Bar

KEPT = (
    "scores",
    "temperature",
    "tempered",
    "reliability",
    "corrupted",
    "gaussian",
    "salt",
    "outsiders",
    "costs",
    "training",
)


@dataclass(frozen=True)
class Experiment:
    """A grid, read from its TOML file.

    Attributes:
        name: Of the experiment.
        preset: "cpu" or "paper", with "-smoke" behind it for a smoke run.
        title: What it shows, in a line.
        paper: Where the paper shows it.
        kind: "jobs", "regression" or "table1".
        figure: Name of the function in `ibnn.lab.figures` that draws it.
        analysis: Name of the function in `ibnn.lab.analysis` that looks into every trained model.
        job: Fields that all cells share.
        settings: What is varied besides the method, each with a name; "with" has fields for single methods, "skip"
            names methods to leave out, "seeds" is fewer than those of the rest.
        methods: What is compared, each with a name, and possibly with fewer "seeds".
        seeds: How many.
        source: The experiment whose result file it shares: itself, or the one that it is like.
    """

    name: str
    preset: str
    title: str
    paper: str
    kind: str = "jobs"
    figure: str = "benchmark"
    analysis: str = ""
    job: dict[str, Any] = field(default_factory=dict)
    settings: tuple[dict[str, Any], ...] = ({"name": ""},)
    methods: tuple[dict[str, Any], ...] = ()
    seeds: int = 1
    source: str = ""

    @property
    def smoke(self) -> bool:
        """Whether it is cut down to see if it runs at all."""
        return self.preset.endswith("-smoke")

    def only(self, methods: list[str] | None, seeds: int | None) -> "Experiment":
        """With these methods alone, and so many seeds of each; None leaves them as they are."""
        known = [method["name"] for method in self.methods]
        if unknown := [name for name in methods or () if name not in known]:
            expected, got = (", ".join(map(repr, some)) for some in (known, unknown))
            raise ValueError(complaint("methods", f"some of {expected}", got, "Leave it out for all."))
        kept = [method for method in self.methods if methods is None or method["name"] in methods]
        if seeds is None:
            return replace(self, methods=tuple(kept))
        kept, settings = ([{**entry, "seeds": seeds} for entry in some] for some in (kept, self.settings))
        return replace(self, methods=tuple(kept), settings=tuple(settings), seeds=seeds)

    def cells(self) -> Iterator["Cell"]:
        """All cells, seed by seed, so that a stopped run has every method."""
        for seed in range(self.seeds):
            for setting in self.settings:
                for method in self.methods:
                    seeds = min(setting.get("seeds", self.seeds), method.get("seeds", self.seeds))
                    if seed < seeds and method["name"] not in setting.get("skip", ()):
                        yield Cell(self, setting, method, seed)


@dataclass(frozen=True)
class Cell:
    """One setting, method and seed."""

    experiment: Experiment
    setting: dict[str, Any]
    method: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """What it is called in the result file."""
        return " / ".join(filter(None, (self.setting["name"], self.method["name"], f"seed {self.seed}")))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its job, later ones winning: the experiment's, the setting's, the method's, both together."""
        own = {key: value for key, value in self.setting.items() if key not in ("name", "with", "seeds", "skip")}
        method = {key: value for key, value in self.method.items() if key not in ("name", "seeds")}
        both = self.setting.get("with", {}).get(self.method["name"], {})
        parts = (self.experiment.job, own, method, both, {"seed": self.seed})
        fields: dict[str, Any] = {}
        for part in parts:
            fields = merged(fields, part)
        if not self.experiment.smoke:
            return fields
        from ibnn.lab import analysis

        return analysis.smoked(fields)

    @property
    def key(self) -> str:
        """What it is known by: a result with another key is of another recipe."""
        from ibnn.lab import analysis

        if self.experiment.kind != "jobs":
            return analysis.key(self.fields)
        return "-".join(filter(None, (Job(**self.fields).key, self.experiment.analysis)))


def names() -> list[str]:
    """The experiments there are."""
    folder = resources.files("ibnn.lab") / "experiments"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read(name: str, preset: str = "cpu", *, smoke: bool = False) -> Experiment:
    """An experiment at one of its sizes, or cut down to see if it runs at all."""
    if name not in names():
        remedy = f"Did you mean {nearest(name, names())!r}?"
        raise ValueError(complaint("name", f"one of {', '.join(names())}", repr(name), remedy))
    content = _content(name)
    presets = content.pop("presets")
    if preset not in presets:
        raise ValueError(complaint("preset", f"one of {', '.join(presets)}", repr(preset), 'Pass preset="cpu".'))
    chosen = presets[preset]
    kept = chosen.pop("only", None)  # names of methods
    methods = [m for m in chosen.pop("methods", []) if kept is None or m["name"] in kept]
    settings = chosen.pop("settings", [{"name": ""}])
    preset += "-smoke" if smoke else ""
    return Experiment(name, preset, **content, **chosen, settings=tuple(settings), methods=tuple(methods))


def _content(name: str) -> dict[str, Any]:
    """The TOML of an experiment on top of that of the one it is like."""
    text = (resources.files("ibnn.lab") / "experiments" / f"{name}.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    like = content.pop("like", None)
    return merged(_content(like), content) if like else content | {"source": name}


def about(name: str) -> str:
    """An experiment in a line."""
    content = _content(name)
    return f"{content['title']} ({content['paper']})"


class Results:
    """A JSON file of cells by name, which several processes may add to."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.content = path, about | {"cells": {}}
        self.content["cells"] |= self._stored()

    @property
    def cells(self) -> dict[str, Any]:
        """The cells there are."""
        cells: dict[str, Any] = self.content["cells"]
        return cells

    def _stored(self) -> dict[str, Any]:
        """The cells of the file."""
        content = read_json(self.path) if self.path.exists() else {"cells": {}}
        if not isinstance(content, dict) or not isinstance(cells := content.get("cells"), dict):
            remedy = "Move the file away, or pass another --out."
            raise ValueError(complaint(str(self.path), "a file of results", "another one", remedy))
        return cells

    def of(self, experiment: Experiment) -> dict[str, Any]:
        """Those of an experiment as it is now; what another recipe gave is left out."""
        named = {cell.name: cell.key for cell in experiment.cells()}
        return {name: cell for name, cell in self.cells.items() if named.get(name, "") == cell.get("key")}

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Puts a cell in its place, next to what others have added."""
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            self.content["cells"] |= self._stored()
            self.cells[name] = result
            write_atomically(self.path, (json.dumps(self.content, indent=1) + "\n").encode())


def results(experiment: Experiment, out: Path) -> Results:
    """What an experiment has given so far."""
    about = {"experiment": experiment.source, "preset": experiment.preset}
    about |= {"title": _content(experiment.source)["title"], "paper": _content(experiment.source)["paper"]}
    return Results(out / f"{experiment.source}-{experiment.preset}.json", about)


class Reproduced(NamedTuple):
    """The files written, results and figures, and the table, its header first."""

    files: list[Path]
    table: list[list[str]]


def reproduce(
    name: str,
    *,
    preset: str = "cpu",
    seeds: int | None = None,
    methods: list[str] | None = None,
    runs: Path = Path("runs"),
    out: Path = Path("results"),
    data: str | Path | None = None,
    smoke: bool = False,
    quiet: bool = False,
) -> Reproduced:
    """Runs what is missing of an experiment, and draws its figure.

    Args:
        name: One of `names`.
        preset: "cpu" (two cores) or "paper" (the full recipe).
        seeds: How many seeds of everything; default the preset's.
        methods: Names of the methods to run; default all.
        runs: Folder of run folders, by the hash of their job; experiments share them.
        out: Folder of result files and figures.
        data: Folder of the data sets.
        smoke: Tiny made data, two steps, small networks: does it run at all? The results mean nothing, and have files
            of their own.
        quiet: Shows nothing.
    """
    whole = read(name, preset, smoke=smoke)
    experiment = whole.only(methods, seeds)
    cells = list(experiment.cells())
    found = results(experiment, out)
    with Bar(f"{name} ({preset})", len(cells), shown=not quiet) as bar:
        left = cells
        while left:
            later = []
            for cell in left:
                done = _attempt(cell, found, runs, data, quiet)
                bar.advance() if done else later.append(cell)
            if len(later) == len(left):
                time.sleep(5)  # others are at them
            left = later
    from ibnn.lab import figures

    shown = whole.only(None, seeds) if seeds and seeds > whole.seeds else whole  # with what was there before
    written = [found.path] if found.path.exists() else []
    return Reproduced(written + figures.draw(shown, found.of(shown), out), figures.table(shown, found.of(shown)))


def _attempt(cell: Cell, found: Results, runs: Path, data: str | Path | None, quiet: bool) -> bool:
    """Runs a cell unless it is there; False if another process has taken it."""
    key = cell.key
    if found.cells.get(cell.name, {}).get("key") == key:
        return True
    folder = runs / key.partition("-")[0]  # other experiments' cells may share it
    with RunFolder(folder).lock(wait=False) as mine:
        if mine:
            found.add(cell.name, {"key": key, **_result(cell, folder, data, quiet)})
        return mine


def _result(cell: Cell, folder: Path, data: str | Path | None, quiet: bool) -> dict[str, Any]:
    """What a cell gives."""
    from ibnn.lab import analysis

    experiment = cell.experiment
    if experiment.kind != "jobs":
        computed: dict[str, Any] = getattr(analysis, experiment.kind)(cell.fields)
        return computed
    job = Job(**cell.fields)
    splits = analysis.made_data(job) if experiment.smoke else None
    result = run(job, folder, data_folder=data, splits=splits, quiet=quiet, held=True)
    kept = {name: result[name] for name in KEPT if name in result}
    if experiment.analysis:
        looked = getattr(analysis, experiment.analysis)(folder, data, splits)
        kept = {"scores": result["scores"], "costs": result["costs"], "analysis": looked}
    return kept | {"job": result["job"], "provenance": result["provenance"]}
