"""MC-DROPOUT (Gal & Ghahramani, 2016): dropout stays on in prediction; everything else is in eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.baselines.plain import Plain, generator
from ibnn.errors import complaint
from ibnn.inputs import Inputs, batch_length, logits_of, repeat_rows, tree_map
from ibnn.layers.registry import layer_type
from ibnn.likelihood import Likelihood


class _Mask(nn.Module):
    """Dropout whose mask, within a draw, is the same for every row, so that a draw is one function of x."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.source: torch.Generator | None = None  # of the current draw

    def forward(self, x: Tensor) -> Tensor:
        if self.source is None:
            return F.dropout(x, self.rate, self.training)
        mask = torch.rand(x.shape[1:], generator=self.source, device=x.device) >= self.rate
        return x * mask / (1 - self.rate)

    def hook(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Drops entries of a layer's input."""
        return (self(args[0]), *args[1:])


class MCDropout(Plain):
    """Dropout as approximate inference.

    Args:
        net: The network; trained in place, its weights keep their names.
        likelihood: Default `Categorical`.
        rate: Share of the inputs that is dropped before every linear and convolutional layer but the first, instead
            of the network's own dropout. None keeps the network's own dropout layers.
    """

    random = True

    def __init__(self, net: nn.Module, likelihood: Likelihood | None = None, *, rate: float | None = None) -> None:
        super().__init__(net, likelihood)
        self.rate = rate
        if rate is not None and not 0 < rate < 1:
            raise ValueError(complaint("rate", "between 0 and 1", rate, "Pass 0.1, or None for the network's own."))
        places = [(m, n, c) for m in net.modules() for n, c in m.named_children()]
        own = [(module, name, child) for module, name, child in places if isinstance(child, nn.Dropout)]
        if rate is None and not any(child.p > 0 for _, _, child in own):
            raise ValueError(complaint("rate", "given", "a network without dropout", "Pass rate=0.1."))
        for module, name, child in own:
            setattr(module, name, _Mask(child.p if rate is None else 0.0))
        layers = [m for m in net.modules() if layer_type(m)][1:] if rate is not None else []
        for layer in layers:
            layer.dropout = _Mask(rate or 0.0)
            layer.register_forward_pre_hook(layer.dropout.hook)
        self.train(self.training)

    @property
    def options(self) -> dict[str, Any]:
        """The rate."""
        return {"rate": self.rate}

    def _nll(self, x: Inputs, y: Tensor, samples: int) -> Tensor:
        rows = batch_length(x)
        return self._loss(*tree_map(lambda tensor: repeat_rows(tensor, rows, samples), (x, y)))

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        for number in numbers:
            with self._drawing(generator(seed, number, self.examples.device)):
                output = logits_of(self.net(*args, **kwargs))
            yield output

    @contextmanager
    def _drawing(self, source: torch.Generator) -> Iterator[None]:
        masks = [m for m in self.net.modules() if isinstance(m, _Mask)]
        try:
            for mask in masks:
                mask.source = source
            yield
        finally:
            for mask in masks:
                mask.source = None
