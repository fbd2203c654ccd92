"""Calibration, entropy under noise, regression, the plane of the components, and the draws for images."""

import math
import statistics
import textwrap
from typing import TYPE_CHECKING, Any

import torch

from figures.grid import Cells, Grid, at, numbers, spread
from figures.style import SOFT, canvas, legend, mark, patch, stacked, styles
from ibnn.lab.display import BLUE, ORANGE, SKY, VERMILION, dots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 15  # of confidence, as `metrics.reliability_curve`
FEWEST = 5  # images in a bin; fewer say nothing
NOISES = (("gaussian", "γ", "Gaussian noise"), ("salt", "p", "salt and pepper"))
PARTS = ("aleatoric", "epistemic")
LEVELS = 14  # of contours
EACH = 5  # images a row
CLASSES = 12  # shown at most, the most probable ones
UNNAMED = "#AAAAAA"  # colour of classes that are neither true nor predicted

Bin = tuple[float, float, float]  # confidence, accuracy, count


def pooled(cells: Cells) -> list[Bin]:
    """Returns the bins of all seeds together, weighted by their counts.

    >>> one = {"reliability": {"confidence": [0.9], "accuracy": [1.0], "count": [1]}}
    >>> two = {"reliability": {"confidence": [0.92], "accuracy": [0.5], "count": [3]}}
    >>> [tuple(round(value, 4) for value in bin) for bin in pooled([one, two])]
    [(0.915, 0.625, 4.0)]
    """
    bins: dict[int, list[Bin]] = {}
    for cell in cells:
        columns = (at(cell, "reliability", name) for name in ("confidence", "accuracy", "count"))
        for confidence, accuracy, count in zip(*columns, strict=True):
            bins.setdefault(math.ceil(confidence * BINS - 1e-9), []).append((confidence, accuracy, float(count)))
    columns = (tuple(zip(*parts, strict=True)) for _, parts in sorted(bins.items()))
    return [(statistics.fmean(c, n), statistics.fmean(a, n), sum(n)) for c, a, n in columns]


def calibration(grid: Grid) -> "Figure":
    """Confidence − accuracy against confidence, a line per method, a panel per setting."""
    count = len(grid.settings)
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = canvas(0.5 + 2.4 * rows)
    every = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for spare in every[count:]:
        spare.set_axis_off()
    for i, (axes, (setting, methods)) in enumerate(zip(every, grid.settings.items(), strict=False)):
        axes.axhline(0, color="black", lw=0.8)
        for method, cells in methods.items():
            bins = pooled(cells)
            total = sum(n for _, _, n in bins)
            points = [(c, c - a, 8 + 110 * n / total) for c, a, n in bins if n >= FEWEST]
            dots(axes, points, lw=1.4, **styles(grid.methods)[method], linewidths=0)
        axes.set_title(textwrap.fill(setting, 24 if columns > 2 else 40))
        axes.grid()
        axes.margins(y=0.12)
        for place, words, side in ((0.98, "more confident than right", "top"), (0.02, "less confident", "bottom")):
            axes.text(0.012, place, words, transform=axes.transAxes, va=side, color=SOFT, fontsize=8, style="italic")
        if i % columns == 0:
            axes.set_ylabel("confidence − accuracy")
        if i + columns >= count:
            axes.set_xlabel("confidence")
            axes.tick_params(labelbottom=True)
    drawn, looks = {method for _, method, _ in grid.groups()}, styles(grid.methods).items()
    legend(figure, [mark(name, ls="-", lw=1.4, **look) for name, look in looks if name in drawn])
    return figure


