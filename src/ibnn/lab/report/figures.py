"""Figures of a report: SVG and PNG as data URIs, the same bytes for the same numbers.

Dashes, hatches and order say the same as colours do.
"""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ibnn.lab.display import COLOURS, OTHER, histogram, house_style
from ibnn.metrics import ReliabilityCurve, RiskCoverage

_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)))
_STYLE = {
    "svg.hashsalt": "ibnn",
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.7,
}
_NO_METADATA: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
_PHOTO = 72  # largest side of a shown image in pixels
_STRIP_HEIGHT, _STRIP_WIDTH = 120, 160
_POINTS = 400  # of a curve at most


class Picture(NamedTuple):
    """What an img element needs, apart from its alternative text."""

    src: str
    width: int
    height: int


def _panels(width: float, height: float, *shape: int, **options: Any) -> tuple[Any, Any]:
    """Returns a matplotlib figure of a size in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(*shape, **options)


def _svg(figure: Any) -> Picture:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata=_NO_METADATA)
    lean = re.sub(rb"<!--.*?-->|(?<=\d\d\.\d\d)\d+", b"", file.getvalue(), flags=re.DOTALL)  # hundredths of a point do
    text = base64.b64encode(re.sub(rb"\s+", b" ", lean)).decode()
    return Picture(f"data:image/svg+xml;base64,{text}", *(round(96 * side) for side in figure.get_size_inches()))


def _png(pixels: Tensor) -> Picture:
    """Returns a picture of uint8 (H, W, 3)."""
    file = io.BytesIO()
    imsave(file, pixels.contiguous().numpy(), format="png", metadata={"Software": ""})  # not matplotlib's version
    text = base64.b64encode(file.getvalue()).decode()
    return Picture(f"data:image/png;base64,{text}", pixels.shape[1], pixels.shape[0])


def _plain(name: str, length: int = 44) -> str:
    """Returns a name in letters that the font has, cut to a length."""
    letters = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in name)
    letters = letters if len(letters) <= length else letters[: length - 1] + "…"
    return f" {letters}" if letters.startswith("_") else letters  # matplotlib hides what begins with _


def _line(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % 6], "ls": _DASHES[number % 6], "lw": 1.6}


def _thinned(size: int) -> Tensor:
    """Returns the indices of at most _POINTS evenly spaced points."""
    return torch.linspace(0, max(size - 1, 0), min(size, _POINTS)).round().long()


@house_style(_STYLE)
def reliability(curve: ReliabilityCurve, colour: str) -> Picture:
    """Draws accuracy over confidence with 95 % Wilson intervals, above the number of rows in each bin."""
    filled = curve.count > 0
    x, p, n = (column[filled].double() for column in (curve.confidence, curve.accuracy, curve.count))
    spread = 1.96**2 / n
    middle = (p + spread / 2) / (1 + spread)
    half = (1.96 / (1 + spread)) * (p * (1 - p) / n + spread / n / 4).sqrt()
    reach = torch.stack([p - middle + half, middle + half - p]).clamp_min(0)
    figure, (top, bottom) = _panels(4, 4.2, 2, 1, sharex=True, height_ratios=(3, 1))
    top.plot([0, 1], [0, 1], color="#555555", lw=1, ls=":")
    top.vlines(x.tolist(), p.tolist(), x.tolist(), color="#999999", lw=5, alpha=0.45)
    top.errorbar(x.tolist(), p.tolist(), reach.tolist(), color=colour, marker="o", ms=4, lw=1.4)
    top.set(ylabel="accuracy", xlim=(0, 1), ylim=(-0.02, 1.04))
    edges = curve.edges.tolist()
    bottom.bar(edges[:-1], curve.count.tolist(), width=edges[1], align="edge", color=colour, alpha=0.7)
    bottom.set(xlabel="confidence", ylabel="rows", yscale="log", ylim=(0.7, 2 * float(curve.count.max())))
    bottom.yaxis.set_major_formatter("{x:g}")  # the usual one is a formula
    return _svg(figure)


@house_style(_STYLE)
def histograms(sets: Mapping[str, Tensor], label: str, edges: list[float], *, expected: str = "") -> Picture:
    """Draws the share of rows in each bin; the first set is filled. `expected` names a line of equal shares."""
    figure, axes = _panels(4, 2.8 + 0.2 * (len(sets) + bool(expected)))
    for i, (name, values) in enumerate(sets.items()):
        form = {"histtype": "stepfilled", "alpha": 0.45, "lw": None} if i == 0 else {"histtype": "step", "lw": 1.8}
        histogram(axes, values, edges, label=_plain(name), **(_line(i) | form))
    axes.set(xlabel=label, ylabel="share of rows", xlim=(0, edges[-1]))
    if expected:
        axes.axhline(1 / (len(edges) - 1), color="#555555", lw=1, ls=":", label=expected)
        axes.set_ylim(0, 1)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return _svg(figure)


@house_style(_STYLE)
def risk_coverage(curves: Sequence[tuple[str, int, RiskCoverage]]) -> Picture:
    """Draws the error rate over the share of answered rows, for runs given by name and number."""
    figure, axes = _panels(4.8, 3.4 + 0.2 * len(curves))
    for name, number, curve in curves:
        keep = _thinned(len(curve.risk))
        x, y = curve.coverage[keep].tolist(), (100 * curve.risk[keep]).tolist()
        axes.plot(x, y, label=_plain(name), **_line(number))
    axes.set(xlabel="coverage: share of rows answered", ylabel="error % among them", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=1)
    return _svg(figure)


@house_style(_STYLE)
def training(axis: str, x: Sequence[float], losses: Mapping[str, list[float]], prior_std: Sequence[float]) -> Picture:
    """Draws losses over epochs or steps and, if the noise was steered, the prior's standard deviation below."""
    panels = 2 if prior_std else 1
    figure, grid = _panels(4, 1.9 + panels, panels, sharex=True, squeeze=False, height_ratios=(3, 1)[:panels])
    top, bottom = grid[0, 0], grid[-1, 0]
    for i, (name, values) in enumerate(losses.items()):
        top.plot(*_finite(x, values), label=name, **_line(i))
    top.set_ylabel("NLL" if any("nll" in name.lower() for name in losses) else "loss")
    top.legend(loc="upper right")
    if prior_std:
        bottom.plot(*_finite(x, prior_std), color=COLOURS[2], lw=1.6)
        bottom.set_ylabel("prior std")
    bottom.set_xlabel(axis)
    bottom.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return _svg(figure)


