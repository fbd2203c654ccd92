"""TASK: what a network's output says about a target. Everything that depends on the task lives here.

A datum is one target: a label of a classifier, a pixel of a segmentation, a number of a regression. Losses are means
over data, and the training-set size N that divides the KL counts data in the same way.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import metrics
from ibnn.errors import complaint
from ibnn.inputs import logits_of, pick
from ibnn.prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    Collected,
    GaussianPrediction,
    JointPrediction,
    Prediction,
    Running,
)

HELD = 2**25  # entries of draws' outputs that a running summary holds at most before it sums them up


class Likelihood(nn.Module, ABC):
    """p(target | output of the network).

    Attributes:
        temperature: T, a buffer, 1 until `ibnn.calibrate` sets it. Logits are divided by it, the standard deviation of
            Gaussian noise is multiplied by it; `draw_logits` knows nothing of it.
    """

    temperature: Tensor
    discrete = True  # whether targets have probabilities and not densities
    masks = False  # whether an output of minus infinity means something: a class that is masked

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

    def read(self, output: Any) -> Tensor:
        """Returns the tensor of class scores or means in what a network returned."""
        return logits_of(output)

    def pack(self, target: Any) -> Tensor:
        """Returns targets, as users pass them, as the one tensor that all other methods take."""
        if not isinstance(target, Tensor):
            raise TypeError(complaint("y", "a tensor", type(target).__name__, "Pass torch.as_tensor(y)."))
        return target

    def check_dtype(self, target: Tensor) -> None:
        """Raises if targets of this dtype cannot be meant."""

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
    def combine(self, draws: Tensor) -> Any:
        """One output that stands for draws (J, B, …): what the network in eval mode returns."""

    @abstractmethod
    def summarise(self, draws: Tensor) -> Prediction:
        """The prediction made of draws (K, S, B, …)."""

    def running(self, components: int, samples: int) -> Running:
        """Returns what makes the same prediction of draws that come a few at a time; this one holds them all."""
        return Collected(self, components)

    @abstractmethod
    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """How good a prediction of this likelihood is; "nll" is always there, in nats per datum."""


class _Discrete(Likelihood):
    """A likelihood whose draws say probabilities."""

    def summarise(self, draws: Tensor) -> Prediction:
        """Probabilities, and their entropy split into aleatoric, between and within."""
        found = self.running(*draws.shape[:2])
        found.take(draws)
        return found.result()

    def running(self, components: int, samples: int) -> "_RunningProbabilities":
        """Sums over draws: of their outputs it holds few at a time."""
        return _RunningProbabilities(components, samples, self._log_probs, self._prediction)

    @abstractmethod
    def _log_probs(self, draws: Tensor) -> Tensor:
        """Log-probabilities (K, S, B, …, C) of draws (K, S, B, …)."""

    @abstractmethod
    def _prediction(self, logs: Tensor, split: "_Split", error: Tensor) -> Prediction:
        """The prediction of log-probabilities (B, …, C), with the standard errors of the probabilities."""


class Categorical(_Discrete):
    """Classes by softmax over one axis of the output, (B, C), (B, C, …) or (B, …, C); targets are class indices.

    Attributes:
        axis: The axis of the classes in the network's output; None until it is known.

    >>> likelihood = Categorical(label_smoothing=0.1)
    >>> round(likelihood.nll(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 4)  # uniform: log 4
    1.3863
    """

    masks = True
    fewest = 2  # classes: a softmax over one is always 1
    weight: Tensor | None

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        axis: int | None = None,
    ) -> None:
        """Takes what `torch.nn.functional.cross_entropy` takes, and where the classes are.

        Args:
            weight: Weight of each class in the training loss, (C,).
            ignore_index: Target value that counts for nothing.
            label_smoothing: Share of the target that is spread evenly over the classes, in the training loss.
            axis: The axis of the classes: 1 for (B, C, …), as in a segmentation of images; −1 for (B, …, C), as in
                token classification and language models. By default the first targets tell (`elbo`, `fit`,
                `calibrate`); until then it is 1, and outputs of three axes are refused, for they may be either.
        """
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(complaint("label_smoothing", "in [0, 1)", label_smoothing, "Pass 0 for none."))
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or axis == 0):
            raise ValueError(complaint("axis", "an axis of the output beyond the batch", repr(axis), "Pass 1 or -1."))
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing, self.axis = ignore_index, label_smoothing, axis

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The axis, if it is known, is part of the state: targets may have told it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.axis is not None:
            destination[prefix + "axis"] = torch.tensor(self.axis)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "axis" in state_dict:
            self.axis = int(state_dict.pop(prefix + "axis"))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def class_dim(self, outputs: Tensor, leading: int = 0) -> int:
        """Returns the axis of the classes, counted from the end, in outputs with so many axes before the batch's."""
        shape = tuple(outputs.shape[leading:])
        if self.axis is None and len(shape) == 3:
            expected = f"known for an output of shape {shape}: (B, C, …) or (B, …, C)"
            remedy = "Convert with likelihood=ibnn.Categorical(axis=-1) if the classes come last, or axis=1."
            raise ValueError(complaint("axis", expected, "none", remedy))
        dim = self._from_end(len(shape))
        if not -len(shape) < dim < 0 or shape[dim] < self.fewest:
            expected = f"a network with class scores in axis {self.axis or 1} of its output, two or more"
            remedy = 'For yes/no targets convert with likelihood="bernoulli", for numbers with "gaussian".'
            raise ValueError(complaint("net", expected, f"an output of shape {shape}", remedy))
        return dim

    def _from_end(self, dims: int) -> int:
        """The axis of the classes in an output of so many axes, counted from its end."""
        axis = self.axis or 1
        return axis - dims if axis > 0 else axis

    def _find_axis(self, output: Tensor, target: Tensor) -> None:
        """Finds out where the classes are, if that is open and the target's shape tells."""
        if self.axis is not None or output.dim() < 3:
            return
        fitting = [axis for axis in (1, -1) if _without(output, axis) == tuple(target.shape[1:])]
        if len(fitting) == 2:
            got = f"both possible for outputs {tuple(output.shape)} and targets {tuple(target.shape)}"
            remedy = "Convert with likelihood=ibnn.Categorical(axis=-1) if the classes come last, or axis=1."
            raise ValueError(complaint("axis", "given where 1 and -1 are both possible", got, remedy))
        self.axis = fitting[0] if fitting else None

    def check_dtype(self, target: Tensor) -> None:
        """Raises if labels are not integers."""
        if target.is_floating_point() or target.dtype == torch.bool:
            raise TypeError(
                complaint("y", "integer class indices", f"dtype {target.dtype}", "Pass y.long(), or one-hot.argmax(1).")
            )

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if labels are not integers, out of range, or do not fit the output's shape; finds the class axis."""
        self.check_dtype(target)
        self._find_axis(output, target)
        dim = self.class_dim(output) if self.axis is not None or output.dim() != 3 else -2
        expected = (len(target), *_without(output, dim))
        if tuple(target.shape) != expected:
            raise ValueError(
                complaint("y", f"of shape {expected}", f"shape {tuple(target.shape)}", "Pass one class index a datum.")
            )
        used, classes = target[target != self.ignore_index], output.shape[dim]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < classes:
            raise ValueError(
                complaint(
                    "y",
                    f"in 0 … {classes - 1} (the network has {classes} outputs)",
                    f"labels from {int(used.min())} to {int(used.max())}",
                    f"Renumber the classes, or mark what to leave out with {self.ignore_index}.",
                )
            )

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, the (weighted) mean over all targets that are not ignored; 0 if all are."""
        logits, dim = self._tempered(output), self.class_dim(output)
        last = dim == -1 and output.dim() > 2
        loss = F.cross_entropy(
            logits.flatten(0, -2) if last else logits.movedim(dim, 1),
            (target.flatten() if last else target).long(),
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

    def log_likelihoods(self, draws: Tensor, target: Tensor) -> Tensor:
        """Returns log p(target) of each draw of the outputs (J, B, …), of the target's shape; 0 where it is ignored."""
        logits = self._tempered(draws).movedim(self.class_dim(draws, 1), -1)
        kept = target != self.ignore_index
        index = (target.long() * kept).expand(len(draws), *target.shape)[..., None]
        return (logits.gather(-1, index)[..., 0] - logits.logsumexp(-1)) * kept

    def combine(self, draws: Tensor) -> Tensor:
        """Log of the mean softmax, of the output's shape: as good as logits to whatever reads them."""
        return _log_mean(self._tempered(draws).log_softmax(self.class_dim(draws, 1)), 1)

    def _log_probs(self, draws: Tensor) -> Tensor:
        """Log-probabilities (K, S, B, …, C) of draws."""
        dim = self.class_dim(draws, 2)
        return self._tempered(draws).log_softmax(dim).movedim(dim, -1)

    def _prediction(self, logs: Tensor, split: "_Split", error: Tensor) -> Prediction:
        dim = self._from_end(logs.dim())
        logs, error = (values.movedim(-1, dim) for values in (logs, error))
        return CategoricalPrediction(logs.exp(), logs, *split, error, axis=1 if dim + logs.dim() == 1 else dim)

    def score(self, prediction: CategoricalPrediction, target: Tensor) -> dict[str, float]:
        """NLL, error and ECE over the targets that are not ignored; without class weights or smoothing."""
        kept = target.flatten() != self.ignore_index
        labels = target.flatten()[kept]
        probs, log_probs = (
            p.movedim(prediction.axis, -1).flatten(0, -2)[kept] for p in (prediction.probs, prediction.log_probs)
        )
        return {
            "nll": metrics.nll(log_probs, labels),
            "error": metrics.error(probs, labels),
            "ece": metrics.ece(probs, labels),
        }


class Bernoulli(_Discrete):
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

    def _log_probs(self, draws: Tensor) -> Tensor:
        """Log-probabilities of yes and no, (K, S, B, …, 2)."""
        draws = self._tempered(draws)
        return torch.stack([F.logsigmoid(draws), F.logsigmoid(-draws)], dim=-1)

    def _prediction(self, logs: Tensor, split: "_Split", error: Tensor) -> Prediction:
        yes, no = logs.unbind(-1)
        return BernoulliPrediction(yes.exp(), yes, *split, error[..., 0], no)

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

    def check_dtype(self, target: Tensor) -> None:
        """Raises if targets are not floating point."""
        if not target.is_floating_point():
            raise TypeError(complaint("y", "floating point", f"dtype {target.dtype}", "Pass y.float()."))

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
        self.check_dtype(target)
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

    def combine(self, draws: Tensor) -> Any:
        """As the likelihood inside."""
        return self.inner.combine(draws)

    def summarise(self, draws: Tensor) -> Prediction:
        """As the likelihood inside."""
        return self.inner.summarise(draws)

    def running(self, components: int, samples: int) -> Running:
        """As the likelihood inside."""
        return self.inner.running(components, samples)

    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """The weighted NLL."""
        weight, rest = self.part(target)
        total = 0.0
        for value in weight.unique():
            rows = (weight == value).nonzero()[:, 0]
            mass = float(value) * self.inner.data(rest[rows])
            total += mass * self.inner.score(prediction.rows(rows), rest[rows])["nll"]
        return {"nll": total / float(self.mass(target))}


class Heads(Likelihood):
    """Several outputs of one network, each with a likelihood of its own, by name.

    The network returns a mapping (or an object with attributes) of these names; so does the network in eval mode, and
    `predict` answers with a `JointPrediction`. Targets are a dict of tensors. Heads are independent given the output,
    and a datum is a target of any of them: losses are means over all, and N counts all.

    Attributes:
        names: Names of the heads.
        heads: Their likelihoods, in the same order.
        relative: Each head's temperature over the common one (a buffer); `calibrate` and `fit` set it.

    >>> likelihood = Heads({"age": Gaussian(), "sex": Bernoulli()})
    >>> y = {"age": torch.zeros(2, 1), "sex": torch.ones(2, 1)}
    >>> output = likelihood.read({"age": torch.zeros(2, 1), "sex": torch.zeros(2, 1)})
    >>> round(likelihood.nll(output, likelihood.pack(y)).item(), 4)  # the mean of ½ log 2π and log 2
    0.806
    """

    masks = True
    relative: Tensor

    def __init__(self, heads: Mapping[str, Likelihood]) -> None:
        """Takes the likelihoods by the names of the outputs."""
        super().__init__()
        if not heads or not all(isinstance(head, Likelihood) for head in heads.values()):
            got, remedy = f"{dict(heads)}", 'Pass {"age": ibnn.Gaussian(), "sex": ibnn.Bernoulli()}.'
            raise TypeError(complaint("heads", "a Likelihood for every name", got, remedy))
        self.names, self.heads = tuple(heads), nn.ModuleList(heads.values())
        self.discrete = all(head.discrete for head in heads.values())
        self.register_buffer("relative", torch.ones(len(heads)))
        self._shapes: dict[str, dict[int, dict[str, torch.Size]]] = {"output": {}, "y": {}}  # by width when joined

    def each(self) -> Iterator[tuple[str, Likelihood]]:
        """Yields the heads, each at its temperature."""
        with torch.inference_mode(False):  # the temperature outlives the block it was computed in
            temperatures = list(self.temperature * self.relative)
        for name, head, temperature in zip(self.names, self.heads, temperatures, strict=True):
            assert isinstance(head, Likelihood)
            head.temperature = temperature
            yield name, head

    def read(self, output: Any) -> Tensor:
        """Returns the outputs of all heads side by side, (B, …)."""
        return self._join({name: head.read(pick(output, name)) for name, head in self.each()}, "output")

    def pack(self, target: Any) -> Tensor:
        """Returns the targets of all heads side by side, (B, …), as floats."""
        if isinstance(target, Tensor):
            return target
        if not isinstance(target, Mapping) or set(target) != set(self.names):
            got = f"{sorted(target)}" if isinstance(target, Mapping) else type(target).__name__
            remedy = "Pass a tensor for each of them."
            raise ValueError(complaint("y", f"a dict with {sorted(self.names)}", got, remedy))
        parts = {name: head.pack(torch.as_tensor(target[name])) for name, head in self.each()}
        for name, head in self.each():
            with _of_head(name):
                head.check_dtype(parts[name])
        return self._join({name: part.float() for name, part in parts.items()}, "y")

    def _join(self, parts: dict[str, Tensor], what: str) -> Tensor:
        rows = [part.shape[:1] for part in parts.values()]
        if not torch.compiler.is_compiling() and (set(rows) != {rows[0]} or not rows[0]):
            got = f"{ {name: tuple(part.shape) for name, part in parts.items()} }"
            raise ValueError(complaint(what, "of as many rows in every head", got, "Put the batch first in each."))
        joined = torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts.values()], 1)
        shapes, width = {name: part.shape[1:] for name, part in parts.items()}, joined.shape[1]
        if what == "y" and self._shapes[what].get(width, shapes) != shapes:  # targets of another shape are in use
            got = f"{shapes} after {self._shapes[what][width]}"
            raise ValueError(complaint("y", "of one shape where sizes are alike", got, "Pad the targets alike."))
        self._shapes[what][width] = shapes
        return joined

    def _parts(self, joined: Tensor, what: str, leading: int = 0) -> dict[str, Tensor]:
        """What `_join` has joined, with so many axes before the batch's."""
        shapes = self._shapes[what][joined.shape[leading + 1]]
        parts = joined.split([shape.numel() for shape in shapes.values()], leading + 1)
        return {
            name: part.reshape(*part.shape[: leading + 1], *shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def split(self, target: Any) -> dict[str, Tensor]:
        """Returns targets by head, class indices as integers."""
        parts = self._parts(self.pack(target), "y")
        return {name: parts[name].long() if isinstance(h, Categorical) else parts[name] for name, h in self.each()}

    def by_head(self, draws: Tensor, target: Any) -> Iterator[tuple[str, Likelihood, Tensor, Tensor]]:
        """Yields every head with its own part of draws (K, S, B, …) and of targets."""
        outputs, targets = self._parts(draws, "output", 2), self.split(target)
        yield from ((name, head, outputs[name], targets[name]) for name, head in self.each())

    def balance(self, draws: Tensor, target: Any, best: Callable[[Likelihood, Tensor, Tensor], float]) -> None:
        """Sets every head's temperature to what is best for its own part of draws (K, S, B, …), the common one to 1."""
        self.temperature.fill_(1.0)
        found = [best(head, own, y) for _, head, own, y in self.by_head(draws, target)]
        self.relative.copy_(torch.tensor(found))

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises as the first head does that complains."""
        outputs, targets = self._parts(output, "output"), self.split(target)
        for name, head in self.each():
            with _of_head(name):
                head.check(outputs[name], targets[name])

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the targets of all heads."""
        outputs, targets = self._parts(output, "output"), self.split(target)
        masses = {name: head.mass(targets[name]).to(output) for name, head in self.each()}
        losses = [head.nll(outputs[name], targets[name]) * masses[name] for name, head in self.each()]
        return torch.stack(losses).sum() / torch.stack(list(masses.values())).sum().clamp_min(1e-12)

    def mass(self, target: Tensor) -> Tensor:
        """The sum over heads."""
        targets = self.split(target)
        return torch.stack([head.mass(targets[name]).cpu() for name, head in self.each()]).sum()

    def data(self, target: Tensor) -> int:
        """The targets of all heads."""
        targets = self.split(target)
        return sum(head.data(targets[name]) for name, head in self.each())

    def combine(self, draws: Tensor) -> dict[str, Tensor]:
        """One output for each head."""
        outputs = self._parts(draws, "output", 1)
        return {name: head.combine(outputs[name]) for name, head in self.each()}

    def summarise(self, draws: Tensor) -> Prediction:
        """A prediction for each head."""
        outputs = self._parts(draws, "output", 2)
        return JointPrediction({name: head.summarise(outputs[name]) for name, head in self.each()})

    def score(self, prediction: JointPrediction, target: Any) -> dict[str, float]:
        """NLL over the targets of all heads; then all scores of each head, "age.nll" and so on."""
        targets, nll = self.split(target), 0.0
        scores: dict[str, float] = {}
        for name, head in self.each():
            own = head.score(prediction[name], targets[name])
            nll += own["nll"] * head.data(targets[name])
            scores |= {f"{name}.{score}": value for score, value in own.items()}
        return {"nll": nll / max(self.data(self.pack(target)), 1)} | scores


@contextmanager
def _of_head(name: str) -> Iterator[None]:
    """Names the head in what the block complains of."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"Head {name!r}: {error}") from error


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


def _without(output: Tensor, axis: int) -> tuple[int, ...]:
    """Returns the shape of an output beyond the batch and without the axis of the classes."""
    axis %= output.dim()
    return tuple(size for number, size in enumerate(output.shape) if number not in (0, axis))


def _entropy(probs: Tensor) -> Tensor:
    """Entropy over the last axis."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1)


class _Split(NamedTuple):
    """How the entropy of the mean probability splits, (B, …) each."""

    aleatoric: Tensor
    between: Tensor
    within: Tensor


class _RunningProbabilities:
    """Mean, entropies and standard error of draws' probabilities, which come component by component, a few at a time.

    Of draws p_ks:  total = H[mean p],  by component = mean_k H[mean_s p_ks],  aleatoric = mean_ks H[p_ks].
    """

    def __init__(
        self,
        components: int,
        samples: int,
        log_probs: Callable[[Tensor], Tensor],
        prediction: Callable[[Tensor, _Split, Tensor], Prediction],
    ) -> None:
        self.components, self.samples, self.log_probs, self.prediction = components, samples, log_probs, prediction
        self.held: list[Tensor] = []
        zero = torch.zeros(())
        self.begun = False
        self.logs = zero  # log of the sum of all probabilities
        self.means = zero  # of the components' draws, summed
        self.entropy, self.component_entropy = zero, zero  # of draws and of components' means, summed
        self.variance = zero  # within components, summed
        self.open = _Moments()  # of the draws of a component that has begun
        self.across = _Moments()  # of the components, where they have one draw each

    def add(self, draws: Tensor) -> None:
        """Takes the next draws of outputs, (J, B, …), component-major; holds them while they are few."""
        self.held.append(draws)
        if sum(part.numel() for part in self.held) > HELD:
            self._flush()

    def _flush(self) -> None:
        draws, self.held = torch.cat(self.held), []
        while len(draws):
            whole = len(draws) // self.samples * self.samples
            if self.open.number or not whole:  # a part of one component
                now = draws[: self.samples - self.open.number][None]
            else:
                now = draws[:whole].unflatten(0, (-1, self.samples))
            self.take(now)
            draws = draws[now.shape[0] * now.shape[1] :]

    def take(self, draws: Tensor) -> None:
        """Takes draws of whole components, (k, S, B, …), or some of one, (1, s, B, …)."""
        log_probs = self.log_probs(draws)  # (k, s, B, …, C)
        probs, logs = log_probs.exp(), log_probs.flatten(0, 1).logsumexp(0)
        self.logs = torch.logaddexp(self.logs, logs) if self.begun else logs
        self.begun = True
        self.entropy = self.entropy + _entropy(probs).sum((0, 1))
        if draws.shape[1] == self.samples:
            self._close(probs.mean(1), probs.var(1).sum(0) if self.samples > 1 else None)
            return
        self.open = self.open.joined(probs[0])
        if self.open.number == self.samples:
            self._close(self.open.mean[None], self.open.squares / (self.samples - 1))
            self.open = _Moments()

    def _close(self, means: Tensor, variance: Tensor | None) -> None:
        """Takes the means of whole components, (k, B, …, C), and the sum of the variances within them."""
        self.means = self.means + means.sum(0)
        self.component_entropy = self.component_entropy + _entropy(means).sum(0)
        if variance is None:
            self.across = self.across.joined(means)
        else:
            self.variance = self.variance + variance

    def result(self) -> Prediction:
        """The prediction made of all draws."""
        if self.held:
            self._flush()
        count = self.components * self.samples
        logs = (self.logs - math.log(count)).clamp_max(0)  # rounding may end above
        total, component = _entropy(self.means / self.components), self.component_entropy / self.components
        aleatoric = self.entropy / count
        # By concavity the differences are ≥ 0; the clamp only removes rounding.
        split = _Split(aleatoric, (total - component).clamp_min(0), (component - aleatoric).clamp_min(0))
        return self.prediction(logs, split, self._standard_error())

    def _standard_error(self) -> Tensor:
        """As `_standard_error` of all draws."""
        if self.components == self.samples == 1:
            return torch.full_like(self.means, math.nan)
        if self.samples == 1:
            return (self.across.squares / (self.components - 1) / self.components).sqrt()
        return (self.variance / self.samples).sqrt() / self.components


class _Moments(NamedTuple):
    """Number, mean and sum of squared deviations of tensors."""

    number: int = 0
    mean: Tensor = torch.zeros(())
    squares: Tensor = torch.zeros(())

    def joined(self, values: Tensor) -> "_Moments":
        """Those with more tensors, (n, …)."""
        more, mean = len(values), values.mean(0)
        squares = (values - mean).square().sum(0)
        if not self.number:
            return _Moments(more, mean, squares)
        number, apart = self.number + more, mean - self.mean
        squares = self.squares + squares + apart.square() * (self.number * more / number)
        return _Moments(number, self.mean + apart * (more / number), squares)
