"""Runs an experiment: a recipe of settings × methods × seeds, cell by cell, into one result file.

    IBNN_DATA=FOLDER python experiments/reproduce.py NAME        # or: make reproduce NAME=…; without NAME, a list

A recipe (recipes/NAME.toml) names networks, data, methods and seeds. A cell is one setting, method and seed; it is
trained by one thread into a run folder (runs/KEY), and its row is added to results/NAME-PRESET.json at once. Cells that
have a row are not run again, stopped ones resume, and several processes share the work: start the same command twice.
Rows of methods with `of` train nothing: they answer with the kept runs of another method (see derived.py). `--again`
makes the rows of all kept runs anew, with the present code and without training.
"""

import argparse
import itertools
import json
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import figures
import torch
from analysis import ANALYSES
from derived import DERIVED
from noisy import noise_curves
from provenance import provenance
from smoke import cut_down, made_data

from ibnn import check
from ibnn.errors import complaint
from ibnn.files.atomic import locked, write_atomically
from ibnn.lab.evaluation import evaluate
from ibnn.lab.job import Job, merged, short_hash
from ibnn.lab.jobs import read_run, run
from ibnn.lab.parts import Splits, make_data
from ibnn.lab.runs import RunFolder
from ibnn.progress import Bar

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PROVENANCE = "provenance.json"  # of the training, in a run folder
KEPT = (  # parts of an evaluation that a row keeps
    *("scores", "temperature", "tempered", "reliability", "corrupted", "gaussian", "salt", "outsiders", "novelty"),
    *("costs", "training"),
)
_NO_FIELDS = ("name", "with", "seeds", "skip", "size")  # entries of settings and methods that are no fields of a job
_DERIVED = ("of", "make", "members", "samples")  # entries of a method that answers with kept runs of another


# ------------------------------------------------------------------------------------------------ recipes


@dataclass(frozen=True)
class Experiment:
    """A grid, read from its recipe.

    Each setting and method has a name and fields of the job, and "seeds" reduces its seeds. In a setting, "with" has
    fields for single methods, "skip" names methods to leave out, and "size" is the number of weights relative to the
    smallest setting. A method with "of" names another one: seed i answers with its runs of the seeds i · members to
    (i + 1) · members − 1, as the function "make" of derived.py joins them, with "samples" draws per component. Methods
    whose package ("needs") is not installed are left out.
    """

    name: str
    preset: str  # "cpu" or "paper", followed by "-smoke" for a smoke run
    title: str  # what it shows, in a line
    paper: str  # where the paper shows it
    figure: str = "benchmark"  # name of the function in figures/ that draws it
    analysis: str = ""  # name of the function in analysis.py that is applied to every run folder
    job: dict[str, Any] = field(default_factory=dict)  # fields that all cells share
    settings: tuple[dict[str, Any], ...] = ({"name": ""},)  # what is varied besides the method
    methods: tuple[dict[str, Any], ...] = ()  # what is compared
    seeds: int = 1
    source: str = ""  # the experiment whose result file it shares: itself, or the one that it is like

    @property
    def smoke(self) -> bool:
        """Whether its jobs are cut down to see if they run at all."""
        return self.preset.endswith("-smoke")

    def only(self, methods: list[str] | None, seeds: int | None, setting: str = "") -> "Experiment":
        """Returns the experiment with these methods, this number of seeds and setting (its name or beginning)."""
        if setting:
            same = [one for one in self.settings if one["name"] == setting]
            kept_settings = same or [one for one in self.settings if one["name"].startswith(setting)]
            return replace(self, settings=tuple(kept_settings)).only(methods, seeds)
        known = [method["name"] for method in self.methods]
        for name in methods or ():
            check.choice("methods", name, known)
        kept = [method for method in self.methods if methods is None or method["name"] in methods]
        if seeds is None:
            return replace(self, methods=tuple(kept))
        kept, settings = ([{**entry, "seeds": seeds} for entry in some] for some in (kept, self.settings))
        return replace(self, methods=tuple(kept), settings=tuple(settings), seeds=seeds)

    def cells(self) -> Iterator["Cell"]:
        """Yields all cells, seed by seed, so that an interrupted run has every method."""
        for seed, setting, method in itertools.product(range(self.seeds), self.settings, self.methods):
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
        """Its name in the result file."""
        return " / ".join(filter(None, (self.setting["name"], self.method["name"], f"seed {self.seed}")))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its job. Later ones win: the experiment's, the setting's, the method's, those of the pair."""
        own, method = ({k: v for k, v in part.items() if k not in _NO_FIELDS} for part in (self.setting, self.method))
        both = self.setting.get("with", {}).get(self.method["name"], {})
        fields = reduce(merged, (own, method, both, {"seed": self.seed}), self.experiment.job)
        return cut_down(fields) if self.experiment.smoke else fields

    @property
    def job(self) -> Job:
        """What is trained."""
        return Job(**self.fields)

    def members(self) -> list["Cell"]:
        """Returns the cells whose runs answer for this one; none if it is trained itself."""
        if "of" not in self.method:
            return []
        every = {method["name"]: method for method in read_methods(self.experiment)}
        check.choice("of", self.method["of"], every)
        count = self.method.get("members", 1)
        seeds = range(self.seed * count, (self.seed + 1) * count)
        return [Cell(self.experiment, self.setting, every[self.method["of"]], seed) for seed in seeds]

    @property
    def key(self) -> str:
        """Configuration hash; results with another hash are stale."""
        if members := self.members():
            options = {name: self.method[name] for name in _DERIVED if name in self.method}
            return short_hash(options | {"members": [member.key for member in members]})
        return "-".join(filter(None, (self.job.key, self.experiment.analysis)))


