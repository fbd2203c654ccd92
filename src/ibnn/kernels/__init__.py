"""Kernels: layers of torch computed from x and a z for each row in one operation, with their gradients.

They exist for speed and memory alone: neither x ∘ z nor its gradient is kept for the backward pass. Each computes what
the layer's own forward gives for x ∘ z, and `run` returns None for every case that no kernel takes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ibnn.kernels.convolution import convolve
from ibnn.kernels.linear import project
from ibnn.units import PLAIN, Units

# Takes a layer, x, z (R, D), the layer's weight and bias, the batch axis of x, and units.
Kernel = Callable[..., Tensor | None]
KERNELS: dict[type[nn.Module], Kernel] = {
    nn.Linear: project,
    nn.Conv1d: convolve,
    nn.Conv2d: convolve,
    nn.Conv3d: convolve,
}


def run(layer: Any, x: Any, z: Tensor, axis: int, units: Units | None) -> Tensor | None:
    """Returns the output of a layer for x ∘ z (∘ u) with z (R, D), a row each; None where no kernel takes the case.

    A subclass of a layer (a parametrised one) has no kernel: its forward may be another.
    """
    kernel = KERNELS.get(type(layer))
    if kernel is None or z.dim() != 2 or not isinstance(x, Tensor) or x.dim() < 2:
        return None
    if x.shape[axis] != z.shape[0] or x.numel() == 0 or not runs_here(x, z, layer.weight, layer.bias):
        return None
    return kernel(layer, *lowered(x, z, layer.weight, layer.bias), axis, units)


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
