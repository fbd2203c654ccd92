"""Kernels: layers of torch computed from x and a z for each row in one operation, with their gradients.

They exist for speed and memory alone: neither x ∘ z nor its gradient is kept for the backward pass. Each computes what
the layer's own forward gives for x ∘ z, and `find` returns None for every case that a kernel does not take.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ibnn.autograd import PLAIN
from ibnn.kernels.convolution import convolved
from ibnn.kernels.linear import linears
from ibnn.units import Placed

Kernel = Callable[[Any, Tensor, Tensor, int, Placed | None], Tensor]  # layer, x, z (R, D), batch axis, unit factors


def _linear(layer: nn.Linear, x: Tensor, z: Tensor, axis: int, units: Placed | None) -> Tensor:
    x, z, weight, bias = lowered(x, z, layer.weight, layer.bias)
    if x.dim() == 3:
        return linears(x, axis, [(z, weight, bias)])[0]
    (output,) = linears(x.reshape(len(x), -1, x.shape[-1]), 0, [(z, weight, bias)])
    return output.view(*x.shape[:-1], output.shape[-1])


def _takes_linear(layer: nn.Linear, x: Tensor, z: Tensor, axis: int) -> bool:
    return x.shape[-1] == z.shape[1] and ((x.dim() == 3 and axis < 2) or (axis == 0 and x.is_contiguous()))


def _convolution(layer: Any, x: Tensor, z: Tensor, axis: int, units: Placed | None) -> Tensor:
    x, z, weight, bias = lowered(x, z, layer.weight, layer.bias)
    how = layer.stride, layer.padding, layer.dilation, layer.groups
    return convolved(x, z.view(*z.shape, *[1] * (x.dim() - 2)), weight, bias, how, units)


def _takes_convolution(layer: Any, x: Tensor, z: Tensor, axis: int) -> bool:
    padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return axis == 0 and x.dim() == len(layer.kernel_size) + 2 and x.shape[1] == z.shape[1] and padded


KERNELS: dict[type[nn.Module], tuple[Kernel, Callable[[Any, Tensor, Tensor, int], bool]]] = {
    nn.Linear: (_linear, _takes_linear),
    nn.Conv1d: (_convolution, _takes_convolution),
    nn.Conv2d: (_convolution, _takes_convolution),
    nn.Conv3d: (_convolution, _takes_convolution),
}


def find(layer: Any, x: Any, z: Tensor, axis: int) -> Kernel | None:
    """Returns the kernel that computes a layer for an input and z (R, D), a row each, or None.

    Args:
        layer: The layer. A subclass (parametrised, sharded) has no kernel: its forward may be another.
        x: Its input.
        z: The factors.
        axis: The batch axis of x.
    """
    if type(layer) not in KERNELS or not isinstance(x, Tensor) or z.dim() != 2:
        return None
    if x.dim() < 2 or x.shape[axis] != z.shape[0] or x.numel() == 0:
        return None
    if not runs_here(x, z, layer.weight, layer.bias):
        return None
    kernel, takes = KERNELS[type(layer)]
    return kernel if takes(layer, x, z, axis) else None


def runs_here(*tensors: Tensor | None) -> bool:
    """Whether an operation with its own backward pass may run: eagerly, without transforms, in one precision.

    Under autocast tensors of several precisions are fine: `lowered` gives them one.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and all(type(tensor) in PLAIN for tensor in given)
        and len({tensor.device for tensor in given}) == 1
        and (len({tensor.dtype for tensor in given}) == 1 or torch.is_autocast_enabled(given[0].device.type))
    )


def lowered(*tensors: Any) -> Any:
    """Returns tensors in the lower precision of autocast, where it is enabled, as torch's own layers take them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


__all__ = ["KERNELS", "Kernel", "find", "lowered", "runs_here"]
