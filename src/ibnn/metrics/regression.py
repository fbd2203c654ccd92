"""REGRESSION: error of a mean, and quality of intervals and of whole predictive distributions."""

import math

import torch
from torch import Tensor

from ibnn.metrics.checks import check_level, check_numbers, problem


def _targets(target: Tensor, **others: Tensor) -> list[Tensor]:
    """Checks tensors of numbers that must have the target's shape."""
    for name, values in others.items():
        if values.shape != target.shape or not target.numel():
            got = f"{tuple(values.shape)} and {tuple(target.shape)}"
            raise problem("target", f"non-empty, of the shape of {name}", got, f"pass target.view_as({name})")
        check_numbers(name, values)
    check_numbers("target", target)
    return [values.detach().cpu() for values in (target, *others.values())]


def rmse(mean: Tensor, target: Tensor) -> float:
    """Root mean squared error.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0]))  # of 3 and 4
    3.535533905029297
    """
    target, mean = _targets(target, mean=mean)
    return (mean - target).square().mean().sqrt().item()


def coverage(low: Tensor, high: Tensor, target: Tensor) -> float:
    """Share of targets inside their intervals, ends included.

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    0.5
    """
    target, low, high = _targets(target, low=low, high=high)
    return ((low <= target) & (target <= high)).to(target.dtype).mean().item()


def interval_score(low: Tensor, high: Tensor, target: Tensor, level: float = 0.9) -> float:
    """Mean width of central intervals, plus 2 / (1 - level) times the distance of each target outside; lower is better.

    Its expectation is lowest for the true quantiles (Gneiting & Raftery, 2007).

    >>> round(interval_score(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.5]), level=0.9), 6)  # 1 and 1 + 20 / 2
    6.0
    """
    check_level(level)
    target, low, high = (values.double() for values in _targets(target, low=low, high=high))
    outside = (low - target).clamp_min(0) + (target - high).clamp_min(0)
    return (high - low + 2 / (1 - level) * outside).mean().item()


def crps(means: Tensor, stds: Tensor, target: Tensor) -> float:
    """Continuous ranked probability score of equally weighted Gaussians, E|X - y| - E|X - X'| / 2; lower is better.

    In closed form (Grimit et al., 2006). For one Gaussian it is an absolute error that uncertainty softens.

    Args:
        means: Mean of each draw, (J, N, ...): `prediction.draw_means`.
        stds: Standard deviation of each draw, (J, N, ...): `prediction.draw_stds`.
        target: (N, ...).

    >>> round(crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1)), 4)  # (sqrt 2 - 1) / sqrt pi
    0.2337
    """
    if means.shape != stds.shape or not len(means) or not bool((stds > 0).all()):
        got = f"shapes {tuple(means.shape)} and {tuple(stds.shape)}, or a std that is not positive"
        raise problem("stds", "positive, of the shape of means", got, "pass prediction.draw_stds")
    _targets(target, means=means[0], stds=stds[0])
    means, stds, target = (values.detach().cpu().double() for values in (means, stds, target))
    apart = torch.zeros_like(target)
    for mean, std in zip(means, stds, strict=True):  # (J, N, ...) at a time
        apart += _mean_distance(means - mean, (stds.square() + std.square()).sqrt()).mean(0)
    return (_mean_distance(means - target, stds).mean(0) - apart / (2 * len(means))).mean().item()


def _mean_distance(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of X ~ N(mean, std²)."""
    ratio = mean / std
    return mean * torch.erf(ratio / math.sqrt(2)) + std * math.sqrt(2 / math.pi) * (-0.5 * ratio.square()).exp()
