"""conv(x ∘ z), or conv(x ∘ z ∘ u), with a z for each row, and its gradients, as one operation.

Only x is kept for the backward pass, and x ∘ z is made again there. An input that needs no gradient, as that of a first
layer, gets none: the gradients of the weights of each row hold those of z, too.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.kernels.autograd import differentiable
from ibnn.units import Units

_PATCHES = 2**18  # entries of patches that are made at once
# Stride, padding, dilation, transposed, output padding, groups: as torch's convolutions and their gradients take them.
How = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]


def convolve(
    layer: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, axis: int, units: Units | None
) -> Tensor | None:
    """Returns a convolution of x ∘ z (∘ u); the deviation of the units gets no gradient."""
    padded = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if axis or x.dim() != len(layer.kernel_size) + 2 or x.shape[1] != z.shape[1] or not padded:
        return None
    how = layer.stride, layer.padding, layer.dilation, False, (0,) * len(layer.stride), layer.groups
    output: Tensor = _Convolution.apply(x, z.view(*z.shape, *[1] * (x.dim() - 2)), weight, bias, how, units)  # type: ignore[no-untyped-call]
    return output


def _product(x: Tensor, z: Tensor, units: Units | None) -> tuple[Tensor, Tensor | None]:
    """Returns x ∘ z (∘ u), and the noise of the units."""
    product = x * z
    if units is None:
        return product, None
    noise = units.noise(product)
    return units.times_(product, noise), noise


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, how: How, units: Units | None
    ) -> Tensor:
        ctx.save_for_backward(x, z, weight, bias)
        ctx.how, ctx.units = how, units
        product, _ = _product(x, z, units)
        return torch.convolution(product, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), inputs, needed, how = gradients, ctx.saved_tensors, ctx.needs_input_grad[:4], ctx.how
        (x, z, weight, _), units = inputs, ctx.units
        if torch.is_grad_enabled():  # create_graph=True
            return *differentiable(partial(_slow, how, units), inputs, gradients, needed), None, None
        if not needed[0] and rows_pay(weight, gradient.shape[2:], dilation=how[2], groups=how[-1]):
            to_bias = gradient.sum([0, *range(2, gradient.dim())]) if needed[3] else None
            seen = x if units is None else x * units.factors(x, 1 - x.dim(), 0)
            return None, *_by_rows(seen, z, weight, gradient, how), to_bias, None, None
        mask = (needed[0] or needed[1], needed[2], needed[3])
        product, noise = _product(x, z, units)
        backward = torch.ops.aten.convolution_backward
        to_product, *others = backward(gradient, product, weight, [len(weight)], *how, mask)
        if not mask[0]:
            return None, None, *others, None, None
        scaled = to_product if units is None or noise is None else units.times_(to_product, noise)
        to_z = (scaled * x).flatten(2).sum(2).view_as(z) if needed[1] else None
        return scaled.mul_(z) if needed[0] else None, to_z, *others, None, None


def _slow(how: How, units: Units | None, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    product = x * z if units is None else x * z * units.factors(x, 1 - x.dim(), 0)
    return (torch.convolution(product, weight, bias, *how),)


# ------------------------------------------------------------------------------- inputs that need no gradient


def rows_pay(weight: Tensor, places: torch.Size, dilation: tuple[int, ...], groups: int) -> bool:
    """Whether the gradients of the weights of each row are small, and patches can be cut as they are."""
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
    stride, padding, *_ = how
    if any(padding):
        x = F.pad(x, [n for one in reversed(padding) for n in (one, one)])
    for axis, (size, step) in enumerate(zip(kernel, stride, strict=True), start=2):
        x = x.unfold(axis, size, step)
    places = len(kernel)
    order = [0, 1, *range(2 + places, 2 + 2 * places), *range(2, 2 + places)]
    return x.permute(order).reshape(len(x), -1, math.prod(x.shape[2 : 2 + places]))
