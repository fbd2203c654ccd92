"""RELIABILITY: how much more confident than right, over the range of confidence."""

import math
from typing import TYPE_CHECKING

from ibnn.lab.figures.grid import Cells, Grid, at
from ibnn.lab.figures.style import SOFT, canvas, legend, mark, panels, styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 15  # as `metrics.reliability_curve`
FEWEST = 5  # images in a bin; fewer say nothing

Bin = tuple[float, float, float]  # confidence, accuracy, count


def pooled(cells: Cells) -> list[Bin]:
    """Returns the bins of all seeds together, weighted by their counts.

    >>> one = {"reliability": {"confidence": [0.9], "accuracy": [1.0], "count": [1]}}
    >>> two = {"reliability": {"confidence": [0.92], "accuracy": [0.5], "count": [3]}}
    >>> [tuple(round(value, 4) for value in bin) for bin in pooled([one, two])]
    [(0.915, 0.625, 4.0)]
    """
    bins: dict[int, list[Bin]] = {}
    for cell in cells:
        columns = (at(cell, "reliability", name) for name in ("confidence", "accuracy", "count"))
        for confidence, accuracy, count in zip(*columns, strict=True):
            bins.setdefault(math.ceil(confidence * BINS - 1e-9), []).append((confidence, accuracy, float(count)))
    return [_mean(parts) for _, parts in sorted(bins.items())]


def _mean(parts: list[Bin]) -> Bin:
    total = sum(count for _, _, count in parts)
    return sum(c * n for c, _, n in parts) / total, sum(a * n for _, a, n in parts) / total, total


def calibration(grid: Grid) -> "Figure | None":
    """Confidence − accuracy against confidence, a line per method, a panel per setting."""
    grid = grid.having("reliability", "confidence")
    if not grid.settings:
        return None
    count = len(grid.settings)
    columns = 1 if count == 1 else 2
    figure = canvas(0.5 + 2.4 * -(-count // columns))
    every = panels(figure, count, columns, sharex=True, sharey=True)
    for axes, (setting, methods) in zip(every, grid.settings.items(), strict=True):
        axes.axhline(0, color="black", lw=0.8)
        for method, cells in methods.items():
            bins = pooled(cells)
            total = sum(n for _, _, n in bins)
            bins = [bin for bin in bins if bin[2] >= FEWEST]
            x, y = [c for c, _, _ in bins], [c - a for c, a, _ in bins]
            style = styles(grid.methods)[method]
            axes.plot(x, y, color=style["color"], lw=1.4)
            axes.scatter(x, y, s=[8 + 110 * n / total for _, _, n in bins], **style, lw=0, alpha=0.85)
        axes.set_title(setting, fontweight="bold")
        axes.grid()
        axes.margins(y=0.12)
        for place, words, side in ((0.98, "more confident than right", "top"), (0.02, "less confident", "bottom")):
            axes.text(0.012, place, words, transform=axes.transAxes, va=side, color=SOFT, fontsize=7, style="italic")
    for i, axes in enumerate(every):
        if i % columns == 0:
            axes.set_ylabel("confidence − accuracy")
        if i + columns >= count:
            axes.set_xlabel("confidence (area of a dot: share of the images)")
            axes.tick_params(labelbottom=True)
    present = {method for _, method, _ in grid.groups()}
    shown = {name: style for name, style in styles(grid.methods).items() if name in present}
    legend(figure, [mark(name, ls="-", lw=1.4, **style) for name, style in shown.items()])
    return figure
