"""What the experiments share: data, plain training, temperature scaling, scores, result files."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import metrics
from ibnn.data import load_cifar10, load_idx
from ibnn.lab import reproduce
from ibnn.lab.provenance import provenance
from ibnn.likelihood import Categorical
from ibnn.likelihood.temperature import best_temperature

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"


class Data(NamedTuple):
    """Inputs and labels."""

    x: Tensor
    y: Tensor


class Splits(NamedTuple):
    """Training data, held-out labels to choose by, and the test set, which nothing is chosen by."""

    train: Data
    valid: Data
    test: Data


def images(folder: Path, name: str, *, train: bool) -> Data:
    """A set's images, normalised by the mean and deviation of its training pixels."""
    if name == "cifar-10":
        pixels, labels = load_cifar10(folder / "cifar-10-batches-bin", train=train)
        return Data((pixels.float() / 255 - 0.4734) / 0.2516, labels)
    pixels, labels = load_idx(folder / name, train=train)
    return Data((pixels.float() / 255 - 0.286) / 0.353, labels)  # MNIST too: it serves as Fashion-MNIST's outsider


def splits(folder: Path, name: str, *, train: int, valid: int, seed: int) -> Splits:
    """Disjoint random subsets of the training images, and the whole test set."""
    whole = images(folder, name, train=True)
    order = torch.randperm(len(whole.y), generator=torch.Generator().manual_seed(seed))
    parts = order[:train], order[train : train + valid]
    return Splits(*(Data(whole.x[part], whole.y[part]) for part in parts), images(folder, name, train=False))


def train_plain(
    net: nn.Module, data: Data, *, epochs: int, seed: int, lr: float = 1e-3, report: Callable[[int], None] | None = None
) -> nn.Module:
    """AdamW with the default recipe's schedule and clipping, batches of 128: what `ibnn.fit` does, without noise."""
    from ibnn.training.recipe import Recipe

    schedule, size = Recipe().schedule, 128
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0)
    steps, step = epochs * -(-len(data.y) // size), 0
    net.train()
    for epoch in range(epochs):
        for rows in torch.randperm(len(data.y), generator=generator).split(size):
            for group in optimiser.param_groups:
                group["lr"] = lr * schedule.factor((step + 0.5) / steps)
            F.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            step += 1
        if report:
            report(epoch)
    return net.eval()


@torch.no_grad()
def logits(net: nn.Module, x: Tensor) -> Tensor:
    """Outputs of a plain network in eval mode."""
    return torch.cat([net.eval()(part) for part in x.split(500)])


def fit_temperature(log_probs: Tensor, labels: Tensor) -> float:
    """T that minimises the NLL of softmax(log_probs / T)."""
    return best_temperature(Categorical(), log_probs[None, None], labels)


def scores(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Error, NLL, ECE."""
    log_probs = log_probs.log_softmax(-1)
    probs = log_probs.exp()
    return {
        "error": metrics.error(probs, labels),
        "nll": metrics.nll(log_probs, labels),
        "ece": metrics.ece(probs, labels),
    }


class Results(reproduce.Results):
    """A JSON file of result cells by name; written after every cell, so that a stopped experiment goes on."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(RESULTS / f"{name}.json", {"about": about})

    def run(self, cell: str, work: Callable[[], dict[str, Any]], key: str | None = None) -> dict[str, Any]:
        """The cell's result: what is there already, or what `work` returns, with its time and provenance.

        With a key what is there counts only if it was made under the same one.
        """
        if cell not in self.cells or self.cells[cell].get("key") != key:
            began = time.monotonic()
            result = work() | ({"key": key} if key else {})
            self.add(cell, result | {"seconds": round(time.monotonic() - began, 1), "provenance": provenance()})
            print(cell, json.dumps(result)[:400], flush=True)
        return dict(self.cells[cell])


def data_folder() -> Path:
    """Where the data sets are: the environment variable IBNN_DATA."""
    return Path(os.environ.get("IBNN_DATA", "data"))


SEVERITIES = {  # of CIFAR-10-C, severities 1 to 5
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation of the Gaussian, in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor on the distance from the image's mean
    "noise": (0.04, 0.06, 0.08, 0.09, 0.1),  # standard deviation of the noise
}


def corrupt(pixels: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """Images (B, C, H, W) in [0, 1], blurred, with less contrast or with Gaussian noise, in [0, 1] again."""
    strength = SEVERITIES[kind][severity - 1]
    if kind == "contrast":
        mean = pixels.mean((2, 3), keepdim=True)
        return mean + (pixels - mean) * strength
    if kind == "noise":
        noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed))
        return (pixels + strength * noise).clamp(0, 1)
    line = torch.exp(-0.5 * (torch.arange(-4, 5) / strength) ** 2)
    kernel = (line / line.sum()).expand(pixels.shape[1], 1, -1)
    padded = F.pad(pixels, (4, 4, 4, 4), mode="reflect")
    rows = F.conv2d(padded, kernel[:, :, :, None], groups=pixels.shape[1])
    return F.conv2d(rows, kernel[:, :, None, :], groups=pixels.shape[1])
