"""Where latents sit: on inputs, outputs or both, and on biases.

    IBNN_DATA=FOLDER python experiments/where.py [--variants "input" "both" …] [--seeds 0 1]

As experiments/form.py: LeNet of twice the width, 5,000 Fashion-MNIST images, 8 components, but 30 epochs. All data are
training images: one part is trained on, one held out for steering and temperatures, and a third, unseen, is scored, as
it is and corrupted. Writes results/where.json; with --figure draws docs/figures/where.png from it instead.
"""

import argparse
from functools import partial
from typing import Any

from common import FIGURES, Results
from form import CELLS, run
from torch import nn

import ibnn

VARIANTS: dict[str, dict[str, Any]] = {
    "input": {},
    "output": {"where": "output"},
    "both": {"where": "both"},
    "input, bias (layer)": {"bias_latents": "layer"},
    "input, bias (node)": {"bias_latents": "node"},
}
CELL = CELLS["lenet"]._replace(epochs=30)


def converted(options: dict[str, Any], net: nn.Module, seed: int) -> ibnn.IBNN:
    """A network with latents in some places."""
    return ibnn.convert(net, components=8, seed=seed, **options)


def figure(cells: dict[str, Any]) -> None:
    """Draws clean against corrupted NLL, both with a temperature, of every variant and seed."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = drawn.subplots()
    colours = dict(zip(VARIANTS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"), strict=True))
    for name, cell in cells.items():
        variant, seed = name.rsplit(" ", 1)
        at = cell["+ T"]["nll"], cell["corrupted + T"]["nll"]
        axes.plot(*at, "o", color=colours[variant], ms=8)
        axes.annotate(f"{variant}, {seed}", at, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(0.25, 0.15)
    axes.set_xlabel("NLL + T")
    axes.set_ylabel("corrupted NLL + T")
    drawn.savefig(FIGURES / "where.png", dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--figure", action="store_true")
    options = parser.parse_args()
    results = Results("where", str(__doc__))
    if options.figure:
        figure(results.cells)
        raise SystemExit
    for seed in options.seeds:
        for name in options.variants:
            results.run(f"{name} {seed}", partial(run, CELL, partial(converted, VARIANTS[name]), seed))
