"""(x ∘ z) Wᵀ + b with a z for each row, and its gradients, as one operation, which keeps x and not x ∘ z."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.kernels.autograd import differentiable


def project(
    layer: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, axis: int, units: object = None
) -> Tensor | None:
    """Returns (x ∘ z) Wᵀ + b for x (…, D) and z (R, D), a row for each entry of the batch axis."""
    if x.shape[-1] != z.shape[1] or axis == x.dim() - 1:
        return None  # the layer's own forward says what is wrong
    shape = [1] * x.dim()
    shape[axis], shape[-1] = z.shape
    output: Tensor = _Linear.apply(x, z.view(shape), weight, bias)  # type: ignore[no-untyped-call]
    return output.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """Returns (N, O) and no view, so that what follows may change it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, z, weight, bias)
        return _slow(x, z, weight, bias)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), inputs, needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True
            return tuple(differentiable(_slow, inputs, gradients, needed))
        x, z, weight, _ = inputs
        to_bias = gradient.sum(0) if needed[3] else None
        to_weight = torch.mm(gradient.t(), (x * z).flatten(0, -2)) if needed[2] else None
        if not (needed[0] or needed[1]):
            return None, None, to_weight, to_bias
        to_product = torch.mm(gradient, weight).view(x.shape)
        to_z = (to_product * x).sum_to_size(z.shape) if needed[1] else None
        return to_product.mul_(z) if needed[0] else None, to_z, to_weight, to_bias


def _slow(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    return (F.linear((x * z).flatten(0, -2), weight, bias),)
