"""Does the default recipe diverge? Trains every kind of network over K, batch size and init_std, all else untouched.

    IBNN_DATA=FOLDER python experiments/robustness.py [--only lenet] [--steps 200]

FOLDER holds fashion-mnist/ (idx .gz files) and cifar-10-batches-bin/ (binary version). Writes results/robustness.json
cell by cell; cells that have a result are skipped.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from common import RESULTS, Data, images
from provenance import provenance
from torch import Tensor, nn

import ibnn
from ibnn.files.atomic import write_atomically
from ibnn.nets import VGG16, LeNet, WideResNet, mlp

RESULT = RESULTS / "robustness.json"


class Transformer(nn.Module):
    """A small classifier of rows as tokens: Fashion-MNIST's 28 rows of 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(x.squeeze(1))).mean(1))
        return scores


def fashion() -> Data:
    return images("fashion-mnist", train=True)


def cifar() -> Data:
    return images("cifar-10", train=True)


def cubic() -> Data:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2000, 1, generator=generator) * 8 - 4
    y = (x**3 + 3 * torch.randn(2000, 1, generator=generator)) / 25
    return Data(x / 2.3, y)


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data], str]] = {
    "lenet": (LeNet, fashion, "categorical"),
    "mlp-regression": (lambda: mlp(1, 1, hidden=64, layers=3), cubic, "gaussian"),
    "transformer": (Transformer, fashion, "categorical"),
    "vgg16-eighth": (lambda: VGG16(width=0.125), cifar, "categorical"),
    "vgg16": (VGG16, cifar, "categorical"),
    "wrn-10-1": (lambda: WideResNet(depth=10, width=1), cifar, "categorical"),
}
# (components, batch size, init_std): each varied over its range, and the corners where slices are smallest
CELLS = [
    *[(k, 128, std) for k in (1, 8, 32) for std in (0.05, 0.3, 0.75)],
    *[(8, 16, std) for std in (0.05, 0.75)],
    (32, 16, 0.75),
    (1, 16, 0.75),
    (8, 1024, 0.75),
]
FEWER = {  # sized for two cores: the widest network, and the deepest at its largest batch, take an hour
    "vgg16": [(8, 16, 0.05), (8, 16, 0.75)],
    "wrn-10-1": [cell for cell in CELLS if cell[1] < 1024],
}


def run_cell(task: str, cell: tuple[int, int, float], steps: int) -> dict[str, Any]:
    """Trains one cell with the default recipe and evaluates on 1,000 held-out training examples."""
    make, load, likelihood = TASKS[task]
    components, batch_size, init_std = cell
    torch.manual_seed(0)
    x, y = load()
    held_out = (x[-1000:], y[-1000:])
    model = ibnn.convert(make(), components=components, init_std=init_std, likelihood=likelihood, seed=0)
    start = time.monotonic()
    before = model.likelihood.score(model.predict(held_out[0], samples=1), held_out[1])["nll"]
    row = {"task": task, "components": components, "batch_size": batch_size, "init_std": init_std, "steps": steps}
    try:
        ibnn.fit(model, (x[:-1000], y[:-1000]), steps=steps, batch_size=batch_size, quiet=True)
        scores = model.likelihood.score(model.predict(held_out[0], samples=1), held_out[1])
        outcome: dict[str, Any] = {"diverged": False, "nll": round(scores["nll"], 4)}
    except ibnn.DivergedError as error:
        outcome = {"diverged": True, "why": str(error)}
    return row | {"nll_before": round(before, 4)} | outcome | {"seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TASKS, action="append")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"cells": []}
    for task in options.only or TASKS:
        for cell in FEWER.get(task, CELLS):
            names = ("task", "components", "batch_size", "init_std", "steps")
            wanted = dict(zip(names, (task, *cell, options.steps), strict=True))
            if any(all(row[name] == wanted[name] for name in names) for row in result["cells"]):
                continue
            result["cells"].append(run_cell(task, cell, options.steps))
            result |= {
                "recipe": ibnn.Recipe(steps=options.steps).model_dump(),
                "seed": 0,
                "versions": provenance("accelerate"),
            }
            write_atomically(RESULT, json.dumps(result, indent=1).encode() + b"\n")
            print(result["cells"][-1], flush=True)


if __name__ == "__main__":
    main()
