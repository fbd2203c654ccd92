"""EXPERIMENT: a grid of settings × methods × seeds as data, read from `experiments/*.toml`. A cell of it is a job."""

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib import resources
from typing import Any

from ibnn.errors import complaint, nearest
from ibnn.lab.job import Job, merged, short_hash

_NO_FIELDS = ("name", "with", "seeds", "skip", "size")  # entries of settings and methods that are no fields of a job
_SMALL = {  # options for smoke runs
    "wideresnet": {"depth": 10, "width": 1},
    "vgg16-small": {"width": 0.125},
    "resnet20": {"width": 0.5},  # torch 2.13 crashes in 1 × 1 convolutions of stride 2, channels last, of fewer than 8
}


@dataclass(frozen=True)
class Experiment:
    """A grid, read from its TOML file.

    Each setting and method has a name and fields of the job, and "seeds" reduces its seeds. In a setting, "with" has
    fields for single methods, "skip" names methods to leave out, and "size" is the number of weights relative to the
    smallest setting.
    """

    name: str
    preset: str  # "cpu" or "paper", followed by "-smoke" for a smoke run
    title: str  # what it shows, in a line
    paper: str  # where the paper shows it
    kind: str = "jobs"  # or "table1", which trains nothing
    figure: str = "benchmark"  # name of the function in `ibnn.lab.figures` that draws it
    analysis: str = ""  # name of the function in `ibnn.lab.analysis` that is applied to every run folder
    job: dict[str, Any] = field(default_factory=dict)  # fields that all cells share
    settings: tuple[dict[str, Any], ...] = ({"name": ""},)  # what is varied besides the method
    methods: tuple[dict[str, Any], ...] = ()  # what is compared
    seeds: int = 1
    source: str = ""  # the experiment whose result file it shares: itself, or the one that it is like

    @property
    def smoke(self) -> bool:
        """Whether its jobs are cut down to see if they run at all."""
        return self.preset.endswith("-smoke")

    def only(self, methods: list[str] | None, seeds: int | None) -> "Experiment":
        """Returns the experiment with these methods and this number of seeds; None changes nothing."""
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
    def key(self) -> str:
        """Configuration hash; results with another hash are stale."""
        if self.experiment.kind != "jobs":
            return short_hash(self.fields)
        return "-".join(filter(None, (Job(**self.fields).key, self.experiment.analysis)))


def cut_down(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a job with two steps, a small network and few components."""
    if "net" not in fields:  # there is nothing to train
        return fields
    quick: dict[str, Any] = {"steps": 2, "batch_size": 8, "evaluate_every": 1}
    given = {name: fields[name] for name in ("train", "first") if fields.get(name)}
    trains = {name: {k: v for k, v in table.items() if k != "epochs"} | quick for name, table in given.items()}
    few = {name: min(n, 2) for name, n in fields.get("method_options", {}).items() if name in ("components", "members")}
    small = {"samples": 1, "net_options": _SMALL.get(fields["net"], {}), "method_options": few}
    return merged(fields, small) | {"train": quick, "examples": None, "weights": None} | trains


def names() -> list[str]:
    """Returns the names of the experiments."""
    folder = resources.files("ibnn.lab") / "experiments"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read(name: str, preset: str = "cpu", *, smoke: bool = False) -> Experiment:
    """Returns an experiment at one of its presets, on request cut down to see if it runs at all."""
    if name not in names():
        remedy = f"Did you mean {nearest(name, names())!r}?"
        raise ValueError(complaint("name", f"one of {', '.join(names())}", repr(name), remedy))
    found = content(name)
    presets = found.pop("presets")
    if preset not in presets:
        raise ValueError(complaint("preset", f"one of {', '.join(presets)}", repr(preset), 'Pass preset="cpu".'))
    chosen = presets[preset]
    kept = chosen.pop("only", None)  # names of methods
    methods = [m for m in chosen.pop("methods", []) if kept is None or m["name"] in kept]
    settings = chosen.pop("settings", [{"name": ""}])
    preset += "-smoke" if smoke else ""
    return Experiment(name, preset, **found, **chosen, settings=tuple(settings), methods=tuple(methods))


def content(name: str) -> dict[str, Any]:
    """Reads the TOML of an experiment, merged into that of the one it is like."""
    text = (resources.files("ibnn.lab") / "experiments" / f"{name}.toml").read_text(encoding="utf-8")
    own = tomllib.loads(text)
    like = own.pop("like", None)
    return merged(content(like), own) if like else own | {"source": name}


def about(name: str) -> str:
    """Describes an experiment in a line."""
    found = content(name)
    return f"{found['title']} ({found['paper']})"
