"""ENTROPY: aleatoric and epistemic parts as the images get noisier."""

from typing import TYPE_CHECKING, Any

from ibnn.lab.figures.grid import Cells, Grid, numbers, outsider, single_network, spread
from ibnn.lab.figures.style import SKY, VERMILION, canvas, legend, patch, stacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISES = (("gaussian", "γ", "Gaussian noise"), ("salt", "p", "salt and pepper"))
PARTS = (("aleatoric", SKY), ("epistemic", VERMILION))


def ood(grid: Grid) -> "Figure | None":
    """Aleatoric and epistemic entropy against the level of two noises, a column per method."""
    grid = grid.having("gaussian")
    if not grid.settings:
        return None
    figure = canvas(0.35 + 2.9 * len(grid.settings))
    titles = [_title(setting, methods) for setting, methods in grid.settings.items()]
    for part, methods in zip(stacked(figure, titles, [1] * len(titles)), grid.settings.values(), strict=True):
        _draw(part, methods)
    legend(figure, [patch(f"{name} entropy", colour) for name, colour in PARTS])
    return figure


def _title(setting: str, methods: dict[str, Cells]) -> str:
    strange = outsider([cell for cells in methods.values() for cell in cells])
    words = f"below a name: AUROC on {strange}, by max. probability | by epistemic entropy"
    return " – ".join(filter(None, (setting, words if strange else "")))


def _draw(part: Any, methods: dict[str, Cells]) -> None:
    every = part.subplots(2, len(methods), squeeze=False, sharey=True, sharex="row")
    for column, (method, cells) in zip(every.T, methods.items(), strict=True):
        for axes, (noise, letter, _) in zip(column, NOISES, strict=True):
            levels, bands = _bands(cells, noise)
            axes.stackplot(levels, bands, colors=[colour for _, colour in PARTS], lw=0)
            axes.set_xlabel(letter, labelpad=1)
            axes.margins(x=0)
            axes.grid()
            axes.set_axisbelow(False)
            axes.locator_params(axis="x", nbins=3)
            axes.locator_params(axis="y", nbins=5)
        column[0].set_title(
            "\n".join([method.replace(" ", "\n", 1) if len(methods) > 5 else method, _auroc(cells)]),
            fontsize=8 if len(methods) < 7 else 6.5,
        )
    every[0, 0].set_ylim(bottom=0)
    for axes, (_, _, words) in zip(every[:, 0], NOISES, strict=True):
        axes.set_ylabel(f"{words}\nentropy (nats)")


def _bands(cells: Cells, noise: str) -> tuple[list[float], list[list[float]]]:
    """Levels, and the mean over seeds of both parts at each."""
    measured: dict[float, Cells] = {}
    for cell in cells:
        for point in cell.get(noise) or []:
            measured.setdefault(point["level"], []).append(point)
    levels = sorted(measured)
    return levels, [[spread(numbers(measured[level], name)).mean for level in levels] for name, _ in PARTS]


def _auroc(cells: Cells) -> str:
    strange = outsider(cells)
    values = [numbers(cells, "outsiders", strange, score) for score in ("max_prob", "epistemic")] if strange else []
    words = [f"{spread(v).mean:.3f}" for v in (values[:1] if single_network(cells) else values) if v]
    return " | ".join(words)