def names() -> list[str]:
    """Returns the names of the experiments."""
    return sorted(path.stem for path in (HERE / "recipes").glob("*.toml"))


def read(name: str, preset: str = "cpu", *, smoke: bool = False) -> Experiment:
    """Returns an experiment at one of its presets, on request cut down to see if it runs at all."""
    check.choice("name", name, names())
    found = content(name)
    presets = found.pop("presets")
    check.choice("preset", preset, presets)
    chosen = presets[preset]
    kept = chosen.pop("only", None)  # names of methods
    methods = [m for m in chosen.pop("methods", []) if kept is None or m["name"] in kept]
    settings = chosen.pop("settings", [{"name": ""}])
    preset += "-smoke" if smoke else ""
    return Experiment(name, preset, **found, **chosen, settings=tuple(settings), methods=tuple(methods))


def read_methods(experiment: Experiment) -> list[dict[str, Any]]:
    """Returns all methods of an experiment's recipe, also those that are left out of it."""
    methods: list[dict[str, Any]] = content(experiment.name)["presets"][experiment.preset.split("-")[0]]["methods"]
    return methods


def content(name: str) -> dict[str, Any]:
    """Reads a recipe, merged into that of the experiment it is like."""
    own = tomllib.loads((HERE / "recipes" / f"{name}.toml").read_text(encoding="utf-8"))
    like = own.pop("like", None)
    return merged(content(like), own) if like else own | {"source": name}


def about(name: str) -> str:
    """Describes an experiment in a line."""
    found = content(name)
    return f"{found['title']} ({found['paper']})"


# ------------------------------------------------------------------------------------------------ results


