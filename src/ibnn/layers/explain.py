"""Words errors of a forward pass by the layer that the inputs do not fit; recognises errors of memory."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ibnn.errors import complaint
from ibnn.inputs import Inputs, call_arguments, evaluating, tensors
from ibnn.layers.batch_axis import before_calls
from ibnn.layers.registry import carried_type, layer_type


@contextmanager
def explaining_shapes(net: Any, inputs: Inputs, argument: str = "x") -> Iterator[None]:
    """Rewords an error of the block, if its cause is that the inputs do not fit a layer, to name that layer."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        explain(error, net, inputs, argument)
        raise


def explain(error: Exception, net: Any, inputs: Inputs, argument: str = "x") -> None:
    """Raises a ValueError that names the layer that the inputs do not fit, if that is the cause of an error."""
    message = None if out_of_memory(error) else _misfit(net, inputs, argument)
    if message is not None:
        raise ValueError(message) from error


def _misfit(net: Any, inputs: Inputs, argument: str) -> str | None:
    """Runs the network once and says which layer gets inputs of the wrong width, or inputs without a batch."""
    net = net[0] if isinstance(net, nn.ModuleList) else net  # an ensemble has several
    layers = {name: m for name, m in net.named_modules() if (kind := layer_type(m)) and not kind.optional}
    calls: list[tuple[str, torch.Size]] = []
    args, kwargs = call_arguments(inputs)
    watch = before_calls(layers, lambda name, shape, x: calls.append((name, shape)))
    with watch, evaluating(net), torch.no_grad(), suppress(Exception):  # the error that is to be explained
        net(*args, **kwargs)
    given = next(tensors(inputs)).shape
    for name, shape in calls:
        kind, layer = carried_type(layers[name]), layers[name]
        width, inner = next(iter(kind.ports(layer).values())), -kind.axis
        alone = len(shape) <= inner  # without a batch, which only matters to layers that read the inputs
        if shape != given if alone else shape[kind.axis] == width:
            continue
        wanted = ", ".join(["rows" if len(shape) <= inner + 1 else "…", str(width), *["…"] * (inner - 1)])
        got = f"shape {tuple(given)}" + ("" if shape == given else f", which gives it {tuple(shape)}")
        remedy = "Pass a batch, x[None] for one row." if alone else "Pass inputs of the size it was built for."
        expected = f"such that layer {name or '(net)'!r} ({type(layer).__name__}) gets an input of shape ({wanted})"
        return complaint(argument, expected, got, remedy)
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    words = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error).lower() for w in words)
