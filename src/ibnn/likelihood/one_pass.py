"""Likelihoods of networks that answer in one pass: their output holds the answer itself, with its epistemic share.

The last axis of a packed output holds, for each place: the class scores and the share (Categorical); the score and the
share (Bernoulli); or the mean, the log of the total deviation and the share (Gaussian). Of outputs with several draws,
such as those of an ensemble of such networks, the answers are mixed.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.likelihood.base import Likelihood, Temperature, Terms, full
from ibnn.likelihood.categorical import Bernoulli, Categorical, Discrete
from ibnn.likelihood.gaussian import Gaussian
from ibnn.likelihood.heads import Heads
from ibnn.likelihood.mixing import ExplicitGaussian
from ibnn.likelihood.running import entropy
from ibnn.prediction import GaussianPrediction, Prediction

FLOOR = 1e-12  # of variances and probabilities in losses


class OnePass(Likelihood):
    """What the likelihoods of packed outputs share."""

    def packed(self, output: Tensor, log_temperature: Tensor, share: Tensor) -> Tensor:
        """Joins a network's output with log-temperatures and epistemic shares, (B, …) each: one for each datum."""
        raise NotImplementedError

    def teaching(self, answer: Any) -> tuple[Tensor, ...]:
        """Returns what a student learns of an answer: tensors with the batch first, the epistemic share last."""
        raise NotImplementedError

    def apart(self, packed: Tensor, taught: tuple[Tensor, ...]) -> Tensor:
        """Returns the KL of what was taught to packed outputs, (B, …), in nats per datum."""
        raise NotImplementedError


class _Probabilities(OnePass, Discrete):
    """Probabilities whose epistemic share is known; `axis` of the share is that of the classes."""

    def _split(self, packed: Tensor, leading: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the logits, of the shape that the network without a share has, and the shares, (…, B, …)."""
        raise NotImplementedError

    def _logs(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities (B, …, C) at the temperature 1, and the shares, of packed outputs (B, …)."""
        logits, share = self._split(packed)
        return self._log_probs(logits[None, None], 1.0)[0, 0], share

    def apart(self, packed: Tensor, taught: tuple[Tensor, ...]) -> Tensor:
        """Returns the KL of what was taught, in nats per datum."""
        logs, target = self._logs(packed)[0], taught[0]
        return (target * (target.clamp_min(FLOOR).log() - logs)).sum(-1)

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns the answer in packed outputs (K, S, B, …); of several, the answer of their mixture."""
        logits, share = self._split(draws, 2)
        logs = self._log_probs(logits, temperature)  # (K, S, B, …, C)
        aleatoric = ((1 - share) * entropy(logs.exp())).mean((0, 1))
        logs = (logs.flatten(0, 1).logsumexp(0) - math.log(math.prod(draws.shape[:2]))).clamp_max(0)
        unsplit = (entropy(logs.exp()) - aleatoric).clamp_min(0)
        error = torch.full_like(logs, math.nan)
        answer: Any = self._prediction(logs, (aleatoric, unsplit, unsplit), error)
        found: Prediction = replace(answer, between=None, within=None, unsplit=unsplit)
        return found

    def running(self, components: int, samples: int, temperature: Temperature = None) -> Any:
        """Returns what holds all outputs."""
        return Likelihood.running(self, components, samples, temperature)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if targets do not fit the answers."""
        super().check(self._split(output)[0], target)  # type: ignore[safe-super]

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns the loss of the probabilities; the share has no part in it."""
        return super().terms(self._split(output)[0], target, temperature)  # type: ignore[safe-super]

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Any:
        """Returns the probabilities as the network without a share does."""
        return super().combine(self._split(draws, 1)[0], temperature)  # type: ignore[safe-super]

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the losses of the mixture; see `Likelihood.losses`."""
        return super().losses(self._split(draws, 2)[0], target, temperature)

    def surprise(self, output: Tensor) -> Any:
        """Returns how unsure the probabilities are."""
        return super().surprise(self._split(output)[0])


class OnePassCategorical(_Probabilities, Categorical):
    """Classes, with the epistemic share as one score more after the last class."""

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
    """Numbers, (B, …, 3): mean, log of the total standard deviation, and epistemic share of each."""

    def packed(self, output: Tensor, log_temperature: Tensor, share: Tensor) -> Tensor:
        """Stacks means, log deviations and shares, (B, …, 3); `output` holds mean and standard deviation, (2, B, …)."""
        mean, std = output
        return torch.stack([mean, std.log() + log_temperature, share], -1)

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> GaussianPrediction:
        """Returns the answer in packed outputs (K, S, B, …); of several, the answer of their mixture."""
        (means, stds), share = (part.flatten(0, 1) for part in self.split(draws, temperature)), draws[..., 2]
        share, variance = share.flatten(0, 1), stds.square()
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


def share_loss(share_logit: Tensor, taught: Tensor) -> Tensor:
    """Returns the cross-entropy of epistemic shares, (B, …)."""
    return F.binary_cross_entropy_with_logits(share_logit, taught, reduction="none")


ONE_PASS: dict[type[Likelihood], type[OnePass]] = {
    Categorical: OnePassCategorical,
    Bernoulli: OnePassBernoulli,
    Gaussian: OnePassGaussian,
}

SAVED: tuple[type[Likelihood], ...] = (*ONE_PASS, *ONE_PASS.values(), ExplicitGaussian)  # that files can name


def one_pass(likelihood: Likelihood) -> Likelihood | None:
    """Returns the likelihood of packed outputs of the same targets, at temperature 1; None for those of your own."""
    if isinstance(likelihood, Heads):
        heads = {name: one_pass(head) for name, head in likelihood.each()}
        return None if None in heads.values() else Heads({n: head for n, head in heads.items() if head is not None})
    if type(likelihood) in (Gaussian, ExplicitGaussian):
        return OnePassGaussian()
    if type(likelihood) not in ONE_PASS:
        return None
    weight = {"weight": likelihood.weight} if isinstance(likelihood, Categorical) else {}
    return ONE_PASS[type(likelihood)](**likelihood.options, **weight)
