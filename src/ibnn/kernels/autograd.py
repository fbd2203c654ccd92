"""Gradients of gradients, for operations with a backward pass of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
