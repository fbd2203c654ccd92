"""Helpers of automatic differentiation: the inverse of softplus, a factor on gradients, and which tensors are plain."""

from typing import Any

import torch
from torch import Tensor, nn

# Classes whose operations are torch's own. Others (fake, distributed) do not go through kernels, nor are they kept.
PLAIN: set[type] = {Tensor, nn.Parameter}


def inverse_softplus(y: Tensor) -> Tensor:
    """Returns ρ with softplus(ρ) = y ≥ 0.

    >>> import torch.nn.functional as F
    >>> torch.allclose(F.softplus(inverse_softplus(torch.tensor([0.05, 3.0]))), torch.tensor([0.05, 3.0]))
    True
    """
    return y + torch.log(-torch.expm1(-y))


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])  # what changes with x is not scaled, only what is learnt from it


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Returns x; the gradient that comes back through it is multiplied by `scale`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_gradient(x, 3.0).sum().backward()
    >>> x.grad
    tensor([3., 3.])
    """
    scaled: Tensor = x if scale == 1.0 or not torch.is_grad_enabled() else _ScaleGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled
