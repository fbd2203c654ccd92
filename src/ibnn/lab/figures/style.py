"""STYLE: colours, sizes and labels that all figures share, in colours that the colour-blind tell apart (Okabe and Ito).

Matplotlib is imported only when something is drawn, and its settings are restored.
"""

import io
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches
DPI = 120
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, GREY = (
    *("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#777777"),
)
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
SOFT = "#666666"  # of words beside the data
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
METHODS = {  # by the method of a job
    "sgd": GREY,
    "swa": "#999933",
    "swag": "#882255",
    "dropout": GREEN,
    "vi": VERMILION,
    "ensemble": PURPLE,
    "ibnn": BLUE,
}
_STYLE = {
    "text.parse_math": False,  # names are not formulas
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": "#999999",
    "ytick.color": "#999999",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}


def house_style() -> AbstractContextManager[None]:
    """Replaces the user's matplotlib settings by ours while something is drawn."""
    import matplotlib.style

    return matplotlib.style.context(["default", _STYLE])


def canvas(height: float) -> "Figure":
    """Returns a figure as wide as a page of the documentation; the height, in inches, excludes its title."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height + 0.25), dpi=DPI, layout="constrained")


def png(figure: "Figure") -> bytes:
    """Returns the figure's PNG, the same bytes each time."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def styles(methods: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Returns colour and marker of every variant of a method, by name; variants have shades of the method's colour.

    >>> styles({"iBNN-8": "ibnn", "SGD": "sgd", "iBNN-16": "ibnn"})["iBNN-16"]
    {'color': '#0072b2', 'marker': 'o'}
    """
    chosen = {}
    for name, method in methods.items():
        variants = [other for other in methods if methods[other] == method]
        place = variants.index(name)
        colour = _lighter(METHODS[method], 0.6 * (1 - (place + 1) / len(variants)))
        chosen[name] = {"color": colour, "marker": MARKERS[(len(variants) - 1 - place) % len(MARKERS)]}
    return chosen


def _lighter(colour: str, share: float) -> str:
    """Mixes a share of white into a colour."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * share):02x}" for p in parts)


def panels(figure: "Figure", count: int, columns: int, **options: Any) -> "list[Axes]":
    """Returns `count` axes in rows; the rest of the last row is empty."""
    columns = min(columns, count)
    every = figure.subplots(-(-count // columns), columns, squeeze=False, **options).flatten().tolist()
    for spare in every[count:]:
        spare.set_axis_off()
    return list(every[:count])


def stacked(figure: "Figure", titles: list[str], heights: list[float]) -> "list[Any]":
    """Returns subfigures one below the other, each with its title."""
    parts = list(figure.subfigures(len(titles), 1, squeeze=False, height_ratios=heights)[:, 0])
    for part, title in zip(parts, titles, strict=True):
        if title:
            part.suptitle(title, fontsize=8.5, x=0.01, ha="left")
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
        axes.annotate(name, (1.03, place), xycoords="axes fraction", color=colour, va="center", fontsize=7.5)


def legend(figure: Any, handles: list[Any], columns: int = 8) -> None:
    """Draws one legend below all panels; handles have their labels."""
    place = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=min(columns, len(handles)), columnspacing=1.4, handletextpad=0.5)


def mark(label: str, **options: Any) -> Any:
    """Returns a line, a marker or both for a legend."""
    from matplotlib.lines import Line2D

    defaults: dict[str, Any] = {"ls": "", "ms": 5}
    return Line2D([], [], label=label, **(defaults | options))


def patch(label: str, colour: str, **options: Any) -> Any:
    """Returns an area for a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label, lw=0, **options)
