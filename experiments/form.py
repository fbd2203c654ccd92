"""The form of the noise: a factor for each channel, for each unit, or both; how many components.

    IBNN_DATA=FOLDER python experiments/form.py [--cells lenet] [--methods "SGD" "both, K = 8" …] [--seeds 0]

All data are training images: one part is trained on, one held out for steering and temperatures, and a third, which
nothing has seen, is scored, as it is and corrupted (noise, blur, contrast, fewer pixels). So defaults may be chosen by
it. *+ T*: at the temperature of the mean probabilities that the held-out part chooses. Writes results/form.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from common import Data, Results, images, parts, scores
from novelty import changed
from torch import Tensor, nn
from torch.utils.data import Dataset

import ibnn
from ibnn import baselines
from ibnn.likelihood import Categorical
from ibnn.likelihood.temperature import best_temperature
from ibnn.nets import VGG16, LeNet

DRAWS = 24  # of all components together
CORRUPTED = ("noise", "blur", "contrast", "pixelated")


class Cell(NamedTuple):
    """A network, images to train on, to hold out and to score by, and how long it trains."""

    make: Callable[[], nn.Module]
    data: str
    rows: tuple[int, int, int]
    epochs: int
    lr: float = 1e-3
    flips: bool = False


class Flipped(Dataset[tuple[Tensor, Tensor]]):
    """Images, each mirrored every other time."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data.x[index], self.data.y[index]
        return (x.flip(-1) if torch.rand(()) < 0.5 else x), y


def small(*, normalised: bool = True) -> nn.Module:
    """A small convolutional network with BatchNorm, which does not overfit 8,000 images within 15 epochs.

    Without BatchNorm it learns slowly.
    """
    sizes, layers = (3, 16, 32, 32, 64, 64), list[nn.Module]()
    for number, (channels, out) in enumerate(pairwise(sizes)):
        norm = [nn.BatchNorm2d(out)] if normalised else []
        layers += [nn.Conv2d(channels, out, 3, padding=1, bias=not normalised), *norm, nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number in (0, 2) else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


_VGG = partial(VGG16, width=0.25, batchnorm=True, dropout=0.0)
CELLS = {
    "lenet": Cell(partial(LeNet, width=2), "fashion-mnist", (5000, 1000, 4000), 60),
    "small": Cell(small, "cifar-10", (8000, 1000, 2000), 15, 3e-3, flips=True),
    "vgg16-quarter": Cell(_VGG, "cifar-10", (10000, 1000, 2000), 20, 3e-3),
}
METHODS: dict[str, Callable[[nn.Module, int], Any]] = {
    "SGD": lambda net, seed: baselines.Plain(net),
    **{
        f"dropout {rate}": lambda net, seed, rate=rate: baselines.MCDropout(net, rate=rate)  # type: ignore[misc]
        for rate in (0.05, 0.1, 0.2, 0.3)
    },
    **{
        f"{draws}, K = {k}": lambda net, seed, draws=draws, k=k: ibnn.convert(  # type: ignore[misc]
            net, components=k, draws=draws, seed=seed
        )
        for draws in ("channel", "unit", "both")
        for k in (1, 8)
    },
}


def run(cell: Cell, method: Callable[[nn.Module, int], Any], seed: int, **recipe: Any) -> dict[str, Any]:
    """Trains a network by a method, and scores it; of components also how far they are apart."""
    train, valid, score = parts(images(cell.data, train=True), list(cell.rows), seed)
    torch.manual_seed(seed)
    model = method(cell.make(), seed)
    options: Any = {"epochs": cell.epochs, "lr": cell.lr, "seed": seed, "evaluate_every": cell.epochs, "quiet": True}
    options |= recipe
    history = ibnn.fit(model, Flipped(train) if cell.flips else train, valid, novelty=False, **options)
    samples = -(-DRAWS // model.components) if model.random else 1
    logs = partial(_log_probs, model, samples)
    temperature = best_temperature(Categorical(), logs(valid.x)[None, None], valid.y)
    rows = 1000 if cell.data == "fashion-mnist" else 600
    found, few = logs(score.x), Data(score.x[:rows], score.y[:rows])
    corrupted = {n: d for n, d in changed(few, float(train.x.min()), float(train.x.max())).items() if n in CORRUPTED}
    harder = {name: scores(logs(given.x) / temperature, given.y) for name, given in corrupted.items()}
    mean = {key: sum(of[key] for of in harder.values()) / len(harder) for key in ("error", "nll", "ece")}
    seen = ("prior_std", "temperature", "training_nll", "held_out_nll")
    steered = {name: [round(look[name], 3) for look in history.looks] for name in seen if history.looks}
    own = {"scores": scores(found, score.y), "+ T": scores(found / temperature, score.y), "T": temperature}
    return own | {"corrupted + T": mean} | steered | _diversity(model, few.x, samples)


def _diversity(model: Any, x: Tensor, samples: int) -> dict[str, Any]:
    """How often components disagree, their part of the epistemic uncertainty, and how far their means are apart."""
    if not isinstance(model, ibnn.IBNN) or model.components == 1:
        return {}
    between, within = _without_bias(model, ibnn.draws(model, x, samples=samples))
    shares = {"between": float(between.sum() / (between + within).sum())}
    found = ibnn.diagnose(model, inputs=x)
    mean, std = (part.detach() for part in model.posterior())
    shares |= {"spread": float(mean.std(0, correction=0).mean()), "std": float(std.mean())}
    return {"diversity": shares | {"disagreement": found.disagreement, "distinct": found.effective_components}}


def _without_bias(model: Any, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Returns between and within without their bias of order 1/S, by the jackknife over the draws (K, S, N, C)."""
    samples, whole = drawn.shape[1], model.likelihood.summarise(drawn)
    less = [model.likelihood.summarise(torch.cat([drawn[:, :s], drawn[:, s + 1 :]], 1)) for s in range(samples)]
    parts = []
    for name in ("between", "within"):
        mean = torch.stack([getattr(answer, name) for answer in less]).mean(0)
        parts.append(samples * getattr(whole, name) - (samples - 1) * mean)
    return parts[0], parts[1]


def _log_probs(model: Any, samples: int, x: torch.Tensor) -> torch.Tensor:
    log_probs: torch.Tensor = model.predict(x, samples=samples, progress=False, novelty=False).log_probs
    return log_probs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = Results("form", str(__doc__))
    for seed in options.seeds:
        for name in options.cells:
            for method in options.methods:
                results.run(f"{name} {method} {seed}", partial(run, CELLS[name], METHODS[method], seed))
