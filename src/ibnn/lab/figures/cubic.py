"""CUBIC: regression of y = x³ by method and number of hidden layers."""

import math
from typing import TYPE_CHECKING, Any

from ibnn.lab.figures.grid import Grid
from ibnn.lab.figures.style import BLUE, SKY, VERMILION, canvas, legend, mark, patch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def regression(grid: Grid) -> "Figure | None":
    """Training points, mean and bands of ± 2 sd of the first seed; rows are methods, columns hidden layers."""
    grid = grid.having("analysis", "mean")
    drawn: dict[tuple[str, int], dict[str, Any]] = {}
    for _, method, cells in grid.groups():
        drawn[method, cells[0]["job"]["net_options"]["layers"]] = cells[0]
    if not drawn:
        return None
    methods = [method for method in grid.methods if any(method == m for m, _ in drawn)]
    depths = sorted({depth for _, depth in drawn})
    figure = canvas(0.5 + 1.65 * len(methods))
    every = figure.subplots(len(methods), len(depths), squeeze=False, sharex=True, sharey=True)
    top = 1.25 * max(abs(x) ** 3 for cell in drawn.values() for x in cell["analysis"]["x"])
    for row, (line, method) in enumerate(zip(every, methods, strict=True)):
        for axes, depth in zip(line, depths, strict=True):
            found = drawn.get((method, depth))
            layers = f"{depth} hidden layer{'s' * (depth > 1)}\n" if row == 0 else ""
            axes.set_title(f"{layers}test NLL {found['scores']['nll']:.2f}" if found else f"{layers}not there yet")
            if found:
                _draw(axes, found["analysis"])
        line[0].set(ylabel="y", ylim=(-top, top))
        beside = {"xycoords": "axes fraction", "xytext": (-46, 0), "textcoords": "offset points"}
        line[0].annotate(method, (0, 0.5), **beside, rotation=90, va="center", ha="right", fontweight="bold")
    for axes in every[-1]:
        axes.set_xlabel("x")
    legend(
        figure,
        [
            mark("training point", marker="o", color=VERMILION, ms=3.5),
            mark("y = x³", ls="--", color="black", lw=1),
            mark("mean", ls="-", color=BLUE, lw=1.4),
            patch("± 2 sd epistemic", SKY, alpha=0.75),
            patch("± 2 sd total", SKY, alpha=0.3),
        ],
    )
    return figure


def _draw(axes: Any, curve: dict[str, Any]) -> None:
    x, mean, epistemic = curve["x"], curve["mean"], curve["epistemic_std"]
    total = [math.hypot(a, e) for a, e in zip(curve["aleatoric_std"], epistemic, strict=True)]
    for sd, alpha in ((total, 0.3), (epistemic, 0.65)):
        low, high = ([m + sign * 2 * s for m, s in zip(mean, sd, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=SKY, alpha=alpha, lw=0)
    axes.plot(x, [value**3 for value in x], color="black", lw=0.9, ls="--")
    axes.plot(x, mean, color=BLUE, lw=1.4)
    axes.scatter(curve["train_x"], curve["train_y"], s=7, color=VERMILION, lw=0, zorder=3)
    axes.set_xlim(min(x), max(x))
