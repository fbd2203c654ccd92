"""PRODUCT: x ∘ z, its gradients, and memory for it."""

from typing import Any

import torch
from torch import Tensor

from ibnn.layers.units import Placed, UnitProduct
from ibnn.layers.units import product as unit_product

_AT_ONCE = 2**18  # entries of a product that stay in the cache


class Product(torch.autograd.Function):
    """x ∘ z with z broadcast; its backward pass makes one tensor of x's size, not two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor) -> Tensor:
        """Keeps x and z."""
        ctx.save_for_backward(x, z)
        return x * z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of x and z."""
        (x, z), (gradient,) = ctx.saved_tensors, gradients
        to_x = gradient * z if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_x, None
        return to_x, summed_product(gradient, x, z.shape)


class Scratch:
    """Memory that the products of all layers take in turn: fresh memory costs more than the multiplication."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, x: Tensor) -> Tensor | None:
        """Returns a tensor of an input's shape, whose entries may be anything; None if the input is small."""
        kept, size = self._memory, x.numel()
        if size < _AT_ONCE:
            return None
        if kept is None or kept.numel() < size or (kept.dtype, kept.device) != (x.dtype, x.device):
            if kept is None and torch._C._current_graph_task_id() >= 0:  # until the end of this backward pass
                torch.autograd.Variable._execution_engine.queue_callback(self.drop)
            self._memory = kept = torch.empty(size, dtype=x.dtype, device=x.device)
        return torch.as_strided(kept, x.shape, torch.empty_like(x, device="meta").stride())

    def drop(self) -> None:
        """Frees the memory."""
        self._memory = None


def product(x: Tensor, z: Tensor, units: Placed | None, scratch: Scratch | None) -> Tensor:
    """Returns x ∘ z, or x ∘ z ∘ u; without a graph in some scratch memory, if there is any."""
    if torch.is_grad_enabled():
        function: Any = Product if units is None else UnitProduct
        made: Tensor = function.apply(x, z, *(() if units is None else units))
        return made
    out = None if scratch is None else scratch.like(x)
    if units is not None and len(units.at) > 1:
        return unit_product(x, z, units, out)
    return torch.mul(x, z if units is None else z * units.factors(x), out=out)  # one draw for all rows


def summed_product(a: Tensor, b: Tensor, shape: torch.Size, then: Tensor | None = None) -> Tensor:
    """Returns a ∘ b summed to a shape, a few rows at a time, without the large tensor of the whole product.

    With `then`, a is afterwards multiplied by it in place, while its rows are still in the cache.
    """
    at_once = max(1, _AT_ONCE * a.shape[0] // max(1, a.numel()))
    if shape[0] != a.shape[0] or at_once >= a.shape[0] or shape == a.shape:
        found = (a * b).sum_to_size(shape)
        if then is not None:
            a.mul_(then)
        return found
    memory, sums = None if torch.is_grad_enabled() else torch.empty_like(a[:at_once]), []
    for first in range(0, a.shape[0], at_once):
        x, y = a[first : first + at_once], b[first : first + at_once]
        both = torch.mul(x, y, out=None if memory is None else memory[: len(x)])
        sums.append(both.sum_to_size(len(x), *shape[1:]))
        if then is not None:
            x.mul_(then[first : first + at_once])
    return torch.cat(sums)