def ood(grid: Grid) -> "Figure":
    """Entropy against the level of two noises, of one setting: a line per method, dashed for the epistemic part."""
    (methods,) = grid.settings.values()
    figure = canvas(2.9)
    every = figure.subplots(1, len(NOISES), sharey=True)
    for axes, (noise, letter, words) in zip(every, NOISES, strict=True):
        for method, cells in methods.items():
            levels, parts = _bands(cells, noise)
            look = styles(grid.methods)[method]
            axes.plot(levels, [sum(both) for both in zip(*parts, strict=True)], **look, lw=1.4, ms=4)
            axes.plot(levels, parts[1], color=look["color"], ls="--", lw=1.1)
        axes.set_title(words)
        axes.set_xlabel(f"level {letter}")
        axes.grid()
    every[0].set_ylabel("entropy (nats)")
    every[0].set_ylim(bottom=0)
    looks = styles(grid.methods).items()
    lines = [mark(name, ls="-", lw=1.4, **look) for name, look in looks if name in methods]
    kinds = [mark("total", ls="-", color=SOFT, lw=1.4), mark("epistemic part", ls="--", color=SOFT, lw=1.1)]
    legend(figure, [*lines, *kinds])
    return figure


def _bands(cells: Cells, noise: str) -> tuple[list[float], list[list[float]]]:
    """Levels, and the mean over seeds of both parts at each."""
    measured: dict[float, Cells] = {}
    for cell in cells:
        for point in cell.get(noise) or []:
            measured.setdefault(point["level"], []).append(point)
    levels = sorted(measured)
    return levels, [[spread(numbers(measured[level], name)).mean for level in levels] for name in PARTS]


def regression(grid: Grid) -> "Figure":
    """Training points, mean and bands of ± 2 sd of the first seed, of one method; columns are hidden layers."""
    drawn = {cells[0]["job"]["net_options"]["layers"]: cells[0] for _, _, cells in grid.groups()}
    figure = canvas(2.5)
    every = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    top = 1.25 * max(abs(x) ** 3 for cell in drawn.values() for x in cell["analysis"]["x"])
    for axes, (depth, cell) in zip(every, sorted(drawn.items()), strict=True):
        layers = f"{depth} hidden layer{'s' * (depth > 1)}"
        axes.set(title=f"{layers}\ntest NLL {cell['scores']['nll']:.2f}", xlabel="x")
        _draw_curve(axes, cell["analysis"])
    every[0].set(ylabel="y", ylim=(-top, top))
    point = mark("training point", marker="o", color=VERMILION, ms=3.5)
    lines = [mark("y = x³", ls="--", color="black", lw=1), mark("mean", ls="-", color=BLUE, lw=1.4)]
    bands = [patch("± 2 sd epistemic", SKY, alpha=0.75), patch("± 2 sd total", SKY, alpha=0.3)]
    legend(figure, [point, *lines, *bands])
    return figure


