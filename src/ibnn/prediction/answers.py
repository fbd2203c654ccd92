"""Prediction classes: answers for a batch, with their uncertainty in parts.

Uncertainty splits exactly: total = aleatoric + epistemic, epistemic = between components + within components, every
part ≥ 0.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint
from ibnn.prediction.conformal import Conformal, Kind, check_groups, more_probable, none_known

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Prediction:
    """Answers for a batch of inputs; the first axis of every field is the batch, unless its metadata says otherwise."""

    #: p-value of the hypothesis that an input is like those known, (B,): near 0 where an input is novel, uniform among
    #: known ones. None if the model has no reference data. See `ibnn.fit_novelty`.
    p_value: Tensor | None = field(default=None, kw_only=True)
    #: Number of held-out inputs, n, that p-values are ranks among; no p-value is below 1 / (n + 1).
    ranked: int = field(default=0, kw_only=True, repr=False)
    #: Held-out distances that sets and intervals with guaranteed coverage are made of, or None: `ibnn.conformalize`.
    conformal: Conformal | None = field(default=None, kw_only=True, repr=False)

    unit: ClassVar[str] = ""  # of the uncertainties

    def __str__(self) -> str:
        """A summary of a few lines; `repr` has the tensors."""
        columns = {name: values.cpu().double() for name, values in self._columns().items()}
        means = ", ".join(f"{name} {columns[name].mean():.3g}" for name in ("total", "aleatoric", "epistemic"))
        lines = [f"{type(self).__name__} for {len(self):,} inputs", f"mean uncertainty in {self.unit}: {means}"]
        if isinstance(self, CategoricalPrediction):
            lines.append(f"mean probability of the answer: {self.log_prob(self.labels).exp().mean():.3g}")
        if "mean" in columns:
            low, high = columns["mean"].aminmax() if len(self) else (math.nan, math.nan)
            lines.append(f"predicted means from {low:.4g} to {high:.4g}")
        if self.p_value is not None and len(self):
            low, high = self.p_value.aminmax()
            lines.append(f"p-values of novelty, among {self.ranked:,} held-out inputs: {low:.3g} to {high:.3g}")
        return "\n".join(lines)

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns a table with a row for each input: its answer, its uncertainties and, where known, its p-value.

        >>> import ibnn
        >>> p = ibnn.Categorical().summarise(torch.zeros(1, 1, 2, 3))
        >>> list(p.to_pandas().columns)
        ['label', 'prob.0', 'prob.1', 'prob.2', 'total', 'aleatoric', 'epistemic']
        """
        import pandas

        table: dict[str, Any] = {}
        columns = self._columns() | ({} if self.p_value is None else {"p_value": self.p_value})
        for name, values in columns.items():
            if values.dim() > 2:
                got, remedy = f"{name} of shape {tuple(values.shape)}", "Read the tensors of the prediction instead."
                raise ValueError(complaint("p", "a prediction of one or several numbers for each input", got, remedy))
            parts = (values[:, None] if values.dim() == 1 else values).detach().cpu().numpy()
            names = [name] if parts.shape[1] == 1 else [f"{name}.{number}" for number in range(parts.shape[1])]
            table |= dict(zip(names, parts.T, strict=True))
        return pandas.DataFrame(table)

    def _columns(self) -> dict[str, Tensor]:
        """Returns the columns of the table, but for the p-value, by name."""
        return {}

    def novel(self, level: float = 0.01) -> Tensor:
        """Whether each input is novel, (B,): its p-value is at most `level`, which is at least 1 / (n + 1).

        Of inputs like those held out, a share of about `level` is called novel, on average over held-out sets. With
        one set of n held-out inputs, that share is spread about like Beta(k, n + 1 − k), k = ⌊level · (n + 1)⌋. With
        50 inputs and a level of 2 % it is 2 % on average, and above 5.8 % in one set of 20.
        """
        check.share("level", level, remedy="Pass level=0.01.")
        if self.p_value is None:
            raise RuntimeError(no_reference("p.novel()"))
        check_level("level", level, self.ranked)
        return self.p_value <= level

    def __len__(self) -> int:
        """How many inputs were answered."""
        first = next(f.name for f in fields(self) if not f.kw_only)
        return len(getattr(self, first))

    def to(self, device: torch.device | str) -> Self:
        """The same answers on another device."""
        return self._map(lambda name, value, axis: value.to(device))

    def rows(self, numbers: Tensor) -> Self:
        """The answers for some of the inputs, in the order of their numbers."""
        return self._map(lambda name, value, axis: value.index_select(axis, numbers.to(value.device)))

    def _map(self, function: Callable[[str, Tensor, int], Tensor]) -> Self:
        """Applies a function of name, value and batch axis to every field that is a tensor."""
        found = ((f.name, getattr(self, f.name), f.metadata.get("batch", 0)) for f in fields(self))
        mapped: Any = {name: function(name, v, axis) for name, v, axis in found if isinstance(v, Tensor)}
        return replace(self, **mapped)

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """Joins the answers for consecutive batches."""

        def joined(name: str, value: Tensor, axis: int) -> Tensor:
            values = [getattr(part, name) for part in parts]
            shapes = {tuple(v.shape[:axis] + v.shape[axis + 1 :]) for v in values}
            if len(shapes) > 1:
                expected, got = "batches with outputs of one shape", " and ".join(map(str, sorted(shapes)[:2]))
                raise ValueError(complaint("x", expected, got, "Pad them to one length, or predict batch by batch."))
            return torch.cat(values, axis)

        return parts[0] if len(parts) == 1 else parts[0]._map(joined)


