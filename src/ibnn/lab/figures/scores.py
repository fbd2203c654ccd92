"""SCORES: error, NLL and ECE by method, and against the number of components or of parameters."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ibnn.lab.figures.grid import Cells, Grid, numbers, spread
from ibnn.lab.figures.look import CYCLE, MARKERS, SOFT, canvas, family, label_ends, legend, looks, mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = (("error", "error (%)", 100.0), ("nll", "NLL (nats)", 1.0), ("ece", "ECE", 1.0))
LONGEST = 16  # letters of a name beside its line; longer ones go to a legend
Others = Sequence[tuple[str, str, Cells]]  # name and colour of what has no x
Series = dict[str, list[tuple[float, Cells]]]  # name → x and the cells there


def _values(cells: Cells, *path: str, unit: float = 1.0) -> list[float]:
    return [unit * value for value in numbers(cells, *path) if math.isfinite(value)]


def benchmark(grid: Grid) -> "Figure | None":
    """Dots with whiskers of ± sd by method, a row of panels per setting; hollow ones with a temperature."""
    grid = grid.having("scores")
    if not grid.settings:
        return None
    rows = [len(methods) for methods in grid.settings.values()]
    figure = canvas(0.35 + sum(0.7 + 0.24 * count for count in rows))
    every = figure.subplots(len(rows), 3, squeeze=False, height_ratios=[1.2 + count for count in rows])
    for line, (setting, methods) in zip(every, grid.settings.items(), strict=True):
        for axes, (name, title, unit) in zip(line, MEASURES, strict=True):
            _dots(axes, methods, looks(grid), name, unit)
            axes.set_xlabel(title)
            axes.tick_params(labelleft=axes is line[0])
        line[0].set_title(setting, fontweight="bold")
    handles = [mark("mean ± sd", marker="o", color=SOFT), mark("single seed", marker="o", color=SOFT, alpha=0.3)]
    if grid.having("tempered").settings:
        handles.append(mark("with a temperature fitted on held-out labels", marker="o", color=SOFT, mfc="white"))
    legend(figure, handles)
    return figure


def _dots(axes: "Axes", methods: dict[str, Cells], styles: dict[str, Any], name: str, unit: float) -> None:
    far = _far([v for cells in methods.values() if (v := _values(cells, "scores", name, unit=unit))])
    for row, (method, cells) in enumerate(methods.items()):
        for path, offset, hollow in ((("scores",), -0.14, {}), (("tempered", "scores"), 0.2, {"mfc": "white"})):
            values = _values(cells, *path, name, unit=unit)
            if not values:
                continue
            mean, sd = spread(values)
            style = styles[method] | hollow
            if mean > far:
                place = {"xycoords": ("axes fraction", "data"), "color": style["color"], "ha": "right", "va": "center"}
                axes.annotate(f"{mean:.3g}{' + T' if hollow else ''} →", (1, row + 1.3 * offset), fontsize=6.5, **place)
                continue
            axes.errorbar(mean, row + offset, xerr=sd, **style, ls="", ms=4.5 - 0.6 * len(hollow), elinewidth=1)
            if len(values) > 1:
                axes.scatter(values, [row + offset] * len(values), s=11, color=style["color"], alpha=0.35, lw=0)
    axes.set(yticks=range(len(methods)), yticklabels=list(methods), ylim=(len(methods) - 0.4, -0.6))
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _far(groups: list[list[float]]) -> float:
    """Where a method is so bad that a number must do, or the others would not be told apart."""
    means = sorted(spread(values).mean for values in groups)
    return 4 * means[len(means) // 2] if len(means) > 2 else math.inf


def components(grid: Grid) -> "Figure | None":
    """Against the number of components K, a line per setting; methods without components are dotted lines."""
    grid = grid.having("scores")
    several = len(grid.settings) > 1
    series: Series = {}
    others: list[tuple[str, str, Cells]] = []
    styles = {s: {"color": CYCLE[i % 6], "marker": MARKERS[i % 7]} for i, s in enumerate(grid.settings)}
    for setting, method, cells in grid.groups():
        count = _components(method, cells)
        if count is None:
            others.append((method, styles[setting]["color"] if several else SOFT, cells))
        else:
            series.setdefault(setting, []).append((count, cells))
    if not series:
        return None
    figure, axes = _against(series, styles, others)
    _ticks(axes, {x: f"{x:g}" for points in series.values() for x, _ in points}, "components K")
    return figure


def _components(method: str, cells: Cells) -> float | None:
    known = numbers(cells, "job", "method_options", "components")
    if known or family(method) != "ibnn":
        return known[0] if known else None
    named = re.search(r"(\d+)$", method)
    return float(named[1]) if named else None


def size(grid: Grid) -> "Figure | None":
    """Against the number of parameters of the plain network, a line per method."""
    grid = grid.having("scores")
    sizes = _sizes(grid)
    series: Series = {}
    for setting, method, cells in grid.groups():
        if setting in sizes:
            series.setdefault(method, []).append((sizes[setting], cells))
    if not series:
        return None
    figure, axes = _against({m: series[m] for m in grid.methods if m in series}, looks(grid))
    _ticks(axes, {x: f"{x:.3g}×" for x in sizes.values()}, "parameters of the network")
    return figure


def _sizes(grid: Grid) -> dict[str, float]:
    """How many times the smallest network's parameters: as the settings say ("4×"), else as counted."""
    said = {setting: re.match(r"(\d+)\s*[×x]", setting) for setting in grid.settings}
    if all(said.values()):
        return {setting: float(found[1]) for setting, found in said.items() if found}
    counted = {
        setting: min((_plain(cell["costs"]) for cells in methods.values() for cell in cells), default=0)
        for setting, methods in grid.having("costs", "parameters").settings.items()
    }
    least = min(counted.values(), default=1)
    return {setting: count / least for setting, count in counted.items()}


