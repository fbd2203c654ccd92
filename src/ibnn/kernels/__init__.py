"""Kernels: layers of torch computed from x and a z for each row in one operation, with their gradients.

They exist for speed and memory alone: neither x ∘ z nor its gradient is kept for the backward pass. Each computes what
the layer's own forward gives for x ∘ z, and `run` returns None for every case that no kernel takes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ibnn.autograd import PLAIN
from ibnn.kernels.convolution import convolved
from ibnn.kernels.linear import linears
from ibnn.units import Units

Kernel = Callable[[Any, Tensor, Tensor, int, Units | None], Tensor | None]  # layer, x, z (R, D), batch axis, units


def run(layer: Any, x: Any, z: Tensor, axis: int, units: Units | None) -> Tensor | None:
    """Returns the output of a layer for x ∘ z (∘ u) with z (R, D), a row each; None where no kernel takes the case.

    A subclass of a layer (parametrised, sharded) has no kernel: its forward may be another.
    """
    kernel = KERNELS.get(type(layer))
    if kernel is None or z.dim() != 2 or not isinstance(x, Tensor) or x.dim() < 2:
        return None
    if x.shape[axis] != z.shape[0] or x.numel() == 0 or not runs_here(x, z, layer.weight, layer.bias):
        return None
    return kernel(layer, x, z, axis, units)


def _linear(layer: nn.Linear, x: Tensor, z: Tensor, axis: int, units: Units | None) -> Tensor | None:
    if x.shape[-1] != z.shape[1] or not (axis < 2 if x.dim() == 3 else axis == 0 and x.is_contiguous()):
        return None
    x, z, weight, bias = lowered(x, z, layer.weight, layer.bias)
    if x.dim() == 3:
        return linears(x, axis, [(z, weight, bias)])[0]
    (output,) = linears(x.reshape(len(x), -1, x.shape[-1]), 0, [(z, weight, bias)])
    return output.view(*x.shape[:-1], output.shape[-1])


def _convolution(layer: Any, x: Tensor, z: Tensor, axis: int, units: Units | None) -> Tensor | None:
    padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if axis or x.dim() != len(layer.kernel_size) + 2 or x.shape[1] != z.shape[1] or not padded:
        return None
    placed = units and units.placed(x.shape, 1 - x.dim(), 0)
    x, z, weight, bias = lowered(x, z, layer.weight, layer.bias)
    how = layer.stride, layer.padding, layer.dilation, layer.groups
    return convolved(x, z.view(*z.shape, *[1] * (x.dim() - 2)), weight, bias, how, placed)


KERNELS: dict[type[nn.Module], Kernel] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}


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


__all__ = ["KERNELS", "Kernel", "lowered", "run", "runs_here"]
