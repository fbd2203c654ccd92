"""Sets of classes and intervals that cover the target with a stated probability.

Held-out examples show how far targets are from answers. If a new example is exchangeable with n of them, its own
distance is at most the ⌈(n + 1) · level⌉-th smallest of theirs with a probability of at least `level`, whatever the
model is worth (split conformal prediction; Vovk et al., 2005).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn import check


class Conformal(NamedTuple):
    """What held-out examples show."""

    scores: Tensor  # how far their targets were from the answers, (N,) or (N, outputs)
    classes: Tensor  # their labels, (N,); empty for numbers

    def limit(self, level: float, label: int | None = None) -> Tensor:
        """Returns the score that a new example stays within with this probability; infinity if too few were held out.

        With a label, of the examples of that class alone.

        >>> Conformal(torch.arange(1.0, 10.0), torch.zeros(0)).limit(0.9)  # the 9th of 9
        tensor(9.)
        """
        check.share("level", level, remedy="Pass level=0.9.")
        scores = self.scores if label is None else self.scores[self.classes == label]
        rank = math.ceil((len(scores) + 1) * level - 1e-9)
        if rank > len(scores):
            return torch.full_like(scores.new_empty(scores.shape[1:]), math.inf)
        return scores.sort(0).values[rank - 1]


def mass_above(probs: Tensor) -> Tensor:
    """Returns, of every class, the probability of all classes before it in the order of probability, (B, C).

    >>> mass_above(torch.tensor([[0.5, 0.2, 0.3]]))
    tensor([[0.0000, 0.8000, 0.5000]])
    """
    order = probs.argsort(stable=True, dim=1, descending=True)
    ordered = probs.gather(1, order)
    before = torch.cat([torch.zeros_like(ordered[:, :1]), ordered[:, :-1].cumsum(1)], 1)
    return torch.zeros_like(probs).scatter(1, order, before)


def none_known(what: str) -> str:
    """Says what is missing where a conformal answer is asked for without held-out labels."""
    return (
        f"{what} needs held-out scores, and this model has none. Call ibnn.fit_novelty(model, train, valid) with "
        "labels, or ibnn.fit or ibnn.calibrate with held-out data. Several heads and dense outputs store none."
    )
