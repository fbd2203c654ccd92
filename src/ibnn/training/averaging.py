"""AVERAGES: moving (EMA) and stochastic (SWA) averages of all parameters over training."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ibnn.inputs import call_arguments


class Average:
    """An average of a model's floating-point state, by name; empty until the first update."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.count = 0  # updates so far

    def update(self, model: nn.Module, decay: float | None = None) -> None:
        """Moves the average towards the model: by 1 − decay (EMA), or so that it is the mean of all so far (SWA).

        The decay of an EMA starts small, so that short runs are not averages of their start.
        """
        self.count += 1
        share = 1 / self.count if decay is None else 1 - min(decay, self.count / (9 + self.count))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.state.setdefault(name, value.clone()).lerp_(value, share)


def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Overwrites parameters and buffers by name, in place."""
    own = model.state_dict()
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)


def estimate_statistics(model: Any, inputs: Iterable[Any]) -> None:
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
