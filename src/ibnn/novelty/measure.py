"""Measures how novel inputs are: what a model's layers receive, compared with its reference data.

The functions work on any model with `net`, `likelihood`, `mean_output(x)`, `evaluating()` and `reference`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn.inputs import Inputs, batch_length, call_arguments
from ibnn.novelty.nodes import padding, watched
from ibnn.novelty.reference import Novelty, Reference, foreign, no_reference
from ibnn.prediction import CategoricalPrediction, Conformal, GaussianPrediction, JointPrediction


class Seen(NamedTuple):
    """What one forward pass shows of inputs."""

    summaries: dict[str, Tensor]  # of the layers' inputs, (B, D), by layer
    surprise: Tensor | None  # how unsure the network's answers are, (B,)
    output: Tensor  # of the network


def see(model: Any, x: Inputs, layers: Mapping[str, nn.Module], axes: Mapping[str, int]) -> Seen:
    """Passes inputs through the network once, in eval mode, and sums up the inputs of some of its layers."""
    call, rows = call_arguments(x), batch_length(x)
    with model.evaluating(), torch.no_grad():
        with watched(layers, axes, rows, padding(model.net, call)) as summaries:
            output = model.mean_output(x)
        return Seen(summaries, model.likelihood.surprise(output), output)


def measure(model: Any, x: Inputs) -> Novelty:
    """Returns how novel the inputs of one call are; `predict` puts the p-values into its answers."""
    reference: Reference | None = model.reference
    if reference is None:
        raise RuntimeError(no_reference())
    layers = reference.layers_of(model.net)
    seen = see(model, x, layers, dict(zip(layers, reference.axes.tolist(), strict=True)))
    if unseen := [name for name in layers if name not in seen.summaries]:
        raise ValueError(foreign(f"layers {unseen} that this call does not reach"))
    found: Novelty = reference([seen.summaries[name] for name in layers], seen.surprise)
    return found


def conformal_of(model: Any) -> Conformal | None:
    """Returns the scores of held-out examples, if answers are still made as theirs were."""
    reference: Reference | None = model.reference
    if reference is None or not len(reference.errors):
        return None
    same = torch.equal(reference.temperature, model.likelihood.temperature.to(reference.temperature))
    return Conformal(reference.errors, reference.classes) if same else None


def annotated(model: Any, x: Inputs, answer: Any, fallback: float | None) -> Any:
    """Returns an answer with p-values and held-out scores; answers for novel inputs fall back to the base rates."""
    found, reference = measure(model, x), model.reference
    fallback = float(reference.fallback) if fallback is None else fallback
    if fallback:
        answer = fallen_back(model.likelihood, answer, found.log_tail, fallback, reference.base)
    if isinstance(answer, JointPrediction):
        heads = {name: replace(head, novelty=found.p_value) for name, head in answer.heads.items()}
        return JointPrediction(heads, novelty=found.p_value)
    return replace(answer, novelty=found.p_value, conformal=conformal_of(model))


def fallen_back(likelihood: Any, answer: Any, log_p: Tensor, fallback: float, base: Tensor) -> Any:
    """Returns an answer that knows how novel its inputs are, from the logarithms of their p-values, (B,).

    Below the p-value `fallback` it becomes a mixture with the base rates. Of its aleatoric part only the share counts
    that can be believed at this p-value; the rest is epistemic (and counted in `between`). The total is that of the
    answer in either case.
    """
    answer = likelihood.fall_back(answer, fallback_weight(log_p, fallback), base)
    if isinstance(answer, JointPrediction):
        return replace(answer, heads={name: _believed(head, log_p) for name, head in answer.heads.items()})
    return _believed(answer, log_p)


def _believed(answer: Any, log_p: Tensor) -> Any:
    """Returns an answer whose aleatoric part is epistemic as far as its inputs are novel."""
    if not isinstance(answer, CategoricalPrediction | GaussianPrediction):
        return answer  # of a likelihood of the user's own
    own = answer.aleatoric
    share = known_share(log_p).to(own).reshape(-1, *[1] * (own.dim() - 1))
    return replace(answer, aleatoric=share * own, between=answer.between + (1 - share) * own)


def fallback_weight(log_p: Tensor, fallback: float) -> Tensor:
    """Returns the weight of an answer against the base rates: 1 from the p-value `fallback` on, in proportion below it.

    >>> fallback_weight(torch.tensor([0.001, 0.005, 0.5]).log(), 0.01)
    tensor([0.1000, 0.5000, 1.0000])
    """
    return (log_p - math.log(fallback)).clamp_max(0).exp()


def known_share(log_p: Tensor) -> Tensor:
    """Returns −e · p · log p, 1 from p = 1/e on: the least Bayes factor for "known" against "novel" at a p-value.

    No distribution of the p-values of novel inputs that favours small ones makes it smaller (Sellke, Bayarri and
    Berger, 2001).

    >>> known_share(torch.tensor([0.001, 0.01, 0.05, 0.5]).log())
    tensor([0.0188, 0.1252, 0.4072, 1.0000])
    """
    log_p = log_p.clamp_min(-80.0)  # minus infinity times zero is NaN
    return torch.where(log_p < -1, -log_p * (log_p + 1).exp(), 1.0)
