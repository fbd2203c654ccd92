"""REGRESSOR: an iBNN behind scikit-learn's regressor interface, for one or several targets."""

from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import validate_data
from torch import Tensor

from ibnn.errors import complaint
from ibnn.likelihood import Gaussian
from ibnn.prediction import GaussianPrediction
from ibnn.sklearn.table import Array, Table, differ


class IBNNRegressor(RegressorMixin, Table):  # type: ignore[misc]
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

    _usual_std = 0.3  # less than for classes: the learnt target noise has to cover what the draws add

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains anew on rows (n, inputs) and targets, (n,) or (n, targets); a row of weight 2 counts as two."""
        x, y, weight = self._rows(X, y, sample_weight, reset=True)
        self._begin(x, y, weight)
        self._train(x, self._targets(y), weight)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains for one more pass over these rows; the first call standardises by its rows.

        The noise stays at `prior_std` ("auto": 0.3), or at what an earlier `fit` has found.
        """
        first = not hasattr(self, "model_")
        x, y, weight = self._rows(X, y, sample_weight, reset=first)
        if first:
            self._begin(x, y, weight)
        self._train_more(x, self._targets(y), weight)
        return self

    def _rows(self, x: Any, y: Any, weight: Any, *, reset: bool) -> tuple[Array, Array, Array]:
        x, y = validate_data(self, x, y, reset=reset, dtype=np.float64, multi_output=True, y_numeric=True)
        return self._present(x, y.astype(np.float64), weight)

    def _begin(self, x: Array, y: Array, weight: Array) -> None:
        self._single = y.ndim == 1
        weights = weight if differ(weight) else None
        self.target_scaler_ = StandardScaler().fit(y.reshape(len(y), -1), sample_weight=weights)
        outputs = len(self.target_scaler_.scale_)
        self._start(x, weight, outputs, Gaussian(outputs=outputs))

    def _targets(self, y: Array) -> Tensor:
        return torch.tensor(self.target_scaler_.transform(y.reshape(len(y), -1)))

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

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:  # noqa: N803
        """Returns the ends of every row's central interval that holds its target with probability `level`."""
        low, high = self.predict_distribution(X).interval(level)
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
