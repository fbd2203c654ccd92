"""SIDES: where else than on its input a layer may have latents: on its output, and on its bias.

A layer f = U x + b becomes f = r ∘ (U (z ∘ x) + v ∘ b): z multiplies its input nodes, r its output nodes, their
bias included, and v the bias, as one factor for all of it or one for each entry. So the weights are diag(r) U diag(z),
and the bias is r ∘ v ∘ b.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

Where = Literal["input", "output", "both"]
BiasLatents = Literal["none", "layer", "node"]


@dataclass(frozen=True)
class Output:
    """What the library must know about the output of a layer type: its nodes are in the axis of the input's.

    >>> Output(lambda layer: layer.out_features, lambda layer, weight, r: weight * r[:, None]).bias
    'bias'
    """

    nodes: Callable[[Any], int]  # number of output nodes of a layer
    fold: Callable[[Any, Tensor, Tensor], Tensor]  # diag(r) W: a weight with r (O,) multiplied in
    bias: str = "bias"  # name of what the layer adds to its product, one number for each output node, or None


class Sides(NamedTuple):
    """How many latents a layer has on its input, its output and its bias; z of a layer is in this order.

    >>> Sides(4, 3, 1).nodes, str(Sides(4, 0, 1))
    (8, 'input + bias')
    """

    inputs: int
    outputs: int = 0
    biases: int = 0

    @property
    def nodes(self) -> int:
        """Number of all of them."""
        return sum(self)

    def __str__(self) -> str:
        return " + ".join(name for name, count in zip(("input", "output", "bias"), self, strict=True) if count)

    def split(self, z: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Splits z (…, nodes) into the factors of inputs, outputs and bias; None for those that there are not."""
        parts = z.split(list(self), -1)
        z_in, r, v = (part if count else None for part, count in zip(parts, self, strict=True))
        return z_in, r, v
