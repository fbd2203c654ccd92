"""Processor time of the estimators' fits beside scikit-learn's MLP, and the learning rate of learnt noise.

python experiments/tabular_speed.py speed   # medians of interleaved turns in one process
python experiments/tabular_speed.py rates   # held-out NLL by `noise_lr`
"""

import sys
import warnings
from typing import Any

import numpy as np
import torch
from common import Results
from sklearn import datasets
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tabular import CLASSES, OURS, REALS, fit_seconds
from torch import nn

import ibnn
from ibnn.sklearn import IBNNClassifier, IBNNRegressor

LARGE = 10_000  # rows of two made tables
TURNS = 3  # fits of each estimator, in turn


def speed() -> None:
    """Processor time of fits of ibnn and scikit-learn's MLP in one process, medians of interleaved turns."""
    warnings.simplefilter("ignore", ConvergenceWarning)
    made = {
        "made classes": lambda: datasets.make_classification(LARGE, 20, n_informative=8, n_classes=3, random_state=5),
        "made numbers": lambda: datasets.make_friedman1(LARGE, noise=1.0, random_state=5),
    }
    results = Results("tabular-speed", "processor seconds of fits; see experiments/tabular_speed.py")
    for name in ("breast cancer", "moons", "diabetes", "friedman1", *made):
        x, y = (CLASSES | REALS | made)[name]()
        classes = name in CLASSES or name == "made classes"
        own, rival = (IBNNClassifier, MLPClassifier) if classes else (IBNNRegressor, MLPRegressor)
        methods = {OURS: own(random_state=0), "MLP": make_pipeline(StandardScaler(), rival(random_state=0))}
        y = y if classes else (y - y.mean()) / y.std()

        def work(x: Any = x, y: Any = y, methods: dict[str, Any] = methods) -> dict[str, Any]:
            clone(methods[OURS]).set_params(epochs=1).fit(x, y)  # imports and warm-up
            turns = [{method: fit_seconds(model, x, y) for method, model in methods.items()} for _ in range(TURNS)]
            medians = {method: float(np.median([turn[method] for turn in turns])) for method in methods}
            ratio = float(np.median([turn[OURS] / turn["MLP"] for turn in turns]))
            return {"rows": len(x), "fit_seconds": medians, "ratio": round(ratio, 2)}

        results.run(name, work)


RATES = (0.001, 0.005, 0.02, 0.05)  # the first is that of the weights
EPOCHS = 30  # the default of `fit`


def rates() -> None:
    """NLL of a quarter of the rows by `noise_lr`, with the default recipe of `fit`; other splits than those above."""
    results = Results("noise-rates", "held-out NLL by noise_lr; see experiments/tabular_speed.py")
    for name in ("diabetes", "friedman1", "Boston", "friedman3"):
        x, y = REALS[name]()
        train, test = train_test_split(np.arange(len(x)), test_size=0.25, random_state=99)
        x, y = ((part - part[train].mean(0)) / part[train].std(0) for part in (x, y[:, None]))
        x, y = torch.tensor(x).float(), torch.tensor(y).float()
        for rate in RATES:

            def work(x: Any = x, y: Any = y, rate: float = rate) -> dict[str, Any]:
                torch.manual_seed(0)
                net = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
                model = ibnn.convert(net.append(nn.Linear(64, 1)), likelihood="gaussian", seed=0)
                options: Any = {"epochs": EPOCHS, "batch_size": 32, "noise_lr": rate, "evaluate_every": EPOCHS}
                ibnn.fit(model, (x[train], y[train]), quiet=True, **options)  # noqa: B023
                answer = model.predict(x[test], progress=False)  # noqa: B023
                return {"nll": -answer.log_prob(y[test]).mean().item()}  # noqa: B023

            results.run(f"{name}/{rate}", work)


if __name__ == "__main__":
    {"speed": speed, "rates": rates}[sys.argv[1]]()