def _finite(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns the finite points, thinned."""
    both = torch.tensor([list(x), list(y)], dtype=torch.float64)
    both = both[:, both.isfinite().all(0)]
    keep = _thinned(both.shape[1])
    return both[0, keep].tolist(), both[1, keep].tolist()


def photo(image: Tensor) -> Picture:
    """Returns an image, uint8 (channels, H, W), in grey or colour, shrunk if it is large."""
    image = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    scale = _PHOTO / max(image.shape[1:])
    if scale < 1:
        size = [max(1, round(scale * side)) for side in image.shape[1:]]
        image = torch.nn.functional.interpolate(image[None].float(), size, mode="area")[0].round().byte()
    return _png(image.movedim(0, -1))


def strips(draws: Tensor, order: Sequence[int]) -> Picture:
    """Draws a stacked bar for each draw (J, C): the classes of `order` from left to right, then all others in grey."""
    draws = draws[torch.linspace(0, len(draws) - 1, min(len(draws), _STRIP_HEIGHT // 2)).round().long()]
    draws = draws / draws.sum(1, keepdim=True).clamp_min(1e-12)
    ends = draws[:, list(order)].cumsum(1)  # (J, R)
    places = (torch.arange(_STRIP_WIDTH) + 0.5) / _STRIP_WIDTH
    segment = (ends[:, :, None] <= places).sum(1)  # (J, width); R is the rest
    colours = [*COLOURS[: len(order)], OTHER]
    palette = torch.tensor([list(bytes.fromhex(colour[1:])) for colour in colours], dtype=torch.uint8)
    height = min(_STRIP_HEIGHT // len(draws), 14)
    pixels = palette[segment].repeat_interleave(height, 0)
    if height > 3:
        pixels[height - 1 :: height] = 255  # a gap between draws
    return _png(pixels)
