"""The results of an experiment as a figure and as a table, also while cells are missing.

>>> print(markdown([["method", "NLL"], ["SGD", "0.658"]]))
| method | NLL |
| --- | ---: |
| SGD | 0.658 |
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures.grid import Grid, grid_of, numbers, spread
from figures.panels import calibration, ood, pca, regression, softmax
from figures.scores import benchmark, components, size
from figures.style import house_style
from figures.tables import markdown, table
from ibnn import check
from ibnn.files.atomic import write_atomically
from ibnn.lab.display import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from reproduce import Experiment

__all__ = ["draw", "grid_of", "markdown", "numbers", "spread", "table"]

FIGURES: dict[str, tuple[Callable[[Grid], "Figure | None"], tuple[str, ...]]] = {  # and what a cell needs for it
    "benchmark": (benchmark, ("scores",)),
    "pretrained": (benchmark, ("scores",)),
    "posterior": (benchmark, ("scores",)),
    "components": (components, ("scores",)),
    "size": (size, ("scores",)),
    "calibration": (calibration, ("reliability", "confidence")),
    "ood": (ood, ("gaussian",)),
    "regression": (regression, ("analysis", "mean")),
    "pca": (pca, ("analysis", "train_loss")),
    "softmax": (softmax, ("analysis", "least")),
}


def draw(experiment: "Experiment", cells: dict[str, Any], out: Path) -> list[Path]:
    """Draws the results of an experiment, by name of the cell; returns the files: a PNG, or none without results."""
    check.choice("figure", experiment.figure, FIGURES)
    function, needed = FIGURES[experiment.figure]
    grid = grid_of(experiment, cells).having(*needed)
    if not grid.settings:
        return []
    path = out / f"{experiment.name}-{experiment.preset}.png"
    with house_style():
        if (figure := function(grid)) is None:
            return []
        figure.suptitle(textwrap.fill(experiment.title, 100), fontsize=9.5, fontweight="bold")
        write_atomically(path, png(figure))
    return [path]
