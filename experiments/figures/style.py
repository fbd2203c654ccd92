"""Sizes, colours, labels and legends that the figures of experiments share."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ibnn.lab import display
from ibnn.lab.display import BLUE, DPI, GREEN, PURPLE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches
SOFT = "#666666"  # of words beside the data
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
METHODS = {"sgd": "#777777", "swa": "#999933", "swag": "#882255", "dropout": GREEN}  # by the method of a job
METHODS |= {"vi": VERMILION, "ensemble": PURPLE, "ibnn": BLUE}

STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.edgecolor": "#999999",
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
}
for _axis in ("xtick", "ytick"):
    STYLE |= {f"{_axis}.labelsize": 9, f"{_axis}.color": "#999999", f"{_axis}.labelcolor": "black"}


def house_style() -> AbstractContextManager[None]:
    """Replaces the user's matplotlib settings by ours while something is drawn."""
    return display.house_style(STYLE)


def canvas(height: float) -> "Figure":
    """Returns a figure as wide as a page of the documentation; the height, in inches, excludes its title."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height + 0.25), dpi=DPI, layout="constrained")


def styles(methods: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Returns colour and marker of every variant of a method, by name; variants have shades of the method's colour.

    >>> styles({"iBNN-8": "ibnn", "SGD": "sgd", "iBNN-16": "ibnn"})["iBNN-16"]
    {'color': '#0072b2', 'marker': 'o'}
    """
    chosen = {}
    for name, method in methods.items():
        variants = [other for other in methods if methods[other] == method]
        place = variants.index(name)
        white = 0.6 * (1 - (place + 1) / len(variants))  # share of white in the mixture
        colour = "#" + "".join(f"{round(p + (255 - p) * white):02x}" for p in bytes.fromhex(METHODS[method][1:]))
        chosen[name] = {"color": colour, "marker": MARKERS[(len(variants) - 1 - place) % len(MARKERS)]}
    return chosen


def stacked(figure: "Figure", titles: list[str]) -> "list[Any]":
    """Returns subfigures one below the other, each with its title."""
    parts = list(figure.subfigures(len(titles), 1, squeeze=False)[:, 0])
    for part, title in zip(parts, titles, strict=True):
        if title:
            part.suptitle(title, fontsize=10, x=0.01, ha="left")
    return parts


def label_ends(axes: "Axes", ends: list[tuple[float, str, str]], gap: float = 0.085) -> None:
    """Writes names right of the last points (y, name, colour) of lines, moved apart so that they do not overlap."""
    low, high = axes.get_ylim()
    ends = sorted(end for end in ends if low <= end[0] <= high)
    places = [(y - low) / (high - low) for y, _, _ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    below = 1 + gap
    for i in reversed(range(len(places))):
        below = places[i] = min(places[i], below - gap)
    for place, (_, name, colour) in zip(places, ends, strict=True):
        axes.annotate(name, (1.03, place), xycoords="axes fraction", color=colour, va="center", fontsize=9)


def legend(figure: Any, handles: list[Any], columns: int = 5) -> None:
    """Draws one legend below all panels; handles have their labels."""
    place = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=min(columns, len(handles)), columnspacing=1.4, handletextpad=0.5)


def mark(label: str, ls: str = "", ms: float = 5, **options: Any) -> Any:
    """Returns a line, a marker or both for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, ls=ls, ms=ms, **options)


def patch(label: str, colour: str, **options: Any) -> Any:
    """Returns an area for a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label, lw=0, **options)
