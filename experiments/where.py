"""Where latents sit: on inputs, outputs or both, and on biases.

    IBNN_DATA=FOLDER python experiments/where.py [--variants "input" "both" …] [--seeds 0 1]

As experiments/form.py: LeNet of twice the width, 5,000 Fashion-MNIST images, 8 components, but 30 epochs. All data are
training images: one part is trained on, one held out for steering and temperatures, and a third, unseen, is scored, as
it is and corrupted. Writes results/where.json.
"""

import argparse
from functools import partial
from typing import Any

from common import Results
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    results = Results("where", str(__doc__))
    for seed in options.seeds:
        for name in options.variants:
            results.run(f"{name} {seed}", partial(run, CELL, partial(converted, VARIANTS[name]), seed))
