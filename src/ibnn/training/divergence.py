"""DIVERGENCE: what is said when training has come to numbers that are not finite."""

from typing import Any

import torch
from torch import Tensor, nn

from ibnn.batches import Share
from ibnn.inputs import call_arguments


class DivergedError(RuntimeError):
    """Training produced a loss or a gradient that is not finite; the last good checkpoint is in place."""


def first_not_finite(model: Any, piece: Share) -> str:
    """Names the first layer whose output, or whose own parameters, are not finite."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"parameter {name!r} is not finite"
    found: list[str] = []

    def note(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append(name)

    handles = [
        m.register_forward_hook(lambda _m, _a, out, name=name: note(name, out))
        for name, m in model.net.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            args, kwargs = call_arguments(piece.x)
            run = model if isinstance(model.net, nn.ModuleList) else model.net  # an ensemble's members
            run(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return (
        f"first in the output of layer {found[0]!r}" if found else "in the loss itself: are targets and inputs finite?"
    )
