"""TASK: what a network's output says about a target. Everything that depends on the task lives here.

A datum is one target: a label of a classifier, a pixel of a segmentation, a number of a regression. Losses are means
over data, and the training-set size N that divides the KL counts data in the same way.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import metrics
from ibnn.errors import complaint
from ibnn.prediction import BernoulliPrediction, CategoricalPrediction, GaussianPrediction, Prediction


class Likelihood(nn.Module, ABC):
    """p(target | output of the network).

    Attributes:
        temperature: T, a buffer, 1 until `ibnn.calibrate` sets it. Logits are divided by it, the standard deviation of
            Gaussian noise is multiplied by it; `draw_logits` knows nothing of it.
    """

    temperature: Tensor
    discrete = True  # whether targets have probabilities and not densities

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """States from before there was a temperature have 1."""
        if prefix + "temperature" not in state_dict:
            state_dict[prefix + "temperature"] = torch.ones(())
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _tempered(self, logits: Tensor) -> Tensor:
        """Logits over T, at least in float32."""
        return _full(logits) / self.temperature

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if a target cannot belong to outputs of this shape; only shapes of `output` beyond the batch count."""

    @abstractmethod
    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean negative log likelihood over the data of the batch."""

    def data(self, target: Tensor) -> int:
        """How many data a target tensor holds."""
        return target.numel()

    def mass(self, target: Tensor) -> Tensor:
        """What `nll` divides its sum over the data by; it weighs parts of a batch against each other."""
        return torch.tensor(float(self.data(target)))

    @abstractmethod
    def combine(self, draws: Tensor) -> Tensor:
        """One output that stands for draws (J, B, …): what the network in eval mode returns."""

    @abstractmethod
    def summarise(self, draws: Tensor) -> Prediction:
        """The prediction made of draws (K, S, B, …)."""

    @abstractmethod
    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """How good a prediction of this likelihood is; "nll" is always there, in nats per datum."""


class Categorical(Likelihood):
    """Classes by softmax over axis 1 of the output, (B, C) or dense (B, C, …); targets are class indices.

    >>> likelihood = Categorical(label_smoothing=0.1)
    >>> round(likelihood.nll(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 4)  # uniform: log 4
    1.3863
    """

    weight: Tensor | None

    def __init__(self, *, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        """Takes what `torch.nn.functional.cross_entropy` takes.

        Args:
            weight: Weight of each class in the training loss, (C,).
            ignore_index: Target value that counts for nothing.
            label_smoothing: Share of the target that is spread evenly over the classes, in the training loss.
        """
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(complaint("label_smoothing", "in [0, 1)", label_smoothing, "Pass 0 for none."))
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if labels are not integers, out of range, or do not fit the output's shape."""
        if target.is_floating_point() or target.dtype == torch.bool:
            raise TypeError(
                complaint("y", "integer class indices", f"dtype {target.dtype}", "Pass y.long(), or one-hot.argmax(1).")
            )
        self._check_classes(output.shape)
        expected = (len(target), *output.shape[2:])
        if tuple(target.shape) != expected:
            raise ValueError(
                complaint("y", f"of shape {expected}", f"shape {tuple(target.shape)}", "Pass one class index a datum.")
            )
        used = target[target != self.ignore_index]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < output.shape[1]:
            raise ValueError(
                complaint(
                    "y",
                    f"in 0 … {output.shape[1] - 1} (the network has {output.shape[1]} outputs)",
                    f"labels from {int(used.min())} to {int(used.max())}",
                    f"Renumber the classes, or mark what to leave out with {self.ignore_index}.",
                )
            )

    @staticmethod
    def _check_classes(shape: torch.Size) -> None:
        """Raises unless an output of a shape, (B, C, …), has two classes or more: a softmax over one is always 1."""
        if len(shape) < 2 or shape[1] == 1:
            raise ValueError(
                complaint(
                    "net",
                    "a network with class scores in axis 1 of its output, two or more",
                    f"an output of shape {tuple(shape)}",
                    'For yes/no targets convert with likelihood="bernoulli", for numbers with "gaussian".',
                )
            )

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, the (weighted) mean over all targets that are not ignored; 0 if all are."""
        loss = F.cross_entropy(
            self._tempered(output),
            target.long(),
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return loss / self.mass(target).to(loss).clamp_min(torch.finfo(loss.dtype).tiny)

    def mass(self, target: Tensor) -> Tensor:
        """The sum of the class weights of the targets that are not ignored; their number without class weights."""
        kept = target != self.ignore_index
        return (kept.float() if self.weight is None else self.weight[target.long() * kept] * kept).sum()

    def data(self, target: Tensor) -> int:
        """How many targets are not ignored."""
        return int((target != self.ignore_index).sum())

    def combine(self, draws: Tensor) -> Tensor:
        """Log of the mean softmax, (B, C, …): as good as logits to whatever reads them."""
        self._check_classes(draws.shape[1:])
        return _log_mean(self._tempered(draws).log_softmax(2), 1)

    def summarise(self, draws: Tensor) -> Prediction:
        """Probabilities, and their entropy split into aleatoric, between and within."""
        self._check_classes(draws.shape[2:])
        log_probs = self._tempered(draws).log_softmax(3)  # (K, S, B, C, …)
        mean = _log_mean(log_probs, 2)
        probs = log_probs.exp()
        split = _entropy_split(probs.movedim(3, -1))
        return CategoricalPrediction(mean.exp(), mean, *split, _standard_error(probs))

    def score(self, prediction: CategoricalPrediction, target: Tensor) -> dict[str, float]:
        """NLL, error and ECE over the targets that are not ignored; without class weights or smoothing."""
        kept = target.flatten() != self.ignore_index
        labels = target.flatten()[kept]
        probs, log_probs = (p.movedim(1, -1).flatten(0, -2)[kept] for p in (prediction.probs, prediction.log_probs))
        return {
            "nll": metrics.nll(log_probs, labels),
            "error": metrics.error(probs, labels),
            "ece": metrics.ece(probs, labels),
        }


class Bernoulli(Likelihood):
    """Independent yes/no targets by sigmoid; targets (0 or 1) have the shape of the output.

    >>> round(Bernoulli().nll(torch.zeros(2, 3), torch.ones(2, 3)).item(), 4)  # log 2
    0.6931
    """

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if targets are not in [0, 1] or not of the output's shape."""
        _check_shape(output, target)
        if not bool((target >= 0).all() and (target <= 1).all()):  # nor NaN
            got = f"values from {target.min():g} to {target.max():g}"
            raise ValueError(complaint("y", "in [0, 1]", got, "Pass 0 for no and 1 for yes."))

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Binary cross-entropy, mean over all labels."""
        output = self._tempered(output)
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def combine(self, draws: Tensor) -> Tensor:
        """Logit of the mean probability, of the output's shape."""
        draws = self._tempered(draws)
        return _log_mean(F.logsigmoid(draws), 1) - _log_mean(F.logsigmoid(-draws), 1)

    def summarise(self, draws: Tensor) -> Prediction:
        """Probabilities of yes, and each label's entropy split."""
        draws = self._tempered(draws)
        mean = _log_mean(F.logsigmoid(draws), 2)
        probs = draws.sigmoid()  # (K, S, B, …)
        split = _entropy_split(torch.stack([probs, (-draws).sigmoid()], dim=-1))
        no = _log_mean(F.logsigmoid(-draws), 2)
        return BernoulliPrediction(mean.exp(), mean, *split, _standard_error(probs), no)

    def score(self, prediction: BernoulliPrediction, target: Tensor) -> dict[str, float]:
        """NLL and error, per label."""
        _check_shape(prediction.probs, target)
        yes = target.to(prediction.probs.dtype)
        nll = -(yes * prediction.log_probs + (1 - yes) * prediction.log_complements).mean()
        return {"nll": nll.item(), "error": (prediction.labels != (target > 0.5)).double().mean().item()}


class Gaussian(Likelihood):
    """Real targets of the shape of the output's mean, with Gaussian noise.

    The noise is one learnt number per output (`noise="learnt"`), or the network predicts it (`noise="predicted"`): then
    the last axis of its output holds the means first and as many noise parameters after them, variance = softplus.

    >>> likelihood = Gaussian(init_std=1.0)
    >>> round(likelihood.nll(torch.zeros(2, 1), torch.zeros(2, 1)).item(), 4)  # ½ log 2π
    0.9189
    """

    log_std: Tensor | None
    discrete = False

    def __init__(
        self, *, noise: Literal["learnt", "predicted"] = "learnt", init_std: float = 1.0, outputs: int = 1
    ) -> None:
        """Chooses where the noise comes from.

        Args:
            noise: "learnt" or "predicted".
            init_std: Where learnt noise starts, in units of the target.
            outputs: How many outputs have a learnt noise of their own; 1 shares one noise between all.
        """
        super().__init__()
        if noise not in ("learnt", "predicted"):
            raise ValueError(complaint("noise", '"learnt" or "predicted"', repr(noise), "Pass one of the two."))
        if not init_std > 0:
            raise ValueError(complaint("init_std", "positive", init_std, "Pass the target's standard deviation."))
        self.noise = noise
        learnt = nn.Parameter(torch.full((outputs,), math.log(init_std))) if noise == "learnt" else None
        self.register_parameter("log_std", learnt)

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation said by an output, of equal shape."""
        output = _full(output)
        if self.log_std is not None:
            return output, (self.log_std.to(output.dtype).exp() * self.temperature).expand_as(output)
        mean, raw = output.chunk(2, dim=-1)
        std = (F.softplus(raw) + 1e-6).sqrt()  # the floor keeps the loss finite on targets fitted exactly
        return mean, std * self.temperature

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if targets are not finite real numbers of the mean's shape."""
        if self.log_std is None and output.shape[-1] % 2:
            raise ValueError(
                complaint(
                    "net",
                    'a network whose last axis has means and as many variances (noise="predicted")',
                    f"an output of shape {tuple(output.shape)}",
                    "Double the outputs of its last layer.",
                )
            )
        if self.log_std is not None and len(self.log_std) not in (1, output.shape[-1]):
            got = f"{len(self.log_std)} for an output of shape {tuple(output.shape)}"
            raise ValueError(complaint("outputs", "1 or the size of the network's last axis", got, "Pass outputs=1."))
        if not target.is_floating_point():
            raise TypeError(complaint("y", "floating point", f"dtype {target.dtype}", "Pass y.float()."))
        _check_shape(self.split(output)[0], target)
        if not target.isfinite().all():
            raise ValueError(complaint("y", "finite", "NaN or infinity", "Drop the rows without a target."))

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """−log N(target; mean, std²), mean over all targets."""
        mean, std = self.split(output)
        return (0.5 * ((target - mean) / std).square() + std.log()).mean() + 0.5 * math.log(2 * math.pi)

    def combine(self, draws: Tensor) -> Tensor:
        """The predictive mean."""
        return self.split(draws)[0].mean(0)

    def summarise(self, draws: Tensor) -> Prediction:
        """Mean and variance, split by the law of total variance, and the mixture itself for intervals."""
        means, stds = self.split(draws)  # (K, S, B, …)
        by_component = means.mean(1)
        return GaussianPrediction(
            mean=by_component.mean(0),
            aleatoric=stds.square().mean((0, 1)),
            between=by_component.var(0, correction=0),
            within=means.var(1, correction=0).mean(0),
            standard_error=_standard_error(means),
            draw_means=means.flatten(0, 1),
            draw_stds=stds.flatten(0, 1),
        )

    def score(self, prediction: GaussianPrediction, target: Tensor) -> dict[str, float]:
        """NLL of the mixture, and root mean squared error."""
        nll = -prediction.log_prob(target).mean()  # refuses a target of another shape
        return {"nll": nll.item(), "rmse": (prediction.mean - target).square().mean().sqrt().item()}


class Weighted(Likelihood):
    """Another likelihood with a weight for every row: one of weight 2 counts as two rows, in loss, KL and scores.

    Weights come in front of the targets, as a column of one float tensor (B, 1 + targets); see `join`. So they go
    wherever targets go: batches, workers, held-out rows. (Drawing rows as often as they weigh is not the same: it has
    the right loss on average only, and none of a row that is never drawn.)

    >>> likelihood, logits = Weighted(Categorical()), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    >>> weighted = likelihood.nll(logits, likelihood.join(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])))
    >>> torch.allclose(weighted, Categorical().nll(logits[[0, 1, 1]], torch.tensor([0, 1, 1])))
    True
    """

    def __init__(self, inner: Likelihood) -> None:
        """Takes the likelihood of a single row; its temperature is shared."""
        super().__init__()
        self.inner, self.discrete = inner, inner.discrete
        self.temperature = inner.temperature

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inner.temperature = self.temperature  # a move to another device has made two of it
        return self

    @staticmethod
    def join(weight: Tensor, target: Tensor) -> Tensor:
        """Weights (B,) and targets, (B,) or (B, …), as one tensor."""
        return torch.cat([weight[:, None], target.reshape(len(target), -1).to(weight.dtype)], 1)

    def part(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and targets of a joined tensor."""
        rest = target[:, 1:]
        return target[:, 0], rest[:, 0].long() if isinstance(self.inner, Categorical) else rest

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if a weight is negative, or as the likelihood inside does."""
        weight, rest = self.part(target)
        if not bool((weight >= 0).all()):
            raise ValueError(complaint("weight", "not negative", f"{weight.min():g}", "Pass 0 to leave a row out."))
        self.inner.check(output, rest)

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the data of the batch, weighted."""
        _, rest = self.part(target)
        losses: Tensor = torch.vmap(self.inner.nll)(output[:, None], rest[:, None])  # a row at a time
        mass = self._masses(target).to(losses)
        return (mass * losses).sum() / mass.sum().clamp_min(torch.finfo(losses.dtype).tiny)

    def _masses(self, target: Tensor) -> Tensor:
        """Weight times number of data, (B,)."""
        weight, rest = self.part(target)
        return weight * torch.vmap(self.inner.mass)(rest[:, None]).to(weight)

    def mass(self, target: Tensor) -> Tensor:
        """The sum of the weights of the data."""
        return self._masses(target).sum()

    def data(self, target: Tensor) -> int:
        """How many data the weights stand for, at least 1."""
        return max(round(float(self.mass(target))), 1)

    def combine(self, draws: Tensor) -> Tensor:
        """As the likelihood inside."""
        return self.inner.combine(draws)

    def summarise(self, draws: Tensor) -> Prediction:
        """As the likelihood inside."""
        return self.inner.summarise(draws)

    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """The weighted NLL."""
        weight, rest = self.part(target)
        total = 0.0
        for value in weight.unique():
            rows = (weight == value).nonzero()[:, 0]
            mass = float(value) * self.inner.data(rest[rows])
            total += mass * self.inner.score(prediction.rows(rows), rest[rows])["nll"]
        return {"nll": total / float(self.mass(target))}


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


def _full(x: Tensor) -> Tensor:
    """Half-precision outputs are read in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _check_shape(output: Tensor, target: Tensor) -> None:
    expected = (len(target), *output.shape[1:])
    if tuple(target.shape) != expected:
        remedy = f"Pass y.reshape({expected}): a target broadcast by accident trains the wrong loss."
        raise ValueError(complaint("y", f"of shape {expected}", f"shape {tuple(target.shape)}", remedy))


def _log_mean(log_probs: Tensor, axes: int) -> Tensor:
    """Log of the mean probability over the first axes."""
    draws = log_probs.flatten(0, axes - 1)
    return (draws.logsumexp(0) - math.log(len(draws))).clamp_max(0)  # rounding may end above


def _standard_error(values: Tensor) -> Tensor:
    """Of the mean over draws (K, S, B, …) stratified by component.

    S = 1 does not show how much of the spread is between components, where it does no harm: all of it counts.
    """
    components, samples = values.shape[:2]
    if components == samples == 1:
        return torch.full_like(values[0, 0], math.nan)
    if samples == 1:
        return values[:, 0].std(0) / math.sqrt(components)
    return (values.var(1).sum(0) / samples).sqrt() / components


def _entropy_split(probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Aleatoric, between and within, (B, …), of probabilities (K, S, B, …, C)."""

    def entropy(p: Tensor) -> Tensor:
        terms: Tensor = torch.special.entr(p)
        return terms.sum(-1)

    by_component = probs.mean(1)  # (K, B, …, C)
    total = entropy(by_component.mean(0))
    component = entropy(by_component).mean(0)
    aleatoric = entropy(probs).mean((0, 1))
    # By concavity the differences are ≥ 0; the clamp only removes rounding.
    return aleatoric, (total - component).clamp_min(0), (component - aleatoric).clamp_min(0)
