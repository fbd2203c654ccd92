"""UCI regressions with the published splits: ibnn at its defaults beside others, split by split.

    python experiments/uci.py FOLDER                 # goes on where it stopped; split by split, so a part has all sets
    python experiments/uci.py FOLDER --only ibnn,GP  # cells of these methods or sets alone
    python experiments/uci.py --page                 # writes the tables of notes/measured.md
    python experiments/uci.py --page --check         # fails if the page is out of date

FOLDER has NAME.npz (x, y and the test rows of each split, test_0 …) and published.json: per-split results of MC-dropout
(Gal & Ghahramani, 2016: one hidden layer, their longest runs). None of it is part of the project.

LL is the mean log density of the test targets in their own units, higher is better. Rivals have standardised inputs
and targets. Boosting has the Gaussian of its errors on five folds inside the training rows. Quantile boosting has a
Gaussian around its median with its 5 and 95 % quantiles. Gaussian processes have constant × RBF + white noise with one
length scale, and run where there are at most 2,000 training rows. NGBoost needs the package ngboost, no dependency of
ours. Scores of the first two splits of each set were seen while the estimator was made, and drew attention to concrete:
its width, batch and weight decay were then chosen by held-out errors in the training rows of concrete's first split.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
from common import NOTES, RESULTS, Results
from reproduce import Results as Cells
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler
from tables import fill_in

from ibnn.sklearn import IBNNRegressor

SETS = ("boston", "concrete", "yacht", "kin8nm", "power-plant")
OURS, PUBLISHED = "ibnn", "MC-dropout"
SPLITS, LARGEST_GP = 20, 2000
REACH = norm.ppf(0.95)

Answer = tuple[Any, Any, Any, Any]  # mean, standard deviation, ends of the 90 % interval


def _gaussian(mean: Any, std: Any) -> Answer:
    return mean, std, mean - REACH * std, mean + REACH * std


def ridge(x: Any, y: Any, new: Any, seed: int) -> Answer:
    """Bayesian ridge regression."""
    return _gaussian(*BayesianRidge().fit(x, y).predict(new, return_std=True))


def gaussian_process(x: Any, y: Any, new: Any, seed: int) -> Answer:
    """A Gaussian process with one length scale."""
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    return _gaussian(*GaussianProcessRegressor(kernel, random_state=seed).fit(x, y).predict(new, return_std=True))


def boosting(x: Any, y: Any, new: Any, seed: int) -> Answer:
    """Boosted trees, with the Gaussian of their errors on held-out rows."""
    method = HistGradientBoostingRegressor(random_state=seed)
    unseen = cross_val_predict(method, x, y, cv=KFold(5, shuffle=True, random_state=seed))
    return _gaussian(method.fit(x, y).predict(new), np.full(len(new), np.sqrt(((y - unseen) ** 2).mean())))


def quantile_boosting(x: Any, y: Any, new: Any, seed: int) -> Answer:
    """Boosted trees for three quantiles."""
    methods = [HistGradientBoostingRegressor(loss="quantile", quantile=q, random_state=seed) for q in (0.05, 0.5, 0.95)]
    low, mean, high = np.sort([method.fit(x, y).predict(new) for method in methods], axis=0)
    return mean, np.maximum((high - low) / (2 * REACH), 0.01), low, high


def ngboost(x: Any, y: Any, new: Any, seed: int) -> Answer:
    """Natural gradient boosting of a Gaussian's mean and standard deviation."""
    from ngboost import NGBRegressor

    found = NGBRegressor(verbose=False, random_state=seed).fit(x, y).pred_dist(new)
    return _gaussian(found.params["loc"], found.params["scale"])


def mlp(x: Any, y: Any, new: Any, seed: int) -> Answer:
    """scikit-learn's MLP, for its RMSE and seconds; it has no predictive distribution."""
    mean = MLPRegressor(random_state=seed).fit(x, y).predict(new)
    return mean, np.full(len(new), np.nan), mean, mean


RIVALS: dict[str, Callable[..., Answer]] = {
    "ridge": ridge,
    "boosting": boosting,
    "quantile boosting": quantile_boosting,
    "MLP": mlp,
    "GP": gaussian_process,
    "NGBoost": ngboost,
}


def ours(x: Any, y: Any, new: Any, target: Any, seed: int) -> dict[str, Any]:
    """The estimator at its defaults, on the table as it comes."""
    began = time.process_time()
    model = IBNNRegressor(random_state=seed).fit(x, y)
    seconds = time.process_time() - began
    answer = model.predict_distribution(new)
    low, high = model.predict_interval(new, 0.9)
    return {
        "ll": answer.log_prob(torch.tensor(target)[:, None]).mean().item(),
        "rmse": float(np.sqrt(((answer.mean[:, 0].numpy() - target) ** 2).mean())),
        "covered": float(((low <= target) & (target <= high)).mean()),
        "fit_seconds": round(seconds, 2),
        "steps": int(model.history_[-1]["step"]),
        "prior_std": model.model_.prior_std,
    }


