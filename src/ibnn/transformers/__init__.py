"""Hugging Face's `Trainer` and `generate` for converted networks. Only `Trainer` imports transformers, on first use."""

from typing import TYPE_CHECKING, Any

from ibnn.transformers.generation import Generation, generate

if TYPE_CHECKING:
    from ibnn.transformers.trainer import Trainer

__all__ = ["Generation", "Trainer", "generate"]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module 'ibnn.transformers' has no attribute {name!r}")
    from ibnn.transformers.trainer import Trainer

    return Trainer