class _Split:
    """Uncertainty in parts; `between` and `within` are None where only their sum, `unsplit`, is known."""

    aleatoric: Tensor
    between: Tensor | None
    within: Tensor | None
    unsplit: Tensor | None

    @property
    def epistemic(self) -> Tensor:
        """What the draws disagree about, (B, …): mutual information of classes, variance of means of numbers."""
        if self.between is None or self.within is None:
            assert self.unsplit is not None
            return self.unsplit
        return self.between + self.within

    @property
    def total(self) -> Tensor:
        """Entropy of `probs`, or predictive variance, (B, …): aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    def _uncertainty(self) -> dict[str, Tensor]:
        return {"total": self.total, "aleatoric": self.aleatoric, "epistemic": self.epistemic}


@dataclass(frozen=True)
class CategoricalPrediction(_Split, Prediction):
    """Class probabilities and the entropies behind them, in nats."""

    probs: Tensor  #: Mean of the draws' probabilities, of the shape of the output: (B, C), (B, C, …) or (B, …, C).
    log_probs: Tensor  #: Its logarithm, computed without underflow.
    aleatoric: Tensor  #: Mean entropy of the draws, (B, …): what no more training data would take away.
    between: Tensor | None  #: Mutual information of label and component: how they disagree; None for one pass.
    within: Tensor | None  #: Mutual information of label and draw, given the component; None for one pass.
    #: Monte Carlo standard error of `probs`; too large with one draw per component, nan with one draw.
    standard_error: Tensor
    #: How many draws each answer is made of, (B,), where `predict` was given a tolerance; else None.
    draws: Tensor | None = field(default=None, kw_only=True)
    axis: int = field(default=1, kw_only=True)  #: The axis of the classes in `probs`, 1 or −1.
    #: The epistemic part where it is not split (one pass); else None.
    unsplit: Tensor | None = field(default=None, kw_only=True, repr=False)
    unit: ClassVar[str] = "nats"

    def _columns(self) -> dict[str, Tensor]:
        return {"label": self.labels, "prob": self.probs} | self._uncertainty()

    @property
    def labels(self) -> Tensor:
        """The most probable class, (B, …)."""
        return self.probs.argmax(self.axis)

    def log_prob(self, target: Tensor) -> Tensor:
        """Returns the log-probability of class indices (B, …)."""
        return self.log_probs.gather(self.axis, target.long().unsqueeze(self.axis)).squeeze(self.axis)

    def set(
        self,
        level: float = 0.9,
        *,
        kind: Kind = "smallest",
        penalty: float = 0,
        by_class: bool = False,
        groups: Any = None,
    ) -> Tensor:
        """Returns which classes are in a set that holds the true one with probability `level`, of the shape of `probs`.

        This holds if inputs are exchangeable with the held-out ones and predicted as they were (5 draws, no fallback),
        on average over held-out sets. With one set of n, coverage is spread like Beta(k, n + 1 − k), k = ⌈level · (n +
        1)⌉. For tokens or pixels, it is the expected share of an input's places whose set holds the true class.

        Args:
            level: Probability of covering the true class, from 0 (empty sets) to 1 (all classes).
            kind: "smallest": the classes above one limit of probability; some sets may be empty (Sadinle et al., 2019).
                "adaptive": larger sets that are fairer to hard inputs, and never empty (Romano et al., 2020).
            penalty: What an adaptive set adds to a class's score for every class before it, such as 0.1: keeps sets of
                many classes small (RAPS; Angelopoulos et al., 2021).
            by_class: Whether coverage holds within every class, and not only on average over all (Mondrian).
            groups: The group of every input, (B,), an integer: coverage then holds within every group that
                `ibnn.conformalize(model, valid, groups=…)` was given; other groups get all classes.
        """
        if self.conformal is None:
            raise RuntimeError(none_known("p.set()"))
        check.choice("kind", kind, ("smallest", "adaptive"), {"lac": "smallest", "aps": "adaptive", "raps": "adaptive"})
        check.number("penalty", penalty, least=0, remedy="Pass penalty=0.1, or 0 for none.")
        probs, _, axis = self.each_class()
        own, above, number = self.conformal.distances.unbind(-1)
        if kind == "smallest":
            check.number("penalty", penalty, most=0, remedy='Pass kind="adaptive" with a penalty.')
            held, scores = 1 - own, 1 - probs
        else:
            mass, before = more_probable(probs)
            held, scores = above + penalty * number, mass + penalty * before
        groups = None if groups is None else check_groups(groups, len(self))
        limits = self.conformal.limits(held, level, classes=probs.shape[-1] if by_class else None, groups=groups)
        limits = limits.movedim(1, 2).to(scores)  # (rows, O, classes)
        if limits.shape[1] == 1:
            limits = limits.reshape(len(limits), *[1] * (probs.dim() - 2), -1)
        return (scores <= limits).movedim(-1, axis)

    def each_class(self) -> tuple[Tensor, Tensor, int]:
        """Returns probabilities and their errors, excluding classes last, and the axis that sets have them in."""
        return self.probs.movedim(self.axis, -1), self.standard_error.movedim(self.axis, -1), self.axis

    def settled(self, tolerance: float) -> Tensor:
        """Whether an answer's error is below a tolerance, and its class ahead of the next by more than it, (B,)."""
        probs, errors, _ = self.each_class()
        first = probs.topk(min(2, probs.shape[-1]))
        lead = first.values[..., 0] - first.values[..., 1:].sum(-1)
        each = errors.gather(-1, first.indices)  # their sum is no less than the error of the lead
        return ((each[..., 0] < tolerance) & (lead > each.sum(-1))).reshape(len(self), -1).all(1)


