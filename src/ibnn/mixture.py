"""The mixture of K equally weighted diagonal Gaussians, its KLs to the prior, its entropy bound.

Pure functions of tensors. A `Mixture` is joint over all layers (their nodes concatenated along one axis D), because one
component index holds for the whole network: q(z) = 1/K Σₖ N(z; μₖ, diag σₖ²), prior p(z) = N(1, s²), with s
a number, or one for every node, (D,).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

KLKind = Literal["mean", "components", "pairwise", "montecarlo"]


class Mixture(NamedTuple):
    """K diagonal Gaussians over D nodes, equally weighted."""

    mean: Tensor  # μ (K, D)
    std: Tensor  # σ (K, D)

    def draw(self, component: Tensor, noise: Tensor) -> Tensor:
        """Returns z = μₖ + σₖ ε, (R, D), for components k (R,) and noise ε (R, D)."""
        # index_select, not indexing: its backward is an index_add, several times faster on CPU
        mean, std = self.mean.index_select(0, component), self.std.index_select(0, component)
        return torch.addcmul(mean, std, noise.to(mean.dtype))  # (R, D)

    def log_prob(self, z: Tensor) -> Tensor:
        """Returns the log density of the mixture at rows z (R, D), joint over all nodes."""
        deviation = (z[:, None] - self.mean) / self.std  # (R, K, D)
        log_normal = -0.5 * deviation.square() - self.std.log() - 0.5 * math.log(2 * math.pi)
        return log_normal.sum(-1).logsumexp(-1) - math.log(len(self.mean))


def _kl_gaussian(mean: Tensor, std: Tensor, prior_std: Tensor | float) -> Tensor:
    """KL(N(mean, std²) ‖ N(1, s²)) per node."""
    ratio = std / prior_std  # square and logarithm keep this one tensor for the backward pass
    return 0.5 * (ratio.square() + ((mean - 1) / prior_std).square() - 1) - ratio.log()


def kl_mean(q: Mixture, prior_std: Tensor | float) -> Tensor:
    """The paper's KL: of the single Gaussian q̂ = N(mean of μₖ, Σₖ σₖ² / K²) to the prior.

    A surrogate: it ignores the spread of the means, so it does not bound the evidence.

    >>> q = Mixture(torch.ones(2, 3), torch.full((2, 3), 2.0**0.5))
    >>> kl_mean(q, prior_std=1.0).item()  # without data its optimum is σₖ = √K s, not s
    0.0
    """
    components = len(q.mean)
    variance = q.std.square().sum(0) / components**2
    return _kl_gaussian(q.mean.mean(0), variance.sqrt(), prior_std).sum()


def kl_components(q: Mixture, prior_std: Tensor | float) -> Tensor:
    """1/K Σₖ KL(qₖ ‖ p): by convexity an upper bound of the mixture's KL."""
    return _kl_gaussian(q.mean, q.std, prior_std).sum(-1).mean()


def _log_overlap(q: Mixture) -> Tensor:
    """Returns meanᵢ log 1/K Σⱼ exp(−BDᵢⱼ), in [−log K, 0]; BD are Bhattacharyya distances of the components."""
    components = len(q.mean)
    i, j = torch.triu_indices(components, components, offset=1, device=q.mean.device)  # every pair once
    variance = q.std.square()
    summed = variance[i] + variance[j]  # (pairs, D)
    distance = (
        0.25 * (q.mean[i] - q.mean[j]).square() / summed + 0.5 * (summed / (2 * q.std[i] * q.std[j])).log()
    ).sum(-1)
    affinity = torch.zeros(components, components, dtype=distance.dtype, device=distance.device)
    affinity = affinity.index_put((torch.cat([i, j]), torch.cat([j, i])), -distance.repeat(2))
    return (affinity.logsumexp(-1) - math.log(components)).mean()


def entropy_bound(q: Mixture) -> Tensor:
    """Ĥ, the Kolchinsky-Tracey lower bound of the mixture's entropy with Bhattacharyya distances.

    >>> q = Mixture(torch.ones(1, 1), torch.ones(1, 1))  # one component: the bound is the entropy, ½ log 2πe
    >>> round(entropy_bound(q).item(), 4)
    1.4189
    """
    return (q.std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean() - _log_overlap(q)


def kl_pairwise(q: Mixture, prior_std: Tensor | float) -> Tensor:
    """meanₖ cross-entropy(qₖ, p) − Ĥ: an upper bound of the mixture's KL, tighter than `kl_components`."""
    # The cross-entropies less the components' own entropies are the components' KLs.
    return kl_components(q, prior_std) + _log_overlap(q)


def kl_montecarlo(q: Mixture, prior_std: Tensor | float, noise: Tensor) -> Tensor:
    """Unbiased estimate of the mixture's KL: mean of log q(z) − log p(z) over equally many draws of each component.

    Row i of the noise, (n·K, D), draws from component i mod K.
    """
    component = torch.arange(len(noise), device=noise.device) % len(q.mean)
    z = q.draw(component, noise)
    prior = Mixture(torch.ones_like(q.mean[:1]), torch.ones_like(q.std[:1]) * prior_std)
    return (q.log_prob(z) - prior.log_prob(z)).mean()


CLOSED_FORMS: dict[str, Callable[[Mixture, Tensor | float], Tensor]] = {
    "mean": kl_mean,
    "components": kl_components,
    "pairwise": kl_pairwise,
}
