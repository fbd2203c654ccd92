"""IMAGES: the least and the most certain test images, and every draw's probabilities."""

import statistics
from typing import TYPE_CHECKING, Any

from ibnn.lab.figures.grid import Grid, at
from ibnn.lab.figures.style import BLUE, VERMILION, canvas, legend, mark, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EACH = 5  # images a row
CLASSES = 12  # shown at most, the most probable ones
OTHER = "#AAAAAA"


def softmax(grid: Grid) -> "Figure | None":
    """Probability of every class by every draw, least certain images on top; of the first group's first seed."""
    grid = grid.having("analysis", "least")
    for _, _, cells in grid.groups():
        found = cells[0]["analysis"]
        break
    else:
        return None
    classes = found.get("classes") or at(cells[0], "classes") or list(range(len(found["least"][0]["draws"][0])))
    ends = (("Least certain", found["least"][:EACH]), ("Most certain", found["most"][-EACH:]))  # by falling doubt
    rows = [(words, entries) for words, entries in ends if entries]
    figure = canvas(0.3 + len(rows) * (1.55 + 0.16 * min(CLASSES, len(classes))))
    for part, (_, entries) in zip(stacked(figure, [words for words, _ in rows], [1] * len(rows)), rows, strict=True):
        _draw(part, entries, [str(name) for name in classes])
    colours = (("true class", BLUE), ("predicted instead", VERMILION), ("other class", OTHER))
    handles = [mark(words, marker="o", color=colour) for words, colour in colours]
    legend(figure, [*handles, mark("median of the draws", marker="|", color="black", ms=8, mew=1.5)])
    return figure


def _draw(part: Any, entries: list[dict[str, Any]], classes: list[str]) -> None:
    kept = _probable(entries, len(classes))
    every = part.subplots(2, EACH, squeeze=False, height_ratios=(1, 0.17 * len(kept)))
    for place, (top, bottom) in enumerate(every.T):
        if place >= len(entries):
            top.set_axis_off()
            bottom.set_axis_off()
            continue
        entry = entries[place]
        _picture(top, entry["image"])
        top.set_title(f"{entry['label']}\nsaid: {entry['predicted']}", loc="center", fontsize=7.5)
        special = {entry["predicted"]: VERMILION, entry["label"]: BLUE}
        strips = [[draw[index] for draw in entry["draws"]] for index in kept]
        _strips(bottom, strips, [special.get(classes[index], OTHER) for index in kept])
        bottom.set(xlim=(-0.04, 1.04), ylim=(len(kept) - 0.4, -0.6), xlabel="probability", xticks=(0, 0.5, 1))
        bottom.set_xticklabels(("0", "½", "1"))
        bottom.set_yticks(range(len(kept)), [classes[i] for i in kept] if place == 0 else [""] * len(kept))
        bottom.tick_params(axis="y", length=0)
        bottom.grid(axis="x")


def _probable(entries: list[dict[str, Any]], count: int) -> list[int]:
    """Returns the classes of the highest mean probability for any of the images, in their own order."""
    means = [[sum(column) / len(column) for column in zip(*entry["draws"], strict=True)] for entry in entries]
    best = sorted(range(count), key=lambda index: -max(mean[index] for mean in means))
    return sorted(best[:CLASSES])


def _picture(axes: Any, image: list[Any]) -> None:
    """Shows an image, grey if it has one channel."""
    import numpy as np

    pixels = np.asarray(image, dtype=np.uint8)
    if pixels.ndim == 3:
        pixels = pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, 2)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_axis_off()


def _strips(axes: Any, rows: list[list[float]], colours: list[str]) -> None:
    """Draws a row of dots per class, one a draw, and their median."""
    x = [value for values in rows for value in values]
    y = [row + 0.5 * ((7 * i % 11) / 10 - 0.5) for row, values in enumerate(rows) for i in range(len(values))]
    each = [colour for colour, values in zip(colours, rows, strict=True) for _ in values]
    axes.scatter(x, y, s=6, c=each, alpha=0.45, lw=0)
    places = [(row - 0.38, row + 0.38) for row in range(len(rows))]
    axes.vlines([statistics.median(values) for values in rows], *zip(*places, strict=True), color="black", lw=1.3)
