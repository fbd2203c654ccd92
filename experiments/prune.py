"""Pruning: a network thinned by several rankings of its channels to the same multiply–adds, and trained on a little.

    IBNN_DATA=FOLDER python experiments/prune.py [--nets lenet] [--keeps 0.5] [--methods ours magnitude]
    python experiments/reproduce.py converged --method iBNN-8 --seeds 1 --runs RUNS  # or benchmark, for its VGG-16
    IBNN_DATA=FOLDER IBNN_RUN=RUNS/KEY python experiments/prune.py --nets converged  # or vgg16

All start from one iBNN (four components) trained on 10,000 images, and are trained on for the same few epochs on the
same images; so is the dense one. *cut*: scores before training on, for 4,000 training images that nothing has seen;
such scores made the choices. The test set is scored once. Two start from finished runs with eight components.
*converged*: a ResNet-20 of half the width, 30 epochs on 47,500 images with crops and flips, trained on for one epoch
with 20,000 of these. *vgg16*: the benchmark's VGG-16 of a quarter of the width, 20 epochs on 10,000 images, trained on
for two. *cut* is of the images that the run held out. The dense one is as the run left and scored it, with 24 draws;
the thin ones have eight.

*ours*: `ibnn.prune`. *magnitude*: the norm of a filter over the mean norm in its layer, ranked over all layers, and
cut. *random*: random numbers in place of norms. *made up*: the channels that magnitude chooses, and weights as
`ibnn.prune` gives them to those that stay. *faster*: CPU seconds of the dense plain network over those of the thinner
one for 64 images on one thread, the median over turns that alternate. Writes results/prune.json and
docs/figures/prune.png.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from common import FIGURES, Data, Results, data_folder, images, parts, scores
from figures import style
from torch import nn

import ibnn
from ibnn.convert import revert
from ibnn.data import Images, subset
from ibnn.lab import display
from ibnn.lab.jobs import read_run
from ibnn.lab.parts import make_data
from ibnn.nets import CifarResNet, LeNet
from ibnn.pruning import Size
from ibnn.pruning.channels import Channels, find_channels
from ibnn.pruning.cutting import BLOCK, choose, size, without
from ibnn.training.recipe import Recipe

CACHE = Path(os.environ.get("IBNN_CACHE", Path(__file__).parent / "cache"))
RUN = Path(os.environ.get("IBNN_RUN", "runs/converged"))
COMPONENTS, ROWS, TIMED, TURNS = 4, [10_000, 1_000, 4_000], 64, 40
RUN_ROWS, PRUNED_BY = 20_000, 5_000  # images of the finished run that thin networks are trained on, and pruned by


class Parts(NamedTuple):
    """Images to train on, to prune by (the same, never cropped or flipped), to steer by, to choose by, and to test."""

    train: Any
    rows: Data
    valid: Any
    dev: Data
    test: Data


class Net(NamedTuple):
    """A network, its data, epochs and learning rate, and the same once it is thin; without the latter no test.

    Without `make` it is that of a finished run.
    """

    title: str
    make: Callable[[], nn.Module] | None
    data: str
    epochs: int
    lr: float
    more: int
    more_lr: float


NETS = {
    "lenet": Net("LeNet × 2", partial(LeNet, width=2), "fashion-mnist", 40, 1e-3, 4, 5e-4),
    "vgg16": Net("VGG-16/4", None, "cifar-10", 20, 1e-3, 2, 5e-4),
    "resnet20": Net("ResNet-20/2, 6 epochs", partial(CifarResNet, depth=20, width=0.5), "cifar-10", 6, 3e-3, 0, 1.5e-3),
    "converged": Net("ResNet-20/2", None, "cifar-10", 30, 0.1, 1, 0.02),
}
METHODS = ("ours", "magnitude", "random", "made up")


def data(name: str, seed: int) -> Parts:
    """Parts of a data set; of a finished run as it split them, where what it held out steers and chooses."""
    if NETS[name].make is None:
        job = read_run(RUN).job
        splits = make_data(job, data_folder())
        whole, every = splits.whole, splits.train.data
        train = subset(every, min(RUN_ROWS, len(every.labels)), seed)
        few, dev, test = (
            Data(whole.normalise(of.images), of.labels)
            for of in (subset(train, PRUNED_BY, seed), splits.valid.data, whole.test)
        )
        cropped = Images(train, mean=whole.mean, std=whole.std, augment=job.augment, flip=whole.flip)
        return Parts(cropped, few, splits.valid, dev, test)
    found = [*parts(images(NETS[name].data, train=True), ROWS, seed), images(NETS[name].data, train=False)]
    train, valid, dev, test = (Data(d.x.contiguous(memory_format=torch.channels_last), d.y) for d in found)
    return Parts(train, train, valid, dev, test)


def dense(name: str, seed: int) -> ibnn.IBNN:
    """The iBNN that all rankings start from: of a finished run, or trained once and kept in a cache folder."""
    net, path = NETS[name], CACHE / f"prune-{name}-{seed}.pt"
    if net.make is None:
        return cast(ibnn.IBNN, read_run(RUN).model)
    torch.manual_seed(seed)
    model = ibnn.convert(net.make().to(memory_format=torch.channels_last), components=COMPONENTS, seed=seed)
    if not path.exists():
        given = data(name, seed)
        options: dict[str, Any] = {"epochs": net.epochs, "lr": net.lr, "seed": seed, "evaluate_every": 5}
        ibnn.fit(model, given.train, given.valid, novelty=False, quiet=True, **options)
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def rival(model: ibnn.IBNN, channels: Channels, method: str, seed: int) -> dict[int, float]:
    """Scores of channels: the mean over the filters that make them, or random numbers."""
    generator, of = torch.Generator().manual_seed(seed), dict[int, list[float]]()
    for layer in channels.layers.values():
        norms = layer.module.weight.detach().flatten(1).norm(dim=1)  # type: ignore[operator, union-attr]
        norms = torch.rand(len(norms), generator=generator) if method == "random" else norms / norms.mean()
        for channel, norm in zip(layer.outs.tolist(), norms.tolist(), strict=True):
            of.setdefault(channel, []).append(norm)
    return {channel: sum(values) / len(values) for channel, values in of.items()}


def thinned(model: ibnn.IBNN, method: str, keep: float, train: Data, seed: int) -> tuple[ibnn.IBNN, Size]:
    """A thinner model by a method, and its size."""
    channels = find_channels(model.net, train.x[:2])
    of = rival(model, channels, method, seed)
    if method in ("ours", "made up"):
        by = {
            name: torch.tensor([of.get(c, 0.0) for c in channels.layers[name].ins.tolist()]) for name in model.latents
        }
        options: Any = {"by": by if method == "made up" else None, "seed": seed, "quiet": True}
        found = ibnn.prune(model, train, keep, **options)
        return found.model, found.after
    cuttable = {channel: of[channel] for channel in channels.cuttable}
    thin = without(model, channels, choose(channels, cuttable, keep * size(model, channels).products, BLOCK))
    return thin, size(thin, find_channels(thin.net, train.x[:2]))


def scored(model: ibnn.IBNN, given: Data) -> dict[str, float]:
    """Error, NLL and ECE of a draw from each component."""
    return scores(model.predict(given.x, samples=1, progress=False, novelty=False).log_probs, given.y)


def times(name: str, seed: int, cells: list[str]) -> dict[str, Any]:
    """Milliseconds of the dense plain network for a batch, and how much faster the thinner ones of some cells are."""
    x = data(name, seed).test.x[:TIMED]
    nets = {cell: torch.load(CACHE / f"{cell}.pt", weights_only=False).eval() for cell in cells}
    nets = {"dense": revert(dense(name, seed)).eval(), **nets}
    seconds: dict[str, list[float]] = {cell: [] for cell in nets}
    with torch.inference_mode():
        for _ in range(TURNS):
            for cell, net in nets.items():
                began = time.thread_time()
                net(x)
                seconds[cell].append(time.thread_time() - began)
    ratios = {
        cell: statistics.median(one / other for one, other in zip(seconds["dense"], seconds[cell], strict=True))
        for cell in cells
    }
    return {"milliseconds": 1e3 * statistics.median(seconds["dense"]), "faster": ratios}


def recipe(name: str, seed: int) -> Recipe:
    """How a thin network is trained on: by the defaults, or as the finished run was."""
    net, found = NETS[name], Recipe() if NETS[name].make else read_run(RUN).job.full_recipe()
    return found.but(epochs=net.more, lr=net.more_lr, seed=seed + 1, evaluate_every=net.more)


def cell(name: str, method: str, keep: float, seed: int) -> dict[str, Any]:
    """One network, thinned to a share by a method; with keep = 1 trained on as all others, or as a run left it."""
    model, given = dense(name, seed), data(name, seed)
    began = time.process_time()
    thin, found = thinned(model, method, keep, given.rows, seed)
    facts: dict[str, Any] = {"pruning seconds": time.process_time() - began, **found._asdict()}
    facts |= {"cut": scored(thin, given.dev)}
    torch.save(revert(copy.deepcopy(thin)), CACHE / f"{name} {method} {keep} {seed}.pt")
    if not NETS[name].more:
        return facts
    if keep == 1 and NETS[name].make is None:
        return facts | {"test": {score: read_run(RUN).result["scores"][score] for score in facts["cut"]}}
    began = time.process_time()
    ibnn.fit(thin, given.train, given.valid, recipe=recipe(name, seed), novelty=False, quiet=True)
    return facts | {"tuning seconds": time.process_time() - began, "test": scored(thin, given.test)}


def draw(cells: dict[str, Any]) -> None:
    """Errors and speed against the multiply–adds that stay, a row of axes for each network."""
    names = [name for name in NETS if "test" in cells.get(f"{name} dense 1.0 0", {})]
    faster = {cell: ratio for of in cells.values() for cell, ratio in of.get("faster", {}).items()}
    faster |= {f"{name} dense 1.0 0": 1.0 for name in names}
    cells = {cell: found | {"faster": faster.get(cell, float("nan"))} for cell, found in cells.items()}
    with style.house_style():
        figure = style.canvas(2.0 * len(names))
        axes = figure.subplots(len(names), 3, squeeze=False)
        for (cut, tuned, speed), name in zip(axes, names, strict=True):
            level = 100 * cells[f"{name} dense 1.0 0"]["test"]["error"]
            tuned.axhspan(level, level + 0.5, color=display.OTHER, alpha=0.3, linewidth=0)
            panel(cut, cells, name, lambda found: 100 * found["cut"]["error"])
            panel(tuned, cells, name, lambda found: 100 * found["test"]["error"])
            panel(speed, cells, name, lambda found: found["faster"])
            cut.set_title(f"{NETS[name].title}: held-out error once cut, %")
            tuned.set_title("test error, trained on, %")
            speed.set_title("times faster")
        for ax in axes[-1]:
            ax.set_xlabel("multiply–adds that stay")
        axes[0][0].legend()
        (FIGURES / "prune.png").write_bytes(display.png(figure))


def panel(axes: Any, cells: dict[str, Any], name: str, of: Callable[[dict[str, Any]], float]) -> None:
    """A measure of all methods and shares of a network, from the dense one on."""
    whole = cells[f"{name} dense 1.0 0"]
    axes.axhline(of(whole), color=display.OTHER, linewidth=1, label="dense")
    for method, colour, marker in zip(METHODS[:3], display.COLOURS, style.MARKERS, strict=False):
        found = [c for cell, c in cells.items() if cell.startswith(f"{name} {method} ") and cell.endswith(" 0")]
        found = [whole, *sorted(found, key=lambda c: -c["products"])]
        shares = [c["products"] / whole["products"] for c in found]
        axes.plot(shares, [of(c) for c in found], color=colour, marker=marker, markersize=3, label=method)
    axes.set_xticks([1, 0.75, 0.5, 0.25], ["1", "¾", "½", "¼"])
    axes.invert_xaxis()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.5, 0.25, 0.75, 0.35])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS[:3]))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = Results("prune", str(__doc__))
    for seed in options.seeds:
        for name in options.nets:
            for keep in options.keeps:
                for method in options.methods:
                    results.run(f"{name} {method} {keep} {seed}", partial(cell, name, method, keep, seed))
            results.run(f"{name} dense 1.0 {seed}", partial(cell, name, "ours", 1.0, seed))
            done = [key for key in results.cells if key.startswith(f"{name} ") and key.endswith(f" {seed}")]
            done = [key for key in done if key.split()[1] not in ("dense", "times")]
            results.run(f"{name} times {seed}", partial(times, name, seed, done), key=", ".join(done))
    draw(results.cells)
