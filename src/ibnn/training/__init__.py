"""Algorithm 1 and what surrounds it."""

from typing import Any


def __getattr__(name: str) -> Any:  # accelerate is imported when one of these is first used
    if name == "fit":
        from ibnn.training.loop import fit

        return fit
    if name == "shard":
        from ibnn.training.sharding import shard

        return shard
    raise AttributeError(f"module 'ibnn.training' has no attribute {name!r}")
