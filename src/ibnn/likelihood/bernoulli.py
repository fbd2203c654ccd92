"""YES OR NO: independent binary targets."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.errors import complaint
from ibnn.likelihood.base import Temperature, check_shape, log_mean
from ibnn.likelihood.running import Discrete, Split
from ibnn.prediction import BernoulliPrediction, Prediction


class Bernoulli(Discrete):
    """Independent yes/no targets by sigmoid; targets (0 or 1) have the shape of the output.

    >>> round(Bernoulli().nll(torch.zeros(2, 3), torch.ones(2, 3)).item(), 4)  # log 2
    0.6931
    """

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if targets are not in [0, 1] or not of the output's shape."""
        check_shape(output, target)
        if not bool((target >= 0).all() and (target <= 1).all()):  # nor NaN
            got = f"values from {target.min():g} to {target.max():g}"
            raise ValueError(complaint("y", "in [0, 1]", got, "Pass 0 for no and 1 for yes."))

    def nll(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns the binary cross-entropy, mean over all labels."""
        output = self._tempered(output, temperature)
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns the logit of the mean probability, of the output's shape."""
        draws = self._tempered(draws, temperature)
        return log_mean(F.logsigmoid(draws)) - log_mean(F.logsigmoid(-draws))

    def _log_probs(self, draws: Tensor, temperature: Temperature) -> Tensor:
        """Returns log-probabilities of yes and no, (K, S, B, …, 2)."""
        draws = self._tempered(draws, temperature)
        return torch.stack([F.logsigmoid(draws), F.logsigmoid(-draws)], dim=-1)

    def _prediction(self, logs: Tensor, split: Split, error: Tensor) -> Prediction:
        yes, no = logs.unbind(-1)
        return BernoulliPrediction(yes.exp(), yes, *split, error[..., 0], no)

    def _datum_losses(self, draws: Tensor, target: Tensor, temperature: Temperature) -> tuple[Tensor, Tensor]:
        losses = _losses(self.summarise(draws, temperature), target)
        return losses, torch.ones_like(losses)

    def score(self, prediction: BernoulliPrediction, target: Tensor) -> dict[str, float]:
        """Returns NLL and error, per label."""
        check_shape(prediction.probs, target)
        error = (prediction.labels != (target > 0.5)).double().mean().item()
        return {"nll": _losses(prediction, target).mean().item(), "error": error}


def _losses(prediction: Prediction, target: Tensor) -> Tensor:
    """Returns −log p of each label."""
    assert isinstance(prediction, BernoulliPrediction)
    yes = target.to(prediction.probs.dtype)
    return -(yes * prediction.log_probs + (1 - yes) * prediction.log_complements)
