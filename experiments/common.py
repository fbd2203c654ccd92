"""What the experiments share: data, plain training, scores, result files."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import reproduce
import torch
from provenance import commit, provenance
from torch import Tensor, nn

import ibnn
from ibnn import metrics
from ibnn.baselines import Plain
from ibnn.data import load_cifar10, load_idx
from ibnn.likelihood import Categorical
from ibnn.likelihood.temperature import best_temperature

RESULTS = Path(__file__).parent / "results"
DOCS, NOTES = Path(__file__).parent.parent / "docs", Path(__file__).parent / "notes"
FIGURES = DOCS / "figures"
NORM = {"cifar-10": (0.4734, 0.2516), "fashion-mnist": (0.286, 0.353), "mnist": (0.286, 0.353)}  # outsiders alike


class Data(NamedTuple):
    """Inputs and labels."""

    x: Tensor
    y: Tensor


class Splits(NamedTuple):
    """Training data, held-out labels to choose by, and a test set that informs no choice."""

    train: Data
    valid: Data
    test: Data


def data_folder() -> Path:
    """The folder of the data sets: the environment variable IBNN_DATA."""
    return Path(os.environ.get("IBNN_DATA", "data"))


def images(name: str, *, train: bool) -> Data:
    """A set's images, normalised by the mean and deviation of its training pixels."""
    cifar = name == "cifar-10"
    load, folder = (load_cifar10, "cifar-10-batches-bin") if cifar else (load_idx, name)
    pixels, labels = load(data_folder() / folder, train=train)
    mean, std = NORM[name]
    return Data((pixels.float() / 255 - mean) / std, labels)


def parts(data: Data, sizes: list[int], seed: int) -> list[Data]:
    """Disjoint random parts of some data."""
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))[: sum(sizes)]
    return [Data(data.x[rows], data.y[rows]) for rows in order.split(sizes)]


def train_plain(net: nn.Module, data: Data, *, epochs: int, seed: int, lr: float = 1e-3) -> Plain:
    """A network trained by the default recipe, as an iBNN but without noise."""
    model = Plain(net)
    ibnn.fit(model, data, epochs=epochs, lr=lr, evaluate_every=epochs, seed=seed, quiet=True)
    return model.eval()


def scores(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Error, NLL and ECE of log-probabilities, which need not be normalised."""
    log_probs = log_probs.log_softmax(-1)
    return metrics.scores(log_probs.exp(), log_probs, labels, ("error", "nll", "ece"))


def tempered_scores(model: Any, valid: Data, test: Data, samples: int = 5) -> dict[str, Any]:
    """Scores of a method, and with the temperature of its mean probabilities that the held-out labels choose."""
    logs = [model.predict(part.x, samples=samples, progress=False).log_probs for part in (valid, test)]
    temperature = best_temperature(Categorical(), logs[0][None, None], valid.y)
    tempered = scores(logs[1] / temperature, test.y)
    return {"test": scores(logs[1], test.y), "tempered": tempered, "temperature": temperature}


class Results(reproduce.Results):
    """A JSON file of result cells by name; written after every cell, so that a stopped experiment goes on."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(RESULTS / f"{name}.json", {"about": about})
        commit()  # asked once: the checkout may change during a run

    def run(self, cell: str, work: Callable[[], dict[str, Any]], key: str | None = None) -> dict[str, Any]:
        """The cell's result: the stored one, or what `work` returns, with its time and provenance.

        With a key, a stored result counts only if it was made under the same key.
        """
        if cell not in self.cells or self.cells[cell].get("key") != key:
            began = time.monotonic()
            result = work() | ({"key": key} if key else {})
            self.add(cell, result | {"seconds": round(time.monotonic() - began, 1), "provenance": provenance()})
            print(cell, json.dumps(result)[:400], flush=True)
        return dict(self.cells[cell])
