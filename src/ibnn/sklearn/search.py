"""SEARCH: chooses the noise of an estimator by the losses of candidates on rows that they were not trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from torch import Tensor

from ibnn.errors import complaint
from ibnn.likelihood.temperature import best_temperature, nll
from ibnn.network import IBNN
from ibnn.prediction import draws
from ibnn.sklearn.panel import Jury, Member
from ibnn.sklearn.weighted import Weighted
from ibnn.training.loop import fit
from ibnn.training.recipe import Recipe

Array = np.ndarray[Any, Any]

FOLDS, HELD_OUT, MANY = 4, 0.25, 1000  # folds, or the one share of the rows that is held out if they are so many
DRAWS = 20  # of the noise for every held-out row
KEPT = 0.8  # part of log T that is kept: candidates have fewer rows than the network that gets it


class Candidate(NamedTuple):
    """A way to train."""

    std: float  # of the noise on the nodes
    predicted: bool = False  # whether the network predicts the noise of its target


class Choice(NamedTuple):
    """What the held-out rows have chosen."""

    std: float
    predicted: bool = False
    temperature: float = 1.0  # factor on the standard deviation of a target


def split(rows: int, share: float, labels: Array | None, seed: int) -> tuple[Array, Array]:
    """Returns a (train, held-out) split, stratified unless a class is too rare."""
    out = int(np.ceil(share * rows))
    if out >= rows:
        got, remedy = f"{rows} sample(s), {out} of them held out", "Pass more rows, or early_stopping=False."
        raise ValueError(complaint("X", "rows to train on besides those held out", got, remedy))
    strata = labels if labels is not None and _fewest(labels) > 1 and out >= len(np.unique(labels)) else None
    train, held = train_test_split(np.arange(rows), test_size=out, stratify=strata, random_state=seed)
    return train, held


def folds(rows: int, labels: Array | None, seed: int, *, one: bool) -> Array:
    """Returns the fold of every row, from 0; with `one` it is 0 for a share of the rows, and −1 for the others."""
    numbers = np.full(rows, -1)
    if one:
        numbers[split(rows, HELD_OUT, labels, seed)[1]] = 0
        return numbers
    kind = StratifiedKFold if labels is not None and _fewest(labels) >= FOLDS else KFold
    for number, (_, held) in enumerate(kind(FOLDS, shuffle=True, random_state=seed).split(numbers, labels)):
        numbers[held] = number
    return numbers


def _fewest(labels: Array) -> int:
    """Returns the number of rows of the rarest class."""
    return int(np.bincount(labels)[np.unique(labels)].min())


@dataclass(frozen=True)
class Rows:
    """Rows that candidates are trained on and compared on."""

    x: Tensor
    target: Tensor
    weight: Tensor
    fold: Tensor  # −1 for rows that are not held out

    @property
    def used(self) -> Tensor:
        """Which rows any member is trained on: all, or those that are not held out if there is one fold."""
        return self.fold < 0 if bool((self.fold < 0).any()) else torch.ones_like(self.fold, dtype=torch.bool)

    def train(self, model: IBNN, recipe: Recipe) -> None:
        """Trains a panel; its members leave out the rows of their folds."""
        target = Jury.join(self.fold.to(self.weight), self.weight, self.target)
        fit(model, (self.x[self.used], target[self.used]), recipe=recipe, quiet=True, novelty=False)

    @torch.no_grad()
    def losses(self, model: IBNN, candidates: int) -> tuple[list[float], list[float], int]:
        """Returns the mean NLLs of candidates on held-out rows, the temperatures for it, and the number of data.

        Members of the panel are ordered by fold, then by candidate. Class probabilities keep a temperature of 1: one
        that is estimated from some ten errors is worse than none.
        """
        out, jury = self.fold >= 0, cast(Jury, model.likelihood)
        drawn = jury.completed(draws(model, self.x[out], samples=DRAWS)[0])  # (S, n, M, outputs)
        fold, target, weight = self.fold[out], self.target[out], self.weight[out]
        likelihood, data = jury.inner, jury.inner.count(target)
        if bool((weight != 1).any()):
            likelihood, target = Weighted(likelihood), Weighted.join(weight, target)
        nlls, temperatures = [], []
        for number in range(candidates):
            own = drawn[:, torch.arange(len(fold)), fold * candidates + number][None]  # (1, S, n, outputs)
            best = 1.0 if likelihood.discrete else best_temperature(likelihood, own, target, rough=True)
            nlls.append(nll(likelihood, own, target, best))
            temperatures.append(best)
        return nlls, temperatures, data


def decide(candidates: Sequence[Candidate], nlls: Sequence[float], temperatures: Sequence[float], data: int) -> Choice:
    """Returns the more likely source of the target's noise, and the mean of its candidates, weighted by likelihood.

    >>> far_better = decide([Candidate(0.2), Candidate(0.5)], [1.0, 2.0], [1.0, 1.0], 100)
    >>> round(far_better.std, 6), round(decide([Candidate(0.2), Candidate(0.5)], [1.0, 1.0], [1.0, 1.0], 100).std, 6)
    (0.2, 0.316228)
    """
    weights = posterior_weights(nlls, data)
    predicted = np.array([candidate.predicted for candidate in candidates])
    kind = bool(weights[predicted].sum() > 0.5)
    shares = np.where(predicted == kind, weights, 0.0)
    shares /= shares.sum()
    std = np.exp(shares @ np.log([candidate.std for candidate in candidates]))
    return Choice(float(std), kind, float(np.exp(KEPT * (shares @ np.log(temperatures)))))


def posterior_weights(nlls: Sequence[float], data: int) -> Array:
    """Returns the posterior weights of models with equal priors, from their mean NLLs on so many data.

    >>> posterior_weights([0.5, 0.5 + np.log(3) / 100], 100).round(2).tolist()
    [0.75, 0.25]
    """
    weights = np.exp(-data * (np.array(nlls) - min(nlls)))
    return np.asarray(weights / weights.sum())


def members(candidates: Sequence[Candidate], number: int) -> list[Member]:
    """Returns the members of a panel: every candidate in every one of so many folds."""
    return [Member(c.std, fold, c.predicted) for fold in range(number) for c in candidates]