class Results:
    """A JSON file of cells by name; several processes may add to it."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.cells = self._stored()

    def _stored(self) -> dict[str, Any]:
        content = json.loads(self.path.read_text()) if self.path.exists() else {"cells": {}}
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
    about |= {name: content(experiment.source)[name] for name in ("title", "paper")}
    return Results(out / f"{experiment.source}-{experiment.preset}.json", about)


# ------------------------------------------------------------------------------------------------ running


class Folders(NamedTuple):
    """Where an experiment reads and writes."""

    runs: Path = Path("runs")  # run folders, by the hash of their job; experiments share them
    out: Path = RESULTS  # result files and figures
    data: Path | None = None  # data sets; default as `ibnn.data.load`


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
    setting: str = "",
    folders: Folders = Folders(),  # noqa: B008  immutable
    smoke: bool = False,
    again: bool = False,
    quiet: bool = False,
) -> Reproduced:
    """Runs the cells of an experiment that have no result yet, and draws its figure.

    Args:
        name: One of `names`.
        preset: "cpu" (two cores) or "paper" (as the paper).
        seeds: Number of seeds; default the preset's.
        methods: Names of the methods to run; default all.
        setting: Name of a setting, or how the names of several begin; default all.
        folders: Where run folders, results and data are.
        smoke: Runs two steps of small networks on made-up data, into a result file of its own.
        again: Replaces the rows of finished runs by new evaluations of them.
        quiet: Shows nothing.
    """
    whole = read(name, preset, smoke=smoke)
    experiment = whole.only(methods, seeds, setting)
    left = [cell for cell in experiment.cells() if find_spec(cell.method.get("needs", "json"))]  # no package, no row
    found = results(experiment, folders.out)
    with Bar(f"{name} ({preset})", len(left), shown=not quiet) as bar:
        while left:
            later = []
            for cell in left:
                done = _attempt(cell, found, folders, again=again, quiet=quiet)
                bar.advance() if done else later.append(cell)
            if len(later) == len(left):
                time.sleep(5)  # other processes run them
            left = later
    shown = whole.only(None, seeds) if seeds and seeds > whole.seeds else whole  # with earlier results
    cells = found.of(shown)
    written = [found.path] if found.path.exists() else []
    return Reproduced(written + figures.draw(shown, cells, folders.out), figures.table(shown, cells))


def _attempt(cell: Cell, found: Results, folders: Folders, *, again: bool, quiet: bool) -> bool:
    """Runs a cell unless it has a row; returns False if another process has taken it or one of its members."""
    key, members = cell.key, cell.members()
    finished = all(RunFolder(_folder(each, folders)).finished for each in members or [cell])
    if found.cells.get(cell.name, {}).get("key") == key and not (again and finished):
        return True
    with RunFolder(folders.runs / key.partition("-")[0]).lock(wait=False) as mine:
        if not mine:
            return False
        for each in members:
            with RunFolder(_folder(each, folders)).lock(wait=False) as free:
                if not free:
                    return False
                _train(each, folders, quiet)
        if not members:
            _train(cell, folders, quiet)
        row = _derived(cell, members, folders) if members else _own(cell, folders, again=again and finished)
        found.add(cell.name, {"key": key, **row})
    return True


def _folder(cell: Cell, folders: Folders) -> Path:
    return folders.runs / cell.job.key  # cells of other experiments may share it


def _splits(cell: Cell, folders: Folders) -> Splits:
    return (made_data(cell.job) if cell.experiment.smoke else None) or make_data(cell.job, folders.data)


def _train(cell: Cell, folders: Folders, quiet: bool) -> None:
    """Trains and evaluates a cell into its run folder, unless it is finished; hold the lock."""
    folder = _folder(cell, folders)
    if RunFolder(folder).finished:
        return
    if not (folder / PROVENANCE).exists():  # the checkout may change while it trains
        write_atomically(folder / PROVENANCE, (json.dumps(provenance(), indent=1) + "\n").encode())
    splits = made_data(cell.job) if cell.experiment.smoke else None
    run(cell.job, folder, data_folder=folders.data, splits=splits, quiet=quiet, held=True)


def _own(cell: Cell, folders: Folders, *, again: bool) -> dict[str, Any]:
    """Returns the row of a finished run; with `again` from a new evaluation."""
    folder = _folder(cell, folders)
    result, facts = RunFolder(folder).result, {"provenance": json.loads((folder / PROVENANCE).read_text())}
    model, splits = read_run(folder, trust_code=True).model, _splits(cell, folders)
    if again:
        options: dict[str, Any] = {"samples": cell.job.samples, "data_folder": folders.data}
        result = result | evaluate(model, splits.whole, splits.valid, **options).result
        facts["evaluated"] = provenance()
    if again or "gaussian" not in result:
        result = result | noise_curves(model, splits.whole, samples=cell.job.samples)
    row = {name: result[name] for name in KEPT if name in result}
    if cell.experiment.analysis:
        row["analysis"] = ANALYSES[cell.experiment.analysis](folder, splits)
    return row | {"job": result["job"], **facts}


def _derived(cell: Cell, members: list[Cell], folders: Folders) -> dict[str, Any]:
    """Returns the row of what kept runs answer together."""
    runs = [read_run(_folder(member, folders), trust_code=True) for member in members]
    splits, samples = _splits(members[0], folders), cell.method.get("samples", members[0].job.samples)
    begin = time.perf_counter()
    model = DERIVED[cell.method.get("make", "ensemble")]([each.model for each in runs], splits, samples)
    seconds = time.perf_counter() - begin
    result = evaluate(model, splits.whole, splits.valid, samples=samples, data_folder=folders.data).result
    result |= noise_curves(model, splits.whole, samples=samples)
    costs = [each.result["costs"] for each in runs]
    forwards = model.components * getattr(model, "per_sample", 1) * (samples if model.random else 1)
    total = {name: sum(cost[name] for cost in costs) for name in costs[0]} | {"forwards": forwards}
    if cell.method.get("make") == "one-pass":
        total |= {"distil_seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}
    if cell.method.get("make") in ("ivon", "abnn"):
        total |= {"seconds": seconds}  # trained anew, or on
    if cell.method.get("make") == "abnn":
        total |= {"rows": total["rows"] + 15 * len(splits.train)}  # three networks, 5 epochs each
    job = {"of": cell.method["of"], "seeds": [member.seed for member in members], "samples": samples}
    trained = [json.loads((_folder(member, folders) / PROVENANCE).read_text()) for member in members]
    row = {name: result[name] for name in KEPT if name in result}
    return row | {"costs": total, "job": job, "provenance": trained[0], "evaluated": provenance()}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="an experiment; without it, all are listed")
    parser.add_argument("--preset", default="cpu", help="cpu (two cores) or paper (as the paper, for a GPU)")
    parser.add_argument("--seeds", type=int, help="number of seeds; default: the preset's")
    parser.add_argument("--method", action="append", help="name of a method; may be repeated; default: all")
    parser.add_argument("--setting", default="", help="a setting's name, or its beginning; default: all")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run folders")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of result files and figures")
    parser.add_argument("--data", type=Path, help="folder of the data sets; default: $IBNN_DATA")
    parser.add_argument("--smoke", action="store_true", help="two steps on made-up data: does it run at all?")
    parser.add_argument("--again", action="store_true", help="evaluate kept runs anew, without training")
    parser.add_argument("--threads", type=int, default=1, help="threads of this process")
    given = parser.parse_args()
    if given.name is None:
        return print("\n".join(f"{name:<16} {about(name)}" for name in names()))
    torch.set_num_threads(given.threads)
    folders = Folders(given.runs, given.out, given.data)
    options = {"preset": given.preset, "seeds": given.seeds, "methods": given.method, "setting": given.setting}
    options |= {"folders": folders}
    found = reproduce(given.name, **options, smoke=given.smoke, again=given.again)
    print(figures.markdown(found.table), *(f"wrote {path}" for path in found.files), sep="\n")


if __name__ == "__main__":
    main()
