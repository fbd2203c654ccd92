"""ANSWERS: what a prediction holds, and the one `predict` that serves every method.

A method offers draws of its network's outputs, (K·S, B, …); its likelihood turns them into a `Prediction`. Uncertainty
splits exactly: total = aleatoric + epistemic, epistemic = between components + within components, every part ≥ 0.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import (
    Inputs,
    Modular,
    as_tensors,
    batch_length,
    call_arguments,
    evaluating,
    slice_rows,
    split_inputs,
    tensors,
    tree_map,
)


@dataclass(frozen=True)
class Prediction:
    """Answers for a batch of inputs; the first axis of every field is the batch, unless its metadata says otherwise."""

    def __len__(self) -> int:
        """How many inputs were answered."""
        first = fields(self)[0]
        return int(getattr(self, first.name).shape[first.metadata.get("batch", 0)])

    def to(self, device: torch.device | str) -> Self:
        """The same answers on another device."""
        return type(self)(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def rows(self, index: Tensor) -> Self:
        """The answers for some of the inputs, by their numbers (R,)."""
        axes = {f.name: f.metadata.get("batch", 0) for f in fields(self)}
        return type(self)(**{name: getattr(self, name).index_select(axis, index) for name, axis in axes.items()})

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """Joins the answers for consecutive batches."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            **{
                f.name: torch.cat([getattr(part, f.name) for part in parts], dim=f.metadata.get("batch", 0))
                for f in fields(cls)
            }
        )


@dataclass(frozen=True)
class CategoricalPrediction(Prediction):
    """Class probabilities and the entropies behind them, in nats.

    Attributes:
        probs: Mean of the draws' probabilities, (B, C) or (B, C, …).
        log_probs: Its logarithm, computed without underflow.
        aleatoric: Mean entropy of the draws, (B, …): what no more training data would take away.
        between: Mutual information of label and component: how much the components disagree.
        within: Mutual information of label and draw, given the component.
        standard_error: Monte Carlo standard error of `probs`; nan with a single draw per component.
    """

    probs: Tensor
    log_probs: Tensor
    aleatoric: Tensor
    between: Tensor
    within: Tensor
    standard_error: Tensor

    @property
    def epistemic(self) -> Tensor:
        """What the draws disagree about (mutual information), (B, …)."""
        return self.between + self.within

    @property
    def total(self) -> Tensor:
        """Entropy of `probs`, (B, …)."""
        return self.aleatoric + self.epistemic

    @property
    def labels(self) -> Tensor:
        """The most probable class, (B, …)."""
        return self.probs.argmax(1)


@dataclass(frozen=True)
class BernoulliPrediction(CategoricalPrediction):
    """As `CategoricalPrediction`, for independent yes/no labels: every field has the shape of the network's output.

    Attributes:
        log_complements: Log of the probability of no.
    """

    log_complements: Tensor

    @property
    def labels(self) -> Tensor:
        """Whether each label is more probable than not, (B, …)."""
        return self.probs > 0.5


@dataclass(frozen=True)
class GaussianPrediction(Prediction):
    """A mixture of Gaussians, one for each draw; variances in squared units of the target.

    Attributes:
        mean: Predictive mean, (B, …).
        aleatoric: Mean of the draws' noise variances.
        between: Variance of the components' means.
        within: Mean variance of a component's draws.
        standard_error: Monte Carlo standard error of `mean`; nan with a single draw per component.
        draw_means: Mean of each draw, (K·S, B, …).
        draw_stds: Noise of each draw, (K·S, B, …).
    """

    mean: Tensor
    aleatoric: Tensor
    between: Tensor
    within: Tensor
    standard_error: Tensor
    draw_means: Tensor = field(metadata={"batch": 1}, repr=False)
    draw_stds: Tensor = field(metadata={"batch": 1}, repr=False)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the draws' means."""
        return self.between + self.within

    @property
    def variance(self) -> Tensor:
        """Predictive variance: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def total(self) -> Tensor:
        """Another name of `variance`, as for classification."""
        return self.variance

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation."""
        return self.variance.sqrt()

    def log_prob(self, target: Tensor) -> Tensor:
        """Log density of the mixture at a target of the mean's shape."""
        if target.shape != self.mean.shape:
            got = f"shape {tuple(target.shape)}"
            remedy = f"Pass target.reshape({tuple(self.mean.shape)})."
            raise ValueError(complaint("target", f"of shape {tuple(self.mean.shape)}", got, remedy))
        log_normal = torch.distributions.Normal(self.draw_means, self.draw_stds).log_prob(target)
        return torch.logsumexp(log_normal, 0) - math.log(len(log_normal))

    def quantile(self, level: float) -> Tensor:
        """The value that the target stays below with probability `level`, by bisection of the mixture's CDF."""
        if not 0 < level < 1:
            raise ValueError(complaint("level", "between 0 and 1", level, "Pass 0.5 for the median."))
        means, stds = self.draw_means, self.draw_stds
        reach: Tensor = stds * abs(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()) * 1.001
        low, high = (means - reach).amin(0), (means + reach).amax(0)  # every draw's own quantile lies between
        for _ in range(60):
            middle = (low + high) / 2
            below: Tensor = torch.special.ndtr((middle - means) / stds).mean(0) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds the target with probability `level`, exact for the mixture."""
        if not 0 < level < 1:
            raise ValueError(complaint("level", "between 0 and 1", level, "Pass 0.9 for a 90 % interval."))
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


class Summary(Protocol):
    """What `predict` asks of a likelihood."""

    def summarise(self, draws: Tensor) -> Prediction:
        """Turns draws of a network's output, (K, S, B, …), into a prediction."""


