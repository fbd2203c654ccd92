"""Reads, cuts and counts the inputs of a network: a tensor, a tuple, or a mapping of keyword arguments."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ibnn.errors import complaint

Inputs = Any  # a tensor, a tuple (positional arguments) or a mapping (by keyword)
Call = tuple[tuple[Any, ...], dict[str, Any]]  # the same, as positional and keyword arguments


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and mappings, in order."""
    return (part for part in _parts(tree) if isinstance(part, Tensor))


def _parts(tree: Any) -> Iterator[Any]:
    """Yields all containers and values in nested tuples, lists and mappings."""
    yield tree
    for part in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ():
        yield from _parts(part)


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Applies a function to every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: tree_map(function, value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [tree_map(function, value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def as_tensors(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns arrays as tensors, in containers too; float64 becomes the dtype of a network, if it is given.

    Without one, arrays of float64, which is numpy's default, become float32, and tensors stay as they are.
    """
    if isinstance(tree, Mapping):
        return {key: as_tensors(value, dtype) for key, value in tree.items()}
    if hasattr(tree, "to_numpy"):  # a table of pandas
        tree = tree.to_numpy(copy=True)  # pandas' own may not be written to
    if isinstance(tree, tuple | list):
        parts = [as_tensors(value, dtype) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if not isinstance(tree, Tensor) and not hasattr(tree, "__array__"):
        return tree
    if dtype is None and not isinstance(tree, Tensor):
        dtype = torch.float32
    tensor = torch.as_tensor(tree)
    wide = dtype is not None and tensor.is_floating_point() and torch.float64 in (tensor.dtype, dtype)
    return tensor.to(dtype) if wide else tensor  # lower precisions are for autocast


def slice_rows(tree: Any, part: slice | Tensor, rows: int) -> Any:
    """Takes some rows of every tensor that has as many rows as the batch; other tensors stay as they are."""
    return tree_map(lambda t: t[part] if t.dim() and len(t) == rows else t, tree)


def batch_length(inputs: Any) -> int:
    """Returns the batch size, the length of the first tensor; raises if there is none, or it is empty."""
    parts = [inputs] if isinstance(inputs, Tensor) else list(_parts(inputs))
    if any(isinstance(part, PackedSequence) for part in parts):
        remedy = "Pass the padded tensor and the lengths, and pack them inside of the network."
        raise TypeError(complaint("x", "tensors with the batch first", "a PackedSequence", remedy))
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None:
        got, remedy = f"a {type(inputs).__name__} without tensors", "Pass a tensor, such as torch.tensor(x)."
    elif first.dim() == 0 or first.shape[0] == 0:
        got, remedy = f"shape {tuple(first.shape)}", "Put the batch in the first dimension."
    else:
        return first.shape[0]  # and not len, which cannot be traced
    raise ValueError(complaint("x", "a batch of at least one row", got, remedy))


def call_arguments(inputs: Inputs) -> Call:
    """Splits inputs into the positional and keyword arguments of the network's forward."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def split_inputs(batch: Any) -> Inputs:
    """Returns the inputs in a loader's batch, without its target."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    if isinstance(batch, tuple | list):
        return batch[0] if len(batch) <= 2 else tuple(batch[:-1])
    return batch


def repeat_rows(tensor: Tensor, rows: int, samples: int) -> Tensor:
    """Repeats a batch S times, copy-major; a tensor without the batch's length stays as it is."""
    if samples == 1 or tensor.dim() == 0 or len(tensor) != rows:
        return tensor
    return tensor.repeat(samples, *[1] * (tensor.dim() - 1))


Pick = str | Callable[[Any], Any]  # which part of a network's output is predicted: a path such as "heads.age"


def pick(output: Any, part: Pick | None) -> Any:
    """Returns a part of a network's output: what a function returns, or what is found along a path.

    >>> pick({"heads": {"age": 1, "sex": 2}}, "heads.age"), pick((3, 4), "1"), pick((3, 4), lambda both: both[0])
    (1, 4, 3)
    """
    if part is None or callable(part):
        return output if part is None else part(output)
    for name in part.split("."):
        try:
            if isinstance(output, Mapping):
                output = output[name]
            else:
                at = name.lstrip("-").isdigit() and isinstance(output, tuple | list)
                output = output[int(name)] if at else getattr(output, name)
        except (KeyError, IndexError, AttributeError):
            has = list(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
            remedy = 'Pass the path to the tensor that is predicted, such as "heads.age" or "0", or a function.'
            raise ValueError(complaint("logits", f"a path into the network's output, {part!r}", has, remedy)) from None
    return output


def logits_of(output: Any) -> Tensor:
    """Returns the tensor of class scores or means in what a network returns."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    expected, got = "a network that returns a tensor, or something with `logits`", type(output).__name__
    remedy = 'Say which part it is: convert(..., logits="path.to.it"), or a function of the output.'
    raise TypeError(complaint("net", expected, f"one that returns {got}", remedy))


def check_rows(output: Tensor, rows: int) -> None:
    """Raises unless an output has a row for every row of the input."""
    if output.dim() == 0 or output.shape[0] != rows:
        expected, got = f"a network that answers each of the {rows} rows of its input", tuple(output.shape)
        remedy = "Keep the batch in the first dimension of its output."
        raise ValueError(complaint("net", expected, f"an output of shape {got}", remedy))


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Sets eval mode for a block, in which other threads wait for a model; then every module has its former mode."""
    with vars(net).get("_lock") or nullcontext():
        training = [module for module in net.modules() if module.training]
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
