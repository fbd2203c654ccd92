"""When an operation with its own backward pass may run, and gradients of its gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def runs_here(*tensors: Tensor | None) -> bool:
    """Whether an operation with its own backward pass may run: eagerly, without transforms, in one precision."""
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(given[0].device.type)
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in given)
        and len({(tensor.dtype, tensor.device) for tensor in given}) == 1
    )


def differentiable(
    slow: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the inputs' gradients by operations that autograd knows, so that they can be differentiated again."""
    pairs = [(made, g) for made, g in zip(slow(*inputs), gradients, strict=True) if g is not None]
    if not pairs:
        return [None] * len(inputs)
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    made, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(made, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]
