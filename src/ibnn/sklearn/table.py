"""TABLES: what classification and regression share: standardised inputs, the choice of the noise, training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from ibnn.convert import convert, plan
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.likelihood import Likelihood
from ibnn.novelty.fitting import FEWEST, fit_novelty_if_possible
from ibnn.novelty.measure import measure
from ibnn.sklearn.line import Line
from ibnn.sklearn.panel import Copies, Jury, Member, Panel, panel_model
from ibnn.sklearn.search import MANY, Candidate, Choice, Rows, decide, folds, members, split
from ibnn.sklearn.weighted import Weighted
from ibnn.training.loop import fit
from ibnn.training.recipe import Recipe, Schedule
from ibnn.training.steering import kl_weight

Array = np.ndarray[Any, Any]
Builder = Callable[[int, int], nn.Module]

# Tried for `prior_std`, the least for numbers alone; their mean, weighted by held-out likelihood, is taken.
PRIOR_STDS = (0.05, 0.2, 0.6)
STEPS, MIN_EPOCHS = 150, 20  # a run has so many steps; the last one no fewer passes over the table
BATCH, LARGE = (128, 512), 4000  # most rows of a step, and of one for so many rows
FEW_COLUMNS = 8  # fewer would drown in noise of their own size: the first layer is then not converted
NOISE_LR = 0.02  # of learnt target noise: log σ would crawl at a rate made for weights
AT_ONCE = 4096  # rows whose novelty is found at once
WARMUP = 0.2  # share of a run over which the fixed weight of the KL rises


class Size(NamedTuple):
    """Numbers of rows, inputs and outputs of a table."""

    rows: int
    inputs: int
    outputs: int


class Uncertainty(NamedTuple):
    """Uncertainty of predictions: total = aleatoric + epistemic, in nats (classes) or squared units of the target."""

    total: Array
    aleatoric: Array
    epistemic: Array


@dataclass(eq=False, repr=False)
class Table(BaseEstimator):  # type: ignore[misc]
    """The base of both estimators; for arguments see `IBNNClassifier`."""

    _usual_std: ClassVar[float]  # where `prior_std` cannot be chosen
    _fewest_rows: ClassVar[int]  # with which it can
    _hidden: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]]  # hidden layers, and those for 1,000 rows and more
    _activation: ClassVar[type[nn.Module]]
    _kinds: ClassVar[tuple[bool, ...]]  # whether candidates predict the noise of the target
    _stds: ClassVar[tuple[float, ...]]  # what they try for `prior_std`

    hidden: Sequence[int] | None = None
    _: KW_ONLY
    net: Builder | None = None
    components: int = 8
    prior_std: float | Literal["auto"] = "auto"
    epochs: int | None = None
    batch_size: int | None = None
    lr: float = 1e-2
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

    def _start(self, x: Array, weight: Array, outputs: int) -> None:
        """Fits the standardisation of inputs, and draws the seed of everything random."""
        if isinstance(self.prior_std, str) and self.prior_std != "auto":
            raise ValueError(complaint("prior_std", 'a number or "auto"', repr(self.prior_std), 'Pass "auto".'))
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._calls = 0
        self._size = Size(len(x), x.shape[1], outputs)
        self.scaler_ = StandardScaler().fit(x, sample_weight=weight if differ(weight) else None)

    def _make(self, choice: Choice | None = None) -> None:
        """Makes an untrained model with the noise that was chosen; default that of `prior_std`."""
        usual = self._usual_std if self.prior_std == "auto" else float(self.prior_std)
        std, predicted, _ = choice or Choice(usual)
        net = self._net(predicted).double()
        k, exclude = int(self.components), self._exclude(net)
        self.model_ = convert(
            net,
            components=k,
            prior_std=std,
            likelihood=self._likelihood(predicted),
            exclude=exclude,
            copy=False,
            seed=self._seed,
        )
        self.model_.set_posterior(std=std)

    def _net(self, predicted: bool) -> nn.Module:
        """Returns an untrained network; with `predicted` it has outputs for the noise of its targets too."""
        return self._body(2 * self._size.outputs if predicted else self._size.outputs)

    def _body(self, outputs: int) -> nn.Module:
        """Returns an untrained network of so many outputs, always from the same seed."""
        rows, inputs, _ = self._size
        with generators_restored():
            torch.manual_seed(self._seed)
            if self.net is not None:
                return self.net(inputs, outputs)
            sizes = [inputs, *(self._hidden[rows >= MANY] if self.hidden is None else self.hidden)]
            layers = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), self._activation())]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))

    def _exclude(self, net: nn.Module) -> str | None:
        """Returns the first of several layers if the table has few columns, else None."""
        first, *others = (layer.name for layer in plan(net).layers)
        return first if others and self._size.inputs < FEW_COLUMNS else None

    def _likelihood(self, predicted: bool) -> Likelihood:
        raise NotImplementedError

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
        choice = None
        if self.prior_std == "auto" and len(x) >= self._fewest_rows and self._size.outputs + (labels is None) > 1:
            choice = self._search(x, target, weight, labels)
        self._make(choice)
        with self._weighted(x, target, weight) as (inputs, target):
            train, valid = (inputs, target), held and self._joined(*held)
            if self.early_stopping and valid is None:
                rows, out = split(len(x), self.validation_fraction, labels, self._seed)
                train, valid = (inputs[rows], target[rows]), (inputs[out], target[out])
            self._fit(train, valid if self.early_stopping else None, **self._pace(len(train[0]), MIN_EPOCHS))
            if choice is not None:
                self.model_.likelihood.set_temperature(choice.temperature)
            if valid is not None:
                fit_novelty_if_possible(self.model_, train, valid, seed=self._seed, samples=int(self.samples))
        self._calls += 1
        self._held = 0 if valid is None else len(valid[0])

    def _joined(self, x: Array, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns held-out rows as those that are trained on are: standardised, and of weight 1 if those have any."""
        weighted = isinstance(self.model_.likelihood, Weighted)
        joined = Weighted.join(torch.ones(len(x), dtype=torch.float64), target) if weighted else target
        return torch.tensor(self.scaler_.transform(x)), joined

    def _search(self, x: Array, target: Tensor, weight: Array, labels: Array | None) -> Choice:
        """Returns what candidates choose by rows that they were not trained on; all are trained in one run.

        Tables of many rows hold a part of them out once. So do networks of a user's own, which run one by one.
        """
        own, size, inputs = self.net is not None, self._size, torch.tensor(self.scaler_.transform(x))
        fold = folds(len(x), labels, self._seed, one=own or len(x) >= MANY)
        candidates = [Candidate(std, kind) for kind in ((False,) if own else self._kinds) for std in self._stds]
        panel = members(candidates, int(fold.max()) + 1)
        predicted = True in self._kinds and not own
        bodies = [self._body(size.outputs * (2 if predicted else 1)).float() for _ in (panel if own else panel[:1])]
        lines = [] if own else self._lines(inputs.numpy(), target.numpy(), weight, fold)
        net = Copies(bodies) if own else Panel(cast(nn.Sequential, bodies[0]), panel, lines, max(self._stds))
        model = panel_model(net, panel, self._jury(panel), self._exclude(bodies[0]) or "", self._seed)
        as_target = target.float() if target.is_floating_point() else target
        rows = Rows(inputs.float(), as_target, torch.tensor(weight).float(), torch.tensor(fold))
        rows.train(model, self._recipe(beta=0.0, clip=0.0, latent_lr=0.0, **self._pace(int(rows.used.sum()))))
        return decide(candidates, *rows.losses(model, len(candidates)))

    def _jury(self, panel: Sequence[Member]) -> Jury:
        """Returns the likelihood of a panel."""
        return Jury(self._likelihood(predicted=False), panel)

    def _lines(self, x: Array, y: Array, weight: Array, fold: Array) -> list[Line]:
        """Returns the lines of the folds' training rows; none for classes."""
        return []

    def _pace(self, rows: int, passes: int = 1) -> dict[str, int]:
        """Returns the batch size and the number of passes over so many rows, at least `passes`.

        Batches of a pass are of equal size.
        """
        batches = -(-rows // int(self.batch_size or BATCH[rows >= LARGE]))
        return {
            "batch_size": -(-rows // batches),
            "epochs": int(self.epochs or max(-(-STEPS // batches), passes)),
        }

    def _train_more(self, x: Array, target: Tensor, weight: Array) -> None:
        """Trains for one pass over more rows."""
        with self._weighted(x, target, weight) as train:
            self._fit(train, None, **self._pace(len(x)) | {"epochs": 1}, schedule=Schedule())
        self._calls += 1
        self._held = 0

    def _fit(self, train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor] | None, **fields: Any) -> None:
        """Calls `ibnn.fit`, in single precision, with the fixed β that holds the noise near its prior."""
        fields |= {
            "beta": kl_weight(1.0, n_data=self.model_.likelihood.count(train[1]), nodes=self.model_.nodes),
            "beta_warmup": 0.0 if self._calls else WARMUP,
            "patience": int(self.patience) if valid else 0,
            "evaluate_every": 1 if valid else fields["epochs"],
        }
        parts = [part and tuple(t.float() if t.is_floating_point() else t for t in part) for part in (train, valid)]
        self.history_ = fit(self.model_.float(), *parts, recipe=self._recipe(**fields), quiet=True, novelty=False)
        self.model_.double()

    def _decay(self) -> float:
        """Returns the weight decay of a run."""
        return float(self.weight_decay)

    def _recipe(self, **fields: Any) -> Recipe:
        """Returns the recipe of a run."""
        common = {
            "lr": float(self.lr),  # searches pass numpy's numbers
            "noise_lr": max(NOISE_LR, float(self.lr)),
            "weight_decay": self._decay(),
            "evaluate_every": fields["epochs"],
            "seed": self._seed + self._calls,
        }
        return Recipe(**(common | fields))

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
        return self.model_.predict(torch.tensor(self.scaler_.transform(x)), samples=int(self.samples), progress=False)

    def p_value(self, X: Any) -> Array:  # noqa: N803
        """Returns the p-value of every row, (n,): near 0 for rows unlike the held-out ones.

        Of rows like those a share of about α has a p-value of α or less. It takes 50 rows that were not trained on,
        of `early_stopping` or `fit(..., X_val=, y_val=)`; p-values go down to 1 / (1 + their number).
        """
        check_is_fitted(self)
        x = torch.tensor(self.scaler_.transform(validate_data(self, X, reset=False, dtype=np.float64)))
        self._check_held("p_value", known=self.model_.reference is not None)
        found = [measure(self.model_, part).p_value for part in x.split(AT_ONCE)]
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
