"""RANKS: conformal p-values. An input is as novel as the rank of its score among those of held-out inputs.

If a new input is exchangeable with n held-out ones, p = (1 + number of held-out scores at or above its own) / (n + 1)
is at most α with a probability of at most α, for any score and any n; p is never below 1 / (n + 1).
"""

import math

import torch
from torch import Tensor

_ROUNDING = 1e-5  # share of a score that counts as a tie
_TAIL = 0.1  # share of the highest scores that tells how fast the tail falls


def p_values(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns the conformal p-values of scores, of their shape; ties count against an input.

    >>> p_values(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 4.0]))
    tensor([1.0000, 0.7500, 0.2500])
    """
    return (1 + _at_or_above(sorted_scores, scores)) / (sorted_scores.shape[-1] + 1)


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
    return p_value.log() - _beyond(scores, top[..., -1:]) / excess


def cautious(p_value: Tensor, sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns log p of scores whose p-values are known, continued by as heavy a tail as the highest scores allow.

    The highest tenth of the scores, over the lowest of them, have a generalised Pareto tail, whose shape is estimated
    by probability-weighted moments (Hosking and Wallis, 1987; at least 0) and raised by its standard error: few scores
    say little about the tail. Where `log_tail` compares inputs, this says how sure one can be that they are not known.

    >>> cautious(torch.tensor([0.0476] * 3), torch.arange(20.0), torch.tensor([19.0, 20.0, 119.0])).exp()
    tensor([0.0476, 0.0317, 0.0009])
    """
    top = sorted_scores[-max(int(len(sorted_scores) * _TAIL), 2) :].to(scores)
    excess, number = top - top[:1], top.shape[0] - 1
    tiny = torch.finfo(scores.dtype).tiny ** 0.5
    mean = (excess.sum(0, keepdim=True) / number).clamp_min(tiny).maximum(1e-6 * top[-1:].abs())  # ONNX: not 0-d
    above = 1 - (torch.arange(number, device=top.device, dtype=top.dtype) + 0.65) / number  # shares of higher ones
    half = (mean - 2 * (excess[1:] * above).sum(0, keepdim=True) / number).maximum(1e-6 * mean)
    own = (2 - mean / half).clamp_min(0).clamp_max(0.9)
    shape = own + 1 / math.sqrt(number)
    scale = mean * (1 - own) + shape * excess[-1:]  # at the highest score
    return p_value.log() - (shape * _beyond(scores, top[-1:]) / scale).log1p() / shape


def _beyond(scores: Tensor, highest: Tensor) -> Tensor:
    """Returns by how much scores are above the highest held-out one; what is above it by rounding is not."""
    return torch.where(scores > highest + _ROUNDING * highest.abs(), scores - highest, 0.0)


def _at_or_above(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns how many of the sorted scores are no lower than each score, up to rounding: that depends on the batch."""
    least = scores * (1 - _ROUNDING * scores.sign())  # not a difference: infinity stays what it is
    if torch.compiler.is_exporting():  # other runtimes know no searchsorted
        return (sorted_scores.unsqueeze(-2) >= least.unsqueeze(-1)).sum(-1)
    return sorted_scores.shape[-1] - torch.searchsorted(sorted_scores, least.contiguous())
