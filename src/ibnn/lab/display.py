"""DISPLAY: the words, colours, sizes and labels that tables, pages and figures share.

Imports nothing but the standard library until something is drawn; matplotlib's settings are restored.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORES = {
    "error": "error %",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "aurc": "AURC",
    "rmse": "RMSE",
    "coverage": "in 90 % interval",
}
UNCERTAINTIES = {
    "max_prob": "largest probability",
    "total": "total entropy",
    "epistemic": "epistemic part",
    "novelty": "novelty",
}
COSTS = {
    "train_seconds": "seconds of training",
    "rows": "rows trained on",
    "steering_rows": "held-out forward passes for steering",
    "parameters": "parameters",
    "latents": "of them latents",
    "stored": "numbers stored",
    "forwards": "forward passes per prediction",
}

WIDTH, DPI = 7.0, 120  # inches, and dots in each
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for the colour-blind
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = COLOURS
OTHER = "#BBBBBB"  # whatever has no colour of its own
SOFT = "#666666"  # of words beside the data
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
METHODS = {"sgd": "#777777", "swa": "#999933", "swag": "#882255", "dropout": GREEN}  # by the method of a job
METHODS |= {"vi": VERMILION, "ensemble": PURPLE, "ibnn": BLUE}
_SHARED = {
    "text.parse_math": False,  # names are not formulas
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.edgecolor": "#999999",
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.7,
    "legend.fontsize": 7.5,
}
for _axis in ("xtick", "ytick"):
    _STYLE |= {f"{_axis}.labelsize": 7, f"{_axis}.color": "#999999", f"{_axis}.labelcolor": "black"}


@contextmanager
def house_style(own: dict[str, Any] = _STYLE) -> Iterator[None]:
    """Replaces the user's matplotlib settings by ours while something is drawn."""
    import matplotlib.style

    with matplotlib.style.context(["default", _SHARED, own]):
        yield


def canvas(height: float) -> "Figure":
    """Returns a figure as wide as a page of the documentation; the height, in inches, excludes its title."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height + 0.25), dpi=DPI, layout="constrained")


def png(figure: "Figure", dpi: int = DPI) -> bytes:
    """Returns the figure's PNG, the same bytes each time."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
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
        white = 0.6 * (1 - (place + 1) / len(variants))  # share of white in the mixture
        colour = "#" + "".join(f"{round(p + (255 - p) * white):02x}" for p in bytes.fromhex(METHODS[method][1:]))
        chosen[name] = {"color": colour, "marker": MARKERS[(len(variants) - 1 - place) % len(MARKERS)]}
    return chosen


def stacked(figure: "Figure", titles: list[str]) -> "list[Any]":
    """Returns subfigures one below the other, each with its title."""
    parts = list(figure.subfigures(len(titles), 1, squeeze=False)[:, 0])
    for part, title in zip(parts, titles, strict=True):
        if title:
            part.suptitle(title, fontsize=8.5, x=0.01, ha="left")
    return parts


def dots(axes: Any, points: Sequence[tuple[float, float, float]], *, lw: float, **style: Any) -> None:
    """Draws a line through dots of given areas (x, y, area)."""
    x, y, areas = ([point[i] for point in points] for i in range(3))
    axes.plot(x, y, color=style["color"], lw=lw)
    axes.scatter(x, y, s=areas, alpha=0.85, **style)


def histogram(axes: Any, values: Any, edges: list[float], **style: Any) -> None:
    """Draws the share of values in each bin."""
    axes.hist(values.tolist(), edges, weights=[1 / len(values)] * len(values), **style)


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


def legend(figure: Any, handles: list[Any]) -> None:
    """Draws one legend below all panels; handles have their labels."""
    place = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=min(8, len(handles)), columnspacing=1.4, handletextpad=0.5)


def mark(label: str, ls: str = "", ms: float = 5, **options: Any) -> Any:
    """Returns a line, a marker or both for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, ls=ls, ms=ms, **options)


def patch(label: str, colour: str, **options: Any) -> Any:
    """Returns an area for a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label, lw=0, **options)
