"""Measures the memory that a block of code takes."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ibnn.inputs import tensors
from ibnn.units import _POOLS


class Peak(TorchDispatchMode):
    """Measures the peak bytes of tensors made in a block, without the workspaces of kernels."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Takes tensors made before: views of them do not count, nor memory that `layers` keeps between passes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self._alive = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in (*known, *_POOLS.values())}

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
