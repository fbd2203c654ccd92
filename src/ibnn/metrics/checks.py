"""Checks of what metrics are given. Numpy arrays, lists and tensors become tensors on the CPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint

if TYPE_CHECKING:
    import numpy as np

Values: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"  # what metrics accept

SUM_TOLERANCE = 1e-3  # of a row's total probability
TOP_TOLERANCE = 1e-4  # of the largest (log-)probability, which rounding may lift above its bound


def real(name: str, values: Values) -> Tensor:
    """Returns values of any kind as a tensor on the CPU, without its graph; raises unless they are real numbers."""
    try:
        found = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "Pass numbers, in rows of equal length."
        raise TypeError(complaint(name, "a tensor, an array or a list", type(values).__name__, remedy)) from error
    if found.is_complex():
        raise TypeError(complaint(name, "real numbers", f"dtype {found.dtype}", f"Pass {name}.real."))
    return found


def numbers(name: str, values: Values) -> Tensor:
    """Returns what `real` does; raises if a number is NaN, too."""
    found = real(name, values)
    if len(nans := found.isnan().nonzero()):
        got = "NaN" if found.dim() == 0 else f"NaN in row {nans[0, 0]}"
        raise ValueError(complaint(name, "numbers", got, "Find what made it upstream."))
    return found


def class_rows(name: str, values: Values, labels: Values, axis: int) -> tuple[Tensor, Tensor]:
    """Checks `values` (N, C, ...), named probs or log_probs, classes in an axis, and flattens both: (R, C), (R,)."""
    values, labels = numbers(name, values), numbers("labels", labels)
    if values.ndim < 2 or values.numel() == 0 or not values.is_floating_point():
        got, remedy = f"{values.dtype} {tuple(values.shape)}", f"Pass prediction.{name}."
        raise ValueError(complaint(name, "a non-empty float tensor (N, C) or (N, C, ...)", got, remedy))
    axis = axis + values.ndim if -values.ndim <= axis < 0 else axis
    check.integer("axis", axis, most=values.ndim - 1, remedy="Pass 1 or -1.")
    values = values.movedim(axis, 1)
    check.shape(
        "labels", labels, tuple(values[:, 0].shape), remedy=f"Pass one class index per row, classes on axis {axis}."
    )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(complaint("labels", "of an integer dtype", labels.dtype, "Pass labels.long()."))
    values, labels = values.movedim(1, -1).flatten(0, -2), labels.long().reshape(-1)
    if len(wrong := labels[(labels < 0) | (labels >= values.shape[1])]):
        remedy = "Drop rows without a label and count classes from 0."
        raise ValueError(complaint("labels", f"in 0 to {values.shape[1] - 1}", int(wrong[0]), remedy))
    wide, logs = values.double(), name == "log_probs"
    probs, top = (wide.exp(), 0) if logs else (wide, 1)
    outside = ((wide > top + TOP_TOLERANCE) | (probs < 0)).any(1)
    if len(bad := (outside | ((probs.sum(1) - 1).abs() > SUM_TOLERANCE)).nonzero()):
        (low, high), total = wide[bad[0]].aminmax(), probs[bad[0]].sum()
        got = f"{low:.4g} to {high:.4g}, with probabilities summing to {total:.4g}, in row {int(bad[0])}"
        remedy = f"Did you pass logits? Pass prediction.{name}, in float32 or wider."
        raise ValueError(complaint(name, "logs of probabilities" if logs else "probabilities", got, remedy))
    return values, labels


def score_column(name: str, values: Values) -> Tensor:
    """Checks that `values` are one or more numbers along one axis."""
    values = numbers(name, values)
    if values.ndim != 1 or len(values) == 0:
        got = f"shape {tuple(values.shape)}"
        raise ValueError(complaint(name, "a non-empty 1-D tensor", got, f"Pass {name}.flatten() of some data."))
    return values.double().contiguous()  # else searchsorted warns


def same_shape(target: Values, **others: Values) -> list[Tensor]:
    """Checks numbers that must have the target's shape; returns the target and the others as tensors."""
    found, tensors = numbers("target", target), {name: numbers(name, values) for name, values in others.items()}
    for name, values in tensors.items():
        if values.shape != found.shape or not found.numel():
            got = f"{tuple(values.shape)} and {tuple(found.shape)}"
            raise ValueError(complaint("target", f"of the shape of {name}, not empty", got, "Pass one of that shape."))
    return [found, *tensors.values()]
