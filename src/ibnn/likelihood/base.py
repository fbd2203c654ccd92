"""TASK: what a network's output says about a target. Everything that depends on the task lives in this package.

A datum is one target: a label of a classifier, a pixel of a segmentation, a number of a regression. Losses are means
over data, and the training-set size N that divides the KL counts data in the same way.
"""

import copy
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import logits_of
from ibnn.prediction import Collected, Prediction, Running

BLOCKS = 10  # parts of the data whose NLL is compared where single rows' cannot be
Temperature = float | Tensor | None  # None stands for the likelihood's own


class Likelihood(nn.Module, ABC):
    """p(target | output of the network).

    Methods that take a `temperature` are pure: None stands for the likelihood's own, and another one leaves it as it
    is. Subclasses may leave that argument out and read `self.temperature`.

    Attributes:
        temperature: T, a buffer, 1 until `set_temperature` sets it (`ibnn.calibrate` and `ibnn.fit` do). Logits are
            divided by it, the standard deviation of Gaussian noise is multiplied by it; `draw_logits` ignores it.
    """

    temperature: Tensor
    discrete = True  # whether targets have probabilities and not densities
    masks = False  # whether an output of minus infinity means something: a class that is masked

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def __init_subclass__(cls, **options: Any) -> None:
        """Lets methods that were written without a temperature be called with one."""
        super().__init_subclass__(**options)
        for name in ("nll", "combine", "summarise", "running"):
            if name in vars(cls) and not _takes_temperature(vars(cls)[name]):
                setattr(cls, name, _taking_temperature(vars(cls)[name]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Loads a temperature of 1 from states that were saved before there was one."""
        if prefix + "temperature" not in state_dict:
            state_dict[prefix + "temperature"] = torch.ones(())
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def options(self) -> dict[str, Any]:
        """Constructor options besides tensors, from which `ibnn.load` makes the likelihood again."""
        return {}

    def set_temperature(self, value: float | Tensor) -> None:
        """Sets T for all answers from now on."""
        with torch.no_grad():
            self.temperature.fill_(value)

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
    def nll(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns the mean negative log likelihood over the data of the batch."""

    def unweighted(self) -> Self:
        """Returns a likelihood whose `nll` is the mean of −log p: without class weights or smoothing."""
        return self

    def data(self, target: Tensor) -> int:
        """Returns how many data a target tensor holds."""
        return target.numel()

    def mass(self, target: Tensor) -> Tensor:
        """Returns what `nll` divides its sum over the data by; it weighs parts of a batch against each other."""
        return torch.tensor(float(self.data(target)))

    @abstractmethod
    def combine(self, draws: Tensor, temperature: Temperature = None) -> Any:
        """Returns one output that stands for draws (J, B, …): what the network in eval mode returns."""

    def of_combined(self) -> Self:
        """Returns what tells losses of outputs of `combine`, which have their temperatures already."""
        return self

    @abstractmethod
    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns the prediction made of draws (K, S, B, …)."""

    def running(self, components: int, samples: int, temperature: Temperature = None) -> Running:
        """Returns an object that makes the same prediction of draws that come a few at a time; this one holds all."""
        return Collected(functools.partial(self.summarise, temperature=temperature), components)

    @abstractmethod
    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """Returns how good a prediction of this likelihood is; "nll" is always there, in nats per datum."""

    def classes(self, target: Tensor) -> Tensor | None:
        """Returns the class of each row, (B,), of targets that have one; else None."""
        return None

    def surprise(self, output: Tensor) -> Tensor | None:
        """Returns how unsure an output (B, …) is of its target, (B,), at temperature 1; None if it does not say."""
        return None

    def base_rates(self, target: Tensor) -> Tensor:
        """Returns what is known of a target without its input, flat; empty if the likelihood has no words for it."""
        return torch.zeros(0)

    def fall_back(self, prediction: Any, weight: Tensor, base: Tensor) -> Any:
        """Returns weight · prediction + (1 − weight) · base rates, with weights (B,).

        What the base rates add to the uncertainty is epistemic: more data there would take it away. So aleatoric and
        within keep the prediction's share, and between is all the rest of the total.
        """
        return prediction

    def nonconformity(self, prediction: Any, target: Tensor) -> Tensor | None:
        """Returns how far targets are from predictions, (B,) or (B, outputs), for conformal answers, or None."""
        return None

    @property
    def by_row(self) -> bool:
        """Whether `losses` are known of single rows: those of the library's own classes, but not of their subclasses.

        A subclass may answer otherwise, and only its `score` tells how well.
        """
        return "_datum_losses" in vars(type(self))

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns sums of −log p(target) of the mixture of draws (K, S, N, …) and numbers of data, by groups of rows.

        A group is a row, or, where a likelihood is not `by_row`, a block of rows, of which it says the mean loss alone.

        >>> import ibnn
        >>> ibnn.Categorical().losses(torch.zeros(1, 1, 2, 4), torch.tensor([0, 3]))[0]  # log 4
        tensor([1.3863, 1.3863], dtype=torch.float64)

        Returns:
            Two tensors (G,).
        """
        if self.by_row:
            losses, kept = self._datum_losses(draws, target, temperature)
            return _by_row(losses), _by_row(kept)
        sums, counts = [], []
        for rows in torch.arange(len(target), device=target.device).tensor_split(BLOCKS):
            if len(rows) and (count := self.data(target[rows])):
                answer = self.summarise(draws[:, :, rows], temperature)
                sums.append(count * self.score(answer, target[rows])["nll"])
                counts.append(count)
        return torch.tensor(sums, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)

    def _datum_losses(self, draws: Tensor, target: Tensor, temperature: Temperature) -> tuple[Tensor, Tensor]:
        """Returns −log p of each datum, of the target's shape and 0 where it is ignored, and which data count."""
        raise NotImplementedError

    def _answer_losses(self, prediction: Any, target: Tensor) -> Tensor:
        """Returns −log p of each datum, likewise, as a prediction has it."""
        raise NotImplementedError


def _takes_temperature(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    return "temperature" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _taking_temperature(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that, called with a temperature, runs on a copy at that temperature."""
    others = len(inspect.signature(method).parameters)  # self included

    @functools.wraps(method)
    def tempered(self: Likelihood, *args: Any, temperature: Temperature = None, **options: Any) -> Any:
        if len(args) == others:
            *args, temperature = args  # type: ignore[assignment]
        return method(self if temperature is None else self.at(temperature), *args, **options)

    return tempered


def full(x: Tensor) -> Tensor:
    """Returns half-precision outputs in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_shape(output: Tensor, target: Tensor) -> None:
    """Raises unless a target has the shape of an output, but for the batch."""
    expected = (len(target), *output.shape[1:])
    if tuple(target.shape) != expected:
        remedy = f"Pass y.reshape({expected}): a target broadcast by accident trains the wrong loss."
        raise ValueError(complaint("y", f"of shape {expected}", f"shape {tuple(target.shape)}", remedy))


def log_mean(log_probs: Tensor) -> Tensor:
    """Returns the log of the mean probability over the first axis."""
    return (log_probs.logsumexp(0) - math.log(len(log_probs))).clamp_max(0)  # rounding may end above


def _by_row(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), -1).sum(1)
