"""Estimators with scikit-learn's interface: a classifier and a regressor for tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import LabelEncoder, StandardScaler
from sklearn.utils import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.likelihood import Likelihood
from ibnn.monitoring import Threshold, abstain
from ibnn.prediction import GaussianPrediction
from ibnn.sklearn.ensemble import CategoricalMembers, Ensemble, GaussianMembers, StackedLinear
from ibnn.sklearn.noise import fit_noise
from ibnn.sklearn.table import MANY, Table
from ibnn.sklearn.training import NONE, Array, Rows, Run

ALPHAS = tuple(10.0**power for power in range(-2, 5))  # ridge penalties that leave-one-out errors choose from
LEAST = 0.01  # size of what a line leaves, in standard deviations of the target


@dataclass(eq=False, repr=False)
class IBNNClassifier(ClassifierMixin, Table):  # type: ignore[misc]
    """An ensemble of implicit Bayesian networks that classifies the rows of a table.

    Every member of the ensemble is trained on all folds of the rows but one, all of them side by side. Training goes on
    until held-out rows stop improving. They also choose the noise on the nodes. Data frames may have categories and
    missing values, arrays may have missing values (NaN).

    Args:
        hidden: Widths of the hidden layers; default two of 64 (ReLU), or of 128 for 800 rows and more. A regression has
            three of 64 (SiLU), or of 128 for 800 to 2,000 rows.
        components: Networks in the ensemble, each one component of the mixture that answers; default 8, or 4 for a
            regression of 2,000 rows and more.
        prior_std: Standard deviation of the noise on every node's input; "auto" chooses it.
        epochs: Most passes over the table; default 1,500 steps, or 2,000 for 2,000 rows and more. Training stops
            earlier when held-out rows stop improving.
        batch_size: Rows per step and member, at most; default 64, or 256 for 2,000 rows and more.
        lr: Learning rate at the start. It drops when held-out rows stop improving.
        weight_decay: Of the weights.
        class_weight: As in scikit-learn: weights by class, or "balanced".
        samples: Draws of the noise for a prediction.
        one_pass: Whether `ibnn.distil` turns the trained ensemble into one network, which answers in one pass. `model_`
            is that network then.
        device: Where networks are trained and answer, such as "cuda". Answers come back to the CPU.
        progress: Whether training shows a bar.
        random_state: Decides everything random.

    Attributes:
        classes_: The labels, in the order of the columns of `predict_proba`.
        model_: The converted ensemble, for everything else that `ibnn` offers.
        encoder_: Turns categories and missing values into numbers (scikit-learn's `ColumnTransformer`).
        scaler_: The standardisation of those.
        history_: Step, held-out loss and learning rate at each check.
        n_features_in_: Number of columns.
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

    _activation = nn.ReLU
    _hidden, _stds = ((64, 64), (128, 128), (128, 128)), (0.2, 0.6)

    lr: float = field(default=0.01, kw_only=True)
    weight_decay: float = field(default=1.0, kw_only=True)
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = field(default=None, kw_only=True)

    def _prepared(self, x: Any, y: Any, weight: Any, *, start: bool) -> tuple[Any, Tensor, Array]:
        """Returns the rows of positive weight, their class numbers, and the product of row and class weights."""
        x, y = self._checked(x, y, start=start)
        check_classification_targets(y)
        x, y, weight = self._present(x, y, weight)
        if start:
            self._encoder = LabelEncoder().fit(y)
            self.classes_ = self._encoder.classes_
        if unseen := set(y.tolist()) - set(self.classes_.tolist()):  # the encoder would cut strings that are too long
            expected, got = "labels of the classes in use, none unseen", sorted(unseen)
            raise ValueError(complaint("y", expected, got, "Pass all labels to fit."))
        weight = weight * compute_sample_weight(self.class_weight, y)
        x, labels, weight = self._present(x, self._encoder.transform(y), weight)
        if start:
            self._start(x, weight, len(self.classes_))
        return x, torch.tensor(labels), weight

    def _likelihood(self) -> Likelihood:
        return CategoricalMembers()

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
        return losses.reshape(output.shape[:-1])

    def predict_proba(self, X: Any) -> Array:
        """Returns the probabilities of the classes, (n, classes)."""
        return np.asarray(self.predict_distribution(X).probs)

    def predict_log_proba(self, X: Any) -> Array:
        """Returns their logarithms, without underflow."""
        return np.asarray(self.predict_distribution(X).log_probs)

    def predict(self, X: Any) -> Array:
        """Returns the most probable label of every row."""
        labels = self.predict_distribution(X).labels
        return np.asarray(self.classes_[labels.numpy()])

    def predict_set(self, X: Any, level: float = 0.9) -> Array:
        """Returns which classes are in a set that holds the true one with probability `level`, (n, classes).

        That holds for rows like the held-out ones, whatever the network is worth; for the rows it takes see `p_value`.
        `predict_distribution(X).set` has other kinds of sets.
        """
        answer = self.predict_distribution(X)
        self._check_held("predict_set", known=answer.conformal is not None)
        return np.asarray(answer.set(level))

    def abstain(self, X: Any, y: Any, risk: float = 0.05, *, confidence: float = 0.95) -> Threshold:
        """Returns a rule, made on held-out rows, that withholds answers so that a share `risk` of the rest is wrong.

        This holds with the stated confidence. `rule(model.predict_distribution(X_new))` says which answers to withhold;
        see `ibnn.abstain`.
        """
        answer = self.predict_distribution(X)
        return abstain(answer, torch.tensor(self._encoder.transform(y)), risk, confidence=confidence)


class IBNNRegressor(RegressorMixin, Table):  # type: ignore[misc]
    """An ensemble of implicit Bayesian networks for one or several real targets.

    The networks learn what straight lines leave: every member is added to a ridge regression on its own rows. They
    learn the mean first, by squared errors. Held-out errors then tell the noise of the target: its size, whether it
    depends on the row (`model_.net.noise`), and whether its tails are heavier than Gaussian
    (`model_.likelihood.scales`).

    Arguments and attributes are those of `IBNNClassifier` but for classes; `target_scaler_` standardises the targets.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = IBNNRegressor((16,), epochs=20, random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:3], return_std=True)
    >>> low, high = model.predict_interval(X[:3], level=0.9)
    >>> bool((low < mean).all() and (mean < high).all() and (std > 0).all())
    True
    """

    _activation, _members = nn.SiLU, (8, 4)
    _hidden, _stds = ((64, 64, 64), (128, 128, 128), (64, 64, 64)), (NONE, 0.25)  # large batches are slow with 128

    def _prepared(self, x: Any, y: Any, weight: Any, *, start: bool) -> tuple[Any, Tensor, Array]:
        """Returns the rows of positive weight, their standardised targets (n, targets), and their weights."""
        x, y = self._checked(x, y, start=start, multi_output=True, y_numeric=True)
        x, y, weight = self._present(x, y.astype(np.float64), weight)
        columns = y.reshape(len(y), -1)
        if start:
            self._single = y.ndim == 1
            self.target_scaler_ = StandardScaler().fit(columns, sample_weight=weight)
            self._start(x, weight, columns.shape[1])
        return x, torch.tensor(self.target_scaler_.transform(columns)), weight

    def _likelihood(self) -> Likelihood:
        return GaussianMembers(outputs=self._outputs)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) / self._gain).square().mean(-1)

    def _base(self, rows: Rows, members: int) -> tuple[StackedLinear | None, Any]:
        """Returns a ridge line for each member, on the rows that it does not hold out, and the size of what is left."""
        x, y, weight = (part.cpu().double().numpy() for part in rows[:3])
        line = StackedLinear(members, x.shape[1], self._outputs).requires_grad_(False)
        shared = len(x) >= MANY or bool((rows.fold < 0).all())  # one for all members: it hardly depends on a fold
        for member in range(members):
            if member == 0 or not shared:
                own = np.ones(len(x), bool) if shared else (rows.fold != member).cpu().numpy()
                ridge = RidgeCV(ALPHAS).fit(x[own], y[own], sample_weight=weight[own])
            line.weight[member] = torch.tensor(np.atleast_2d(ridge.coef_).T)
            line.bias[member, 0] = torch.tensor(np.atleast_1d(ridge.intercept_))
        squares = np.average((y - ridge.predict(x).reshape(y.shape)) ** 2, axis=0, weights=weight)
        self._gain = torch.tensor(np.sqrt(squares).clip(LEAST)).float().to(rows.x.device)
        return line, self._gain

    def _after_training(self, run: Run) -> None:
        """Learns the noise of the targets."""
        rows, net, likelihood = run.rows, cast(Ensemble, run.net), cast(GaussianMembers, self.model_.likelihood)
        if (rows.fold >= 0).any():
            std, net.noise, scales = fit_noise(rows, run.answers(), run.members, run.pace)
            if net.noise is not None:
                likelihood = self.model_.likelihood = GaussianMembers(noise="predicted").to(rows.x.device)
            likelihood.scales = scales.to(rows.x.device, self._dtype)
        else:
            with torch.no_grad():
                error = rows.y - net(rows.x)[..., : rows.y.shape[1]].mean(1)
            std = (rows.weight[:, None] * error.square()).sum(0).div(rows.weight.sum()).sqrt().clamp_min(NONE)
        if likelihood.log_std is not None:
            likelihood.log_std.data.copy_(std.log())

    def predict_distribution(self, X: Any) -> GaussianPrediction:
        """Returns the whole prediction of `ibnn.predict`, as tensors (n, targets) in units of the targets."""
        answer: GaussianPrediction = super().predict_distribution(X)
        scale, offset = (torch.tensor(part) for part in (self.target_scaler_.scale_, self.target_scaler_.mean_))
        found: dict[str, Any] = {name: getattr(answer, name) * scale + offset for name in ("mean", "draw_means")}
        found |= {name: getattr(answer, name) * scale for name in ("standard_error", "draw_stds")}
        squares = {name: getattr(answer, name) for name in ("aleatoric", "between", "within", "unsplit")}
        found |= {name: part * scale.square() for name, part in squares.items() if part is not None}
        return replace(answer, **found)

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Returns the mean of every row; with `return_std` also its predictive standard deviation, noise included."""
        answer = self.predict_distribution(X)
        mean = self._shaped(answer.mean)
        return (mean, self._shaped(answer.std)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9, *, conformal: bool = False) -> tuple[Array, Array]:
        """Returns the ends of every row's central interval that holds its target with probability `level`.

        With `conformal` it is as wide as held-out rows need it, and so right whatever the network is worth, for rows
        like those; infinite if they are too few for the level. For the rows it takes, see `p_value`.
        """
        answer = self.predict_distribution(X)
        if conformal:
            self._check_held("conformal", known=answer.conformal is not None)
        low, high = answer.interval(level, conformal=conformal)
        return self._shaped(low), self._shaped(high)

    def _shaped(self, values: Tensor) -> Array:
        return values[:, 0].numpy() if self._single else values.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
