"""Averages of weights that replace them at the end of training."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ibnn.inputs import call_arguments
from ibnn.training.trainable import Trainable


@dataclass
class Average:
    """An average of a model's floating-point parameters and buffers, by name; empty until the first update."""

    state: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0  # updates so far

    def update(self, model: Trainable, decay: float | None = None) -> None:
        """Moves the average towards the model: by 1 − decay (EMA), or so that it is the mean of all so far (SWA)."""
        self.count += 1  # an EMA's decay starts small, so that short runs are not averages of their start
        share = 1 / self.count if decay is None else 1 - min(decay, self.count / (9 + self.count))
        kinds = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        tensors = {name for named in kinds for name, _ in named}  # an IBNN's state has other numbers, too
        for name, value in model.state_dict().items():
            if name in tensors and value.is_floating_point():
                self.state.setdefault(name, value.clone()).lerp_(value, share)

    def end_epoch(self, model: Trainable, *, collect: bool, last: bool) -> bool:
        """Adds the weights to an SWA, unless the method averages by itself; returns if an average replaced them."""
        own = hasattr(model, "end_epoch") and model.end_epoch(collect=collect, last=last)
        if collect and not own:
            self.update(model)
        if last and not own and self.state:
            model.load_state_dict(self.state, strict=False)
        return last and (own or bool(self.state))


class _Call(nn.Module):
    """A model that takes all its inputs as one argument, as torch's `update_bn` passes them."""

    def __init__(self, model: Trainable) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        args, kwargs = call_arguments(inputs)
        return self.model(*args, **kwargs)


def estimate_statistics(model: Trainable, inputs: Iterable[Any]) -> None:
    """Estimates BatchNorm's running statistics anew, as plain means over batches; an average of weights needs it."""
    examples = model.examples.clone()
    update_bn(([x] for x in inputs), _Call(model))
    model.examples.copy_(examples)
