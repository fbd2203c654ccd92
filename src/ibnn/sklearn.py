"""TABLES: scikit-learn estimators over `convert` and `fit`, with defaults for tables of 100 to a few thousand rows.

Inputs (and a regression's targets) are standardised inside; the network and its draws are in double precision, so that
a row's answer does not depend on the rows beside it. Everything is decided by `random_state`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelEncoder, StandardScaler
from sklearn.utils import check_random_state, compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from ibnn.convert import convert, plan
from ibnn.errors import complaint
from ibnn.likelihood import Categorical, Gaussian, Likelihood, Weighted
from ibnn.likelihood.temperature import best_temperature, nll
from ibnn.normal import generators_restored
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, draws
from ibnn.training.loop import fit
from ibnn.training.recipe import Recipe, Schedule
from ibnn.training.steering import kl_weight

Array = np.ndarray[Any, Any]
Builder = Callable[[int, int], nn.Module]

STRENGTHS = (0.25, 0.7)  # what is tried for `prior_std`; their mean, weighted by held-out likelihood, is taken
HELD_OUT, FEWEST = 0.25, 100  # share of the rows that the strengths are compared by, and rows there must be for it
STEPS, FEWEST_EPOCHS = 400, 20  # a run has so many steps, and no fewer passes over the table
WIDTH, MANY, WIDER = 64, 1000, 128  # of two hidden layers, and of those for so many rows
FEW_COLUMNS = 8  # fewer would drown in noise of their own size: the first layer is then spared
NOISE_LR = 0.02  # of learnt noise: log σ would crawl at a rate made for weights
WARMUP = 0.2  # share of a run over which a fixed KL's weight rises


class Uncertainty(NamedTuple):
    """What an answer is unsure of: total = aleatoric + epistemic, in nats (classes) or squared units of the target."""

    total: Array
    aleatoric: Array
    epistemic: Array


class _Table(BaseEstimator):  # type: ignore[misc]
    """What classification and regression share."""

    _usual: float  # the strength where it cannot be chosen

    def __init__(
        self,
        hidden: Sequence[int] | None = None,
        *,
        net: Builder | None = None,
        components: int = 8,
        prior_std: float | Literal["auto"] = "auto",
        epochs: int | None = None,
        batch_size: int = 64,
        lr: float = 3e-3,
        weight_decay: float = 1.0,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        samples: int = 5,
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.net = net
        self.components = components
        self.prior_std = prior_std
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.samples = samples
        self.random_state = random_state

    # ---------------------------------------------------------------------------------------------------- training

    def _present(self, x: Array, y: Array, weight: Any, factor: Array | float = 1.0) -> tuple[Array, Array, Array]:
        """The rows that weigh anything, and their weights: a row of weight 0 is as good as not there."""
        weight = factor * _check_sample_weight(weight, x, dtype=np.float64, ensure_non_negative=True)
        kept = weight > 0
        if not kept.any():
            raise ValueError(complaint("sample_weight", "positive for some row", "zeros", "Leave it out."))
        return x[kept], y[kept], weight[kept]

    def _start(self, x: Array, weight: Array, outputs: int, likelihood: Likelihood) -> None:
        """A network that has seen nothing, and how inputs are standardised."""
        if isinstance(self.prior_std, str) and self.prior_std != "auto":
            raise ValueError(complaint("prior_std", 'a number or "auto"', repr(self.prior_std), 'Pass "auto".'))
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._calls = 0
        self.scaler_ = StandardScaler().fit(x, sample_weight=weight if _differ(weight) else None)
        with generators_restored():
            torch.manual_seed(self._seed)
            net = (self.net or self._mlp(len(x)))(x.shape[1], outputs).double()
        first, *others = (layer.name for layer in plan(net).layers)
        spared = first if others and x.shape[1] < FEW_COLUMNS else None
        std = self._usual if self.prior_std == "auto" else float(self.prior_std)
        self.model_ = convert(
            net,
            components=int(self.components),
            prior_std=std,
            likelihood=likelihood,
            exclude=spared,
            copy=False,
            seed=self._seed,
        )
        self._set_strength(std)

    def _set_strength(self, std: float) -> None:
        self.model_.prior_std = std
        self.model_.set_posterior(std=std)

    def _mlp(self, rows: int) -> Builder:
        hidden = (WIDER if rows >= MANY else WIDTH,) * 2 if self.hidden is None else self.hidden

        def build(inputs: int, outputs: int) -> nn.Module:
            sizes = [inputs, *hidden]
            body = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
            return nn.Sequential(*body, nn.Linear(sizes[-1], outputs))

        return build

    def _train(self, x: Array, target: Tensor, weight: Array, *, labels: Array | None = None) -> None:
        """A whole run; `labels` are what rows held out are stratified by."""
        with self._weighed(x, target, weight) as (inputs, target):
            noise = None
            if self.prior_std == "auto" and len(x) >= FEWEST:
                start = copy.deepcopy(self.model_.state_dict())
                std, noise = self._choose(inputs, target, labels, start)
                self.model_.load_state_dict(start)
                self._set_strength(std)
            train, valid = (inputs, target), None
            if self.early_stopping:
                rows, out = self._split(len(x), self.validation_fraction, labels)
                train, valid = (inputs[rows], target[rows]), (inputs[out], target[out])
            self._fit(train, valid, epochs=self._epochs(len(train[0])))
        self._calls += 1
        if noise is not None:
            (log_std,) = self.model_.likelihood.parameters()
            log_std.data.lerp_(noise, 0.5)  # one has seen its rows, the other had fewer of them

    def _choose(
        self, inputs: Tensor, target: Tensor, labels: Array | None, start: dict[str, Tensor]
    ) -> tuple[float, Tensor | None]:
        """The strength that rows held out make likely, and the noise of the target (its log) that goes with it.

        Trained noise is too small by what the network has learnt of it by heart. Probabilities get no temperature in
        the same way: one told by some ten errors is worse than none.
        """
        rows, out = self._split(len(inputs), HELD_OUT, labels)
        likelihood, nlls, noises = self.model_.likelihood, [], []
        for std in STRENGTHS:
            self.model_.load_state_dict(start)
            self._set_strength(std)
            self._fit((inputs[rows], target[rows]), None, epochs=self._epochs(len(rows)))
            drawn = draws(self.model_, inputs[out], samples=int(self.samples))
            best = 1.0 if likelihood.discrete else best_temperature(likelihood, drawn, target[out])
            nlls.append(nll(likelihood, drawn, target[out], best))
            noises += [p.detach().clone() + np.log(best) for p in likelihood.parameters()]
        shares = _plausibility(nlls, likelihood.data(target[out]))
        noise = torch.tensor(shares, dtype=torch.float32) @ torch.stack(noises) if noises else None
        return float(np.exp(np.log(STRENGTHS) @ shares)), noise

    def _split(self, rows: int, share: float, labels: Array | None) -> tuple[Array, Array]:
        """Rows to train on and rows held out; of every class, unless one is too rare."""
        out = int(np.ceil(share * rows))
        if out >= rows:
            got, remedy = f"{rows} sample(s), {out} of them held out", "Pass more rows, or early_stopping=False."
            raise ValueError(complaint("X", "rows to train on besides those held out", got, remedy))
        counts = np.bincount(labels)[np.unique(labels)] if labels is not None else np.zeros(1)
        strata = labels if counts.min() > 1 and out >= len(counts) else None
        held: tuple[Array, Array] = train_test_split(
            np.arange(rows), test_size=out, stratify=strata, random_state=self._seed
        )
        return held

    def _epochs(self, rows: int) -> int:
        return int(self.epochs or max(-(-STEPS * self.batch_size // rows), FEWEST_EPOCHS))

    def _go_on(self, x: Array, target: Tensor, weight: Array) -> None:
        """One pass over some more rows."""
        with self._weighed(x, target, weight) as train:
            self._fit(train, None, epochs=1, schedule=Schedule())
        self._calls += 1

    def _fit(self, train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor] | None, **fields: Any) -> None:
        """One call of `ibnn.fit`, with the fixed β that holds the noise near its prior."""
        beta = kl_weight(1.0, n_data=self.model_.likelihood.data(train[1]), nodes=self.model_.nodes)
        recipe = Recipe(
            batch_size=int(self.batch_size),  # numpy's numbers come from searches
            lr=float(self.lr),
            noise_lr=max(NOISE_LR, float(self.lr)),
            weight_decay=float(self.weight_decay),
            beta=beta,
            beta_warmup=0.0 if self._calls else WARMUP,
            patience=int(self.patience) if valid else 0,
            evaluate_every=1 if valid else fields["epochs"],
            seed=self._seed + self._calls,
            **fields,
        )
        self.history_ = fit(self.model_, train, valid, recipe=recipe, quiet=True)

    @contextmanager
    def _weighed(self, x: Array, target: Tensor, weight: Array) -> Iterator[tuple[Tensor, Tensor]]:
        """Standardised inputs, and targets; with their weights, unless these are all 1, and a likelihood for them."""
        plain = self.model_.likelihood
        if _differ(weight):
            self.model_.likelihood, target = Weighted(plain), Weighted.join(torch.tensor(weight), target)
        try:
            yield torch.tensor(self.scaler_.transform(x)), target
        finally:
            self.model_.likelihood = plain

    # -------------------------------------------------------------------------------------------------- prediction

    def _predict(self, x: Any) -> Any:
        """What `ibnn.predict` says of rows."""
        check_is_fitted(self)
        x = validate_data(self, x, reset=False, dtype=np.float64)
        return self.model_.predict(torch.tensor(self.scaler_.transform(x)), samples=self.samples, progress=False)

    def predict_uncertainty(self, X: Any) -> Uncertainty:  # noqa: N803
        """Total, aleatoric and epistemic uncertainty of every row.

        Entropies in nats for classes; variances in squared units of the target for regression.
        """
        answer = self.predict_distribution(X)
        return Uncertainty(*(self._shaped(part) for part in (answer.total, answer.aleatoric, answer.epistemic)))

    def _shaped(self, values: Tensor) -> Array:
        return values.numpy()


class _OneClass(Categorical):
    """Certain of the one class that a table has; elsewhere a single output is a mistake."""

    fewest = 1


class IBNNClassifier(ClassifierMixin, _Table):  # type: ignore[misc]
    """An implicit Bayesian network that classifies the rows of a table.

    With 100 rows and more the strength of the noise is chosen: a weak and a strong one are compared on a quarter of the
    rows, and a third run trains on all rows with what was found.

    Args:
        hidden: Widths of the hidden layers (ReLU); default two of 64, or of 128 for 1,000 rows and more.
        net: Makes another network: called with the numbers of inputs and outputs.
        components: K, Gaussians in the posterior's mixture.
        prior_std: Standard deviation of the noise on every node's input; "auto" chooses it. A number takes one run and
            not three.
        epochs: Passes over the table; default by its size.
        batch_size: Rows a step.
        lr: Learning rate of the weights.
        weight_decay: Of the weights.
        early_stopping: Holds `validation_fraction` of the rows out and stops after `patience` passes without a better
            NLL of theirs.
        validation_fraction: See `early_stopping`.
        patience: See `early_stopping`.
        class_weight: As in scikit-learn: weights by class, or "balanced".
        samples: Draws per component of a prediction.
        random_state: Decides everything random.

    Attributes:
        classes_: The labels, in the order of the columns of `predict_proba`.
        model_: The converted network, for all that `ibnn` can do with it.
        scaler_: How inputs are standardised.
        history_: What `ibnn.fit` said of the last run.
        n_features_in_: Number of inputs.
        feature_names_in_: Their names, if a data frame came.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = IBNNClassifier((16,), epochs=20, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape, bool(model.score(X, y) > 0.8)
    ((2, 3), True)
    """

    _usual = 0.5

    def __init__(
        self,
        hidden: Sequence[int] | None = None,
        *,
        net: Builder | None = None,
        components: int = 8,
        prior_std: float | Literal["auto"] = "auto",
        epochs: int | None = None,
        batch_size: int = 64,
        lr: float = 3e-3,
        weight_decay: float = 1.0,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        samples: int = 5,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            hidden,
            net=net,
            components=components,
            prior_std=prior_std,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            weight_decay=weight_decay,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            samples=samples,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains anew on rows (n, inputs) and their labels, of any kind; a row of weight 2 counts as two."""
        x, y = self._rows(X, y, reset=True)
        self._learn_classes(y)
        x, labels, weight = self._labels(x, y, sample_weight)
        self._start(x, weight, len(self.classes_), self._likelihood())
        self._train(x, torch.tensor(labels), weight, labels=labels)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """One more pass over these rows; the first call needs all `classes`, and standardises by its own rows.

        The strength of the noise stays `prior_std` ("auto": 0.5), or what an earlier `fit` has found.
        """
        if self.class_weight == "balanced":
            remedy = "Pass the weights of the classes, or sample_weight."
            raise ValueError(complaint("class_weight", "known before the data for partial_fit", "'balanced'", remedy))
        first = not hasattr(self, "model_")
        if first and classes is None:
            raise ValueError(complaint("classes", "all labels in the first partial_fit", None, "Pass np.unique(y)."))
        x, y = self._rows(X, y, reset=first)
        if first:
            self._learn_classes(classes)
        x, labels, weight = self._labels(x, y, sample_weight)
        if first:
            self._start(x, weight, len(self.classes_), self._likelihood())
        self._go_on(x, torch.tensor(labels), weight)
        return self

    def _rows(self, x: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        x, y = validate_data(self, x, y, reset=reset, dtype=np.float64)
        check_classification_targets(y)
        return x, y

    def _learn_classes(self, classes: Any) -> None:
        self._encoder = LabelEncoder().fit(classes)
        self.classes_ = self._encoder.classes_

    def _likelihood(self) -> Categorical:
        return Categorical() if len(self.classes_) > 1 else _OneClass()

    def _labels(self, x: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Array]:
        """The rows that weigh anything, their class numbers, and weights of rows and classes multiplied."""
        return self._present(x, self._encoder.transform(y), sample_weight, compute_sample_weight(self.class_weight, y))

    def predict_distribution(self, X: Any) -> CategoricalPrediction:  # noqa: N803
        """All that `ibnn.predict` says, as tensors."""
        answer: CategoricalPrediction = self._predict(X)
        return answer

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Probabilities of the classes, (n, classes)."""
        return self.predict_distribution(X).probs.numpy()

    def predict_log_proba(self, X: Any) -> Array:  # noqa: N803
        """Their logarithms, without underflow."""
        return self.predict_distribution(X).log_probs.numpy()

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable label of every row."""
        labels = self.predict_distribution(X).labels.numpy()
        return np.asarray(self.classes_[labels])

    def abstain(self, X: Any, risk: float = 0.1) -> Array:  # noqa: N803
        """Which rows to leave to someone else (True): where the likeliest label is wrong with probability above `risk`.

        Of the answers given no more than `risk` are wrong, as far as the probabilities are right (Chow's rule).
        """
        if not 0 <= risk <= 1:
            raise ValueError(complaint("risk", "a probability", risk, "Pass 0.1 for one error in ten."))
        return np.asarray(1 - self.predict_proba(X).max(1) > risk)


class IBNNRegressor(RegressorMixin, _Table):  # type: ignore[misc]
    """An implicit Bayesian network for one or several real targets, each with Gaussian noise of a learnt size.

    Arguments and attributes are those of `IBNNClassifier` but for classes; `target_scaler_` standardises the targets.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = IBNNRegressor((16,), epochs=20, random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:3], return_std=True)
    >>> low, high = model.predict_interval(X[:3], level=0.9)
    >>> bool((low < mean).all() and (mean < high).all() and (std > 0).all())
    True
    """

    _usual = 0.3  # the learnt noise of the target has to cover what the draws do to it: it bears less

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains anew on rows (n, inputs) and targets, (n,) or (n, targets); a row of weight 2 counts as two."""
        x, y, weight = self._rows(X, y, sample_weight, reset=True)
        self._begin(x, y, weight)
        self._train(x, self._targets(y), weight)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """One more pass over these rows; the first call standardises by its own rows.

        The strength of the noise stays `prior_std` ("auto": 0.3), or what an earlier `fit` has found.
        """
        first = not hasattr(self, "model_")
        x, y, weight = self._rows(X, y, sample_weight, reset=first)
        if first:
            self._begin(x, y, weight)
        self._go_on(x, self._targets(y), weight)
        return self

    def _rows(self, x: Any, y: Any, weight: Any, *, reset: bool) -> tuple[Array, Array, Array]:
        x, y = validate_data(self, x, y, reset=reset, dtype=np.float64, multi_output=True, y_numeric=True)
        return self._present(x, y.astype(np.float64), weight)

    def _begin(self, x: Array, y: Array, weight: Array) -> None:
        self._single = y.ndim == 1
        self.target_scaler_ = StandardScaler().fit(
            y.reshape(len(y), -1), sample_weight=weight if _differ(weight) else None
        )
        outputs = len(self.target_scaler_.scale_)
        self._start(x, weight, outputs, Gaussian(outputs=outputs))

    def _targets(self, y: Array) -> Tensor:
        return torch.tensor(self.target_scaler_.transform(y.reshape(len(y), -1)))

    def predict_distribution(self, X: Any) -> GaussianPrediction:  # noqa: N803
        """All that `ibnn.predict` says, as tensors (n, targets) in units of the targets; `log_prob` is its density."""
        answer: GaussianPrediction = self._predict(X)
        scale, offset = (torch.tensor(part) for part in (self.target_scaler_.scale_, self.target_scaler_.mean_))
        return replace(
            answer,
            **{name: getattr(answer, name) * scale + offset for name in ("mean", "draw_means")},
            **{name: getattr(answer, name) * scale for name in ("standard_error", "draw_stds")},
            **{name: getattr(answer, name) * scale.square() for name in ("aleatoric", "between", "within")},
        )

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:  # noqa: N803
        """The mean of every row; with `return_std` its predictive standard deviation, noise included, too."""
        answer = self.predict_distribution(X)
        mean = self._shaped(answer.mean)
        return (mean, self._shaped(answer.std)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:  # noqa: N803
        """The central interval of every row that holds its target with probability `level`: lower and upper ends."""
        low, high = self.predict_distribution(X).interval(level)
        return self._shaped(low), self._shaped(high)

    def abstain(self, X: Any, risk: float) -> Array:  # noqa: N803
        """Which rows to leave to someone else (True): where the root mean squared error expected is above `risk`.

        It is the predictive standard deviation, in units of the target; with several targets any of them counts.
        """
        if not risk > 0:
            raise ValueError(complaint("risk", "positive", risk, "Pass an error of the target that you can bear."))
        return (self.predict_distribution(X).std > risk).any(1).numpy()

    def _shaped(self, values: Tensor) -> Array:
        return values[:, 0].numpy() if self._single else values.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _differ(weight: Array) -> bool:
    """Whether weights are any but 1."""
    return bool((weight != 1).any())


def _plausibility(nlls: Sequence[float], data: int) -> Array:
    """Posterior weights of models, alike before so many data, by the mean NLL that they give them.

    >>> _plausibility([0.5, 0.5 + np.log(3) / 100], 100).round(2).tolist()
    [0.75, 0.25]
    """
    weights = np.exp(-data * (np.array(nlls) - min(nlls)))
    return np.asarray(weights / weights.sum())
