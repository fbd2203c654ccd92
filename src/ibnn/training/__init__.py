"""TRAINING: Algorithm 1 and what surrounds it."""

from typing import Any


def __getattr__(name: str) -> Any:  # accelerate is imported when `fit` is first used
    if name != "fit":
        raise AttributeError(f"module 'ibnn.training' has no attribute {name!r}")
    from ibnn.training.loop import fit

    return fit
