"""The least noise that the estimators for tables try: 0.2 and 0.6, or less as well.

    python experiments/least_noise.py

On draws of the made tables, and splits of the others, that no other experiment uses: three quarters of the rows to
train on, a quarter to score. `plain` has no noise and no temperature. Writes results/least-noise.json.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
from common import Results
from sklearn import datasets
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from tabular import CLASSES as LABELLED
from tabular import NONE, REALS

from ibnn.sklearn import IBNNClassifier, IBNNRegressor

TRIED = {"0.2, 0.6": (0.2, 0.6), "0.05, 0.2, 0.6": (0.05, 0.2, 0.6), "0.1, 0.4": (0.1, 0.4), "0.07, 0.6": (0.07, 0.6)}
SEEDS = range(50, 56)


def plane(seed: int) -> tuple[Any, Any]:
    """A linear function of five of ten columns."""
    return datasets.make_regression(300, 10, n_informative=5, noise=10.0, random_state=seed)


def groups(seed: int) -> tuple[Any, Any]:
    """Three classes, by five of ten columns."""
    return datasets.make_classification(400, 10, n_informative=5, n_classes=3, random_state=seed)


TABLES: dict[str, Any] = {name: make for name, make in REALS.items() if name != "Boston"} | {"plane": plane}
CLASSES: dict[str, Any] = {name: make for name, make in LABELLED.items() if name != "digits"} | {"blobs": groups}
REAL = ("diabetes", "iris", "wine", "breast cancer")  # these have no seed


def nll(model: Any, x: Any, y: Any) -> float:
    """Mean NLL of rows."""
    if isinstance(model, IBNNClassifier):
        return float(log_loss(y, model.predict_proba(x), labels=model.classes_))
    return -float(model.predict_distribution(x).log_prob(torch.tensor(y)[:, None]).mean())


def score(name: str, seed: int) -> dict[str, Any]:
    """NLL of every choice on one split."""
    classes = name in CLASSES
    make = (TABLES | CLASSES)[name]
    x, y = make() if name in REAL else make(seed)
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
