"""CLASSIFIER, REGRESSOR: iBNNs behind scikit-learn's interfaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.preprocessing import LabelEncoder, StandardScaler
from sklearn.utils import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.likelihood import Categorical, Gaussian, Likelihood
from ibnn.prediction import CategoricalPrediction, GaussianPrediction
from ibnn.sklearn.line import Line, OnLine, fit_line
from ibnn.sklearn.panel import Jury, Member
from ibnn.sklearn.table import FEW_COLUMNS, PRIOR_STDS, Array, Table, differ


class _OneClass(Categorical):
    """Is certain of the only class that a table has; elsewhere a single output is a mistake."""

    fewest = 1


@dataclass(eq=False, repr=False)
class IBNNClassifier(ClassifierMixin, Table):  # type: ignore[misc]
    """An implicit Bayesian network that classifies the rows of a table.

    With 100 rows and more the noise is chosen: networks with little and with much of it are trained side by side in one
    run, on all folds but one each, and compared on the rows that they have not seen. A second run trains on all rows.

    Args:
        hidden: Widths of the hidden layers (ReLU); default two of 64, or of 128 for 1,000 rows and more. A regression
            has three (SiLU) of 32, or of 64.
        net: Makes another network: called with the numbers of inputs and outputs.
        components: K, Gaussians in the posterior's mixture.
        prior_std: Standard deviation of the noise on every node's input; "auto" chooses it. With a number there is one
            run, not two.
        epochs: Passes over the table; default by its size.
        batch_size: Rows per step, at most; default 128, or 512 for 4,000 rows and more.
        lr: Learning rate of the weights.
        weight_decay: Of the weights. A regression on fewer than 8 columns takes an eighth of it for each.
        early_stopping: Holds `validation_fraction` of the rows out and stops after `patience` passes without a lower
            NLL on them.
        validation_fraction: See `early_stopping`.
        patience: See `early_stopping`.
        class_weight: As in scikit-learn: weights by class, or "balanced".
        samples: Draws per component of a prediction.
        random_state: Decides everything random.

    Attributes:
        classes_: The labels, in the order of the columns of `predict_proba`.
        model_: The converted network, for everything else that `ibnn` offers.
        scaler_: The standardisation of inputs.
        history_: The history of the last run (`ibnn.History`).
        n_features_in_: Number of inputs.
        feature_names_in_: Their names, if a data frame was passed.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = IBNNClassifier((16,), epochs=20, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape, bool(model.score(X, y) > 0.8)
    ((2, 3), True)
    >>> known, held = slice(0, 150, 2), slice(1, 150, 2)
    >>> model = model.fit(X[known], y[known], X_val=X[held], y_val=y[held])
    >>> model.p_value([[5.1, 3.5, 1.4, 0.2], [51.0, 3.5, 1.4, 0.2]]) < 0.05
    array([False,  True])
    >>> model.predict_set(X[held], level=0.9).shape
    (75, 3)
    """

    _usual_std, _fewest_rows, _hidden = 0.5, 100, ((64, 64), (128, 128))
    _activation, _kinds, _stds = nn.ReLU, (False,), PRIOR_STDS[1:]

    class_weight: Mapping[Any, float] | Literal["balanced"] | None = field(default=None, kw_only=True)

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        sample_weight: Any = None,
        *,
        X_val: Any = None,  # noqa: N803
        y_val: Any = None,
    ) -> Self:
        """Trains anew on rows (n, inputs) and their labels, of any kind; a row of weight 2 counts as two.

        Rows `X_val` with labels `y_val` are not trained on: `p_value` and `predict_set` need 50 of them, and early
        stopping goes by them instead of rows of its own.
        """
        x, labels, weight = self._rows(X, y, sample_weight, start=True)
        held = None
        if X_val is not None:
            x_val, labels_val, _ = self._rows(X_val, y_val, None, start=False)
            held = x_val, torch.tensor(labels_val)
        self._train(x, torch.tensor(labels), weight, labels=labels, held=held)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains for one more pass over these rows; the first call needs all `classes`, and standardises by its rows.

        The noise stays at `prior_std` ("auto": 0.5), or at what an earlier `fit` has found.
        """
        if self.class_weight == "balanced":
            remedy = "Pass the weights of the classes, or sample_weight."
            raise ValueError(complaint("class_weight", "known before the data for partial_fit", "'balanced'", remedy))
        first = not hasattr(self, "model_")
        if first and classes is None:
            raise ValueError(complaint("classes", "all labels in the first partial_fit", None, "Pass np.unique(y)."))
        x, labels, weight = self._rows(X, y, sample_weight, start=first, classes=classes)
        self._train_more(x, torch.tensor(labels), weight)
        return self

    def _rows(self, x: Any, y: Any, weight: Any, *, start: bool, classes: Any = None) -> tuple[Array, Array, Array]:
        """Returns the rows of positive weight, their class numbers, and the product of row and class weights."""
        x, y = validate_data(self, x, y, reset=start, dtype=np.float64)
        check_classification_targets(y)
        x, y, weight = self._present(x, y, weight)
        if start:
            self._encoder = LabelEncoder().fit(y if classes is None else classes)
            self.classes_ = self._encoder.classes_
        if unseen := set(y.tolist()) - set(self.classes_.tolist()):  # the encoder would cut strings that are too long
            remedy = "Pass all labels to fit, or as classes to the first partial_fit."
            raise ValueError(complaint("y", "labels of the classes in use, none unseen", sorted(unseen), remedy))
        labels, class_weights = self._encoder.transform(y), compute_sample_weight(self.class_weight, y)
        x, labels, weight = self._present(x, labels, weight, class_weights)
        if start:
            self._start(x, weight, len(self.classes_))
            self._make()
        return x, labels, weight

    def _likelihood(self, predicted: bool) -> Likelihood:
        return Categorical() if len(self.classes_) > 1 else _OneClass()

    def predict_distribution(self, X: Any) -> CategoricalPrediction:  # noqa: N803
        """Returns the whole prediction of `ibnn.predict`, as tensors."""
        answer: CategoricalPrediction = self._predict(X)
        return answer

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Returns the probabilities of the classes, (n, classes)."""
        return self.predict_distribution(X).probs.numpy()

    def predict_log_proba(self, X: Any) -> Array:  # noqa: N803
        """Returns their logarithms, without underflow."""
        return self.predict_distribution(X).log_probs.numpy()

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Returns the most probable label of every row."""
        labels = self.predict_distribution(X).labels.numpy()
        return np.asarray(self.classes_[labels])

    def predict_set(self, X: Any, level: float = 0.9, *, by_class: bool = False) -> Array:  # noqa: N803
        """Returns which classes are in a set that holds the true one with probability `level`, (n, classes).

        That holds for rows like the held-out ones, whatever the network is worth; with `by_class` also within every
        class. See `ibnn.CategoricalPrediction.set`; for the rows it takes, `p_value`.
        """
        answer = self.predict_distribution(X)
        self._check_held("predict_set", known=answer.conformal is not None)
        return answer.set(level, by_class=by_class).numpy()

    def abstain(self, X: Any, risk: float = 0.1) -> Array:  # noqa: N803
        """Returns which rows to leave to someone else: where the label is wrong with a probability above `risk`.

        If the probabilities are calibrated, at most `risk` of the other predictions are wrong (Chow's rule).
        """
        if not 0 <= risk <= 1:
            raise ValueError(complaint("risk", "a probability", risk, "Pass 0.1 for one error in ten."))
        return np.asarray(1 - self.predict_proba(X).max(1) > risk)


class IBNNRegressor(RegressorMixin, Table):  # type: ignore[misc]
    """An implicit Bayesian network for one or several real targets with Gaussian noise.

    The network learns what a straight line leaves: the output of a ridge regression is added to its own. With 20 rows
    and more, held-out rows choose the noise on the nodes, whether the target's noise is the same for all rows or
    predicted by the network (`model_.likelihood.noise`), and a factor on its size. With a number for `prior_std`, or a
    `net` of your own, it is the same for all rows.

    Arguments and attributes are those of `IBNNClassifier` but for classes; `target_scaler_` standardises the targets.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = IBNNRegressor((16,), epochs=20, random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:3], return_std=True)
    >>> low, high = model.predict_interval(X[:3], level=0.9)
    >>> bool((low < mean).all() and (mean < high).all() and (std > 0).all())
    True
    """

    _usual_std = 0.3  # less than for classes: the learnt target noise has to cover what the draws add
    _fewest_rows, _hidden = 20, ((32, 32, 32), (64, 64, 64))
    _activation, _kinds, _stds = nn.SiLU, (False, True), PRIOR_STDS

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        sample_weight: Any = None,
        *,
        X_val: Any = None,  # noqa: N803
        y_val: Any = None,
    ) -> Self:
        """Trains anew on rows (n, inputs) and targets, (n,) or (n, targets); a row of weight 2 counts as two.

        Rows `X_val` with targets `y_val` are not trained on: `p_value` and conformal intervals need 50 of them, and
        early stopping goes by them instead of rows of its own.
        """
        rows = self._rows(X, y, sample_weight, start=True)
        held = None if X_val is None else self._rows(X_val, y_val, None, start=False)[:2]
        self._train(*rows, held=held)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains for one more pass over these rows; the first call standardises by its rows.

        The noise stays at `prior_std` ("auto": 0.3), or at what an earlier `fit` has found.
        """
        self._train_more(*self._rows(X, y, sample_weight, start=not hasattr(self, "model_")))
        return self

    def _rows(self, x: Any, y: Any, weight: Any, *, start: bool) -> tuple[Array, Tensor, Array]:
        """Returns the rows of positive weight, their standardised targets (n, targets), and their weights."""
        x, y = validate_data(self, x, y, reset=start, dtype=np.float64, multi_output=True, y_numeric=True)
        x, y, weight = self._present(x, y.astype(np.float64), weight)
        columns = y.reshape(len(y), -1)
        if start:
            self._single = y.ndim == 1
            self.target_scaler_ = StandardScaler().fit(columns, sample_weight=weight if differ(weight) else None)
            self._start(x, weight, columns.shape[1])
            self._fitted = fit_line(self.scaler_.transform(x), self.target_scaler_.transform(columns), weight)
            self._make()
        return x, torch.tensor(self.target_scaler_.transform(columns)), weight

    def _likelihood(self, predicted: bool) -> Likelihood:
        if predicted:
            return Gaussian(noise="predicted")
        likelihood = Gaussian(outputs=self._size.outputs)
        if self.net is None and likelihood.log_std is not None:
            likelihood.log_std.data.copy_(self._fitted.rest.log())
        return likelihood

    def _jury(self, panel: Sequence[Member]) -> Jury:
        (log_std,) = self._likelihood(predicted=False).parameters()
        return Jury(self._likelihood(predicted=True), panel, log_std)

    def _net(self, predicted: bool) -> nn.Module:
        body = super()._net(predicted)
        return OnLine(Line(self._fitted, predicted=predicted), body) if self.net is None else body

    def _decay(self) -> float:
        return float(self.weight_decay) * min(1.0, self._size.inputs / FEW_COLUMNS)

    def _lines(self, x: Array, y: Array, weight: Array, fold: Array) -> list[Line]:
        found = []
        for number in range(int(fold.max()) + 1):
            kept = fold != number
            fitted = fit_line(x[kept], y[kept], weight[kept], self._fitted.rest)
            found.append(Line(fitted, predicted=True).float())
        return found

    def predict_distribution(self, X: Any) -> GaussianPrediction:  # noqa: N803
        """Returns the whole prediction of `ibnn.predict`, as tensors (n, targets) in units of the targets."""
        answer: GaussianPrediction = self._predict(X)
        scale, offset = (torch.tensor(part) for part in (self.target_scaler_.scale_, self.target_scaler_.mean_))
        return replace(
            answer,
            **{name: getattr(answer, name) * scale + offset for name in ("mean", "draw_means")},
            **{name: getattr(answer, name) * scale for name in ("standard_error", "draw_stds")},
            **{name: getattr(answer, name) * scale.square() for name in ("aleatoric", "between", "within")},
        )

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:  # noqa: N803
        """Returns the mean of every row; with `return_std` also its predictive standard deviation, noise included."""
        answer = self.predict_distribution(X)
        mean = self._shaped(answer.mean)
        return (mean, self._shaped(answer.std)) if return_std else mean

    def predict_interval(
        self,
        X: Any,  # noqa: N803
        level: float = 0.9,
        *,
        conformal: bool = False,
    ) -> tuple[Array, Array]:
        """Returns the ends of every row's central interval that holds its target with probability `level`.

        With `conformal` it is as wide as held-out rows need it, and so right whatever the network is worth, for rows
        like those; infinite if they are too few for the level. For the rows it takes, see `p_value`.
        """
        answer = self.predict_distribution(X)
        if conformal:
            self._check_held("conformal", known=answer.conformal is not None)
        low, high = answer.interval(level, conformal=conformal)
        return self._shaped(low), self._shaped(high)

    def abstain(self, X: Any, risk: float) -> Array:  # noqa: N803
        """Returns which rows to leave to someone else: where the predictive standard deviation is above `risk`.

        It is the root mean squared error to expect, in units of the target; with several targets any of them counts.
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
