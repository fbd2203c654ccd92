"""PLANE: training loss and test error over the plane of weights that the components span."""

import math
from typing import TYPE_CHECKING, Any

from ibnn.lab.figures.grid import Grid
from ibnn.lab.figures.style import ORANGE, canvas, legend, mark, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = 14


def pca(grid: Grid) -> "Figure | None":
    """Contours of both, the components' places and the centre U; of the first seed of every setting and method."""
    grid = grid.having("analysis", "train_loss")
    groups = list(grid.groups())
    if not groups:
        return None
    titles = [" / ".join(filter(None, names)) if len(groups) > 1 else "" for *names, _ in groups]
    figure = canvas(0.35 + 2.85 * len(groups))
    for part, (_, _, cells) in zip(stacked(figure, titles, [1] * len(groups)), groups, strict=True):
        found = cells[0]["analysis"]
        left, right = part.subplots(1, 2, sharey=True)
        _contours(part, left, found, found["train_loss"], "training loss (nats)")
        _contours(part, right, found, [[100 * v for v in row] for row in found["test_error"]], "test error (%)")
        left.set_ylabel(_axis("second", found, 1))
    edged = {"mec": "white", "mew": 0.8}
    dots = mark("component's weights U diag(μₖ)", marker="o", color=ORANGE, ms=7, **edged)
    legend(figure, [dots, mark("shared weights U", marker="*", color="#CC0000", ms=12, **edged)])
    return figure


def _contours(part: Any, axes: Any, found: dict[str, Any], heights: list[list[float]], words: str) -> None:
    """Values along rows go with x; the highest tenth has one colour, or it would hide the valley."""
    flat = sorted(value for row in heights for value in row)
    low, high = flat[0], flat[int(0.9 * (len(flat) - 1))]
    levels = [low + (high - low or 1) * i / LEVELS for i in range(LEVELS + 1)]
    plane = (found["plane_x"], found["plane_y"], heights)
    filled = axes.contourf(*plane, levels=levels, cmap="cividis", extend="max")
    axes.contour(*plane, levels=levels[1::2], colors="white", linewidths=0.4, alpha=0.7)
    digits = max(0, 1 - math.floor(math.log10(levels[3] - levels[0])))  # neighbouring ticks differ
    part.colorbar(filled, ax=axes, ticks=levels[::3], format=f"%.{digits}f", pad=0.02)
    edged = {"edgecolors": "white", "linewidths": 0.8, "zorder": 3}
    axes.scatter(*zip(*found["components"], strict=True), s=42, color=ORANGE, **edged)
    axes.scatter(*found["centre"], s=150, marker="*", color="#CC0000", **edged)
    axes.set(title=words, xlabel=_axis("first", found, 0), aspect="equal")


def _axis(which: str, found: dict[str, Any], index: int) -> str:
    return f"{which} direction ({100 * found['explained'][index]:.0f} % of the spread)"
