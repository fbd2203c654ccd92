"""FIGURES: the results of an experiment as a figure and as a table, also while cells are missing.

>>> print(markdown([["method", "NLL"], ["SGD", "0.658"]]))
| method | NLL |
| --- | ---: |
| SGD | 0.658 |
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.lab.display import house_style, png
from ibnn.lab.experiment import Experiment
from ibnn.lab.figures.grid import Grid, grid_of
from ibnn.lab.figures.panels import calibration, ood, pca, regression, softmax
from ibnn.lab.figures.scores import benchmark, components, size
from ibnn.lab.figures.tables import markdown, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "table", "markdown"]

FIGURES: dict[str, tuple[Callable[[Grid], "Figure | None"], tuple[str, ...]]] = {  # and what a cell needs for it
    "benchmark": (benchmark, ("scores",)),
    "pretrained": (benchmark, ("scores",)),
    "components": (components, ("scores",)),
    "size": (size, ("scores",)),
    "calibration": (calibration, ("reliability", "confidence")),
    "ood": (ood, ("gaussian",)),
    "regression": (regression, ("analysis", "mean")),
    "pca": (pca, ("analysis", "train_loss")),
    "softmax": (softmax, ("analysis", "least")),
    "table1": (lambda grid: None, ()),
}


def draw(experiment: Experiment, cells: dict[str, Any], out: Path) -> list[Path]:
    """Draws the results of an experiment, by name of the cell; returns the files: a PNG, or none without results."""
    if experiment.figure not in FIGURES:
        remedy = "Correct the experiment's TOML file."
        raise ValueError(complaint("figure", f"one of {', '.join(FIGURES)}", repr(experiment.figure), remedy))
    function, needed = FIGURES[experiment.figure]
    grid = grid_of(experiment, cells).having(*needed)
    if not grid.settings or experiment.figure == "table1":
        return []
    path = out / f"{experiment.name}-{experiment.preset}.png"
    with house_style():
        if (figure := function(grid)) is None:
            return []
        figure.suptitle(textwrap.fill(experiment.title, 100), fontsize=9.5, fontweight="bold")
        write_atomically(path, png(figure))
    return [path]
