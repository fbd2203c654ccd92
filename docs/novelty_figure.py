"""Draws docs/figures/novelty.png: two moons from afar, and scores of novelty from experiments/results/novelty.json.

    python docs/novelty_figure.py

Left: the largest probability that an iBNN gives, without and with the fallback for novel inputs. Right: mean AUROC of
scores over the pairs for which all were measured.
"""

import json
from statistics import mean

import matplotlib.pyplot as plt
import torch
from readme_figure import DOCS, STYLE
from sklearn.datasets import make_moons

import ibnn
from ibnn import nets

SCORES = {  # label: (score, colour)
    "entropy + T": ("entropy", "#777777"),
    "energy": ("energy", "#E69F00"),
    "10 neighbours": ("last layer, 10 neighbours", "#CC79A7"),
    "last layer": ("last layer, Mahalanobis", "#56B4E9"),
    "ensemble of 4": ("ensemble of 4, epistemic", "#009E73"),
    "novelty": ("iBNN, novelty", "#0072B2"),
}


def trained() -> tuple[ibnn.IBNN, torch.Tensor, torch.Tensor]:
    """An iBNN of two moons, and its data."""
    points, labels = make_moons(2000, noise=0.1, random_state=0)
    x, y = torch.tensor(points).float(), torch.tensor(labels)
    torch.manual_seed(0)
    model = ibnn.convert(nets.mlp(2, 2, hidden=64), seed=0)
    ibnn.fit(model, (x, y), epochs=20, quiet=True)
    return model, x, y


def means(kind: str) -> dict[str, float]:
    """Mean AUROC of every score over the pairs of one kind."""
    cells = json.loads((DOCS.parent / "experiments" / "results" / "novelty.json").read_text())["cells"]
    by_pair: dict[tuple[str, str], list[dict[str, float]]] = {}  # seeds of a pair count as one
    for name, cell in cells.items():
        for pair in (pair for pair, own in cell.get("kinds", {}).items() if own == kind):
            by_pair.setdefault((name.rsplit(" ", 1)[0], pair), []).append(cell["auroc"][pair])
    pairs = [{score: mean(one[score] for one in many) for score in many[0]} for many in by_pair.values()]
    pairs = [pair for pair in pairs if all(score in pair for score, _ in SCORES.values())]
    return {label: mean(pair[score] for pair in pairs) for label, (score, _) in SCORES.items()}


def main() -> None:
    """Draws and writes the figure."""
    model, x, y = trained()
    width = torch.linspace(-6, 7, 131)
    height = torch.linspace(-6, 6.5, 126)
    grid = torch.cartesian_prod(width, height)
    with plt.style.context(["default", STYLE]):
        figure, axes = plt.subplots(1, 3, figsize=(7, 2.6), width_ratios=(1, 1.15, 1.2), layout="constrained")
        for place, (title, fallback) in zip(axes, (("without fallback", None), ("with fallback", 0.01)), strict=False):
            largest = model.predict(grid, fallback=fallback).probs.amax(1).reshape(len(width), len(height)).T
            image = place.pcolormesh(
                width, height, largest, vmin=0.5, vmax=1, cmap="Blues", shading="nearest", rasterized=True
            )
            for label, colour in ((0, "#D55E00"), (1, "#009E73")):
                some = x[y == label][:150]
                place.plot(some[:, 0], some[:, 1], ".", ms=2, color=colour)
            place.set(title=title.capitalize(), xticks=[], yticks=[])
        figure.colorbar(image, ax=axes[1], label="largest probability")
        found = {kind: means(kind) for kind in ("near", "far")}
        for row, (label, (_, colour)) in enumerate(SCORES.items()):
            axes[2].plot([found["near"][label], found["far"][label]], [row, row], color=colour, lw=1)
            axes[2].plot(found["near"][label], row, "s", ms=6, color=colour, mfc="white")
            axes[2].plot(found["far"][label], row, "o", ms=6, color=colour)
        for label, marker, face in (("near", "s", "white"), ("far", "o", "#444444")):
            axes[2].plot([], [], marker, color="#444444", mfc=face, label=label)
        axes[2].set_yticks(range(len(SCORES)), list(SCORES))
        axes[2].invert_yaxis()
        axes[2].set(xlabel="AUROC against test inputs", title="Scores of novelty", xlim=(None, 1.01))
        axes[2].grid(axis="x")
        axes[2].legend(loc="upper right")
        figure.suptitle("A network is sure far from its data; with a fallback it answers the base rates there")
        figure.savefig(DOCS / "figures" / "novelty.png", dpi=120)


if __name__ == "__main__":
    main()
