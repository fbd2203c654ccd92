"""TABLES: what classification and regression share: standardised inputs, the choice of the noise, training."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from ibnn.convert import convert, plan
from ibnn.errors import complaint
from ibnn.likelihood import Likelihood, Weighted
from ibnn.likelihood.temperature import best_temperature, nll
from ibnn.normal import generators_restored
from ibnn.novelty.fitting import FEWEST, fit_novelty_if_possible
from ibnn.prediction import draws
from ibnn.training.loop import fit
from ibnn.training.recipe import Recipe, Schedule
from ibnn.training.steering import kl_weight

Array = np.ndarray[Any, Any]
Builder = Callable[[int, int], nn.Module]

PRIOR_STDS = (0.25, 0.7)  # tried for `prior_std`; their mean, weighted by held-out likelihood, is taken
HELD_OUT, MIN_ROWS = 0.25, 100  # share of the rows that they are compared on, and the fewest rows for that
STEPS, MIN_EPOCHS = 400, 20  # a run has so many steps, and no fewer passes over the table
WIDTH, MANY, WIDER = 64, 1000, 128  # of two hidden layers, and of those for so many rows
FEW_COLUMNS = 8  # fewer would drown in noise of their own size: the first layer is then not converted
NOISE_LR = 0.02  # of learnt target noise: log σ would crawl at a rate made for weights
AT_ONCE = 4096  # rows whose novelty is found at once
WARMUP = 0.2  # share of a run over which the fixed weight of the KL rises


class Uncertainty(NamedTuple):
    """Uncertainty of predictions: total = aleatoric + epistemic, in nats (classes) or squared units of the target."""

    total: Array
    aleatoric: Array
    epistemic: Array


@dataclass(eq=False, repr=False)
class Table(BaseEstimator):  # type: ignore[misc]
    """The base of both estimators; for arguments see `IBNNClassifier`."""

    _usual_std: ClassVar[float]  # where `prior_std` cannot be chosen

    hidden: Sequence[int] | None = None
    _: KW_ONLY
    net: Builder | None = None
    components: int = 8
    prior_std: float | Literal["auto"] = "auto"
    epochs: int | None = None
    batch_size: int = 64
    lr: float = 3e-3
    weight_decay: float = 1.0
    early_stopping: bool = False
    validation_fraction: float = 0.1
    patience: int = 10
    samples: int = 5
    random_state: Any = None

    # ---------------------------------------------------------------------------------------------------- training

    def _present(self, x: Array, y: Array, weight: Any, factor: Array | float = 1.0) -> tuple[Array, Array, Array]:
        """Returns the rows of positive weight, and their weights: a row of weight 0 is as good as absent."""
        weight = factor * _check_sample_weight(weight, x, dtype=np.float64, ensure_non_negative=True)
        kept = weight > 0
        if not kept.any():
            raise ValueError(complaint("sample_weight", "positive for some row", "zeros", "Leave it out."))
        return x[kept], y[kept], weight[kept]

    def _start(self, x: Array, weight: Array, outputs: int, likelihood: Likelihood) -> None:
        """Makes an untrained network, and fits the standardisation of inputs."""
        if isinstance(self.prior_std, str) and self.prior_std != "auto":
            raise ValueError(complaint("prior_std", 'a number or "auto"', repr(self.prior_std), 'Pass "auto".'))
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._calls = 0
        self.scaler_ = StandardScaler().fit(x, sample_weight=weight if differ(weight) else None)
        with generators_restored():
            torch.manual_seed(self._seed)
            net = (self.net or partial(self._mlp, len(x)))(x.shape[1], outputs).double()
        first, *others = (layer.name for layer in plan(net).layers)
        std = self._usual_std if self.prior_std == "auto" else float(self.prior_std)
        k, exclude = int(self.components), first if others and x.shape[1] < FEW_COLUMNS else None
        self.model_ = convert(
            net, components=k, prior_std=std, likelihood=likelihood, exclude=exclude, copy=False, seed=self._seed
        )
        self._set_noise(std)

    def _set_noise(self, std: float) -> None:
        self.model_.prior_std = std
        self.model_.set_posterior(std=std)

    def _mlp(self, rows: int, inputs: int, outputs: int) -> nn.Module:
        sizes = [inputs, *((WIDER if rows >= MANY else WIDTH,) * 2 if self.hidden is None else self.hidden)]
        body = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*body, nn.Linear(sizes[-1], outputs))

    def _train(
        self,
        x: Array,
        target: Tensor,
        weight: Array,
        *,
        labels: Array | None = None,
        held: tuple[Array, Tensor] | None = None,
    ) -> None:
        """Trains from the start; rows are held out unless they are given, stratified by `labels`."""
        with self._weighted(x, target, weight) as (inputs, target):
            log_noise, valid = None, held and self._joined(*held)
            if self.prior_std == "auto" and len(x) >= MIN_ROWS:
                start = copy.deepcopy(self.model_.state_dict())
                std, log_noise = self._choose(inputs, target, labels, start)
                self.model_.load_state_dict(start)
                self._set_noise(std)
            train = inputs, target
            if self.early_stopping and valid is None:
                rows, out = self._split(len(x), self.validation_fraction, labels)
                train, valid = (inputs[rows], target[rows]), (inputs[out], target[out])
            self._fit(train, valid if self.early_stopping else None, epochs=self._epochs(len(train[0])))
            if log_noise is not None:
                (log_std,) = self.model_.likelihood.parameters()
                log_std.data.lerp_(log_noise, 0.5)  # one has seen its rows, the other had fewer of them
            if valid is not None:
                fit_novelty_if_possible(self.model_, train, valid, seed=self._seed)
        self._calls += 1
        self._held = 0 if valid is None else len(valid[0])

    def _joined(self, x: Array, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns held-out rows as those that are trained on are: standardised, and of weight 1 if those have any."""
        weighted = isinstance(self.model_.likelihood, Weighted)
        joined = Weighted.join(torch.ones(len(x), dtype=torch.float64), target) if weighted else target
        return torch.tensor(self.scaler_.transform(x)), joined

    def _choose(
        self, inputs: Tensor, target: Tensor, labels: Array | None, start: dict[str, Tensor]
    ) -> tuple[float, Tensor | None]:
        """Returns the `prior_std` that held-out rows make likely, and log σ of the target noise that goes with it.

        Trained target noise is too small by what the network has memorised. Class probabilities get no temperature in
        the same way: one estimated from some ten errors is worse than none.
        """
        rows, out = self._split(len(inputs), HELD_OUT, labels)
        likelihood, nlls, noises = self.model_.likelihood, [], []
        for std in PRIOR_STDS:
            self.model_.load_state_dict(start)
            self._set_noise(std)
            self._fit((inputs[rows], target[rows]), None, epochs=self._epochs(len(rows)))
            drawn = draws(self.model_, inputs[out], samples=int(self.samples))
            best = 1.0 if likelihood.discrete else best_temperature(likelihood, drawn, target[out])
            nlls.append(nll(likelihood, drawn, target[out], best))
            noises += [p.detach().clone() + np.log(best) for p in likelihood.parameters()]
        shares = _posterior_weights(nlls, likelihood.data(target[out]))
        log_noise = torch.tensor(shares, dtype=torch.float32) @ torch.stack(noises) if noises else None
        return float(np.exp(np.log(PRIOR_STDS) @ shares)), log_noise

    def _split(self, rows: int, share: float, labels: Array | None) -> tuple[Array, Array]:
        """Returns a (train, held-out) split, stratified unless a class is too rare."""
        out = int(np.ceil(share * rows))
        if out >= rows:
            got, remedy = f"{rows} sample(s), {out} of them held out", "Pass more rows, or early_stopping=False."
            raise ValueError(complaint("X", "rows to train on besides those held out", got, remedy))
        counts = np.bincount(labels)[np.unique(labels)] if labels is not None else np.zeros(1)
        strata = labels if counts.min() > 1 and out >= len(counts) else None
        train, held = train_test_split(np.arange(rows), test_size=out, stratify=strata, random_state=self._seed)
        return train, held

    def _epochs(self, rows: int) -> int:
        return int(self.epochs or max(-(-STEPS * self.batch_size // rows), MIN_EPOCHS))

    def _train_more(self, x: Array, target: Tensor, weight: Array) -> None:
        """Trains for one pass over more rows."""
        with self._weighted(x, target, weight) as train:
            self._fit(train, None, epochs=1, schedule=Schedule())
        self._calls += 1

    def _fit(self, train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor] | None, **fields: Any) -> None:
        """Calls `ibnn.fit` with the fixed β that holds the noise near its prior."""
        recipe = Recipe(
            batch_size=int(self.batch_size),  # searches pass numpy's numbers
            lr=float(self.lr),
            noise_lr=max(NOISE_LR, float(self.lr)),
            weight_decay=float(self.weight_decay),
            beta=kl_weight(1.0, n_data=self.model_.likelihood.data(train[1]), nodes=self.model_.nodes),
            beta_warmup=0.0 if self._calls else WARMUP,
            patience=int(self.patience) if valid else 0,
            evaluate_every=1 if valid else fields["epochs"],
            seed=self._seed + self._calls,
            **fields,
        )
        self.history_ = fit(self.model_, train, valid, recipe=recipe, quiet=True, novelty=False)

    @contextmanager
    def _weighted(self, x: Array, target: Tensor, weight: Array) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields standardised inputs, and targets; weights other than 1 are joined to them, for the likelihood."""
        plain = self.model_.likelihood
        if differ(weight):
            self.model_.likelihood, target = Weighted(plain), Weighted.join(torch.tensor(weight), target)
        try:
            yield torch.tensor(self.scaler_.transform(x)), target
        finally:
            self.model_.likelihood = plain

    # -------------------------------------------------------------------------------------------------- prediction

    def _predict(self, x: Any) -> Any:
        """Returns `ibnn.predict` for rows."""
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, dtype=np.float64)
        return self.model_.predict(torch.tensor(self.scaler_.transform(x)), samples=self.samples, progress=False)

    def novelty(self, X: Any) -> Array:  # noqa: N803
        """Returns how novel every row is: p-values (n,), near 0 for rows unlike the held-out ones.

        Of rows like those a share of at most α has a p-value of α or less. It takes 50 rows that were not trained on,
        of `early_stopping` or `fit(..., X_val=, y_val=)`; p-values go down to 2 / (2 + their number).
        """
        check_is_fitted(self)
        x = torch.tensor(self.scaler_.transform(validate_data(self, X, reset=False, dtype=np.float64)))
        self._check_held("novelty", known=self.model_.reference is not None)
        found = [self.model_.novelty(part).p_value for part in x.split(AT_ONCE)]
        return torch.cat(found).double().numpy()

    def _check_held(self, what: str, *, known: bool) -> None:
        """Raises unless enough rows were held out for what is asked."""
        if not known:
            expected = f"asked of an estimator with at least {FEWEST} rows held out, and no partial_fit since"
            remedy = "Call fit(X, y, X_val=…, y_val=…), or fit with early_stopping=True and more rows."
            raise ValueError(complaint(what, expected, getattr(self, "_held", 0), remedy))

    def predict_uncertainty(self, X: Any) -> Uncertainty:  # noqa: N803
        """Returns the total, aleatoric and epistemic uncertainty of every row.

        Entropies in nats for classes; variances in squared units of the target for regression.
        """
        answer = self.predict_distribution(X)
        return Uncertainty(*(self._shaped(part) for part in (answer.total, answer.aleatoric, answer.epistemic)))

    def _shaped(self, values: Tensor) -> Array:
        return values.numpy()


def differ(weight: Array) -> bool:
    """Returns whether any weight is not 1."""
    return bool((weight != 1).any())


def _posterior_weights(nlls: Sequence[float], data: int) -> Array:
    """Returns the posterior weights of models with equal priors, from their mean NLLs on so many data.

    >>> _posterior_weights([0.5, 0.5 + np.log(3) / 100], 100).round(2).tolist()
    [0.75, 0.25]
    """
    weights = np.exp(-data * (np.array(nlls) - min(nlls)))
    return np.asarray(weights / weights.sum())
