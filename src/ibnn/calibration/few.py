"""FEW DRAWS: from the losses of a few draws, what those of more would be."""

import torch
from torch import Tensor

from ibnn.likelihood.base import Temperature
from ibnn.likelihood.temperature import Losses

LARGEST = 0.4  # nats per datum that a correction goes to: where draws differ more, 1 / J is no longer the law


class FewDraws:
    """Losses that answers of more draws would have.

    −log of a mean of J probabilities is too large by about c / J. The losses of both halves of some draws and of all of
    them tell c, and so the loss of any number of draws. Large corrections are damped.

    >>> import ibnn
    >>> draws = torch.randn(1, 64, 500, 3, generator=torch.Generator().manual_seed(0))
    >>> target = torch.zeros(500, dtype=torch.int64)
    >>> nll = lambda likelihood, number: float(likelihood.losses(draws[:, :number], target, 1.0)[0].mean())
    >>> [round(nll(likelihood, 8), 2) for likelihood in (ibnn.Categorical(), FewDraws(ibnn.Categorical(), 64))]
    [1.12, 1.1]
    >>> round(nll(ibnn.Categorical(), 64), 2)
    1.1
    """

    def __init__(self, likelihood: Losses, draws: int) -> None:
        """Takes the likelihood, and how many draws answers are made of."""
        self.likelihood, self.draws = likelihood, draws

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """As `Likelihood.losses`; draws (K, S, N, …) are halved by their samples first."""
        losses, counts = self.likelihood.losses(draws, target, temperature)
        number = draws.shape[0] * draws.shape[1]
        if not 1 < number < self.draws:
            return losses, counts
        flat = draws.transpose(0, 1).flatten(0, 1)[None]
        half = number // 2 if number < 4 or len(draws) % 2 else number // 4 * 2  # mirror images stay together
        first, second = (flat[:, part] for part in (slice(0, half), slice(half, 2 * half)))
        both = [self.likelihood.losses(part, target, temperature)[0] for part in (first, second)]
        gap = (both[0] + both[1]) / 2 - losses
        weight = (1 / number - 1 / self.draws) / (1 / half - 1 / number)
        return losses - weight * gap / (1 + gap / (LARGEST * counts.clamp_min(1e-9))), counts


class Completed(FewDraws):
    """Losses of draws (K, S, N, …) of which some rows have all; the others have a few again and again."""

    def __init__(self, likelihood: Losses, draws: int, samples: int) -> None:
        """Takes the likelihood, how many draws answers are made of, and how many of each component are not repeated."""
        super().__init__(likelihood, draws)
        self.samples = samples

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """As `Likelihood.losses`: those of all draws, or of as many, where there are few."""
        losses, counts = self.likelihood.losses(draws, target, temperature)
        repeated = (draws[:, self.samples :] == draws[:, : -self.samples]).transpose(0, 2).flatten(1).all(1)
        if not repeated.any() or len(losses) != len(target):
            return losses, counts
        foreseen = super().losses(draws[:, : self.samples], target, temperature)[0]
        return torch.where(repeated, foreseen, losses), counts