def _draw_curve(axes: Any, curve: dict[str, Any]) -> None:
    x, mean, epistemic = curve["x"], curve["mean"], curve["epistemic_std"]
    total = [math.hypot(a, e) for a, e in zip(curve["aleatoric_std"], epistemic, strict=True)]
    for sd, alpha in ((total, 0.3), (epistemic, 0.65)):
        low, high = ([m + sign * 2 * s for m, s in zip(mean, sd, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=SKY, alpha=alpha, lw=0)
    axes.plot(x, [value**3 for value in x], color="black", lw=0.9, ls="--")
    axes.plot(x, mean, color=BLUE, lw=1.4)
    axes.scatter(curve["train_x"], curve["train_y"], s=7, color=VERMILION, lw=0, zorder=3)
    axes.set_xlim(min(x), max(x))


def pca(grid: Grid) -> "Figure":
    """Contours of training loss and test error, the components' places and the centre U; of every first seed."""
    groups = list(grid.groups())
    titles = [" / ".join(filter(None, names)) if len(groups) > 1 else "" for *names, _ in groups]
    figure = canvas(0.9 + 2.85 * len(groups))
    for part, (_, _, cells) in zip(stacked(figure, titles), groups, strict=True):
        found = cells[0]["analysis"]
        left, right = part.subplots(1, 2, sharey=True)
        _contours(part, left, found, found["train_loss"], "training loss (nats)")
        _contours(part, right, found, [[100 * v for v in row] for row in found["test_error"]], "test error (%)")
        left.set_ylabel(f"second direction ({100 * found['explained'][1]:.0f} % of the spread)")
    edged: dict[str, Any] = {"mec": "white", "mew": 0.8}
    places = mark("component's weights U diag(μₖ)", marker="o", color=ORANGE, ms=7, **edged)
    legend(figure, [places, mark("shared weights U", marker="*", color="#CC0000", ms=12, **edged)])
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
    first = f"first direction ({100 * found['explained'][0]:.0f} % of the spread)"
    axes.set(title=words, xlabel=first, aspect="equal")


def softmax(grid: Grid) -> "Figure":
    """Probability of every class by every draw, least certain images on top; of the first group's first seed."""
    _, _, cells = next(grid.groups())
    found = cells[0]["analysis"]
    classes = found.get("classes") or at(cells[0], "classes") or list(range(len(found["least"][0]["draws"][0])))
    ends = {"Least certain": found["least"][:EACH], "Most certain": found["most"][-EACH:]}  # by falling doubt
    rows = {words: entries for words, entries in ends.items() if entries}
    figure = canvas(0.3 + len(rows) * (1.55 + 0.16 * min(CLASSES, len(classes))))
    for part, entries in zip(stacked(figure, list(rows)), rows.values(), strict=True):
        _draw_images(part, entries, [str(name) for name in classes])
    colours = (("true class", BLUE), ("predicted instead", VERMILION), ("other class", UNNAMED))
    handles = [mark(words, marker="o", color=colour) for words, colour in colours]
    legend(figure, [*handles, mark("median of the draws", marker="|", color="black", ms=8, mew=1.5)])
    return figure


def _draw_images(part: Any, entries: list[dict[str, Any]], classes: list[str]) -> None:
    means = [[sum(column) / len(column) for column in zip(*entry["draws"], strict=True)] for entry in entries]
    best = sorted(range(len(classes)), key=lambda index: -max(mean[index] for mean in means))
    kept = sorted(best[:CLASSES])  # most probable for any of the images, in their own order
    every = part.subplots(2, EACH, squeeze=False, height_ratios=(1, 0.17 * len(kept)))
    for spare in every[:, len(entries) :].flatten():
        spare.set_axis_off()
    for place, ((top, bottom), entry) in enumerate(zip(every.T, entries, strict=False)):
        pixels = torch.tensor(entry["image"], dtype=torch.uint8)  # channels first, if there are any
        pixels = pixels.movedim(0, -1) if pixels.ndim == 3 else pixels
        top.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        top.set_axis_off()
        top.set_title(f"{entry['label']}\nsaid: {entry['predicted']}", loc="center", fontsize=9)
        special = {entry["predicted"]: VERMILION, entry["label"]: BLUE}
        strips = [[draw[index] for draw in entry["draws"]] for index in kept]
        _strips(bottom, strips, [special.get(classes[index], UNNAMED) for index in kept])
        bottom.set(xlim=(-0.04, 1.04), ylim=(len(kept) - 0.4, -0.6), xlabel="probability", xticks=(0, 0.5, 1))
        bottom.set_xticklabels(("0", "½", "1"))
        bottom.set_yticks(range(len(kept)), [classes[i] for i in kept] if place == 0 else [""] * len(kept))
        bottom.tick_params(axis="y", length=0)
        bottom.grid(axis="x")


def _strips(axes: Any, rows: list[list[float]], colours: list[str]) -> None:
    """Draws a row of dots per class, one a draw, and their median."""
    x = [value for values in rows for value in values]
    y = [row + 0.5 * ((7 * i % 11) / 10 - 0.5) for row, values in enumerate(rows) for i in range(len(values))]
    each = [colour for colour, values in zip(colours, rows, strict=True) for _ in values]
    axes.scatter(x, y, s=6, c=each, alpha=0.45, lw=0)
    places = [(row - 0.38, row + 0.38) for row in range(len(rows))]
    axes.vlines([statistics.median(values) for values in rows], *zip(*places, strict=True), color="black", lw=1.3)
