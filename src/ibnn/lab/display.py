"""The words, colours and settings that tables, pages and figures share.

Imports nothing but the standard library until something is drawn; matplotlib's settings are restored.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SCORES = {"error": "error %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "aurc": "AURC", "rmse": "RMSE"}
SCORES |= {"coverage": "in 90 % interval"}
UNCERTAINTIES = {"max_prob": "largest probability", "total": "total entropy"}
UNCERTAINTIES |= {"epistemic": "epistemic part", "novelty": "novelty"}
COSTS = {"train_seconds": "seconds of training", "rows": "rows trained on"}
COSTS |= {"steering_rows": "held-out forward passes for steering", "parameters": "parameters"}
COSTS |= {"latents": "of them latents", "stored": "numbers stored", "forwards": "forward passes per prediction"}

DPI = 120  # dots in each inch of a figure
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for the colour-blind
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = COLOURS
OTHER = "#BBBBBB"  # whatever has no colour of its own
_SHARED = {
    "text.parse_math": False,  # names are not formulas
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


@contextmanager
def house_style(own: dict[str, Any]) -> Iterator[None]:
    """Replaces the user's matplotlib settings by those of all figures and these while something is drawn."""
    import matplotlib.style

    with matplotlib.style.context(["default", _SHARED, own]):
        yield


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Any, dpi: int = DPI) -> bytes:
    """Returns the figure's PNG, the same bytes each time."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def dots(axes: Any, points: Sequence[tuple[float, float, float]], *, lw: float, **style: Any) -> None:
    """Draws a line through dots of given areas (x, y, area)."""
    x, y, areas = ([point[i] for point in points] for i in range(3))
    axes.plot(x, y, color=style["color"], lw=lw)
    axes.scatter(x, y, s=areas, alpha=0.85, **style)


def histogram(axes: Any, values: Any, edges: list[float], **style: Any) -> None:
    """Draws the share of values in each bin."""
    axes.hist(values.tolist(), edges, weights=[1 / len(values)] * len(values), **style)


def draw_examples(figure: Any, images: Any, titles: Sequence[str], draws: Any = None) -> None:
    """Draws images (n, channels, H, W) with titles, each above its draws (n, J, classes)."""
    grid = figure.subplots(1 if draws is None else 2, len(images), squeeze=False)
    for column, (image, title) in enumerate(zip(images, titles, strict=True)):
        colour = image[:3].movedim(0, -1) if len(image) >= 3 else image[0]
        grid[0, column].imshow(colour.numpy(), cmap="gray_r")
        grid[0, column].set_title(title, fontsize=7)
        if draws is not None:
            shown = grid[1, column].imshow(draws[column].numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
            grid[1, column].set_xlabel("class", fontsize=8)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
    if draws is not None:
        grid[1, 0].set_ylabel(f"{draws.shape[1]} draws", fontsize=8)
        figure.colorbar(shown, ax=grid[1, :], label="probability", shrink=0.9, pad=0.01)
