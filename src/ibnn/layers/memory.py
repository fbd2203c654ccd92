"""MEMORY: peak bytes of tensors in a block, bytes kept for its backward pass, and whether memory ran out."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ibnn.inputs import tensors


class Peak(TorchDispatchMode):
    """Measures the peak bytes of tensors made in a block, without the workspaces of kernels.

    >>> with Peak() as peak:
    ...     x = torch.zeros(256) + 1  # two tensors of 1 kB
    ...     y = x * 2  # the first is gone
    >>> peak.bytes
    2048
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Takes tensors made before: views of them do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self._alive = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._alive += storage.nbytes()
                self.bytes = max(self.bytes, self._alive)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


@dataclass
class Saved:
    """Bytes kept for a backward pass."""

    bytes: int = 0


@contextmanager
def saved_bytes(known: Iterable[Tensor] = ()) -> Iterator[Saved]:
    """Counts the distinct storages that a block keeps for its backward pass, without those of known tensors.

    >>> x = torch.ones(256, requires_grad=True)
    >>> with saved_bytes(known=[x]) as saved:
    ...     y = x.exp().square()  # both keep the exponential
    >>> saved.bytes
    1024
    """
    own = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage
            saved.bytes += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory")), out_of_memory(RuntimeError("shape"))
    (True, False)
    """
    words = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error).lower() for w in words)
