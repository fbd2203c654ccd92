"""LOOK: colours, sizes and labels that all figures share. Colours are Okabe and Ito's, told apart by the colour-blind.

Matplotlib is imported when something is drawn, not before, and left as it was.
"""

import io
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ibnn.lab.figures.grid import Grid

WIDTH = 7.0  # inches
DPI = 120
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, GREY = (
    *("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#777777"),
)
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
SOFT = "#666666"  # of words beside the data
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_FAMILIES = (  # what a method's name, in lower case, contains; the first that fits
    ("ensemble", PURPLE),
    ("dropout", GREEN),
    ("ibnn", BLUE),
    ("swag", "#882255"),
    ("swa", "#999933"),
    ("vi", VERMILION),
    ("calibrat", SKY),
    ("temperature", ORANGE),
    ("+ t", ORANGE),
    ("sgd", GREY),
    ("plain", GREY),
)
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


def house_look() -> AbstractContextManager[None]:
    """Draws in our style, whatever the user's is."""
    import matplotlib.style

    return matplotlib.style.context(["default", _STYLE])


def canvas(height: float) -> "Figure":
    """A figure as wide as a page of the documentation, and so many inches high without its title."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height + 0.25), dpi=DPI, layout="constrained")


def png(figure: "Figure") -> bytes:
    """The same bytes for the same figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def family(method: str) -> str:
    """The first known part of a method's name, which decides its colour; the name itself if there is none.

    >>> family("iBNN-8"), family("BNN-VI"), family("SWAG")
    ('ibnn', 'vi', 'swag')
    """
    return next((part for part, _ in _FAMILIES if part in method.lower()), method)


def looks(grid: "Grid") -> dict[str, dict[str, Any]]:
    """Colour and marker of every method: a family has a colour, its members have lighter ones and other markers."""
    chosen = {}
    for name in grid.methods:
        kin = [other for other in grid.methods if family(other) == family(name)]
        place = kin.index(name)
        colour = _lighter(dict(_FAMILIES).get(family(name), "#222222"), 0.6 * (1 - (place + 1) / len(kin)))
        chosen[name] = {"color": colour, "marker": MARKERS[(len(kin) - 1 - place) % len(MARKERS)]}
    return chosen


def _lighter(colour: str, share: float) -> str:
    """A colour with a share of white in it."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + (255 - p) * share):02x}" for p in parts)


def panels(figure: "Figure", count: int, columns: int, **options: Any) -> "list[Axes]":
    """So many axes in rows; places left over are empty."""
    columns = min(columns, count)
    every = figure.subplots(-(-count // columns), columns, squeeze=False, **options).flatten().tolist()
    for spare in every[count:]:
        spare.set_axis_off()
    return list(every[:count])


def stacked(figure: "Figure", titles: list[str], heights: list[float]) -> "list[Any]":
    """A subfigure below the other, each with its title, if there are several."""
    parts = list(figure.subfigures(len(titles), 1, squeeze=False, height_ratios=heights)[:, 0])
    for part, title in zip(parts, titles, strict=True):
        if title:
            part.suptitle(title, fontsize=8.5, x=0.01, ha="left")
    return parts


def label_ends(axes: "Axes", ends: list[tuple[float, str, str]], gap: float = 0.085) -> None:
    """Writes names right of the last points (y, name, colour) of lines, moved apart where they would overlap."""
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
    """One legend below all panels; handles have their labels."""
    place = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=min(columns, len(handles)), columnspacing=1.4, handletextpad=0.5)


def mark(label: str, **options: Any) -> Any:
    """A line, a marker or both for a legend."""
    from matplotlib.lines import Line2D

    defaults: dict[str, Any] = {"ls": "", "ms": 5}
    return Line2D([], [], label=label, **(defaults | options))


def patch(label: str, colour: str, **options: Any) -> Any:
    """An area for a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label, lw=0, **options)
