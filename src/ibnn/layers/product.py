"""PRODUCT: x ∘ z and its gradients."""

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


def product(x: Tensor, z: Tensor, units: Placed | None) -> Tensor:
    """Returns x ∘ z, or x ∘ z ∘ u."""
    if torch.is_grad_enabled():
        function: Any = Product if units is None else UnitProduct
        made: Tensor = function.apply(x, z, *(() if units is None else units))
        return made
    return x * z if units is None else unit_product(x, z, units)


def summed_product(a: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """Returns a ∘ b summed to a shape, a few rows at a time, without the large tensor of the whole product."""
    at_once = max(1, _AT_ONCE * a.shape[0] // max(1, a.numel()))
    if shape[0] != a.shape[0] or at_once >= a.shape[0] or shape == a.shape:
        return (a * b).sum_to_size(shape)
    memory, sums = None if torch.is_grad_enabled() else torch.empty_like(a[:at_once]), []
    for first in range(0, a.shape[0], at_once):
        x, y = a[first : first + at_once], b[first : first + at_once]
        both = torch.mul(x, y, out=None if memory is None else memory[: len(x)])
        sums.append(both.sum_to_size(len(x), *shape[1:]))
    return torch.cat(sums)
