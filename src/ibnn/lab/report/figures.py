"""FIGURES: SVG and PNG as data URIs, the same bytes for the same numbers; matplotlib is left as it was.

Colours are Okabe and Ito's, told apart by the colour-blind; dashes, hatches and order say the same without colour.
"""

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
import torch
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ibnn.metrics import ReliabilityCurve, RiskCoverage

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
OTHER = "#BBBBBB"
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)))
_STYLE = {
    "svg.hashsalt": "ibnn",
    "svg.fonttype": "path",
    "text.parse_math": False,  # names are not formulas
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.7,
}
_NO_METADATA: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
_SIDE = 72  # pixels at most of a shown image
_HIGH = 120  # pixels of a strip of draws
_WIDE = 160


class Picture(NamedTuple):
    """What an img element needs, but for its alt text."""

    src: str
    width: int
    height: int


def _draw(size: tuple[float, float], paint: Callable[[Any], None]) -> Picture:
    file = io.BytesIO()
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(file, format="svg", metadata=_NO_METADATA)
    lean = re.sub(rb"<!--.*?-->|(?<=\d\d\.\d\d)\d+", b"", file.getvalue(), flags=re.DOTALL)  # hundredths of a point do
    text = base64.b64encode(re.sub(rb"\s+", b" ", lean)).decode()
    return Picture(f"data:image/svg+xml;base64,{text}", round(96 * size[0]), round(96 * size[1]))


def _png(pixels: Tensor) -> Picture:
    """From uint8 (H, W, 3)."""
    file = io.BytesIO()
    imsave(file, pixels.contiguous().numpy(), format="png", metadata={"Software": ""})  # not matplotlib's version
    text = base64.b64encode(file.getvalue()).decode()
    return Picture(f"data:image/png;base64,{text}", pixels.shape[1], pixels.shape[0])


def _plain(name: str, length: int = 44) -> str:
    """A name in letters that the font has."""
    letters = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in name)
    letters = letters if len(letters) <= length else letters[: length - 1] + "…"
    return f" {letters}" if letters.startswith("_") else letters  # matplotlib hides what begins with _


def reliability(curve: ReliabilityCurve, number: int) -> Picture:
    """Accuracy over confidence with 95 % Wilson intervals, above the rows of each bin."""

    def paint(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        there = curve.count > 0
        x, p, n = (column[there].double() for column in (curve.confidence, curve.accuracy, curve.count))
        spread = 1.96**2 / n
        middle = (p + spread / 2) / (1 + spread)
        half = (1.96 / (1 + spread)) * (p * (1 - p) / n + spread / n / 4).sqrt()
        reach = torch.stack([p - middle + half, middle + half - p]).clamp_min(0)
        top.plot([0, 1], [0, 1], color="#555555", lw=1, ls=":")
        top.vlines(x.tolist(), p.tolist(), x.tolist(), color="#999999", lw=5, alpha=0.45)
        top.errorbar(x.tolist(), p.tolist(), reach.tolist(), color=COLOURS[number % 6], marker="o", ms=4, lw=1.4)
        top.set(ylabel="accuracy", xlim=(0, 1), ylim=(-0.02, 1.04))
        edges = curve.edges.tolist()
        bottom.bar(edges[:-1], curve.count.tolist(), width=edges[1], align="edge", color=COLOURS[number % 6], alpha=0.7)
        bottom.set(xlabel="confidence", ylabel="rows", yscale="log", ylim=(0.7, 2 * float(curve.count.max())))
        bottom.yaxis.set_major_formatter("{x:g}")  # the usual one is a formula

    return _draw((4, 4.2), paint)


def histograms(sets: Mapping[str, Tensor], label: str) -> Picture:
    """Shares of rows over an uncertainty; the first set is filled."""

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        high = max(float(values.max()) for values in sets.values()) or 1.0
        edges = torch.linspace(0, high * (1 + 1e-9), 25, dtype=torch.float64).tolist()
        for i, (name, values) in enumerate(sets.items()):
            look = {"histtype": "stepfilled", "alpha": 0.45} if i == 0 else {"histtype": "step", "lw": 1.8}
            share = [1 / len(values)] * len(values)
            axes.hist(
                values.tolist(),
                edges,
                weights=share,
                color=COLOURS[i % 6],
                ls=DASHES[i % 6],
                label=_plain(name),
                **look,
            )
        axes.set(xlabel=f"{label} (nats)", ylabel="share of rows", xlim=(0, high))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=1 + (len(sets) == 2), borderaxespad=0.2)

    return _draw((4, 2.8 + 0.2 * len(sets)), paint)


