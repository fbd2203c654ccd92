"""Likelihoods of networks that answer in one pass: their output holds the answer itself, with its epistemic share.

Each class says what the last axis of its packed output holds. Of outputs with several draws, such as those of an
ensemble of such networks, the answers are mixed.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ibnn.errors import complaint
from ibnn.likelihood.base import Likelihood, Temperature, full
from ibnn.likelihood.categorical import Bernoulli, Categorical, Discrete
from ibnn.likelihood.gaussian import Gaussian
from ibnn.likelihood.heads import Heads
from ibnn.likelihood.mixing import ExplicitGaussian
from ibnn.likelihood.running import entropy
from ibnn.prediction import GaussianPrediction, Prediction

FLOOR = 1e-12  # of variances and probabilities in losses


class OnePass(Likelihood):
    """What the likelihoods of packed outputs share.

    Each has `packed`, which joins a network's output with log-temperatures and epistemic shares, one for each datum;
    `teaching`, which returns what a student learns of an answer, the epistemic share last; and `apart`, the KL of what
    was taught to packed outputs, (B, …), in nats per datum.
    """

    def features(self, output: Tensor) -> Tensor:
        """Returns a network's output (B, …) with its classes or numbers in the last axis."""
        return output if output.dim() > 1 else output[:, None]

    def data(self, output: Tensor, predicted: bool) -> Tensor:
        """Returns a part of a network's output that has one number for each datum; see `Place.predicted`."""
        return output.chunk(2, -1)[0] if predicted else output


def _of_scores(name: str, leading: int = 0) -> Any:
    """Returns a method of the likelihood without shares, for packed outputs with so many axes before the batch's."""

    def method(self: Any, packed: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(_Probabilities, self), name)(self._split(packed, leading)[0], *args, **kwargs)

    return method


