"""The interface of a likelihood, p(target | output): everything that depends on the task is in this folder.

A datum is one target: a label of a classifier, a pixel of a segmentation, a number of a regression. Losses are means
over data, and the training-set size N that divides the KL counts data in the same way.
"""

import copy
import functools
import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.errors import complaint
from ibnn.inputs import logits_of
from ibnn.likelihood.running import Running
from ibnn.prediction import Conformal, Prediction

BLOCKS = 10  # blocks of rows by which `losses` are known where they are not known row by row
Temperature = float | Tensor | None  # None stands for the likelihood's own


class Terms(NamedTuple):
    """What a batch says about a network's outputs."""

    loss: Tensor  #: The mean loss over the data, which training minimises. It may weigh classes and smooth labels.
    nll: Tensor  #: The mean of −log p over the data, without class weights or smoothing.
    #: How many data there are: what `nll` is divided by.
    count: Tensor  # type: ignore[assignment]
    weight: Tensor  #: The sum of their weights: what `loss` is divided by.

    @classmethod
    def plain(cls, loss: Tensor, target: Tensor) -> Self:
        """Returns the terms of a loss that is the mean of −log p over every entry of the target."""
        count = torch.tensor(float(target.numel()))
        return cls(loss, loss, count, count)


class Likelihood(nn.Module, ABC):
    """p(target | output of the network).

    A likelihood of your own has `check`, `terms`, `combine`, `summarise` and `score`. A subclass of one of the
    library's that combines draws in its own way overrides `losses`, too. Methods that take a `temperature` are pure:
    None stands for the likelihood's own.
    """

    #: T, a buffer, 1 until `set_temperature` sets it (`ibnn.calibrate` and `ibnn.fit` do). Logits are divided by it,
    #: the standard deviation of Gaussian noise is multiplied by it; `draw_logits` ignores it.
    temperature: Tensor
    discrete = True  # whether targets have probabilities and not densities
    masks = False  # whether an output of minus infinity means something: a class that is masked

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    @property
    def options(self) -> dict[str, Any]:
        """Constructor options besides tensors, from which `ibnn.load` makes the likelihood again."""
        return {}

    def set_temperature(self, value: float | Tensor) -> None:
        """Sets T for all answers from now on."""
        with torch.no_grad():
            self.temperature.fill_(value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        loaded = state_dict.get(f"{prefix}temperature", self.temperature)
        if not loaded.is_meta and not bool((loaded > 0).all() and loaded.isfinite().all()):
            remedy = "Save the model again, or set another one: model.likelihood.set_temperature(1.0)."
            raise ValueError(complaint("temperature", "a finite number above 0", loaded.tolist(), remedy))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _resolve(self, temperature: Temperature) -> Tensor:
        """Returns a temperature as a tensor; the only place where the buffer is read."""
        if temperature is None:
            return self.temperature
        return temperature if isinstance(temperature, Tensor) else torch.full_like(self.temperature, temperature)

    def at(self, temperature: Temperature) -> Self:
        """Returns a copy with another temperature of its own; all parameters are shared."""
        other = copy.copy(self)
        other._buffers = self._buffers | {"temperature": self._resolve(temperature)}
        return other

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
    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns the training loss and the NLL of a batch, and what each of them is divided by."""

    def standardise(self, output: Tensor, target: Tensor) -> None:
        """Chooses the units of an untrained network's outputs by targets; only numbers have units."""

    def count(self, target: Tensor) -> int:
        """Returns how many data a target tensor holds."""
        return target.numel()

    def total_weight(self, target: Tensor) -> Tensor:
        """Returns `Terms.weight` before any output is known; it weighs parts of a batch against each other."""
        return torch.tensor(float(self.count(target)))

    @abstractmethod
    def combine(self, draws: Tensor, temperature: Temperature = None) -> Any:
        """Returns one output that stands for draws (J, B, …): what the network in eval mode returns."""

    def of_combined(self) -> Self:
        """Returns a likelihood that scores outputs of `combine`, to which the temperature has been applied already."""
        return self

    @abstractmethod
    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns the prediction made of draws (K, S, B, …)."""

    def running(self, components: int, samples: int, temperature: Temperature = None) -> Running:
        """Returns an object that makes the same prediction of draws that come a few at a time; this one holds all."""
        return Running(functools.partial(self.summarise, temperature=temperature), components)

    @abstractmethod
    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """Returns how good a prediction of this likelihood is; "nll" is always there, in nats per datum."""

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the sum of −log p(target) of the mixture of draws (K, S, N, …), and the number of data, of each row.

        All likelihoods of the library return two tensors (N,). This default calls `score` for blocks of rows.

        >>> import ibnn
        >>> ibnn.Categorical().losses(torch.zeros(1, 1, 2, 4), torch.tensor([0, 3]))[0]  # log 4
        tensor([1.3863, 1.3863], dtype=torch.float64)
        """
        sums, counts = [], []
        for rows in torch.arange(len(target), device=target.device).tensor_split(BLOCKS):
            if len(rows) and (count := self.count(target[rows])):
                answer = self.summarise(draws[:, :, rows], temperature)
                sums.append(count * self.score(answer, target[rows])["nll"])
                counts.append(count)
        return torch.tensor(sums, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)

    def classes(self, target: Tensor) -> Tensor | None:
        """Returns the class of each row, (B,), of targets that have one; else None."""
        return None

    def surprise(self, output: Tensor) -> Tensor | None:
        """Returns how unsure an output (B, …) is of its target, (B,), at temperature 1; None if it does not say."""
        return None

    def base_rates(self, target: Tensor) -> Tensor:
        """Returns what is known of a target without its input, flat; empty if the likelihood does not know it."""
        return torch.zeros(0)

    def fall_back(self, prediction: Any, weight: Tensor, base: Tensor) -> Any:
        """Returns weight · prediction + (1 − weight) · base rates, with weights (B,).

        What the base rates add to the uncertainty is epistemic: more data there would take it away. So aleatoric and
        within keep the prediction's share, and between is all the rest of the total.
        """
        return prediction

    def distances(self, prediction: Any, target: Tensor) -> list[Conformal | None]:
        """Returns how far targets are from predictions, for conformal answers, of every head; None where unknown."""
        return [None]


def full(x: Tensor) -> Tensor:
    """Returns half-precision outputs in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_shape(output: Tensor, target: Tensor) -> None:
    """Raises unless a target has the shape of an output, but for the batch: one broadcast trains the wrong loss."""
    expected = (len(target), *output.shape[1:])
    fits = target.numel() == math.prod(expected)
    remedy = f"Pass y.reshape({expected})." if fits else "Give each output its target."
    check.shape("y", target, expected, remedy=remedy)


def like_rows(weight: Tensor, values: Tensor) -> Tensor:
    """Returns weights (B,) such that they multiply the rows of values (B, …)."""
    return weight.to(values).reshape(-1, *[1] * (values.dim() - 1))


def log_mean(log_probs: Tensor) -> Tensor:
    """Returns the log of the mean probability over the first axis."""
    return (log_probs.logsumexp(0) - math.log(len(log_probs))).clamp_max(0)  # rounding may end above


def by_row(values: Tensor) -> Tensor:
    """Returns sums over all axes but the first, in double precision on the CPU: some devices have none."""
    return values.cpu().double().reshape(len(values), -1).sum(1)


def as_rows(target: Tensor) -> Tensor:
    """Returns targets (B,) or (B, outputs) as rows, those of more axes one by one, in double precision on the CPU."""
    rows = target.cpu().double()
    return rows.reshape(len(rows), -1) if rows.dim() <= 2 else rows.reshape(-1, 1)
