"""CLASSIFIER: an iBNN behind scikit-learn's classifier interface."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from ibnn.errors import complaint
from ibnn.likelihood import Categorical
from ibnn.prediction import CategoricalPrediction
from ibnn.sklearn.table import Array, Builder, Table


class _OneClass(Categorical):
    """Is certain of the only class that a table has; elsewhere a single output is a mistake."""

    fewest = 1


class IBNNClassifier(ClassifierMixin, Table):  # type: ignore[misc]
    """An implicit Bayesian network that classifies the rows of a table.

    With 100 rows and more the noise is chosen: little and much of it are compared on a quarter of the rows, and a third
    run trains on all rows with what was found.

    Args:
        hidden: Widths of the hidden layers (ReLU); default two of 64, or of 128 for 1,000 rows and more.
        net: Makes another network: called with the numbers of inputs and outputs.
        components: K, Gaussians in the posterior's mixture.
        prior_std: Standard deviation of the noise on every node's input; "auto" chooses it. With a number there is one
            run, not three.
        epochs: Passes over the table; default by its size.
        batch_size: Rows per step.
        lr: Learning rate of the weights.
        weight_decay: Of the weights.
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
    """

    _usual_std = 0.5

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
        self._store(locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains anew on rows (n, inputs) and their labels, of any kind; a row of weight 2 counts as two."""
        x, y = self._rows(X, y, reset=True)
        self._learn_classes(y)
        x, labels, weight = self._labels(x, y, sample_weight)
        self._start(x, weight, len(self.classes_), self._likelihood())
        self._train(x, torch.tensor(labels), weight, labels=labels)
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
        x, y = self._rows(X, y, reset=first)
        if first:
            self._learn_classes(classes)
        x, labels, weight = self._labels(x, y, sample_weight)
        if first:
            self._start(x, weight, len(self.classes_), self._likelihood())
        self._train_more(x, torch.tensor(labels), weight)
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
        """Returns the rows of positive weight, their class numbers, and the product of row and class weights."""
        return self._present(x, self._encoder.transform(y), sample_weight, compute_sample_weight(self.class_weight, y))

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

    def abstain(self, X: Any, risk: float = 0.1) -> Array:  # noqa: N803
        """Returns which rows to leave to someone else: where the label is wrong with a probability above `risk`.

        If the probabilities are calibrated, at most `risk` of the other predictions are wrong (Chow's rule).
        """
        if not 0 <= risk <= 1:
            raise ValueError(complaint("risk", "a probability", risk, "Pass 0.1 for one error in ten."))
        return np.asarray(1 - self.predict_proba(X).max(1) > risk)
