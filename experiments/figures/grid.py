"""The results of an experiment by setting and method, and numbers of them."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from reproduce import Experiment

Cells = list[dict[str, Any]]  # of one setting and method, by seed


@dataclass(frozen=True)
class Grid:
    """The results of an experiment, which need not be complete; no group of cells is empty."""

    settings: dict[str, dict[str, Cells]]  # by setting and name of the method, in the experiment's order
    methods: dict[str, str]  # name → method of its jobs, without results too, so that colours do not depend on them
    sizes: dict[str, float]  # setting → weights relative to the smallest one, where the experiment varies them
    seeds: Counter[tuple[str, str]]  # how many there will be of each setting and method

    def having(self, *path: str) -> "Grid":
        """Returns the part whose cells have a value at a path."""
        groups = ((s, m, [c for c in cells if at(c, *path) is not None]) for s, m, cells in self.groups())
        return replace(self, settings=_nested(groups))

    def split(self, by: str) -> dict[str, "Grid"]:
        """Returns the part of every "setting" or "method" by its name, empty ones too; itself if by neither."""
        if not by:
            return {"": self}
        place = ("setting", "method").index(by)
        names = dict.fromkeys(key[place] for key in self.seeds)
        groups = {name: [group for group in self.groups() if group[place] == name] for name in names}
        return {name: replace(self, settings=_nested(of)) for name, of in groups.items()}

    def groups(self) -> Iterator[tuple[str, str, Cells]]:
        """Yields every setting and method with its cells."""
        for setting, methods in self.settings.items():
            for method, cells in methods.items():
                yield setting, method, cells


def _nested(groups: Iterable[tuple[str, str, Cells]]) -> dict[str, dict[str, Cells]]:
    nested: dict[str, dict[str, Cells]] = {}
    for setting, method, cells in groups:
        if cells:
            nested.setdefault(setting, {})[method] = cells
    return nested


def grid_of(experiment: "Experiment", cells: dict[str, Any]) -> Grid:
    """Groups the cells of an experiment by setting and method."""
    pairs = itertools.product(experiment.settings, experiment.methods)
    found: dict[tuple[str, str], Cells] = {(s["name"], m["name"]): [] for s, m in pairs}
    seeds: Counter[tuple[str, str]] = Counter()
    for cell in experiment.cells():
        group = cell.setting["name"], cell.method["name"]
        seeds[group] += 1
        if cell.name in cells:
            found[group].append(cells[cell.name])
    shared = experiment.job.get("method", "ibnn")
    methods = {method["name"]: method.get("method", shared) for method in experiment.methods}
    methods |= {m["name"]: methods.get(m["of"], shared) for m in experiment.methods if "of" in m}
    sizes = {setting["name"]: float(setting["size"]) for setting in experiment.settings if "size" in setting}
    return Grid(_nested((*key, group) for key, group in found.items()), methods, sizes, seeds)


def at(cell: Any, *path: str) -> Any:
    """Returns the value at a path of keys, None if there is none.

    >>> at({"scores": {"nll": 0.3}}, "scores", "nll"), at({}, "scores", "nll")
    (0.3, None)
    """
    for key in path:
        cell = cell.get(key) if isinstance(cell, dict) else None
    return cell


def numbers(cells: Cells, *path: str) -> list[float]:
    """Returns the number at a path of every cell that has it."""
    return [float(value) for cell in cells if (value := at(cell, *path)) is not None]


class Spread(NamedTuple):
    """Mean and standard deviation (with n − 1) of some numbers; nan of none, and the latter is 0 of one."""

    mean: float
    sd: float


def spread(values: list[float]) -> Spread:
    """Returns mean and standard deviation, usually over seeds.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, sd=1.4142135623730951)
    """
    if not values:
        return Spread(math.nan, math.nan)
    mean = sum(values) / len(values)
    return Spread(mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)))


def outsider(cells: Cells) -> str | None:
    """Returns the data set whose images test images are told from, if there was one."""
    known = [name for cell in cells for name in cell.get("outsiders") or {} if not name.startswith("corrupted")]
    return known[0] if known else None


def auroc(cells: Cells, score: str) -> list[float]:
    """Returns how well a score tells outsiders from test images; none for the epistemic part of a plain network."""
    single = all(at(c, "costs", "forwards") == 1 and at(c, "costs", "distil_seconds") is None for c in cells)
    strange = outsider(cells)
    return numbers(cells, "outsiders", strange, score) if strange and not (single and score == "epistemic") else []
