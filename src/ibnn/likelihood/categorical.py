"""Likelihoods of classes: one of several by softmax, or independent yes/no targets by sigmoid."""

import functools
import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import check
from ibnn.errors import complaint
from ibnn.likelihood.base import Likelihood, Temperature, Terms, as_rows, by_row, check_shape, full, like_rows, log_mean
from ibnn.likelihood.running import RunningProbabilities, Split, entropy
from ibnn.prediction import BernoulliPrediction, CategoricalPrediction, Conformal, Prediction, class_distances

OPEN_AXIS = "Convert with likelihood=ibnn.Categorical(axis=-1) if the classes come last, or axis=1."


class Discrete(Likelihood):
    """A likelihood of probabilities, whose logits a temperature divides."""

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns probabilities, and their entropy split into aleatoric, between and within."""
        return self.running(draws.shape[0], draws.shape[1], temperature).at_once(draws)

    def running(self, components: int, samples: int, temperature: Temperature = None) -> RunningProbabilities:
        """Returns sums over draws, which hold few of their outputs at a time."""
        log_probs = functools.partial(self._log_probs, temperature=temperature)
        return RunningProbabilities(components, samples, log_probs, self._prediction)

    def _tempered(self, logits: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns logits over T, at least in float32."""
        return full(logits) / self._resolve(temperature)

    @abstractmethod
    def _log_probs(self, draws: Tensor, temperature: Temperature) -> Tensor:
        """Returns log-probabilities (K, S, B, …, C) of draws (K, S, B, …)."""

    @abstractmethod
    def _prediction(self, logs: Tensor, split: Split, error: Tensor) -> Prediction:
        """Returns the prediction of log-probabilities (B, …, C), with the standard errors of the probabilities."""


