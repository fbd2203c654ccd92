"""Puts the outputs of several models on one scale, so that one likelihood reads them all: see `ibnn.Ensemble`."""

import copy

import torch
from torch import Tensor

from ibnn.likelihood.base import Likelihood, Temperature
from ibnn.likelihood.gaussian import Gaussian
from ibnn.likelihood.heads import Heads


class ExplicitGaussian(Gaussian):
    """Numbers whose mean and log standard deviation are both in the output, (B, …, 2)."""

    def __init__(self) -> None:
        super().__init__(noise="predicted")

    @property
    def options(self) -> dict[str, object]:
        """None: all is in the output."""
        return {}

    def split(self, output: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation."""
        return output[..., 0], output[..., 1].exp() * self._resolve(temperature)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if targets do not fit the means."""
        Gaussian().check(output[..., 0], target)


def mixing(likelihood: Likelihood) -> Likelihood:
    """Returns the likelihood, at temperature 1, of what `on_one_scale` makes of outputs."""
    if isinstance(likelihood, Heads):
        return Heads({name: mixing(head) for name, head in likelihood.each()})
    if isinstance(likelihood, Gaussian) and not hasattr(likelihood, "packed"):
        return ExplicitGaussian()
    own = copy.deepcopy(likelihood)
    own.set_temperature(1.0)
    return own


def on_one_scale(draws: Tensor, own: Likelihood, mixed: Likelihood) -> Tensor:
    """Returns outputs (J, B, …) of a likelihood as `mixing` of it reads them: at temperature 1, with their noise."""
    if isinstance(own, Heads) and isinstance(mixed, Heads):
        parts, heads = own._parts(draws, "output", 1), dict(mixed.each())
        made = {name: on_one_scale(parts[name], head, heads[name]).flatten(0, 1) for name, head in own.each()}
        return mixed._join(made, "output").unflatten(0, draws.shape[:2])  # type: ignore[no-any-return]
    if isinstance(mixed, ExplicitGaussian) and isinstance(own, Gaussian):
        mean, std = own.split(draws)
        return torch.stack([mean, std.log()], -1)
    return draws if isinstance(own, Gaussian) else draws / own.temperature
