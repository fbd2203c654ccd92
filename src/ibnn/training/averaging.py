"""AVERAGES: which weights remain: a moving (EMA) or stochastic (SWA) average, the best evaluation's, or the last."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ibnn.inputs import call_arguments
from ibnn.training.trainable import Trainable


class Average:
    """An average of a model's floating-point parameters and buffers, by name; empty until the first update.

    Attributes:
        state: The average so far.
        count: Number of updates.
    """

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.count = 0

    def update(self, model: Trainable, decay: float | None = None) -> None:
        """Moves the average towards the model: by 1 − decay (EMA), or so that it is the mean of all so far (SWA).

        The decay of an EMA starts small, so that short runs are not averages of their start. Numbers of the state that
        are neither parameters nor buffers (an IBNN's `prior_std`) are not averaged.
        """
        self.count += 1
        share = 1 / self.count if decay is None else 1 - min(decay, self.count / (9 + self.count))
        kinds = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        tensors = {name for named in kinds for name, _ in named}
        for name, value in model.state_dict().items():
            if name in tensors and value.is_floating_point():
                self.state.setdefault(name, value.clone()).lerp_(value, share)

    def end_epoch(self, model: Trainable, *, collect: bool, last: bool) -> bool:
        """Collects the weights into an SWA, or has the method do it, and returns whether an average took their place.

        Args:
            model: What is trained.
            collect: Whether the present weights go into the average.
            last: Whether training ends.
        """
        own = model.end_epoch(collect=collect, last=last)
        if collect and not own:
            self.update(model)
        if last and not own and self.state:
            model.load_state_dict(self.state, strict=False)
        return last and (own or bool(self.state))


@dataclass
class Best:
    """The evaluation with the lowest validation NLL so far.

    Attributes:
        best: Its row of the history.
        waited: Number of evaluations since.
        state: The model's state then, by name, if it was kept.
    """

    best: dict[str, Any] | None = None
    waited: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def update(self, row: dict[str, Any], model: Trainable, *, keep: bool) -> None:
        """Compares an evaluation with the best; `keep` copies the model's state if it is better."""
        self.waited += 1
        if self.best is None or row["valid_nll"] < self.best["valid_nll"]:
            self.best, self.waited = row, 0
            if keep:
                self.state = {name: value.clone() for name, value in model.state_dict().items()}


def estimate_statistics(model: Trainable, inputs: Iterable[Any]) -> None:
    """Estimates BatchNorm's running statistics anew, as plain means over batches; an average of weights needs it."""
    norms = [m for m in model.net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    momenta, examples = [norm.momentum for norm in norms], model.examples.clone()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    with torch.no_grad():
        for x in inputs:
            args, kwargs = call_arguments(x)
            model(*args, **kwargs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.examples.copy_(examples)
