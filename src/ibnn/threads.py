"""Models that threads may share: one predicts while another trains, saves or copies."""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self, TypeVar

import torch
from torch import nn

from ibnn import inputs

F = TypeVar("F", bound=Callable[..., Any])


class Lock(type(threading.RLock())):  # type: ignore[misc]
    """A lock of which a copy or a pickle is a new one; models that share one have copies that share one."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def one_at_a_time(function: F) -> F:
    """Lets a function of a model wait until passes of other threads are done; compiled passes do not wait."""

    @functools.wraps(function)
    def waiting(model: Any, *args: Any, **kwargs: Any) -> Any:
        lock = None if torch.compiler.is_compiling() else getattr(model, "_lock", None)
        with lock or nullcontext():
            return function(model, *args, **kwargs)

    return waiting  # type: ignore[return-value]


class Shared(nn.Module):
    """A model whose passes come one after the other, each in the mode and with the weights of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    train = one_at_a_time(nn.Module.train)
    state_dict = one_at_a_time(nn.Module.state_dict)
    load_state_dict = one_at_a_time(nn.Module.load_state_dict)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Holds the model in eval mode, and locked for other threads, within a block."""
        with self._lock, inputs.evaluating(self):
            yield

    @one_at_a_time
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return made
