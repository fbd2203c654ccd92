"""Measures how novel inputs are: compares the inputs of a model's layers with those of its reference data.

The functions work on any model with `net`, `likelihood`, `mean_output(x)`, `evaluating()` and `reference`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn.inputs import Inputs, batch_length, call_arguments
from ibnn.novelty.nodes import padding, watched
from ibnn.novelty.reference import Novelty, foreign
from ibnn.prediction import JointPrediction, no_reference


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
    return measured(model, x)[0]


def measured(model: Any, x: Inputs) -> tuple[Novelty, Tensor]:
    """Returns how novel inputs are, and the output of the pass that shows it."""
    if (reference := model.reference) is None:
        raise RuntimeError(no_reference("measure(model, x)"))
    layers = reference.layers_of(model.net)
    seen = see(model, x, layers, dict(zip(layers, reference.axes.tolist(), strict=True)))
    if unseen := [name for name in layers if name not in seen.summaries]:
        raise ValueError(foreign(f"layers {unseen} that this call does not reach"))
    return reference([seen.summaries[name] for name in layers], seen.surprise), seen.output


def annotated(model: Any, answer: Any, novelty: Novelty, fallback: float | None) -> Any:
    """Adds p-values to an answer; with `fallback` mixes it with the base rates where they are below."""
    p_value, reference = novelty.p_value, model.reference
    if fallback is not None:
        weight = fallback_weight(p_value, fallback, reference.ranked)
        answer = model.likelihood.fall_back(answer, weight, reference.base)
    known: Any = {"p_value": p_value, "ranked": reference.ranked}
    if isinstance(answer, JointPrediction):
        return JointPrediction({name: replace(head, **known) for name, head in answer.heads.items()}, **known)
    return replace(answer, **known)


def fallback_weight(p_value: Tensor, fallback: float, ranked: int) -> Tensor:
    """Returns the weight of an answer against the base rates: 1 from the p-value `fallback` on, 0 at the smallest one.

    Between the two it falls in proportion. The smallest p-value is 1 / (n + 1), with n inputs `ranked`.

    >>> fallback_weight(torch.tensor([0.01, 0.02, 0.03, 0.5]), 0.03, ranked=99)
    tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    least = 1 / (ranked + 1)
    return ((p_value - least) / max(fallback - least, 0.1 * least)).clamp(0, 1)  # p-values are `least` apart