class Categorical(Discrete):
    """Classes by softmax over one axis of the output, (B, C), (B, C, …) or (B, …, C); targets are class indices.

    `axis` and `next_token` are None until they are known.

    >>> likelihood = Categorical(label_smoothing=0.1)
    >>> round(likelihood.terms(torch.zeros(2, 4), torch.tensor([0, 3])).loss.item(), 4)  # uniform: log 4
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
        next_token: bool | None = None,
    ) -> None:
        """Takes what `torch.nn.functional.cross_entropy` takes, and where the classes are.

        Args:
            weight: Weight of each class in the training loss, (C,).
            ignore_index: Target value that counts for nothing.
            label_smoothing: Share of the target that is spread evenly over the classes, in the training loss.
            axis: The axis of the classes: 1 for (B, C, …), as in a segmentation of images; −1 for (B, …, C), as in
                token classification and language models. By default the first targets tell (`elbo`, `fit`,
                `calibrate`); until then it is 1, and outputs of three axes are refused, for they may be either.
            next_token: True: the target of token t is label t + 1, so that labels are the input's own tokens. By
                default `convert` sets it, and the axis, by the class of a Hugging Face model.
        """
        super().__init__()
        check.number("label_smoothing", label_smoothing, least=0, below=1, remedy="Pass 0 for none.")
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or axis == 0):
            raise ValueError(complaint("axis", "an axis of the output beyond the batch", repr(axis), "Pass 1 or -1."))
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing, self.axis = ignore_index, label_smoothing, axis
        self.next_token = next_token

    @property
    def options(self) -> dict[str, Any]:
        """What the loss leaves out and smooths, where the classes are, and whether targets are the next tokens."""
        return {name: getattr(self, name) for name in ("ignore_index", "label_smoothing", "axis", "next_token")}

    def aligned(self, target: Tensor) -> Tensor:
        """Returns targets with the label of each token in its place: those of `next_token` are shifted by one.

        >>> Categorical(next_token=True).aligned(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
        """
        return F.pad(target[:, 1:], (0, 1), value=self.ignore_index) if self.next_token else target

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
            raise ValueError(complaint("axis", expected, "none", OPEN_AXIS))
        dim = self._from_end(len(shape))
        if not -len(shape) < dim < 0 or shape[dim] < self.fewest:
            expected = f"a network with class scores in axis {self.axis or 1} of its output, two or more"
            remedy = 'For yes/no targets convert with likelihood="bernoulli", for numbers with "gaussian".'
            raise ValueError(complaint("net", expected, f"an output of shape {shape}", remedy))
        return dim

    def _from_end(self, dims: int) -> int:
        """Returns the axis of the classes in an output of so many axes, counted from its end."""
        axis = self.axis or 1
        return axis - dims if axis > 0 else axis

    def check_dtype(self, target: Tensor) -> None:
        """Raises if labels are not integers."""
        if target.is_floating_point() or target.dtype == torch.bool:
            remedy = 'For numbers convert with likelihood="gaussian", for yes/no targets with "bernoulli".'
            remedy += " Class numbers stored as floats: pass y.long(); one-hot rows: y.argmax(1)."
            raise TypeError(complaint("y", "integer class indices", f"dtype {target.dtype}", remedy))

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if labels are not integers, out of range, or do not fit the output's shape; finds the class axis."""
        self.check_dtype(target)
        shape, found = tuple(output.shape), tuple(target.shape)
        if self.axis is None and output.dim() > 2:  # the target's shape may tell
            fitting = [axis for axis in (1, -1) if _without(output, axis) == found[1:]]
            if len(fitting) == 2:
                got = f"both possible for outputs {shape} and targets {found}"
                raise ValueError(complaint("axis", "given where 1 and -1 are both possible", got, OPEN_AXIS))
            self.axis = fitting[0] if fitting else None
        dim = self.class_dim(output) if self.axis is not None or output.dim() != 3 else -2
        one_hot = found == shape and target.numel() > 0 and int(target.max()) <= 1
        remedy = f"Pass y.argmax({dim % output.dim()})." if one_hot else "Pass one class index a datum."
        if found[1:] != (size := _without(output, dim)):
            raise ValueError(complaint("y", f"of shape {(len(target), *size)}", f"shape {found}", remedy))
        if self.weight is not None:
            check.shape("weight", self.weight, (shape[dim],), remedy="Pass a weight for every class.")
        classes, (low, high) = shape[dim], target.aminmax() if target.numel() else (0, 0)
        if low < 0 or high >= classes:
            low, high = target.masked_fill(target == self.ignore_index, 0).aminmax()
        if low < 0 or high >= classes:
            expected = f"in 0 … {classes - 1} (the network has {classes} outputs)"
            remedy = f"Renumber the classes, or mark what to leave out with {self.ignore_index}."
            raise ValueError(complaint("y", expected, f"labels from {int(low)} to {int(high)}", remedy))

    def refuse_shifted(self, tokens: Tensor, target: Tensor) -> None:
        """Raises if the targets of `next_token` were shifted before: they are the tokens that follow."""
        if not self.next_token or tokens.shape != target.shape or target.shape[1] < 3:
            return
        given, kept = target[:, :-1], target[:, :-1] != self.ignore_index
        if bool(kept.any()) and bool((given == tokens[:, 1:])[kept].all()) and bool((given != tokens[:, :-1]).any()):
            remedy = "Pass labels = input_ids, or convert with likelihood=ibnn.Categorical(axis=-1, next_token=False)."
            raise ValueError(complaint("y", "the tokens themselves", "labels that are shifted already", remedy))

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns the cross-entropy, the (weighted) mean over all targets that are not ignored; 0 if all are."""
        logits, dim, weight = self._tempered(output, temperature), self.class_dim(output), self.total_weight(target)
        target = self.aligned(target)
        last = dim == -1 and output.dim() > 2
        scores = logits.flatten(0, -2) if last else logits.movedim(dim, 1)
        labels = (target.flatten() if last else target).long()

        def mean(total: Tensor, **options: Any) -> Tensor:
            loss = F.cross_entropy(scores, labels, ignore_index=self.ignore_index, reduction="sum", **options)
            return loss / total.to(loss).clamp_min(torch.finfo(loss.dtype).tiny)

        loss = mean(weight, weight=self.weight, label_smoothing=self.label_smoothing)
        if self.weight is None and not self.label_smoothing:
            return Terms(loss, loss, weight, weight)
        count = (target != self.ignore_index).float().sum()
        return Terms(loss, mean(count), count, weight)

    def count(self, target: Tensor) -> int:
        """Returns how many targets are not ignored."""
        return int((self.aligned(target) != self.ignore_index).sum())

    def total_weight(self, target: Tensor) -> Tensor:
        """Returns the sum of the class weights of the targets that are not ignored; their number without weights."""
        target = self.aligned(target)
        kept = target != self.ignore_index
        return (kept.float() if self.weight is None else self.weight[target.long() * kept] * kept).sum()

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns the log of the mean softmax, of the output's shape: as good as logits to whatever reads them."""
        return log_mean(self._tempered(draws, temperature).log_softmax(self.class_dim(draws, 1)))

    def _log_probs(self, draws: Tensor, temperature: Temperature) -> Tensor:
        dim = self.class_dim(draws, 2)
        return self._tempered(draws, temperature).log_softmax(dim).movedim(dim, -1)

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the sum of −log p(target) and the number of targets of each row; see `Likelihood.losses`."""
        target = self.aligned(target)
        draws, kept = draws.flatten(0, 1), target != self.ignore_index
        logits = self._tempered(draws, temperature).movedim(self.class_dim(draws, 1), -1)
        index = (target.long() * kept).expand(len(draws), *target.shape)[..., None]
        log_probs = (logits.gather(-1, index)[..., 0] - logits.logsumexp(-1)) * kept  # of each draw
        return by_row((math.log(len(draws)) - log_probs.logsumexp(0)) * kept), by_row(kept)

    def _prediction(self, logs: Tensor, split: Split, error: Tensor) -> Prediction:
        dim = self._from_end(logs.dim())
        logs, error = (values.movedim(-1, dim) for values in (logs, error))
        return CategoricalPrediction(logs.exp(), logs, *split, error, axis=1 if dim + logs.dim() == 1 else dim)

    def score(self, prediction: CategoricalPrediction, target: Tensor) -> dict[str, float]:
        """NLL, error and ECE over the targets that are not ignored; without class weights or smoothing."""
        from ibnn import metrics

        target = self.aligned(target).flatten()
        kept, answers = target != self.ignore_index, (prediction.probs, prediction.log_probs)
        probs, log_probs = (values.movedim(prediction.axis, -1).flatten(0, -2)[kept] for values in answers)
        return metrics.scores(probs, log_probs, target[kept], ("nll", "error", "ece"))

    def classes(self, target: Tensor) -> Tensor | None:
        """Returns the labels, if every row has one of its own."""
        return target if target.dim() == 1 and bool((target != self.ignore_index).all()) else None

    def surprise(self, output: Tensor) -> Tensor:
        """Returns how low the largest class score is, the mean over an input's data."""
        return -full(output).amax(self.class_dim(output)).reshape(output.shape[0], -1).mean(1)

    def distances(self, prediction: CategoricalPrediction, target: Tensor) -> list[Conformal | None]:
        """Returns the distances of classes that are not ignored; see `Conformal`."""
        target = self.aligned(target)
        return [class_distances(prediction.each_class()[0], target, target != self.ignore_index, by_output=False)]

    def base_rates(self, target: Tensor) -> Tensor:
        """Returns how frequent each class is, with one target more of each."""
        target = self.aligned(target)
        counts = torch.bincount(target[target != self.ignore_index].flatten().long()).cpu().double() + 1
        return counts / counts.sum()

    def fall_back(self, prediction: CategoricalPrediction, weight: Tensor, base: Tensor) -> CategoricalPrediction:
        """Returns a mixture with the class frequencies; see `Likelihood.fall_back`."""
        axis, classes = prediction.axis, prediction.probs.shape[prediction.axis]
        rates = torch.cat([base, base.min().expand(classes - len(base))])  # classes that never came
        rates = (rates / rates.sum()).log().reshape(-1, *[1] * (-1 - axis % -prediction.probs.dim()))  # (C, …)
        logs = mixed(prediction.log_probs, weight, rates)
        parts = fallen_back(prediction, weight, entropy(logs.exp().movedim(axis, -1)))
        return replace(prediction, probs=logs.exp(), log_probs=logs, **parts)


def mixed(logs: Tensor, weight: Tensor, base: Tensor) -> Tensor:
    """Returns log(w · exp(logs) + (1 − w) · exp(base)) for weights (B,); logs themselves where w is 1."""
    w = like_rows(weight, logs)
    return torch.logaddexp(logs + w.log(), base.to(logs) + (-w).log1p())


def fallen_back(answer: Any, weight: Tensor, total: Tensor) -> dict[str, Any]:
    """Returns the parts of the uncertainty after a fallback that has made it `total`; between gets what is left."""
    w, aleatoric = like_rows(weight, total), like_rows(weight, total) * answer.aleatoric
    parts = {"aleatoric": aleatoric, "standard_error": like_rows(weight, answer.standard_error) * answer.standard_error}
    if answer.between is None or answer.within is None:
        return parts | {"unsplit": torch.where(w < 1, (total - aleatoric).clamp_min(0), answer.epistemic)}
    within = w * answer.within
    between = torch.where(w < 1, (total - aleatoric - within).clamp_min(0), answer.between)
    return parts | {"between": between, "within": within}


def _without(output: Tensor, axis: int) -> tuple[int, ...]:
    """Returns the shape of an output beyond the batch and without the axis of the classes."""
    axis %= output.dim()
    return tuple(size for number, size in enumerate(output.shape) if number not in (0, axis))


class Bernoulli(Discrete):
    """Independent yes/no targets by sigmoid; targets (0 or 1) have the shape of the output.

    >>> round(Bernoulli().terms(torch.zeros(2, 3), torch.ones(2, 3)).loss.item(), 4)  # log 2
    0.6931
    """

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if targets are not in [0, 1] or not of the output's shape."""
        if target.dim() == 1 and output.dim() == 2 and output.shape[1] > 1:
            expected = f"a 0 or 1 for each of {output.shape[1]} labels, of shape {(len(target), output.shape[1])}"
            remedy = 'For one class number each convert with likelihood="categorical", or one-hot the labels.'
            raise ValueError(complaint("y", expected, f"shape {tuple(target.shape)}", remedy))
        check_shape(output, target)
        if not bool(((target >= 0) & (target <= 1)).all()):  # nor NaN
            got = f"values from {target.min():g} to {target.max():g}"
            raise ValueError(complaint("y", "in [0, 1]", got, "Pass 0 for no and 1 for yes."))

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns the binary cross-entropy, mean over all labels."""
        output = self._tempered(output, temperature)
        return Terms.plain(F.binary_cross_entropy_with_logits(output, target.to(output.dtype)), target)

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns the logit of the mean probability, of the output's shape."""
        draws = self._tempered(draws, temperature)
        return log_mean(F.logsigmoid(draws)) - log_mean(F.logsigmoid(-draws))

    def _log_probs(self, draws: Tensor, temperature: Temperature) -> Tensor:
        """Returns log-probabilities of yes and no, (K, S, B, …, 2)."""
        draws = self._tempered(draws, temperature)
        return torch.stack([F.logsigmoid(draws), F.logsigmoid(-draws)], dim=-1)

    def _prediction(self, logs: Tensor, split: Split, error: Tensor) -> Prediction:
        yes, no = logs.unbind(-1)
        return BernoulliPrediction(yes.exp(), yes, *split, error[..., 0], no)

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the sum of −log p(target) and the number of labels of each row; see `Likelihood.losses`."""
        losses = -self.summarise(draws, temperature).log_prob(target)  # type: ignore[attr-defined]
        return by_row(losses), by_row(torch.ones_like(losses))

    def score(self, prediction: BernoulliPrediction, target: Tensor) -> dict[str, float]:
        """Returns NLL and error, per label."""
        check_shape(prediction.probs, target)
        error = (prediction.labels != (target > 0.5)).cpu().double().mean().item()
        return {"nll": -prediction.log_prob(target).mean().item(), "error": error}

    def surprise(self, output: Tensor) -> Tensor:
        """Returns how near the scores are to 0, which is undecided, the mean over an input's labels."""
        return -full(output).abs().reshape(output.shape[0], -1).mean(1)

    def distances(self, prediction: BernoulliPrediction, target: Tensor) -> list[Conformal | None]:
        """Returns the distances of the classes no and yes; labels of outputs (B, labels) have limits of their own."""
        yes, every = target > 0.5, torch.ones_like(target, dtype=torch.bool)
        return [class_distances(prediction.each_class()[0], yes, every, by_output=target.dim() <= 2)]

    def base_rates(self, target: Tensor) -> Tensor:
        """Returns how frequent each label is (all labels where there are more than one axis of them), smoothed."""
        yes = as_rows(target)
        return (yes.sum(0) + 1) / (len(yes) + 2)

    def fall_back(self, prediction: BernoulliPrediction, weight: Tensor, base: Tensor) -> BernoulliPrediction:
        """Returns a mixture with the labels' frequencies; see `Likelihood.fall_back`."""
        rates = base.expand(prediction.probs.shape[-1]) if prediction.probs.dim() > 1 else base
        yes = mixed(prediction.log_probs, weight, rates.log())
        no = mixed(prediction.log_complements, weight, (-rates).log1p())
        parts = fallen_back(prediction, weight, entropy(torch.stack([yes, no], -1).exp()))
        return replace(prediction, probs=yes.exp(), log_probs=yes, log_complements=no, **parts)


def own_activation(likelihood: Likelihood, net: nn.Module, outputs: Tensor | None) -> str:
    """Returns "softmax" or "sigmoid" if a network of class scores ends in one, by its modules or outputs (J, B, …)."""
    likelihood = getattr(likelihood, "inner", likelihood)  # of one whose rows have weights
    if not isinstance(likelihood, Categorical | Bernoulli):
        return ""
    last = net
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    kinds = {nn.Softmax: "softmax", nn.Softmax2d: "softmax", nn.Sigmoid: "sigmoid"}
    if type(last) in kinds or outputs is None or isinstance(likelihood, Bernoulli):
        return kinds.get(type(last), "")
    near_one = (full(outputs).sum(likelihood.class_dim(outputs, 1)) - 1).abs() < 1e-3  # in half precision too
    return "softmax" if bool((outputs >= 0).all() and near_one.all()) else ""