class Method(Modular, Protocol):
    """What `predict` asks of a method."""

    components: int

    @property
    def likelihood(self) -> Summary:
        """Turns the draws into a prediction."""

    def draw_logits(self, inputs: Inputs, samples: int, seed: int) -> Tensor:
        """Draws of the network's output, (K·S, B, …), component-major."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `nn.Module.parameters`."""


def predict(
    method: Method,
    inputs: Inputs,
    *,
    samples: int = 5,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> Prediction:
    """Answers for a tensor, a tuple or mapping of inputs, or a loader of batches, in bounded memory.

    Args:
        method: A converted network or a baseline. It is evaluated in eval mode and left in the mode it was in.
        inputs: What one call of the network takes, or an iterable of such batches. Of a batch that is a tuple the last
            entry is the target, unless it is the only one; of a mapping all entries but "labels" are inputs.
        samples: Draws per component, S.
        seed: Decides the draws.
        batch_size: Rows that go through the network at once; changes nothing else. The outputs of all draws for these
            rows are held in memory: lower it for dense outputs (segmentation).
        progress: Shows a bar while it goes through a loader in a terminal.

    Where several workers run (torch.distributed), all must pass the same loader: they share its batches, and each gets
    the answers for all of them, in order.

    Returns:
        The prediction, on the inputs' device; on the CPU for a loader.
    """
    for name, value in (("samples", samples), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(complaint(name, "an integer of at least 1", value, f"Pass {name}=5 or leave it out."))
    device = next(method.parameters()).device
    inputs = as_tensors(inputs)
    from_loader = not isinstance(inputs, Tensor | tuple | list | dict) and isinstance(inputs, Iterable)
    batches: Iterable[Inputs] = (
        map(split_inputs, _progress(inputs) if progress else inputs) if from_loader else [inputs]
    )
    if not from_loader:
        batch_length(inputs)
    home = torch.device("cpu") if from_loader else next(tensors(inputs)).device
    rank, world = _worker() if from_loader else (0, 1)
    parts: list[tuple[int, Prediction]] = []  # with the number of their batch
    rows = 0
    with evaluating(method), torch.no_grad():
        for number, batch in enumerate(batches):
            for chunk in _chunks(batch, batch_size, first=rows) if number % world == rank else ():
                draws = method.draw_logits(tree_map(lambda t: t.to(device), chunk), samples, seed)
                draws = draws.unflatten(0, (method.components, -1))  # (K, S, b, …)
                parts.append((number, method.likelihood.summarise(draws).to(home)))
            rows += batch_length(batch)
    if world > 1:
        parts = _gathered(parts, world)
    if not parts:
        raise ValueError(complaint("inputs", "at least one batch", "an empty loader", "Pass a loader with data."))
    return type(parts[0][1]).cat([part for _, part in parts])


def _worker() -> tuple[int, int]:
    """Rank and number of workers."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _gathered(parts: list[tuple[int, Prediction]], world: int) -> list[tuple[int, Prediction]]:
    """All workers' parts in the order of their batches."""
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, parts)
    return sorted((part for theirs in everyone for part in theirs), key=lambda part: part[0])


def _chunks(inputs: Inputs, size: int, first: int) -> Iterator[Inputs]:
    """Slices a batch into pieces of at most `size` rows and refuses NaN; `first` is the number of the first row."""
    rows = batch_length(inputs)
    named = (
        inputs if isinstance(inputs, Mapping) else {f"input {i}": t for i, t in enumerate(call_arguments(inputs)[0])}
    )
    for name, value in named.items():
        for tensor in tensors(value):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == rows and tensor.isnan().any():
                row = first + int(tensor.isnan().reshape(rows, -1).any(1).nonzero()[0])
                raise ValueError(complaint(name, "free of NaN", f"NaN in row {row}", "Clean or drop that row."))
    if rows <= size:
        yield inputs
        return
    for start in range(0, rows, size):
        yield slice_rows(inputs, slice(start, start + size), rows)


def _progress(loader: Iterable[Any]) -> Iterable[Any]:
    """A progress bar over a loader when someone watches and rich is there to draw it."""
    if not sys.stderr.isatty():
        return loader
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return loader
    total = len(loader) if isinstance(loader, Sized) else None
    return track(loader, "predict", total=total, console=Console(stderr=True), transient=True)