@dataclass(frozen=True)
class BernoulliPrediction(CategoricalPrediction):
    """As `CategoricalPrediction`, for independent yes/no labels: every field has the shape of the network's output.

    `set` returns a set of {no, yes} for every label, (B, …, 2): `p.set(0.9)[..., 1]` says which labels may be true.
    Each label of outputs (B, labels) has its own guarantee.
    """

    log_complements: Tensor  #: Log of the probability of no.

    def each_class(self) -> tuple[Tensor, Tensor, int]:
        """Returns those of no and yes: a set of each label, (B, …, 2), holds one, both or neither."""
        errors = self.standard_error.unsqueeze(-1).expand(*self.probs.shape, 2)
        return torch.stack([self.log_complements.exp(), self.probs], -1), errors, -1

    @property
    def labels(self) -> Tensor:
        """Whether each label is more probable than not, (B, …)."""
        return self.probs > 0.5

    def log_prob(self, target: Tensor) -> Tensor:
        """Returns the log-probability of labels, 0 or 1, of the shape of `probs`."""
        yes = target.to(self.probs.dtype)
        return yes * self.log_probs + (1 - yes) * self.log_complements


@dataclass(frozen=True)
class GaussianPrediction(_Split, Prediction):
    """A mixture of Gaussians, one for each draw; variances in squared units of the target."""

    mean: Tensor  #: Predictive mean, (B, …).
    aleatoric: Tensor  #: Mean of the draws' noise variances.
    between: Tensor | None  #: Variance of the components' means; None for one pass.
    within: Tensor | None  #: Mean variance of a component's draws; None for one pass.
    standard_error: Tensor  #: Monte Carlo standard error of `mean`; see `CategoricalPrediction`.
    draw_means: Tensor = field(metadata={"batch": 1}, repr=False)  #: Mean of each draw, (K·S, B, …).
    draw_stds: Tensor = field(metadata={"batch": 1}, repr=False)  #: Noise of each draw, (K·S, B, …).
    #: Weight of each draw, (K·S, B, …), where they are not equal: the last one is then the base rate.
    draw_weights: Tensor | None = field(default=None, metadata={"batch": 1}, repr=False, kw_only=True)
    #: The epistemic part where it is not split (one pass); else None.
    unsplit: Tensor | None = field(default=None, kw_only=True, repr=False)
    unit: ClassVar[str] = "squared units of the target"

    def _columns(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "std": self.std} | self._uncertainty()

    @property
    def variance(self) -> Tensor:
        """Predictive variance: another name of `total`."""
        return self.total

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation."""
        return self.total.sqrt()

    def log_prob(self, target: Tensor) -> Tensor:
        """Log density of the mixture at a target of the mean's shape."""
        check.shape("target", target, tuple(self.mean.shape))
        log_normal = torch.distributions.Normal(self.draw_means, self.draw_stds).log_prob(target)
        if self.draw_weights is not None:
            return torch.logsumexp(log_normal + self.draw_weights.log(), 0)
        return torch.logsumexp(log_normal, 0) - math.log(len(log_normal))

    def quantile(self, level: float) -> Tensor:
        """The value that the target stays below with probability `level`, by bisection of the mixture's CDF."""
        check.share("level", level, remedy="Pass level=0.5 for the median.")
        means, stds = self.draw_means, self.draw_stds
        reach: Tensor = stds * abs(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()) * 1.001
        low, high = (means - reach).amin(0), (means + reach).amax(0)  # every draw's own quantile lies between
        for _ in range(60):
            middle = (low + high) / 2
            below: Tensor = self._mean(torch.special.ndtr((middle - means) / stds)) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def _mean(self, values: Tensor) -> Tensor:
        """Returns the mean over draws."""
        return values.mean(0) if self.draw_weights is None else (values * self.draw_weights).sum(0)

    def interval(self, level: float = 0.9, *, conformal: bool = False, groups: Any = None) -> tuple[Tensor, Tensor]:
        """Returns the ends of the central interval that holds the target with probability `level`, by the mixture.

        With `conformal` it is the mean and as many standard deviations to each side as covered that share of held-out
        targets: right even if the mixture is not. Each number of outputs (B, numbers) has its own guarantee; for more
        axes it is the expected share of an input's numbers. `groups` are as in `CategoricalPrediction.set`.
        """
        if conformal or groups is not None:
            if self.conformal is None:
                raise RuntimeError(none_known("p.interval(conformal=True)"))
            groups = None if groups is None else check_groups(groups, len(self))
            limits = self.conformal.limits(self.conformal.distances[..., 0], level, groups=groups)[:, 0]  # (rows, O)
            limits = limits if self.mean.dim() == 2 else limits.reshape(-1, *[1] * (self.mean.dim() - 1))
            reach = limits.to(self.mean).clamp_min(0) * self.std
            return self.mean - reach, self.mean + reach
        check.share("level", level, remedy="Pass level=0.9 for a 90 % interval.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


@dataclass(frozen=True)
class JointPrediction(Prediction, Mapping[str, Any]):
    """A prediction for each of several outputs, by name: `p["age"].mean`, `dict(p)`; `len(p)` is that of the batch."""

    heads: dict[str, Prediction]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {head}" for name, head in self.heads.items())

    def _columns(self) -> dict[str, Tensor]:
        parts = {name: head._columns() for name, head in self.heads.items()}
        return {f"{name}.{column}": values for name, part in parts.items() for column, values in part.items()}

    def __getitem__(self, name: str) -> Any:
        return self.heads[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(next(iter(self.heads.values())))

    def _map(self, function: Callable[[str, Tensor, int], Tensor]) -> Self:
        return replace(super()._map(function), heads={name: head._map(function) for name, head in self.heads.items()})

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """Joins the answers for consecutive batches."""
        heads = {name: type(head).cat([part[name] for part in parts]) for name, head in parts[0].heads.items()}
        p_values = [part.p_value for part in parts if part.p_value is not None]
        return replace(parts[0], heads=heads, p_value=torch.cat(p_values) if p_values else None)


def check_level(name: str, level: float, ranked: int) -> None:
    """Raises unless a p-value among `ranked` held-out inputs can be as small as a level.

    >>> check_level("level", 0.01, ranked=60)
    Traceback (most recent call last):
    ValueError: Expected `level` to be at least 0.0164 with 60 held-out inputs, but got 0.01. Pass it, or hold out 99.
    """
    if ranked and level * (ranked + 1) < 1 - 1e-9:
        least, rows = math.ceil(1e4 / (ranked + 1)) / 1e4, math.ceil(1 / level - 1e-9) - 1
        expected = f"at least {least:g} with {ranked} held-out inputs"
        raise ValueError(complaint(name, expected, level, f"Pass it, or hold out {rows}."))


def no_reference(what: str) -> str:
    """Says what is missing where the novelty of inputs is asked for."""
    return (
        f"{what} needs reference data, and this model has none. Call ibnn.fit_novelty(model, train, valid) before you "
        "predict; ibnn.fit and ibnn.calibrate do so at their end if they hold out enough rows."
    )
