"""One step of each sampler, as pure functions of tensors, (K, nodes), chain by chain.

All sample exp(−U) for the U and gradient they are given. `scale` (nodes,) is the preconditioner: the inverse mass, best
the posterior variance of each node; `noise` (nodes,) is the variance of the gradient, 0 for an exact one. It heats a
chain, so as much noise less is injected.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[Tensor, bool], tuple[Tensor, Tensor]]  # z, whether it is the last → U (K,), gradient (K, nodes)


def underdamped(
    z: Tensor, v: Tensor, gradient: Tensor, scale: Tensor, step: float, friction: float, normal: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """SGHMC, as a splitting: kick by the gradient, half a drift, friction and noise, half a drift (BAOAB).

    Of a Gaussian, with exact gradients, the distribution of z is right for every stable step, h √(m λ) < 2. `normal`
    holds standard normals, `noise` the variance of the gradient; h is `step`, γ `friction`, m `scale`.
    """
    kept = math.exp(-friction * step)
    v = v - step * scale * gradient
    z = z + 0.5 * step * v
    variance = ((1 - kept**2) * scale - (kept * step * scale).square() * noise).clamp_min(0)
    v = kept * v + variance.sqrt() * normal
    return z + 0.5 * step * v, v


def leapfrog(
    state: tuple[Tensor, Tensor], gradient: Tensor, energy: Gradient, scale: Tensor, step: float, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns z, v, U and its gradient at the end of a trajectory of HMC.

    >>> at = (torch.ones(1, 1), torch.zeros(1, 1))
    >>> z, *_ = leapfrog(at, torch.ones(1, 1), lambda z, last: (z[:, 0] ** 2 / 2, z), torch.ones(1), 0.01, 314)
    >>> round(z.item(), 3)  # half a period of z″ = −z
    -1.0
    """
    z, v = state
    potential = torch.zeros(len(z))
    for number in range(1, steps + 1):
        v = v - 0.5 * step * scale * gradient
        z = z + step * v
        potential, gradient = energy(z, number == steps)
        v = v - 0.5 * step * scale * gradient
    return z, v, potential, gradient


def kinetic(v: Tensor, scale: Tensor) -> Tensor:
    """Returns ½ Σ v²/m, (K,), in double precision."""
    return 0.5 * (v.double().square() / scale.double()).sum(1)