class _Probabilities(OnePass, Discrete):
    """Probabilities whose epistemic share is known. A class has `_split`, which returns scores and shares."""

    _split: Any
    check, terms, combine = _of_scores("check"), _of_scores("terms"), _of_scores("combine", 1)
    surprise = _of_scores("surprise")
    running = Likelihood.running  # type: ignore[assignment]  # holds all outputs

    def apart(self, packed: Tensor, taught: tuple[Tensor, ...]) -> Tensor:
        """Returns the KL of what was taught, in nats per datum."""
        logs, target = self._log_probs(self._split(packed)[0][None, None], 1.0)[0, 0], taught[0]
        return (target * (target.clamp_min(FLOOR).log() - logs)).sum(-1)

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns the answer in packed outputs (K, S, B, …); of several, the answer of their mixture."""
        logits, share = self._split(draws, 2)
        logs = self._log_probs(logits, temperature)  # (K, S, B, …, C)
        aleatoric = ((1 - share) * entropy(logs.exp())).mean((0, 1))
        logs = (logs.flatten(0, 1).logsumexp(0) - math.log(math.prod(draws.shape[:2]))).clamp_max(0)
        unsplit = (entropy(logs.exp()) - aleatoric).clamp_min(0)
        answer: Any = self._prediction(logs, (aleatoric, unsplit, unsplit), torch.full_like(logs, math.nan))
        found: Prediction = replace(answer, between=None, within=None, unsplit=unsplit)
        return found


class OnePassCategorical(_Probabilities, Categorical):
    """Classes, with the epistemic share as one score more after the last class."""

    losses = _of_scores("losses", 2)

    def features(self, output: Tensor) -> Tensor:
        """Returns scores with the classes last."""
        return output.movedim(self.class_dim(output), -1)

    def data(self, output: Tensor, predicted: bool) -> Tensor:
        """Returns the scores of the first class."""
        return output.select(self.class_dim(output), 0)

    def packed(self, output: Tensor, log_temperature: Tensor, share: Tensor) -> Tensor:
        """Joins scores (B, …, C) over their temperatures with shares."""
        dim = self.class_dim(output)
        return torch.cat([full(output) / log_temperature.exp().unsqueeze(dim), share.unsqueeze(dim)], dim)

    def _split(self, packed: Tensor, leading: int = 0) -> tuple[Tensor, Tensor]:
        dim = self._from_end(packed.dim() - leading)
        return packed.narrow(dim, 0, packed.shape[dim] - 1), packed.select(dim, -1)

    def teaching(self, answer: Any) -> tuple[Tensor, ...]:
        """Returns probabilities, classes last, and the epistemic share."""
        return answer.probs.movedim(answer.axis, -1), share_of(answer)


class OnePassBernoulli(_Probabilities, Bernoulli):
    """Yes/no labels, (B, …, 2): score and epistemic share of each."""

    def packed(self, output: Tensor, log_temperature: Tensor, share: Tensor) -> Tensor:
        """Stacks scores over their temperatures and shares, (B, …, 2)."""
        return torch.stack([full(output) / log_temperature.exp(), share], -1)

    def _split(self, packed: Tensor, leading: int = 0) -> tuple[Tensor, Tensor]:
        return packed[..., 0], packed[..., 1]

    def teaching(self, answer: Any) -> tuple[Tensor, ...]:
        """Returns the probabilities of yes and no, and the epistemic share."""
        return torch.stack([answer.probs, answer.log_complements.exp()], -1), share_of(answer)


class OnePassGaussian(OnePass, ExplicitGaussian):
    """Numbers, (B, …, 3): mean, log of the total standard deviation, and epistemic share of each.

    `location` and `scale` are the units of the network's output; packed outputs are in units of the targets.
    """

    def packed(self, output: Tensor, log_temperature: Tensor, share: Tensor) -> Tensor:
        """Stacks means, log deviations and shares, (B, …, 3)."""
        output = full(output)
        location, scale = self.location.to(output), self.scale.to(output)
        if output.shape != log_temperature.shape:  # the network predicts the noise
            output, raw = output.chunk(2, -1)
            log_temperature = log_temperature + 0.5 * (torch.nn.functional.softplus(raw) + 1e-6).log()
        return torch.stack([location + scale * output, log_temperature + scale.log(), share], -1)

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> GaussianPrediction:
        """Returns the answer in packed outputs (K, S, B, …); of several, the answer of their mixture."""
        means, stds = (part.flatten(0, 1) for part in self.split(draws, temperature))
        share, variance = draws[..., 2].flatten(0, 1), stds.square()
        return GaussianPrediction(
            mean=means.mean(0),
            aleatoric=((1 - share) * variance).mean(0),
            between=None,
            within=None,
            standard_error=torch.full_like(means[0], math.nan),
            draw_means=means,
            draw_stds=stds,
            unsplit=(share * variance).mean(0) + means.var(0, correction=0),
        )

    def teaching(self, answer: Any) -> tuple[Tensor, ...]:
        """Returns mean, total variance and epistemic share."""
        return answer.mean, answer.variance, share_of(answer)

    def apart(self, packed: Tensor, taught: tuple[Tensor, ...]) -> Tensor:
        """Returns the KL of the Gaussian of the taught mean and variance, in nats per number."""
        log_variance, variance = 2 * packed[..., 1], taught[1].clamp_min(FLOOR)
        ratio = (variance + (taught[0] - packed[..., 0]).square()) * (-log_variance).exp()
        return 0.5 * (ratio - 1 + log_variance - variance.log())


def share_of(answer: Any) -> Tensor:
    """Returns the epistemic share of an answer's uncertainty, in [0, 1]."""
    share: Tensor = answer.epistemic / answer.total.clamp_min(FLOOR)
    return share.clamp(0, 1)


ONE_PASS: dict[type[Likelihood], type[Likelihood]]
ONE_PASS = {Categorical: OnePassCategorical, Bernoulli: OnePassBernoulli, Gaussian: OnePassGaussian}
SAVED: tuple[type[Likelihood], ...] = (*ONE_PASS, *ONE_PASS.values(), ExplicitGaussian)  # that files can name


def one_pass(likelihood: Likelihood) -> Likelihood:
    """Returns the likelihood of packed outputs of the same targets, at temperature 1; raises for one of your own."""
    if isinstance(likelihood, Heads):
        return Heads({name: one_pass(head) for name, head in likelihood.each()})
    if type(likelihood) not in ONE_PASS:
        got, remedy = type(likelihood).__name__, "Use one of these, or Heads of them."
        raise TypeError(complaint("likelihood", "Categorical, Bernoulli or Gaussian", got, remedy))
    if isinstance(likelihood, Gaussian):
        made = OnePassGaussian()
        made.location, made.scale = likelihood.location.clone(), likelihood.scale.clone()
        return made
    weight = {"weight": likelihood.weight} if isinstance(likelihood, Categorical) else {}
    return ONE_PASS[type(likelihood)](**likelihood.options, **weight)
