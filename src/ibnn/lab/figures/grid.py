"""GRID: the cells there are, by setting and method, and numbers out of them."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ibnn.lab.reproduce import Experiment

Cells = list[dict[str, Any]]  # of one setting and method, by seed


@dataclass(frozen=True)
class Grid:
    """What there is of an experiment.

    Attributes:
        settings: Setting → method → cells, in the experiment's order; no group is empty.
        methods: All methods of the experiment, so that colours do not depend on what is there.
        seeds: How many there will be of each setting and method.
    """

    settings: dict[str, dict[str, Cells]]
    methods: list[str]
    seeds: Counter[tuple[str, str]]

    def having(self, *path: str) -> "Grid":
        """The part whose cells have something there."""
        groups = ((s, m, [c for c in cells if at(c, *path) is not None]) for s, m, cells in self.groups())
        return replace(self, settings=_nested(groups))

    def groups(self) -> Iterator[tuple[str, str, Cells]]:
        """Every setting and method with its cells."""
        for setting, methods in self.settings.items():
            for method, cells in methods.items():
                yield setting, method, cells


def _nested(groups: Iterator[tuple[str, str, Cells]]) -> dict[str, dict[str, Cells]]:
    nested: dict[str, dict[str, Cells]] = {}
    for setting, method, cells in groups:
        if cells:
            nested.setdefault(setting, {})[method] = cells
    return nested


def grid_of(experiment: "Experiment", cells: dict[str, Any]) -> Grid:
    """Groups the cells of an experiment by setting and method."""
    found: dict[tuple[str, str], Cells] = {
        (s["name"], m["name"]): [] for s in experiment.settings for m in experiment.methods
    }
    for cell in experiment.cells():
        if cell.name in cells:
            found[cell.setting["name"], cell.method["name"]].append(cells[cell.name])
    methods = [method["name"] for method in experiment.methods]
    seeds = Counter((cell.setting["name"], cell.method["name"]) for cell in experiment.cells())
    return Grid(_nested((*key, group) for key, group in found.items()), methods, seeds)


def at(cell: Any, *path: str) -> Any:
    """What is at a path of keys; None if it is not there.

    >>> at({"scores": {"nll": 0.3}}, "scores", "nll"), at({}, "scores", "nll")
    (0.3, None)
    """
    for key in path:
        cell = cell.get(key) if isinstance(cell, dict) else None
    return cell


def numbers(cells: Cells, *path: str) -> list[float]:
    """The number at a path of every cell that has it."""
    return [float(value) for cell in cells if (value := at(cell, *path)) is not None]


class Spread(NamedTuple):
    """Mean and standard deviation (with n − 1) of some numbers; of none nan, and of one the latter is 0."""

    mean: float
    sd: float


def spread(values: list[float]) -> Spread:
    """Over seeds.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, sd=1.4142135623730951)
    """
    if not values:
        return Spread(math.nan, math.nan)
    mean = sum(values) / len(values)
    return Spread(mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)))


def outsider(cells: Cells) -> str | None:
    """The images the test images are told from: those of another data set, else the corrupted ones."""
    known = sorted({name for cell in cells for name in cell.get("outsiders") or {}})
    return min(known, key=lambda name: name.startswith("corrupted"), default=None)
