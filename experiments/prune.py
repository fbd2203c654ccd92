"""Pruning: a network thinned by several rankings of its channels to the same multiply–adds, and trained on a little.

    IBNN_DATA=FOLDER python experiments/prune.py [--nets lenet] [--keeps 0.5] [--methods sensitivity magnitude]

All start from one iBNN (four components) trained on 10,000 images, and are trained on for the same few epochs on the
same images. *dev*: 4,000 training images that nothing has seen, by which choices were made; the test set is scored
once. Magnitude: the norm of a filter over the mean norm in its layer, ranked over all layers. Milliseconds: one answer
of one draw for 64 images, the least of several. Writes results/prune.json.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Data, Results, images, parts, scores
from torch import Tensor, nn

import ibnn
from ibnn.nets import VGG16, CifarResNet, LeNet
from ibnn.pruning.channels import find_channels

CACHE = Path(os.environ.get("IBNN_CACHE", Path(__file__).parent / "cache"))
COMPONENTS, ROWS, DRAWS, TIMED = 4, [10_000, 1_000, 4_000], 8, 64


class Net(NamedTuple):
    """A network, its data, how long it trains at first, and how long once it is thin."""

    make: Callable[[], nn.Module]
    data: str
    epochs: int
    lr: float
    more: int


NETS = {
    "lenet": Net(partial(LeNet, width=2), "fashion-mnist", 40, 1e-3, 4),
    "vgg16": Net(partial(VGG16, width=0.25, batchnorm=True, dropout=0.0), "cifar-10", 20, 3e-3, 3),
    "resnet20": Net(partial(CifarResNet, depth=20, width=0.5), "cifar-10", 20, 3e-3, 3),
}
METHODS = ("sensitivity", "posterior", "magnitude", "random")


def data(name: str, seed: int) -> list[Data]:
    """Images to train on, to steer by, to choose by, and the test set."""
    found = [*parts(images(NETS[name].data, train=True), ROWS, seed), images(NETS[name].data, train=False)]
    return [Data(part.x.contiguous(memory_format=torch.channels_last), part.y) for part in found]


def dense(name: str, seed: int) -> ibnn.IBNN:
    """The iBNN that all rankings start from, trained once and kept in a cache folder."""
    net, path = NETS[name], CACHE / f"prune-{name}-{seed}.pt"
    torch.manual_seed(seed)
    model = ibnn.convert(net.make().to(memory_format=torch.channels_last), components=COMPONENTS, seed=seed)
    if not path.exists():
        train, valid, *_ = data(name, seed)
        options: dict[str, Any] = {"epochs": net.epochs, "lr": net.lr, "seed": seed, "evaluate_every": 5}
        ibnn.fit(model, train, valid, novelty=False, quiet=True, **options)
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def rival(model: ibnn.IBNN, method: str, x: Tensor, seed: int) -> dict[str, Tensor]:
    """Scores of nodes: of the filters that make them, or random ones."""
    channels = find_channels(model.net, x[:2])
    generator, of = torch.Generator().manual_seed(seed), dict[int, list[float]]()
    for layer in channels.layers.values():
        norms = layer.module.weight.detach().flatten(1).norm(dim=1)  # type: ignore[operator, union-attr]
        norms = norms / norms.mean() if method == "magnitude" else torch.rand(len(norms), generator=generator)
        for channel, norm in zip(layer.outs.tolist(), norms.tolist(), strict=True):
            of.setdefault(channel, []).append(norm)
    mean = {channel: sum(values) / len(values) for channel, values in of.items()} | {-1: 0.0}
    return {name: torch.tensor([mean[c] for c in channels.layers[name].ins.tolist()]) for name in model.latents}


def scored(model: ibnn.IBNN, given: Data) -> dict[str, float]:
    """Error, NLL and ECE of eight draws."""
    return scores(model.predict(given.x, samples=DRAWS // COMPONENTS, progress=False, novelty=False).log_probs, given.y)


def milliseconds(model: ibnn.IBNN, x: Tensor) -> float:
    """The least time that a draw, as a plain network, takes for a batch."""
    net, times = model.draw(0), []
    with torch.inference_mode():
        for _ in range(12):
            began = time.perf_counter()
            net(x)
            times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def cell(name: str, method: str, keep: float, seed: int) -> dict[str, Any]:
    """One network, thinned to a share by a method; with keep = 1 trained on as all others are."""
    model, (train, valid, dev, test), net = dense(name, seed), data(name, seed), NETS[name]
    began = time.process_time()
    by: Any = rival(model, method, train.x, seed) if method in ("magnitude", "random") else method
    found = ibnn.prune(model, train, keep, by=by, rows=1000, seed=seed)
    facts: dict[str, Any] = {"pruning seconds": time.process_time() - began, "cut": scored(found.model, dev)}
    began, thin = time.process_time(), found.model
    options: dict[str, Any] = {"epochs": net.more, "lr": net.lr / 2, "seed": seed + 1, "evaluate_every": net.more}
    ibnn.fit(thin, train, valid, novelty=False, quiet=True, **options)
    facts |= {"tuning seconds": time.process_time() - began, "outputs": [layer.outputs[1] for layer in found.layers]}
    facts |= {"weights": found.after.weights, "products": found.after.products, "nodes": found.after.nodes}
    facts |= {"dev": scored(thin, dev), "test": scored(thin, test)}
    return facts | {"milliseconds": milliseconds(thin, test.x[:TIMED])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.5, 0.25, 0.75])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = Results("prune", str(__doc__))
    for seed in options.seeds:
        for name in options.nets:
            results.run(f"{name} dense 1.0 {seed}", partial(cell, name, "sensitivity", 1.0, seed))
            for keep in options.keeps:
                for method in options.methods:
                    results.run(f"{name} {method} {keep} {seed}", partial(cell, name, method, keep, seed))
