"""DIRECT: layers of torch that compute their output from x and a z for each row in one operation.

Others multiply their input first and keep x instead of x ∘ z by hooks of autograd (`recompute`), which takes more calls
and more memory passes.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ibnn.layers.convolution import convolved
from ibnn.layers.fused import linears, runs_here
from ibnn.layers.units import Placed

# of a layer, x, z (R, D) or (D,), the batch axis, and factors of units, which convolutions alone have
Direct = Callable[[Any, Tensor, Tensor, int, Placed | None], Tensor]


def _linear(layer: nn.Linear, x: Tensor, z: Tensor, axis: int, units: Placed | None) -> Tensor:
    if x.dim() == 3:
        return linears(x, axis, [(z, layer.weight, layer.bias)])[0]
    (output,) = linears(x.reshape(len(x), -1, x.shape[-1]), 0, [(z, layer.weight, layer.bias)])
    return output.view(*x.shape[:-1], output.shape[-1])


def _convolution(layer: Any, x: Tensor, z: Tensor, axis: int, units: Placed | None) -> Tensor:
    return convolved(layer, x, z.view(-1, z.shape[-1], *[1] * (x.dim() - 2)), units)


DIRECT: dict[type[nn.Module], Direct] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}


def goes_direct(layer: Any, x: Any, z: Tensor, axis: int, shared: bool = False) -> bool:
    """Whether a layer computes its output from an input and z (R, D), a row each, in one operation.

    If z may be shared by all rows, also from z (D,).
    """
    if type(layer) not in DIRECT or type(x) is not Tensor:  # sharding, too, changes a layer's class
        return False
    if x.dim() < 2 or (x.shape[axis] != z.shape[0] if z.dim() == 2 else not shared):
        return False
    if not runs_here(x, z, layer.weight, layer.bias):
        return False
    if type(layer) is nn.Linear:
        fits = x.shape[-1] == z.shape[1] and x.numel() > 0
        return fits and ((x.dim() == 3 and axis < 2) or (axis == 0 and x.is_contiguous()))
    places = len(layer.kernel_size)
    padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return axis == 0 and x.dim() == places + 2 and x.shape[1] == z.shape[-1] and x.numel() > 0 and padded
