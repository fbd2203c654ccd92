"""CONVOLUTION: conv(x ∘ z), or conv(x ∘ z ∘ u), with a z for each row, and its gradients, as one operation.

Only x is kept for the backward pass, and x ∘ z is made again there, both times in memory that all layers of a pass take
in turn. The gradient of x ∘ z is multiplied in place: fresh memory costs more than the arithmetic. An input that needs
no gradient, as that of a first layer, gets none: the gradients of the weights of each row hold those of z, too.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.layers.fused import differentiable
from ibnn.layers.product import Scratch, summed_product
from ibnn.layers.units import Placed, gradients_of_product
from ibnn.layers.units import product as unit_product

_PATCHES = 2**18  # entries of patches that are made at once
How = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # stride, padding, dilation, groups


class Times(NamedTuple):
    """What the input is multiplied by besides z, and memory for the product."""

    units: Placed | None
    scratch: Scratch | None

    def product(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns x ∘ z (∘ u)."""
        out = None if self.scratch is None else self.scratch.like(x)
        return torch.mul(x, z, out=out) if self.units is None else unit_product(x, z, self.units, out)


def convolved(layer: Any, x: Tensor, z: Tensor, scratch: Scratch | None, units: Placed | None = None) -> Tensor:
    """Returns what a convolution (Conv1d, Conv2d, Conv3d) gives for x ∘ z (∘ u), z broadcast, (B, D, 1, …).

    The deviation of units gets no gradient.
    """
    how: How = layer.stride, layer.padding, layer.dilation, layer.groups
    times = Times(units, scratch)
    if not torch.is_grad_enabled():
        return _forward(x, z, layer.weight, layer.bias, how, times)
    output: Tensor = _Convolution.apply(x, z, layer.weight, layer.bias, how, times)  # type: ignore[no-untyped-call]
    return output


def _forward(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, how: How, times: Times) -> Tensor:
    stride, padding, dilation, groups = how
    product = times.product(x, z)
    return torch.convolution(product, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, how: How, times: Times) -> Tensor:
        ctx.save_for_backward(x, z, weight, bias)
        ctx.how, ctx.times = how, times
        return _forward(x, z, weight, bias, how, times)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), inputs, needed, how = gradients, ctx.saved_tensors, ctx.needs_input_grad[:4], ctx.how
        times: Times = ctx.times
        if torch.is_grad_enabled():  # create_graph=True
            return *differentiable(partial(_slow, how, times.units), inputs, gradients, needed), None, None
        x, z, weight, _ = inputs
        if not needed[0] and _rows_pay(weight, gradient.shape[2:], how):
            to_bias = gradient.sum([0, *range(2, gradient.dim())]) if needed[3] else None
            seen = x if times.units is None else x * times.units.factors(x)
            return None, *_by_rows(seen, z, weight, gradient, how), to_bias, None, None
        stride, padding, dilation, groups = how
        product = times.product(x, z) if needed[2] else x  # x says its shape
        mask = (needed[0] or needed[1], needed[2], needed[3])
        more = ([len(weight)], stride, padding, dilation, False, (0,) * len(stride), groups, mask)
        to_product, to_weight, to_bias = torch.ops.aten.convolution_backward(gradient, product, weight, *more)
        if times.units is not None:
            to_z = gradients_of_product(to_product, x, z, times.units, to_product if needed[0] else None)
        elif not needed[1]:
            return to_product.mul_(z) if needed[0] else None, None, to_weight, to_bias, None, None
        else:
            to_z = summed_product(to_product, x, z.shape, z if needed[0] else None)
        return to_product if needed[0] else None, to_z, to_weight, to_bias, None, None  # by now the gradient of x


def _slow(how: How, units: Placed | None, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    stride, padding, dilation, groups = how
    product = x * z if units is None else x * z * units.factors(x)
    return (torch.convolution(product, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups),)


# ------------------------------------------------------------------------------- inputs that need no gradient


def gradient_by_rows(layer: Any, output: Tensor) -> bool:
    """Whether a layer spares the gradient of an input that needs none."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    return _rows_pay(layer.weight, output.shape[2:], (layer.stride, (), layer.dilation, layer.groups))


def _rows_pay(weight: Tensor, places: torch.Size, how: How) -> bool:
    """Whether the gradients of the weights of each row are small, and patches can be cut as they are."""
    _, _, dilation, groups = how
    return groups == 1 and max(dilation) == 1 and weight[0].numel() <= math.prod(places)


def _by_rows(x: Tensor, z: Tensor, weight: Tensor, gradient: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Returns the gradients of z and of the weights, from those of W = U diag(z) of each row on its own x."""
    outputs, nodes, rows = len(weight), x.shape[1], len(x)
    flat = gradient.flatten(2)  # (B, O, L); if channels are last, they stay last
    if not gradient.is_contiguous():
        flat = gradient.movedim(1, -1).flatten(1, -2).transpose(1, 2)
    entries = weight[0].numel()
    each = x.new_empty(rows, outputs, entries)
    at_once = max(1, _PATCHES // (entries * flat.shape[2]))
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        torch.bmm(flat[part], _patches(x[part], weight.shape[2:], how).transpose(1, 2), out=each[part])
    by_node = each.view(rows, outputs, nodes, -1)
    to_z = torch.mul(by_node, weight.view(outputs, nodes, -1)).sum((1, 3)).view_as(z)
    return to_z, torch.einsum("bodk,bd->odk", by_node, z.flatten(1)).view_as(weight)


def _patches(x: Tensor, kernel: torch.Size, how: How) -> Tensor:
    """Returns what each output place sees of inputs, (B, D · kernel, L)."""
    stride, padding, _, _ = how
    if any(padding):
        x = F.pad(x, [n for one in reversed(padding) for n in (one, one)])
    for axis, (size, step) in enumerate(zip(kernel, stride, strict=True), start=2):
        x = x.unfold(axis, size, step)
    places = len(kernel)
    order = [0, 1, *range(2 + places, 2 + 2 * places), *range(2, 2 + places)]
    return x.permute(order).reshape(len(x), -1, math.prod(x.shape[2 : 2 + places]))
