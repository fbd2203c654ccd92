"""Algorithm 1 and what surrounds it."""

from importlib import import_module
from typing import Any

_PLACES = {"fit": "loop", "shard": "sharding"}  # they import accelerate, so they are imported on first use


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"ibnn.training.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'ibnn.training' has no attribute {name!r}")
