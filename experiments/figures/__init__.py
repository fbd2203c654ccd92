"""The results of an experiment as figures and as a table, also while cells are missing.

A figure is as wide as a page and has at most three panels; an experiment of several settings or methods has several.

>>> print(markdown([["method", "NLL"], ["SGD", "0.658"]]))
| method | NLL |
| --- | ---: |
| SGD | 0.658 |
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Kind(NamedTuple):
    draw: Callable[[Grid], "Figure | None"]
    needed: tuple[str, ...]  # what a cell must have
    each: str = ""  # a figure for every "setting" or "method"; otherwise one for all


FIGURES = {
    "benchmark": _Kind(benchmark, ("scores",), each="setting"),
    "pretrained": _Kind(benchmark, ("scores",), each="setting"),
    "posterior": _Kind(benchmark, ("scores",), each="setting"),
    "components": _Kind(components, ("scores",)),
    "size": _Kind(size, ("scores",)),
    "calibration": _Kind(calibration, ("reliability", "confidence")),
    "ood": _Kind(ood, ("gaussian",), each="setting"),
    "regression": _Kind(regression, ("analysis", "mean"), each="method"),
    "pca": _Kind(pca, ("analysis", "train_loss")),
    "softmax": _Kind(softmax, ("analysis", "least")),
}


def draw(experiment: "Experiment", cells: dict[str, Any], out: Path) -> list[Path]:
    """Draws the results of an experiment, by name of the cell; returns the PNGs, those without results left out."""
    check.choice("figure", experiment.figure, FIGURES)
    kind = FIGURES[experiment.figure]
    parts = grid_of(experiment, cells).having(*kind.needed).split(kind.each)
    written = []
    for number, (name, grid) in enumerate(parts.items(), 1):
        with house_style():
            if not grid.settings or (figure := kind.draw(grid)) is None:
                continue
            title = textwrap.fill(experiment.title, 80) + (f"\n{name}" if len(parts) > 1 else "")
            figure.suptitle(title, fontsize=10, fontweight="bold")
            path = out / f"{experiment.name}-{experiment.preset}{f'-{number}' if len(parts) > 1 else ''}.png"
            write_atomically(path, png(figure))
        written.append(path)
    return written
