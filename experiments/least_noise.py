"""The least noise that the estimators for tables try: 0.2 and 0.6, or less as well.

    python experiments/least_noise.py

On draws of the made tables, and splits of the others, that no other experiment uses: three quarters of the rows to
train on, a quarter to score. `plain` has no noise and no temperature. Writes results/least-noise.json.
"""

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import Results
from sklearn import datasets
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from tabular import NONE

from ibnn.sklearn import IBNNClassifier, IBNNRegressor

TRIED = {"0.2, 0.6": (0.2, 0.6), "0.05, 0.2, 0.6": (0.05, 0.2, 0.6), "0.1, 0.4": (0.1, 0.4), "0.07, 0.6": (0.07, 0.6)}
SEEDS = range(50, 56)


def made(seed: int, rows: int, reach: float, mean: Any, std: Any) -> tuple[Any, Any]:
    """One column, uniform within ± reach, and a function of it with Gaussian noise."""
    random = np.random.default_rng(seed)
    x = random.uniform(-reach, reach, rows)
    return x[:, None], mean(x) + std(x) * random.normal(size=rows)


TABLES: dict[str, Any] = {
    "diabetes": lambda seed: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda seed: datasets.make_friedman1(300, noise=1.0, random_state=seed),
    "friedman2": lambda seed: datasets.make_friedman2(300, noise=50.0, random_state=seed),
    "friedman3": lambda seed: datasets.make_friedman3(300, noise=0.1, random_state=seed),
    "step": partial(made, rows=200, reach=1.0, mean=lambda x: np.where(x > 0.2, 1.0, -1.0), std=lambda x: 0.1),
    "sine": partial(made, rows=300, reach=3.0, mean=lambda x: np.sin(2 * x), std=lambda x: 0.05 + 0.075 * (x + 3)),
    "cube": partial(made, rows=30, reach=4.0, mean=lambda x: x**3, std=lambda x: 3.0),
    "plane": lambda seed: datasets.make_regression(300, 10, n_informative=5, noise=10.0, random_state=seed),
}
CLASSES: dict[str, Any] = {
    "iris": lambda seed: datasets.load_iris(return_X_y=True),
    "wine": lambda seed: datasets.load_wine(return_X_y=True),
    "breast cancer": lambda seed: datasets.load_breast_cancer(return_X_y=True),
    "moons": lambda seed: datasets.make_moons(400, noise=0.3, random_state=seed),
    "blobs": lambda seed: datasets.make_classification(400, 10, n_informative=5, n_classes=3, random_state=seed),
}


def nll(model: Any, x: Any, y: Any) -> float:
    """Mean NLL of rows."""
    if isinstance(model, IBNNClassifier):
        return float(log_loss(y, model.predict_proba(x), labels=model.classes_))
    return -float(model.predict_distribution(x).log_prob(torch.tensor(y)[:, None]).mean())


def score(name: str, seed: int) -> dict[str, Any]:
    """NLL of every choice on one split."""
    classes = name in CLASSES
    x, y = (TABLES | CLASSES)[name](seed)
    y, kind = (y, IBNNClassifier) if classes else ((y - y.mean()) / y.std(), IBNNRegressor)
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.25, random_state=seed)
    found: dict[str, Any] = {}
    for tried, stds in TRIED.items():
        with mock.patch.object(kind, "_stds", stds):
            model = kind(random_state=seed).fit(train_x, train_y)
        found[tried] = {"nll": nll(model, test_x, test_y), "prior_std": float(model.model_.prior_std)}
    model = kind(prior_std=NONE, components=1, samples=1, random_state=seed).fit(train_x, train_y)
    return found | {"plain": {"nll": nll(model, test_x, test_y)}}


if __name__ == "__main__":
    results = Results("least-noise", str(__doc__))
    for seed in SEEDS:
        for name in TABLES | CLASSES:
            results.run(f"{name} {seed}", partial(score, name, seed))
