"""The lock of a model that threads share: one predicts while another trains, saves or copies."""

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


class Lock(type(threading.RLock())):  # type: ignore[misc]
    """A lock of which a copy or a pickle is a new one; models that share one have copies that share one."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def one_at_a_time(function: F) -> F:
    """Lets a function of a model with a `_lock` wait for passes of other threads; compiled passes do not wait."""

    @functools.wraps(function)
    def waiting(model: Any, *args: Any, **kwargs: Any) -> Any:
        lock = None if torch.compiler.is_compiling() else getattr(model, "_lock", None)
        with lock or nullcontext():
            return function(model, *args, **kwargs)

    return waiting  # type: ignore[return-value]


@one_at_a_time
def deepcopy(model: Any, memo: dict[int, Any]) -> Any:
    """Copies a model; its `__deepcopy__`."""
    memo[id(model)] = made = object.__new__(type(model))
    made.__setstate__(copy.deepcopy(model.__dict__, memo))
    return made
