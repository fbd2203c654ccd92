"""Can components be set apart, and does it pay? K = 8 in several forms against K = 1, with as many draws.

    IBNN_DATA=FOLDER python experiments/apart.py [--tiny] [--variants "K = 1" "K = 8" …] [--seeds 0]

As experiments/form.py: LeNet of twice the width, 5,000 Fashion-MNIST images, but 30 epochs; or a tiny network on 1,000
images of half the side, 60 epochs. All data are training images: one part is trained on, one held out for steering and
temperatures, and a third, unseen, is scored, as it is and corrupted. Beside the scores: how often the networks at two
components' means give an image different labels, and the share of the epistemic uncertainty that is between components
(bias of few draws corrected). Writes results/apart.json.
"""

import argparse
import math
from functools import partial
from typing import Any

from common import Results
from form import CELLS, Cell, run
from torch import nn

import ibnn

MEAN = {"kl": "mean", "prior_std": 0.3 / math.sqrt(8)}  # σ tends to √K s
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of convert and of fit
    "K = 1": ({"components": 1}, {}),
    "K = 8": ({}, {}),
    "K = 8, KL mean, init_std .5": (MEAN | {"init_std": 0.5}, {}),
    "K = 8, init_std .5, means fixed": ({"init_std": 0.5, "fixed": True}, {}),
    "K = 8, KL mean, init_std .5, latent_lr .03": (MEAN | {"init_std": 0.5}, {"latent_lr": 0.03}),
    "K = 8, gamma 10": ({"init_std": 0.5}, {"gamma": 10.0}),
    "K = 8, S = 2 to other components (twice the cost)": ({}, {"samples": 2, "spread": True}),
    "K = 8, inputs and outputs": ({"where": "both"}, {}),
}
LENET = CELLS["lenet"]._replace(epochs=30)


def tiny() -> nn.Module:
    """Two convolutions and two linear layers, for a run of seconds."""
    halved = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3))
    return nn.Sequential(*halved, nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


TINY = Cell(tiny, "fashion-mnist", (1000, 500, 1000), 60)


def converted(options: dict[str, Any], net: nn.Module, seed: int) -> ibnn.IBNN:
    """A network with latents; "fixed" keeps their means where they start."""
    own = {"components": 8, "seed": seed} | options
    fixed = own.pop("fixed", False)
    model = ibnn.convert(net, **own)
    for latent in model.latents.values():
        latent.mean.requires_grad_(not fixed)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tiny", action="store_true", help="the tiny network")
    chosen = parser.parse_args()
    results = Results("apart", str(__doc__))
    for seed in chosen.seeds:
        for name in chosen.variants:
            options, recipe = VARIANTS[name]
            label, cell = (f"tiny: {name}", TINY) if chosen.tiny else (name, LENET)
            results.run(f"{label} {seed}", partial(run, cell, partial(converted, options), seed, **recipe))
