"""The noise of a regression's targets, learnt from the errors of members on rows that they were not trained on.

The mean is learnt first, by squared errors, so that no noise stops it from being learnt.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy.special import chdtri  # type: ignore[import-untyped]
from torch import Tensor, nn

from ibnn.generators import generators_restored
from ibnn.latent import inverse_softplus
from ibnn.sklearn.ensemble import noise_inputs, stacked
from ibnn.sklearn.training import Pace, Rows, Run, train

HIDDEN = (32, 32)  # widths of the networks that predict noise
LEAST = 1e-6  # variance, in standardised units: what `Gaussian` adds to a predicted one
LR, WEIGHT_DECAY, STEPS = 5e-3, 0.1, 300
CERTAIN = 2.0  # standard errors by which a prediction of the noise has to be better than one number for all rows
DEGREES = (2.5, 3.0, 4.0, 6.0, 10.0, 20.0)  # of freedom, of the Student distributions that are tried
SCALES = 4  # Gaussians that a Student distribution is made of
FACTORS = torch.linspace(-0.4, 0.4, 33, dtype=torch.float64).exp()  # sizes of the noise that are tried
NATS = 2.0  # by which a Student distribution has to be more likely than a Gaussian one, for all rows together


class Noise(NamedTuple):
    """What held-out errors say."""

    std: Tensor  # of targets, (targets,)
    net: nn.Module | None  # predicts it from `noise_inputs`, for each member; None if it is the same for all rows
    scales: Tensor  # see `GaussianMembers.scales`


def fit_noise(rows: Rows, mean: Tensor, members: int, pace: Pace) -> Noise:
    """Fits the noise to the errors of means (n, targets), each by the member that holds the row out."""
    error = rows.y - mean
    weight = rows.weight / rows.weight.sum()
    variance = (weight[:, None] * error.square()).sum(0).clamp_min(LEAST)
    with generators_restored():
        torch.manual_seed(pace.seed)
        net = stacked(members, [rows.x.shape[1] + mean.shape[1], *HIDDEN, error.shape[1]], nn.SiLU).to(error.device)
    nn.init.zeros_(net[-1].weight)  # type: ignore[arg-type]
    net[-1].bias.data.copy_(inverse_softplus(variance))  # type: ignore[operator]
    inputs = rows._replace(x=noise_inputs(rows.x, mean), y=error)
    run = Run(net, members, inputs, _loss, pace._replace(lr=LR, weight_decay=WEIGHT_DECAY, steps=STEPS))
    constant = _loss(inverse_softplus(variance).expand_as(error), error)
    train([run])
    gain = constant - run.losses()  # (n,)
    average = float((weight * gain).sum())
    spread = float((weight * (gain - average).square()).sum().sqrt()) / math.sqrt(len(gain))
    predicted = average > CERTAIN * spread
    std = (_variance(run.answers()) if predicted else variance.expand_as(error)).sqrt()
    return Noise(variance.sqrt(), net if predicted else None, tails(error / std, weight * len(weight)))


def _variance(raw: Tensor) -> Tensor:
    return F.softplus(raw) + LEAST


def _loss(raw: Tensor, error: Tensor) -> Tensor:
    """Returns the NLL of errors, but for a constant, (…)."""
    variance = _variance(raw)
    return 0.5 * (error.square() / variance + variance.log()).mean(-1)


def tails(ratio: Tensor, weight: Tensor) -> Tensor:
    """Returns the scales of the noise that held-out errors, over their standard deviations (n, targets), ask for.

    A Student distribution is a mixture of Gaussians whose precisions have a gamma distribution; a few of its quantiles
    stand for it. One scale is returned unless heavier tails are clearly more likely.
    """
    ratio, weight = ratio.cpu().double(), weight.cpu().double()
    tried = [factor * student_scales(degrees) for degrees in (math.inf, *DEGREES) for factor in FACTORS]

    def likelihood(scales: Tensor) -> float:
        each = scales[:, None, None]
        density = torch.logsumexp(-0.5 * (ratio / each).square() - each.log(), 0) - math.log(len(scales))
        return float((weight[:, None] * density).sum()) - NATS * (len(scales) > 1)

    best: Tensor = max(tried, key=likelihood)
    return best


def student_scales(degrees: float) -> Tensor:
    """Returns standard deviations of equally likely Gaussians whose mixture is nearly a Student distribution."""
    if math.isinf(degrees):
        return torch.ones(1, dtype=torch.float64)
    middle = (torch.arange(SCALES, dtype=torch.float64) + 0.5) / SCALES
    return torch.tensor(degrees / chdtri(degrees, 1 - middle.numpy())).sqrt()