def _plain(costs: dict[str, Any]) -> float:
    """Parameters of the network alone."""
    return float(costs["parameters"] - (costs.get("latents") or 0))


def _against(series: Series, styles: dict[str, Any], others: Others = ()) -> "tuple[Figure, list[Axes]]":
    """A panel per measure with a line per name: mean over seeds, and a band of ± sd; others are dotted lines."""
    figure = canvas(2.3)
    every: list[Axes] = figure.subplots(1, 3).tolist()
    for axes, (measure, title, unit) in zip(every, MEASURES, strict=True):
        ends = []
        for name, points in series.items():
            found = [(x, spread(v)) for x, cells in points if (v := _values(cells, "scores", measure, unit=unit))]
            if not found:
                continue
            x, y = [x for x, _ in sorted(found)], [s for _, s in sorted(found)]
            style = styles[name]
            axes.plot(x, [s.mean for s in y], **style, lw=1.4, ms=4)
            low, high = [s.mean - s.sd for s in y], [s.mean + s.sd for s in y]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.15, lw=0)
            ends.append((y[-1].mean, name, style["color"]))
        short = all(len(name) <= LONGEST for name in series)
        ends = ends if short else []
        for name, colour, cells in others:
            mean = spread(_values(cells, "scores", measure, unit=unit)).mean
            axes.axhline(mean, color=colour, lw=1.1, ls=":")
            ends.append((mean, name, colour))
        axes.set_title(title)
        axes.grid()
        axes.locator_params(axis="y", nbins=6)
    label_ends(every[-1], ends)
    if not short:
        legend(figure, [mark(name, ls="-", lw=1.4, **styles[name]) for name in series])
    return figure, every


def _ticks(every: "list[Axes]", names: dict[float, str], title: str) -> None:
    for axes in every:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(names), list(names.values()))
        axes.minorticks_off()
        axes.set_xlabel(title)
