"""What both estimators share: tables that become tensors, the ensemble and its training, answers."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from math import ceil
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils import check_random_state, validation
from torch import Tensor, nn

from ibnn import check
from ibnn.convert import convert
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.likelihood import Likelihood
from ibnn.network import IBNN
from ibnn.novelty.fitting import FEWEST, fit_novelty_if_possible
from ibnn.novelty.measure import measure
from ibnn.one_pass import FEWEST as FEWEST_TAUGHT
from ibnn.one_pass import distil
from ibnn.progress import Bar
from ibnn.sklearn.ensemble import Ensemble, StackedLinear, stacked
from ibnn.sklearn.training import NONE, Array, Pace, Rows, Run, folds, train

SOME, MANY = 800, 2000  # rows of a table that is no longer small, and of a large one
BATCH = (64, 256)  # rows of a step, and of one for many rows
STEPS = (1500, 2000)  # the most of a run, and of one for many rows
FEW_COLUMNS = 8  # fewer would drown in noise of their own size: the first layer then has none
FEW_ROWS = 2  # for each member to hold out; with fewer rows nothing is held out
UNSEEN_STEPS = 150  # of a run without held-out rows
COPIES, TAUGHT_STEPS, TAUGHT_LR = 8, 1000, 2e-3  # of a network that answers in one pass
AT_ONCE = 4096  # rows whose p-values are measured at once
CATEGORIES = 30  # most columns that one column of categories becomes; rarer ones share the last


class Uncertainty(NamedTuple):
    """Uncertainty of predictions: total = aleatoric + epistemic, in nats (classes) or squared units of the target."""

    total: Array
    aleatoric: Array
    epistemic: Array


@dataclass(eq=False, repr=False)
class Table(BaseEstimator):  # type: ignore[misc]
    """The base of both estimators; for arguments see `IBNNClassifier`."""

    _stds: ClassVar[tuple[float, ...]]  # candidates for `prior_std`; the last one is used where nothing is held out
    _members: ClassVar[tuple[int, int]] = (8, 8)  # networks, and those for many rows
    _hidden: ClassVar[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # widths for few, some and many rows
    _activation: ClassVar[type[nn.Module]]
    _prepared: ClassVar[Callable[..., tuple[Any, Tensor, Array]]]  # rows of positive weight, their targets and weights
    _likelihood: ClassVar[Callable[..., Likelihood]]
    _loss: ClassVar[Callable[..., Tensor]]  # losses (…) of outputs (…, outputs) for targets (…, targets)

    hidden: Sequence[int] | None = None
    _: KW_ONLY
    components: int | None = None
    prior_std: float | Literal["auto"] = "auto"
    epochs: int | None = None
    batch_size: int | None = None
    lr: float = 0.015
    weight_decay: float = 0.01
    samples: int = 5
    one_pass: bool = False
    device: Any = "cpu"
    progress: bool = False
    random_state: Any = None

    def _checked(self, x: Any, *y: Any, start: bool, **options: Any) -> Any:
        """Returns rows, and targets if they are passed, after scikit-learn's checks; a mixed data frame stays one."""
        mixed = _is_mixed(x)
        if not start and mixed != self._mixed:
            got = "categories" if mixed else "numbers alone"
            raise ValueError(complaint("X", "a table like that of fit", got, "Pass a data frame with its columns."))
        self._mixed: bool = mixed
        if not mixed:
            options |= {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
            return validation.validate_data(self, x, *y, reset=start, **options)
        x = validation.validate_data(self, x, skip_check_array=True, reset=start)
        validation.check_consistent_length(x, *y)
        return (x, validation._check_y(*y, estimator=self, **options)) if y else x

    def _present(self, x: Any, y: Array, weight: Any) -> tuple[Any, Array, Array]:
        """Returns the rows of positive weight, and their weights: a row of weight 0 is as good as absent."""
        weight = validation._check_sample_weight(weight, y, dtype=np.float64, ensure_non_negative=True)
        if not (kept := weight > 0).any():
            raise ValueError(complaint("sample_weight", "positive for some row", "zeros", "Leave it out."))
        return x[kept], y[kept], weight[kept]

    def _start(self, x: Any, weight: Array, outputs: int) -> None:
        """Learns how rows become standardised numbers, and draws the seed of everything random."""
        if self.prior_std != "auto":
            check.number("prior_std", _python(self.prior_std), above=0, remedy='Pass a number, or "auto".')
        if self.components is not None:
            check.integer("components", _python(self.components))
        check.device("device", self.device)
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._outputs = outputs
        self.encoder_ = _encoder(x)
        self.scaler_ = StandardScaler().fit(self.encoder_.fit(x).transform(x), sample_weight=weight)

    def _tensor(self, x: Any) -> Tensor:
        """Returns standardised rows (n, inputs) on the device."""
        rows = self.scaler_.transform(self.encoder_.transform(x))
        return torch.tensor(rows, dtype=self._dtype, device=self.device)

    def _inputs(self, x: Any) -> Tensor:
        """Returns `_tensor` of rows to answer for."""
        validation.check_is_fitted(self)
        return self._tensor(self._checked(x, start=False))

    @property
    def _dtype(self) -> torch.dtype:
        """Answers are computed in double precision on a CPU; other devices may not have it."""
        return torch.float64 if torch.device(self.device).type == "cpu" else torch.float32

    def _base(self, rows: Rows, members: int) -> tuple[StackedLinear | None, Any]:
        """Returns what the networks are added to, and the size of what they add."""
        return None, 1.0

    def _after_training(self, run: Run) -> None:
        """Learns what is left to learn from held-out rows."""

    def _make(self, std: float, rows: Rows, members: int) -> IBNN:
        """Returns an untrained ensemble; the noise on its nodes stays as it is."""
        count, inputs = rows.x.shape
        hidden = self._hidden[(count >= SOME) + (count >= MANY)] if self.hidden is None else self.hidden
        line, gain = self._base(rows, members)
        with generators_restored():
            torch.manual_seed(self._seed)
            body = stacked(members, [inputs, *hidden, self._outputs], self._activation).float()
        quiet = ["body.0"] if inputs < FEW_COLUMNS and len(hidden) else []
        quiet += [] if line is None else ["line"]
        options: Any = {"prior_std": std, "init_std": 0.0, "seed": self._seed, "exclude": quiet or None, "copy": False}
        model = convert(Ensemble(body, members, line, gain), components=1, likelihood=self._likelihood(), **options)
        model.set_posterior(mean=1.0, std=std)
        for latent in model.latents.values():
            latent.requires_grad_(False)
        return model.to(self.device)

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, X_val: Any = None, y_val: Any = None) -> Self:
        """Trains anew on rows (n, inputs), and labels of any kind or targets (n,) or (n, targets).

        A row of weight 2 counts as two. Rows `X_val` with `y_val` are not trained on: `p_value`, `predict_set` and
        conformal intervals need 50 of them.
        """
        x, target, weight = self._prepared(X, y, sample_weight, start=True)
        inputs, count, many = self._tensor(x), len(target), len(target) >= MANY
        valid = None
        if X_val is not None:
            more, targets, _ = self._prepared(X_val, y_val, None, start=False)
            valid = self._tensor(more), targets
        members = self._members[many] if self.components is None else int(self.components)
        labels = None if target.is_floating_point() else target.numpy()
        held_out = count >= FEW_ROWS * members and members > 1 and self._outputs + (labels is None) > 1
        fold = folds(count, members, labels, self._seed) if held_out else np.full(count, -1)
        parts = inputs, target.reshape(count, -1), torch.tensor(weight), torch.tensor(fold)
        rows = Rows(*((part.float() if part.is_floating_point() else part).to(self.device) for part in parts))
        batch_size, steps = int(self.batch_size or BATCH[many]), STEPS[many] if held_out else UNSEEN_STEPS
        steps = steps if self.epochs is None else int(self.epochs) * ceil(count / batch_size)
        pace = Pace(float(self.lr), float(self.weight_decay), batch_size, steps, self._seed)
        stds = (self._stds if held_out else self._stds[-1:]) if self.prior_std == "auto" else (float(self.prior_std),)
        with Bar("training", total=steps, shown=bool(self.progress)) as bar:
            models = [self._make(std, rows, members) for std in stds]
            runs = [Run(m.net, members, rows, self._loss, pace, m if m.prior_std > NONE else None) for m in models]
            run = train(runs, bar)
        self.model_: Any = models[runs.index(run)]
        self.history_ = run.history
        self._after_training(run)
        self.model_.eval()
        options: Any = {"samples": self._samples(), "seed": self._seed}
        if self.one_pass and (labels is None or self._outputs > 1):  # one class is certain as it is
            own = inputs.float().repeat(ceil(FEWEST_TAUGHT / count), 1)
            epochs = ceil(TAUGHT_STEPS * BATCH[1] / ((1 + COPIES) * len(own)))
            taught: Any = {"whole": True, "epochs": epochs, "copies": COPIES, "lr": TAUGHT_LR}
            self.model_ = distil(self.model_, own, progress=bool(self.progress), **taught, **options)
        self.model_.to(self._dtype)
        self._held = 0 if valid is None else len(valid[0])
        if valid is not None:
            fit_novelty_if_possible(self.model_, (inputs, target), valid, **options)
        return self

    def _samples(self) -> int:
        """Returns the draws of a prediction: one is enough without noise."""
        return int(self.samples) if float(self.model_.prior_std) > NONE else 1

    def predict_distribution(self, X: Any) -> Any:
        """Returns the whole prediction of `ibnn.predict`, as tensors."""
        inputs = self._inputs(X)  # raises if there is no model
        return self.model_.predict(inputs, samples=self._samples(), progress=False).to("cpu")

    def p_value(self, X: Any) -> Array:
        """Returns the p-value of every row, (n,): near 0 for rows unlike the held-out ones.

        Of rows like those a share of about α has a p-value of α or less. It takes 50 rows that were not trained on
        (`fit(..., X_val=, y_val=)`); p-values go down to 1 / (1 + their number).
        """
        x = self._inputs(X)
        self._check_held("p_value", known=self.model_.reference is not None)
        return torch.cat([measure(self.model_, part).p_value.cpu() for part in x.split(AT_ONCE)]).double().numpy()

    def _check_held(self, what: str, *, known: bool) -> None:
        """Raises unless enough rows were held out for what is asked."""
        if not known:
            got = f"{what} needs at least {FEWEST} rows that were not trained on. This one has {self._held}."
            raise ValueError(f"{got} Call fit(X, y, X_val=…, y_val=…).")

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Returns the total, aleatoric and epistemic uncertainty of every row.

        Entropies in nats for classes; variances in squared units of the target for regression.
        """
        answer = self.predict_distribution(X)
        return Uncertainty(*(self._shaped(part) for part in (answer.total, answer.aleatoric, answer.epistemic)))

    def _shaped(self, values: Tensor) -> Array:
        return values.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def _python(value: Any) -> Any:
    """Returns numpy's numbers, which searches pass, as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _is_mixed(x: Any) -> bool:
    """Returns whether x is a data frame with columns that are not numbers: categories, strings, dates."""
    return hasattr(x, "dtypes") and hasattr(x, "columns") and not all(_numeric(kind) for kind in x.dtypes)


def _numeric(kind: Any) -> bool:
    """Returns whether a column of this dtype holds numbers; booleans do."""
    kind = getattr(kind, "numpy_dtype", kind)  # pandas' own nullable kinds
    return isinstance(kind, np.dtype) and kind.kind in "biuf"


def _encoder(x: Any) -> ColumnTransformer:
    """Returns an unfitted encoder for rows like these.

    A missing number becomes its column's median, and a column that says so; columns without a known number become 0. A
    category becomes a column of zeros and ones, missing ones have a column of their own, and those that were not seen
    in training have none.
    """
    kinds = list(x.dtypes) if _is_mixed(x) else [np.dtype(float)] * x.shape[1]
    numbers = [place for place, kind in enumerate(kinds) if _numeric(kind)]
    others = [place for place in range(len(kinds)) if place not in numbers]
    filled = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    categories = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=CATEGORIES, sparse_output=False)
    return ColumnTransformer([("numbers", filled, numbers), ("categories", categories, others)])
