"""Ranks of scores among those of held-out inputs, and the conformal p-values that they give.

If a new input is exchangeable with n held-out ones, p = (1 + number of held-out scores at or above its own) / (n + 1)
is at most α with a probability of at most α, for any score and any n; p is never below 1 / (n + 1).
"""

import torch
from torch import Tensor

_ROUNDING = 1e-5  # share of a score that counts as a tie
_TAIL = 0.1  # share of the highest scores that tells how fast the tail falls


def at_or_above(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns how many of the sorted scores are no lower than each score, up to rounding: that depends on the batch."""
    least = scores * (1 - _ROUNDING * scores.sign())  # not a difference: infinity stays what it is
    if torch.compiler.is_exporting():  # other runtimes know no searchsorted
        return (sorted_scores.unsqueeze(-2) >= least.unsqueeze(-1)).sum(-1)
    return sorted_scores.shape[-1] - torch.searchsorted(sorted_scores, least.contiguous())


def p_values(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns the conformal p-values of scores, of their shape; ties count against an input.

    >>> p_values(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 4.0]))
    tensor([1.0000, 0.7500, 0.2500])
    """
    return (1 + at_or_above(sorted_scores, scores)) / (sorted_scores.shape[-1] + 1)


def log_tail(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns log p, continued beyond the highest score by an exponential tail, so that far inputs still differ.

    The tail falls by e for every mean excess of the highest tenth of the scores over the lowest of them.

    >>> log_tail(torch.arange(20.0), torch.tensor([19.0, 20.0, 21.0])).exp()  # mean excess 1
    tensor([0.0952, 0.0175, 0.0064])
    """
    p_value = p_values(sorted_scores, scores)
    top = sorted_scores[..., -max(int(sorted_scores.shape[-1] * _TAIL), 2) :]
    excess = (top - top[..., :1]).sum(-1, keepdim=True) / (top.shape[-1] - 1)
    tiny = torch.finfo(scores.dtype).tiny ** 0.5
    excess = excess.clamp_min(tiny).maximum(1e-6 * top[..., -1:].abs())
    highest = top[..., -1:]
    beyond = torch.where(scores > highest + _ROUNDING * highest.abs(), scores - highest, 0.0)  # not by rounding
    return p_value.log() - beyond / excess
