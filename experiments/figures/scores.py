"""Error, NLL and ECE by method, and against the number of components or of parameters."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from figures.grid import Cells, Grid, numbers, spread
from figures.style import MARKERS, SOFT, canvas, label_ends, legend, mark, styles
from ibnn.lab.display import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = (("error", "error (%)", 100.0), ("nll", "NLL (nats)", 1.0), ("ece", "ECE", 1.0))
LONGEST = 16  # letters of a name beside its line; longer ones go to a legend
Others = Sequence[tuple[str, str, Cells]]  # name and colour of methods without an x
Series = dict[str, list[tuple[float, Cells]]]  # name → x and its cells


def _values(cells: Cells, *path: str, unit: float = 1.0) -> list[float]:
    return [unit * value for value in numbers(cells, *path) if math.isfinite(value)]


def benchmark(grid: Grid) -> "Figure":
    """Dots with whiskers of ± sd by method, of one setting; hollow ones with a temperature."""
    (methods,) = grid.settings.values()
    figure = canvas(1.05 + 0.26 * len(methods))
    line = figure.subplots(1, 3)
    for axes, (name, title, unit) in zip(line, MEASURES, strict=True):
        _dots(axes, methods, styles(grid.methods), name, unit)
        axes.set_xlabel(title)
        axes.tick_params(labelleft=axes is line[0])
    handles = [mark("mean ± sd", marker="o", color=SOFT), mark("single seed", marker="o", color=SOFT, alpha=0.3)]
    if grid.having("tempered").settings:
        handles.append(mark("with a temperature fitted on held-out labels", marker="o", color=SOFT, mfc="white"))
    legend(figure, handles)
    return figure


def _dots(axes: "Axes", methods: dict[str, Cells], looks: dict[str, Any], name: str, unit: float) -> None:
    far = _far([v for cells in methods.values() if (v := _values(cells, "scores", name, unit=unit))])
    for row, (method, cells) in enumerate(methods.items()):
        for path, offset, hollow in ((("scores",), -0.14, {}), (("tempered", "scores"), 0.2, {"mfc": "white"})):
            values = _values(cells, *path, name, unit=unit)
            if not values:
                continue
            mean, sd = spread(values)
            style = looks[method] | hollow
            if mean > far:
                place = {"xycoords": ("axes fraction", "data"), "color": style["color"], "ha": "right", "va": "center"}
                axes.annotate(f"{mean:.3g}{' + T' if hollow else ''} →", (1, row + 1.3 * offset), fontsize=8, **place)
                continue
            axes.errorbar(mean, row + offset, xerr=sd, **style, ls="", ms=4.5 - 0.6 * len(hollow), elinewidth=1)
            if len(values) > 1:
                axes.scatter(values, [row + offset] * len(values), s=11, color=style["color"], alpha=0.35, lw=0)
    axes.set(yticks=range(len(methods)), yticklabels=list(methods), ylim=(len(methods) - 0.4, -0.6))
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _far(groups: list[list[float]]) -> float:
    """Returns the value beyond which a method gets a number instead of a dot, so that the others can be told apart."""
    means = sorted(spread(values).mean for values in groups)
    return 4 * means[len(means) // 2] if len(means) > 2 else math.inf


def components(grid: Grid) -> "Figure | None":
    """Against the number of components K, a line per setting; methods without components are dotted lines."""
    several = len(grid.settings) > 1
    series: Series = {}
    others: list[tuple[str, str, Cells]] = []
    colours = {s: {"color": COLOURS[i % 6], "marker": MARKERS[i % 7]} for i, s in enumerate(grid.settings)}
    for setting, method, cells in grid.groups():
        if count := numbers(cells, "job", "method_options", "components"):
            series.setdefault(setting, []).append((count[0], cells))
        else:
            others.append((method, colours[setting]["color"] if several else SOFT, cells))
    if not series:
        return None
    figure, axes = _against(series, colours, others)
    _ticks(axes, {x: f"{x:g}" for points in series.values() for x, _ in points}, "components K")
    return figure


def size(grid: Grid) -> "Figure":
    """Against the number of parameters of the plain network, a line per method."""
    series: Series = {}
    for setting, method, cells in grid.groups():
        series.setdefault(method, []).append((grid.sizes[setting], cells))
    figure, axes = _against({m: series[m] for m in grid.methods if m in series}, styles(grid.methods))
    _ticks(axes, {x: f"{x:.3g}×" for x in grid.sizes.values()}, "parameters of the network")
    return figure


def _against(series: Series, looks: dict[str, Any], others: Others = ()) -> "tuple[Figure, list[Axes]]":
    """Draws a panel per measure with a line per name, mean over seeds with a band of ± sd; others are dotted lines."""
    figure = canvas(2.3)
    every: list[Axes] = figure.subplots(1, 3).tolist()
    for axes, (measure, title, unit) in zip(every, MEASURES, strict=True):
        ends = []
        for name, points in series.items():
            found = [(x, spread(v)) for x, cells in points if (v := _values(cells, "scores", measure, unit=unit))]
            if not found:
                continue
            x, y = [x for x, _ in sorted(found)], [s for _, s in sorted(found)]
            style = looks[name]
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
        legend(figure, [mark(name, ls="-", lw=1.4, **looks[name]) for name in series])
    return figure, every


def _ticks(every: "list[Axes]", names: dict[float, str], title: str) -> None:
    for axes in every:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(names), list(names.values()))
        axes.minorticks_off()
        axes.set_xlabel(title)