def risk_coverage(curves: Mapping[str, RiskCoverage], first: int, points: int = 400) -> Picture:
    """Error rate over the share of answered rows, at most so many points a line."""

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        for number, (name, curve) in enumerate(curves.items(), start=first):
            size = len(curve.risk)
            keep = torch.linspace(0, size - 1, min(size, points)).round().long()
            x, y = curve.coverage[keep].tolist(), (100 * curve.risk[keep]).tolist()
            axes.plot(x, y, color=COLOURS[number % 6], ls=DASHES[number % 6], lw=1.6, label=_plain(name))
        axes.set(xlabel="coverage: share of rows answered", ylabel="error % among them", xlim=(0, 1))
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=1)

    return _draw((4.8, 3.4 + 0.2 * len(curves)), paint)


def split(parts: Mapping[str, Tensor]) -> Picture:
    """Mean uncertainty of each set as a stacked bar of aleatoric, between and within."""

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        names = [_plain(name, 16) for name in parts]
        places = list(range(len(names)))
        left = torch.zeros(len(names), dtype=torch.float64)
        kinds = zip(
            ("aleatoric", "between", "within"), (OTHER, COLOURS[0], COLOURS[5]), ("", "///", "\\\\\\"), strict=True
        )
        for i, (kind, colour, hatch) in enumerate(kinds):
            width = torch.stack([values[i] for values in parts.values()])
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": kind}
            axes.barh(places, width.tolist(), left=left.tolist(), height=0.62, **look)
            left = left + width
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("mean uncertainty (nats)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, columnspacing=1, handlelength=1.5)

    return _draw((4, 1.5 + 0.36 * len(parts)), paint)


def training(
    x: tuple[str, Sequence[float]], losses: Mapping[str, list[float]], below: Mapping[str, list[float]]
) -> Picture:
    """Losses over epochs or steps and, below, what steers the noise."""

    def paint(figure: Any) -> None:
        rows = 1 + len(below)
        grid = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=(3, *[1] * len(below)))[:, 0]
        for i, (name, values) in enumerate(losses.items()):
            grid[0].plot(*_finite(x[1], values), color=COLOURS[i], ls=DASHES[i], lw=1.6, label=name)
        grid[0].set_ylabel("NLL" if any("nll" in name.lower() for name in losses) else "loss")
        grid[0].legend(loc="upper right")
        for axes, (name, values) in zip(grid[1:], below.items(), strict=True):
            axes.plot(*_finite(x[1], values), color=COLOURS[2], lw=1.6)
            axes.set_ylabel(name)
        grid[-1].set_xlabel(x[0])
        grid[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))

    return _draw((4, 2.9 + 1.0 * len(below)), paint)


def _finite(x: Sequence[float], y: Sequence[float], points: int = 400) -> tuple[list[float], list[float]]:
    """The points that are numbers, thinned."""
    both = torch.tensor([list(x), list(y)], dtype=torch.float64)
    both = both[:, both.isfinite().all(0)]
    keep = torch.linspace(0, max(both.shape[1] - 1, 0), min(both.shape[1], points)).round().long()
    return both[0, keep].tolist(), both[1, keep].tolist()


def photo(image: Tensor) -> Picture:
    """A shown image, uint8 (channels, H, W), in grey or colour, made smaller if it is large."""
    image = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    scale = _SIDE / max(image.shape[1:])
    if scale < 1:
        size = [max(1, round(scale * side)) for side in image.shape[1:]]
        image = torch.nn.functional.interpolate(image[None].float(), size, mode="area")[0].round().byte()
    return _png(image.movedim(0, -1))


def strips(draws: Tensor, order: Sequence[int]) -> Picture:
    """A stacked bar for each draw (J, C): the classes of `order` from left to right, then all others in grey."""
    draws = draws[torch.linspace(0, len(draws) - 1, min(len(draws), _HIGH // 2)).round().long()]
    draws = draws / draws.sum(1, keepdim=True).clamp_min(1e-12)
    ends = draws[:, list(order)].cumsum(1)  # (J, R)
    places = (torch.arange(_WIDE) + 0.5) / _WIDE
    segment = (ends[:, :, None] <= places).sum(1)  # (J, wide); R is the rest
    colours = [*COLOURS[: len(order)], OTHER]
    palette = torch.tensor([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours], dtype=torch.uint8)
    high = min(_HIGH // len(draws), 14)
    pixels = palette[segment].repeat_interleave(high, 0)
    if high > 3:
        pixels[high - 1 :: high] = 255  # a gap between draws
    return _png(pixels)
