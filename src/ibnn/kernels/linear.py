"""The product of inputs with a z for each row and with weights, (x ∘ z) Wᵀ + b, a few rows at a time.

Neither x ∘ z nor its gradient is ever whole in memory: parts of them stay in the cache, and several products of one
input read it once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.kernels.autograd import differentiable

_AT_ONCE = 2**19  # entries of inputs that are multiplied at once, for each thread of a CPU
Product = tuple[Tensor, Tensor, Tensor | None]  # z, W and b


def linears(x: Tensor, axis: int, products: Sequence[Product]) -> tuple[Tensor, ...]:
    """Returns (x ∘ z) Wᵀ + b for each product of one input.

    Args:
        x: (B, T, D), or (T, B, D) if the batch axis is 1.
        axis: The batch axis.
        products: z (B, D), W (O, D) and b (O,) or None, of each.
    """
    if not torch.is_grad_enabled():
        return tuple(_forward(axis, x, products))
    outputs: tuple[Tensor, ...] = _Linears.apply(axis, x, *(t for part in zip(*products, strict=True) for t in part))  # type: ignore[no-untyped-call]
    return outputs


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: int, x: Tensor, *more: Any) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.save_for_backward(x, *more)
        ctx.set_materialize_grads(False)
        products = list(zip(*_thirds(more), strict=True))
        return tuple(_forward(axis, x, products))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True
            return None, *differentiable(lambda *given: _slow(ctx.axis, *given), inputs, gradients, needed)
        return None, *_backward(ctx.axis, inputs, gradients, needed)


def _forward(axis: int, x: Tensor, products: Sequence[Product]) -> list[Tensor]:
    outputs = [x.new_empty(*x.shape[:2], len(w)) for _, w, _ in products]
    for rows, product in _chunks(x, 1):
        for (z, w, b), output in zip(products, outputs, strict=True):
            scaled = torch.mul(x[rows], _part(z, axis, rows), out=product).flatten(0, 1)
            target = output[rows].flatten(0, 1)
            torch.mm(scaled, w.t(), out=target) if b is None else torch.addmm(b, scaled, w.t(), out=target)
    return outputs


def _backward(
    axis: int, inputs: Sequence[Any], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    x, *more = inputs
    zs, ws, bs = _thirds(more)
    need_ws = _thirds(needed[1:])[1]
    to_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
    to_zs, to_ws = [torch.zeros_like(z) for z in zs], [torch.zeros_like(w) for w in ws]
    parts = [(n, g.contiguous()) for n, g in enumerate(gradients) if g is not None]
    if not parts:
        return [None] * len(inputs)
    for rows, product, to_product in _chunks(x, 2):
        part = x[rows]
        for count, (n, whole) in enumerate(parts):
            z, gradient = _part(zs[n], axis, rows), whole[rows].flatten(0, 1)
            if need_ws[n]:
                scaled = torch.mul(part, z, out=product).flatten(0, 1)
                torch.addmm(to_ws[n], gradient.t(), scaled, out=to_ws[n])
            torch.mm(gradient, ws[n], out=to_product.flatten(0, 1))
            to_z = torch.mul(to_product, part, out=product).sum(1 - axis)
            if axis:
                to_zs[n].add_(to_z)
            else:
                to_zs[n][rows] = to_z
            if to_x is not None:
                to_x[rows].addcmul_(to_product, z) if count else torch.mul(to_product, z, out=to_x[rows])
    sums = {n: g.flatten(0, 1).sum(0) for n, g in parts}
    to_bs = [sums.get(n, torch.zeros_like(b)) if b is not None else None for n, b in enumerate(bs)]
    found = [to_x, *to_zs, *to_ws, *to_bs]
    return [gradient if need else None for gradient, need in zip(found, needed, strict=True)]


def _slow(axis: int, x: Tensor, *more: Any) -> tuple[Tensor, ...]:
    return tuple(F.linear(x * z.unsqueeze(1 - axis), w, b) for z, w, b in zip(*_thirds(more), strict=True))


def _thirds(tensors: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    count = len(tensors) // 3
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count :]


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
