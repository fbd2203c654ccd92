"""Checks of what metrics are given. Numpy arrays, lists and tensors become tensors on the CPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ibnn.errors import complaint

if TYPE_CHECKING:
    import numpy as np

Values: TypeAlias = "Tensor | np.ndarray[Any, Any] | Sequence[Any]"  # what metrics accept

_SUM_TOLERANCE = 1e-3  # of a row's total probability
_TOP_TOLERANCE = 1e-4  # of the largest (log-)probability, which rounding may lift above its bound


def problem(argument: str, expected: str, got: str, remedy: str) -> ValueError:
    """An error in four parts; the remedy becomes a sentence."""
    return ValueError(complaint(argument, expected, got, f"{remedy[0].upper()}{remedy[1:]}."))


def as_tensor(name: str, values: Values) -> Tensor:
    """Returns values of any kind as a tensor on the CPU, without its graph.

    >>> as_tensor("probs", [1.0, 2.0])
    tensor([1., 2.])
    """
    try:
        found = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "Pass numbers, in rows of equal length."
        raise TypeError(complaint(name, "a tensor, an array or a list", type(values).__name__, remedy)) from error
    if found.is_complex():
        raise TypeError(complaint(name, "real numbers", f"dtype {found.dtype}", f"Pass {name}.real."))
    return found


def check_numbers(name: str, values: Tensor) -> None:
    """Raises if a value is NaN."""
    if len(nans := values.isnan().nonzero()):
        raise problem(name, "numbers", f"NaN in row {nans[0, 0]}", "find what made it upstream")


def _check_distributions(name: str, values: Tensor) -> None:
    """Checks that every row of `values` (R, C), probs or log_probs by name, is a distribution."""
    logs = name == "log_probs"
    probs, top, what = (values.exp(), 0, "exps") if logs else (values, 1, "values")
    total = probs.sum(1)  # (R,)
    outside = ((values > top + _TOP_TOLERANCE) | (probs < 0)).any(1)
    if len(bad := (outside | ((total - 1).abs() > _SUM_TOLERANCE)).nonzero()):
        row = int(bad[0])
        expected = f"values {'of at most 0' if logs else 'in [0, 1]'} with {what} summing to 1"
        low, high = values[row].aminmax()
        got = f"{low:.4g} to {high:.4g} with {what} summing to {total[row]:.4g} in row {row}"
        raise problem(name, expected, got, f"did you pass logits? pass prediction.{name}, in float32 or wider")


def class_rows(name: str, values: Values, labels: Values, axis: int) -> tuple[Tensor, Tensor]:
    """Checks `values` (N, C, ...), named probs or log_probs, classes in an axis, and flattens both: (R, C), (R,)."""
    values, labels = as_tensor(name, values), as_tensor("labels", labels)
    shape = tuple(values.shape)
    if values.ndim < 2 or values.numel() == 0 or not values.is_floating_point():
        expected = "a non-empty float tensor (N, C) or (N, C, ...)"
        raise problem(name, expected, f"{values.dtype} {shape}", f"pass prediction.{name}")
    if axis in (0, -values.ndim) or not -values.ndim <= axis < values.ndim:
        raise problem("axis", f"one of {name} {shape} beyond the first", f"{axis}", "pass 1 or -1")
    values = values.movedim(axis, 1)
    if labels.shape != values[:, 0].shape:
        expected = f"of shape {tuple(values[:, 0].shape)} to go with {name} {shape}"
        got = f"shape {tuple(labels.shape)}"
        raise problem("labels", expected, got, f"pass one class index per row, classes on axis {axis}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise problem("labels", "of an integer dtype", f"{labels.dtype}", "pass labels.long()")
    values, labels = values.movedim(1, -1).flatten(0, -2), labels.long().reshape(-1)
    classes = values.shape[1]
    if len(wrong := labels[(labels < 0) | (labels >= classes)]):
        remedy = "drop rows without a label and count classes from 0"
        raise problem("labels", f"in 0 to {classes - 1}", f"{wrong[0]}", remedy)
    check_numbers(name, values)
    _check_distributions(name, values.double())
    return values, labels


def score_column(name: str, values: Values) -> Tensor:
    """Checks that `values` are one or more numbers along one axis."""
    values = as_tensor(name, values)
    if values.ndim != 1 or len(values) == 0:
        got, remedy = f"shape {tuple(values.shape)}", f"pass {name}.flatten() of some data"
        raise problem(name, "a non-empty 1-D tensor", got, remedy)
    check_numbers(name, values)
    return values.double().contiguous()  # else searchsorted warns


def same_shape(target: Values, **others: Values) -> list[Tensor]:
    """Checks numbers that must have the target's shape; returns the target and the others as tensors."""
    target, tensors = as_tensor("target", target), {name: as_tensor(name, values) for name, values in others.items()}
    for name, values in tensors.items():
        if values.shape != target.shape or not target.numel():
            got = f"{tuple(values.shape)} and {tuple(target.shape)}"
            raise problem("target", f"non-empty, of the shape of {name}", got, f"pass target.view_as({name})")
        check_numbers(name, values)
    check_numbers("target", target)
    return [target, *tensors.values()]
