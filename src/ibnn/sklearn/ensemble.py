"""An ensemble of small networks that run side by side, and the likelihood of their common answer.

A member is a whole network. All members are one module, so that one step trains and one pass asks all of them.
Outputs are (B, M, outputs), with an axis for the members.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ibnn.layers.registry import register_layer
from ibnn.likelihood import Categorical, Gaussian, Likelihood
from ibnn.likelihood.base import Temperature, Terms
from ibnn.likelihood.one_pass import ONE_PASS, OnePassCategorical, OnePassGaussian
from ibnn.prediction import GaussianPrediction

REACH = 4.0  # standardised inputs are squashed smoothly to within ± this
LEAST_SHARE = 0.5  # of the held-out variance is taken for noise, however much the members differ


class StackedLinear(nn.Module):
    """M linear layers of equal shape, one for each member: (B, M, D) to (B, M, outputs)."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        """Starts every member from weights of its own, drawn as `nn.Linear` draws them."""
        super().__init__()
        self.nodes = inputs
        bound = 1 / math.sqrt(max(inputs, 1))
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs (B, M, outputs) for inputs (B, M, D)."""
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)


register_layer(StackedLinear, nodes="nodes", fold=lambda layer, z: layer.weight * z[:, None])  # type: ignore[operator]


def stacked(members: int, sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Returns M networks of layers of these sizes, as one module."""
    layers = [m for a, b in pairwise(sizes) for m in (StackedLinear(members, a, b), activation())]
    return nn.Sequential(*layers[:-1])


class Ensemble(nn.Module):
    """M networks; for numbers each is added to a line, and may be given a second network for the target's noise."""

    gain: Tensor  # factor on the outputs of `body` before they are added to `line`, (targets,)

    def __init__(self, body: nn.Module, members: int, line: StackedLinear | None = None, gain: Any = 1.0) -> None:
        super().__init__()
        self.body, self.members, self.line = body, members, line
        self.noise: nn.Module | None = None  # predicts the noise of targets from inputs and means
        self.register_buffer("gain", torch.as_tensor(gain, dtype=torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs (B, M, outputs) for rows (B, D), or (B, M, D) if each member has rows of its own."""
        rows = x if x.dim() == 3 or not self.members else x[:, None].expand(-1, self.members, -1)
        output: Tensor = self.body(squash(rows))
        if self.line is not None:
            output = self.line(rows) + self.gain * output
        if self.noise is None:
            return output
        return torch.cat([output, self.noise(noise_inputs(rows, output))], -1)

    def single(self) -> "Ensemble":
        """Returns the first member as a network of its own, (B, D) to (B, outputs): what `distil` starts from."""
        found = Ensemble(_first(self.body), 0, self.line and _first(self.line), self.gain)
        found.noise = self.noise and _first(self.noise)
        return found


def _first(net: Any) -> Any:
    """Returns the first of networks that run side by side."""
    if isinstance(net, StackedLinear):
        layer = nn.Linear(net.nodes, net.weight.shape[2], device=net.weight.device, dtype=net.weight.dtype)
        layer.load_state_dict({"weight": net.weight[0].T, "bias": net.bias[0, 0]})
        return layer
    if isinstance(net, nn.Sequential):
        return nn.Sequential(*map(_first, net))
    return net


def squash(x: Tensor) -> Tensor:
    """Returns x where it is small, and values within ± `REACH` where it is large.

    >>> squash(torch.tensor([0.0, 0.1, 1e6], dtype=torch.float64)).round(decimals=3).tolist()
    [0.0, 0.1, 4.0]
    """
    return x / (1 + (x / REACH).square()).sqrt()


def noise_inputs(x: Tensor, mean: Tensor) -> Tensor:
    """Returns what the noise of a target is predicted from: inputs and predicted means, (…, D + targets)."""
    return torch.cat([squash(x), squash(mean.detach())], -1)


class _Members(Likelihood):
    """A mixin for likelihoods of ensembles: the members of an output (B, M, outputs) are components of one mixture."""

    def check(self, output: Tensor, target: Tensor) -> None:
        """Checks nothing: the estimator has."""

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns the means over all members."""
        members = output.shape[1]
        found = super().terms(output.flatten(0, 1), target.repeat_interleave(members, 0), temperature)  # type: ignore[safe-super]
        return found._replace(count=found.count / members, weight=found.weight / members)

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Any:
        """Returns one output (B, outputs) that stands for draws (J, B, M, outputs)."""
        return super().combine(draws.movedim(-2, 1).flatten(0, 1), temperature)  # type: ignore[safe-super]

    def surprise(self, output: Tensor) -> Tensor | None:
        """Returns the mean over members of how unsure each is, (B,)."""
        found = super().surprise(output.flatten(0, 1))
        return None if found is None else found.reshape(output.shape[:2]).mean(1)


class CategoricalMembers(_Members, Categorical):  # type: ignore[misc]
    """Labels of any number of classes: a table may have only one."""

    fewest = 1
    running = Likelihood.running  # type: ignore[assignment]

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Any:
        """Returns the prediction made of draws (1, S, B, M, classes)."""
        members = draws[0].movedim(-2, 0)  # (M, S, B, classes)
        return Categorical.running(self, members.shape[0], members.shape[1], temperature).at_once(members)


class GaussianMembers(_Members, Gaussian):
    """Numbers, with noise that was measured on rows that a member had not been trained on.

    So measured it includes the error of a single member. The mixture has the spread of the members besides, and the
    error of their mean is smaller than that of a single one, both by the variance between members. Twice that variance
    is therefore taken off the noise. Its standard deviations are multiplied by each of the `scales`, (Q,), with equal
    probability: one scale is Gaussian noise, several have heavier tails.
    """

    scales: Tensor

    def __init__(self, *, noise: Literal["learnt", "predicted"] = "learnt", outputs: int = 1) -> None:
        super().__init__(noise=noise, outputs=outputs)
        self.register_buffer("scales", torch.ones(1))

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> GaussianPrediction:
        """Returns the prediction made of draws (1, S, B, M, outputs)."""
        members = draws[0].movedim(-2, 0)  # (M, S, B, outputs)
        means, stds = self.split(members, temperature)  # (M, S, B, targets)
        measured, between = stds.square(), means.mean(1).var(0, correction=0)
        noise = (measured - 2 * between).maximum(LEAST_SHARE * measured).sqrt()
        scaled = torch.stack([scale * noise for scale in self.scales.to(noise)])  # (Q, M, S, B, targets)
        return replace(
            super().summarise(members, temperature),
            aleatoric=scaled.square().mean((0, 1, 2)),
            draw_means=means.expand_as(scaled).flatten(0, 2),
            draw_stds=scaled.flatten(0, 2),
        )


ONE_PASS.update({CategoricalMembers: OnePassCategorical, GaussianMembers: OnePassGaussian})
