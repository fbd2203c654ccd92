"""The product of inputs with a z for each row and with weights, (x ∘ z) Wᵀ + b, a few rows at a time.

Neither x ∘ z nor its gradient is ever whole in memory: parts of them stay in the cache, and several products of one
input read it once.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.kernels.autograd import differentiable

_AT_ONCE = 2**19  # entries of inputs that are multiplied at once, for each thread of a CPU
Product = tuple[Tensor, Tensor, Tensor | None]  # z, W and b


def project(
    layer: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, axis: int, units: object = None
) -> Tensor | None:
    """Returns (x ∘ z) Wᵀ + b."""
    if x.shape[-1] != z.shape[1] or not (axis < 2 if x.dim() == 3 else axis == 0 and x.is_contiguous()):
        return None
    flat = x if x.dim() == 3 else x.reshape(x.shape[0], -1, x.shape[-1])
    (output,) = _Linears.apply(axis, flat, z, weight, bias)  # type: ignore[no-untyped-call]
    return output.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def linears(x: Tensor, axis: int, products: Sequence[Product]) -> tuple[Tensor, ...]:
    """Returns (x ∘ z) Wᵀ + b for each product of one input.

    Args:
        x: (B, T, D), or (T, B, D) if the batch axis is 1.
        axis: The batch axis.
        products: z (B, D), W (O, D) and b (O,) or None, of each.
    """
    outputs: tuple[Tensor, ...] = _Linears.apply(axis, x, *(t for part in products for t in part))  # type: ignore[no-untyped-call]
    return outputs


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: int, x: Tensor, *more: Any) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.save_for_backward(x, *more)
        ctx.set_materialize_grads(False)
        outputs = tuple(x.new_empty(*x.shape[:2], len(w)) for w in more[1::3])
        for rows, product in _chunks(x, 1):
            for z, w, b, output in zip(more[::3], more[1::3], more[2::3], outputs, strict=True):
                scaled = torch.mul(x[rows], _part(z, axis, rows), out=product).flatten(0, 1)
                target = output[rows].flatten(0, 1)
                torch.mm(scaled, w.t(), out=target) if b is None else torch.addmm(b, scaled, w.t(), out=target)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        axis, inputs, needed = ctx.axis, ctx.saved_tensors, ctx.needs_input_grad[1:]
        parts = [(n, g.contiguous()) for n, g in enumerate(gradients) if g is not None]
        if not parts:
            return None, *[None] * len(inputs)
        if torch.is_grad_enabled():  # create_graph=True
            return None, *differentiable(partial(_slow, axis), inputs, gradients, needed)
        x, *more = inputs
        found = [
            torch.zeros_like(t) if t is not None and need else None for t, need in zip(more, needed[1:], strict=True)
        ]
        to_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
        for rows, product, to_product in _chunks(x, 2):
            part = x[rows]
            for count, (n, whole) in enumerate(parts):
                z, w, gradient = _part(more[3 * n], axis, rows), more[3 * n + 1], whole[rows].flatten(0, 1)
                to_z, to_w = found[3 * n : 3 * n + 2]
                if to_w is not None:
                    torch.addmm(to_w, gradient.t(), torch.mul(part, z, out=product).flatten(0, 1), out=to_w)
                torch.mm(gradient, w, out=to_product.flatten(0, 1))
                if to_z is not None:
                    (to_z if axis else to_z[rows]).add_(torch.mul(to_product, part, out=product).sum(1 - axis))
                if to_x is not None:
                    to_x[rows].addcmul_(to_product, z) if count else torch.mul(to_product, z, out=to_x[rows])
        for n, whole in parts:
            if found[3 * n + 2] is not None:
                found[3 * n + 2] = whole.flatten(0, 1).sum(0)
        return None, to_x, *found


def _slow(axis: int, x: Tensor, *more: Any) -> tuple[Tensor, ...]:
    products = zip(more[::3], more[1::3], more[2::3], strict=True)
    return tuple(F.linear(x * z.unsqueeze(1 - axis), w, b) for z, w, b in products)


def _part(z: Tensor, axis: int, rows: slice) -> Tensor:
    """Returns z in a shape that multiplies some rows of an input."""
    return z if axis else z[rows, None]


def _chunks(x: Tensor, count: int) -> Iterator[Any]:
    """Yields slices of the input's first axis, and `count` tensors of a slice's shape, in the same memory each time."""
    rows = x.shape[0]
    at_once = rows
    if x.is_cpu:  # what a piece needs stays in the cache
        at_once = min(rows, max(1, _AT_ONCE * torch.get_num_threads() * rows // max(1, x.numel())))
    memory = [x.new_empty(at_once, *x.shape[1:]) for _ in range(count)]
    for start in range(0, rows, at_once):
        length = min(at_once, rows - start)
        yield slice(start, start + length), *(part[:length] for part in memory)