def rival(method: Callable[..., Answer], x: Any, y: Any, new: Any, target: Any, seed: int) -> dict[str, Any]:
    """The same scores of another method."""
    scaler, mean, std = StandardScaler().fit(x), y.mean(), y.std()
    began = time.process_time()
    answer = method(scaler.transform(x), (y - mean) / std, scaler.transform(new), seed)
    seconds = time.process_time() - began
    centre, spread, low, high = answer
    scaled = (target - mean) / std
    result = {
        "ll": float((norm.logpdf(scaled, centre, spread) - np.log(std)).mean()),
        "rmse": float(np.sqrt(((centre - scaled) ** 2).mean()) * std),
        "covered": float(((low <= scaled) & (scaled <= high)).mean()),
        "fit_seconds": round(seconds, 2),
    }
    return {name: value for name, value in result.items() if method is not mlp or name in ("rmse", "fit_seconds")}


def run(folder: Path, only: set[str], splits: range) -> None:
    """Runs all cells that are not there yet."""
    warnings.simplefilter("ignore", ConvergenceWarning)  # of rivals at their defaults
    published = json.loads((folder / "published.json").read_text())
    results = Results("uci", "UCI regressions on the published splits, defaults everywhere; see experiments/uci.py")
    for split in splits:
        for name in SETS:
            with np.load(folder / f"{name}.npz") as data:
                x, y, test = data["x"], data["y"], data[f"test_{split}"]
            train = np.setdiff1d(np.arange(len(y)), test)
            parts = x[train], y[train], x[test], y[test], split
            work: dict[str, Callable[[], dict[str, Any]]] = {OURS: lambda p=parts: ours(*p)}  # type: ignore[misc]
            theirs = {score: published[name][f"mc_dropout_{score}"][split] for score in ("ll", "rmse")}
            work[PUBLISHED] = lambda t=theirs: t  # type: ignore[misc]
            for label, method in RIVALS.items():
                if label != "GP" or len(train) <= LARGEST_GP:
                    work[label] = lambda m=method, p=parts: rival(m, *p)  # type: ignore[misc]
            for label, cell in work.items():
                if not only or only & {label, name}:
                    results.run(f"{name}/{label}/{split}", cell, key=f"seed {split}")


def scores(cells: dict[str, Any], name: str, method: str, score: str) -> Any:
    """Returns a score on all splits that a method has."""
    found = (cells.get(f"{name}/{method}/{split}", {}).get(score) for split in range(SPLITS))
    return np.array([value for value in found if value is not None])


def table(cells: dict[str, Any], score: str, digits: dict[str, int]) -> str:
    """Returns the means and standard errors over the splits; bold where a method is best."""
    methods = [OURS, PUBLISHED, *RIVALS]
    methods = [m for m in methods if any(len(scores(cells, name, m, score)) for name in SETS)]
    rows = [["set", "splits", *methods]]
    for name in SETS:
        found = {method: scores(cells, name, method, score) for method in methods}
        means = {method: values.mean() for method, values in found.items() if len(values)}
        best = max(means, key=means.get) if score == "ll" else min(means, key=means.get)  # type: ignore[arg-type]
        row, full = [name, str(len(found[OURS]))], len(found[OURS])
        for method, values in found.items():
            if not len(values):
                row.append("–")
                continue
            error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
            text = f"{values.mean():.{digits[name]}f} ± {error:.{digits[name]}f}"
            text += f" ({len(values)})" if len(values) < full else ""
            row.append(f"**{text}**" if method == best else text)
        rows.append(row)
    return figures.markdown(rows).rstrip() + "\n"


def details(cells: dict[str, Any]) -> str:
    """Returns how often 90 % intervals hold the target, and seconds of processor time."""
    rows = [["set", "within 90 %", "NGBoost's", "quantile boosting's", "seconds", "MLP's", "ratio"]]
    for name in SETS:
        covered = [scores(cells, name, method, "covered") for method in (OURS, "NGBoost", "quantile boosting")]
        seconds = [scores(cells, name, method, "fit_seconds") for method in (OURS, "MLP")]
        shown = [f"{100 * values.mean():.1f} %" if len(values) else "–" for values in covered]
        both = [f"{np.median(values):.1f}" if len(values) else "–" for values in seconds]
        ratio = f"{np.median(seconds[0]) / np.median(seconds[1]):.1f}" if len(seconds[1]) else "–"
        rows.append([name, *shown, *both, ratio])
    return figures.markdown(rows).rstrip() + "\n"


def page(check: bool) -> int:
    """Fills the tables in, or says that they are out of date."""
    cells = Cells(RESULTS / "uci.json", {}).cells
    lls = table(cells, "ll", dict.fromkeys(SETS, 2))
    rmses = table(cells, "rmse", dict.fromkeys(SETS, 2) | {"kin8nm": 4})
    blocks = {"uci-ll": lls, "uci-rmse": rmses, "uci-details": details(cells)}
    return fill_in({NOTES / "measured.md": blocks}, check)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="methods or sets, separated by commas")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.page:
        sys.exit(page(options.check))
    run(options.folder, set(filter(None, options.only.split(","))), range(options.splits))
