"""Counts the bytes that a block keeps for its backward pass."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_bytes(known: Iterable[Tensor] = ()) -> Iterator[SimpleNamespace]:
    """Counts the bytes of distinct storages, but those of known tensors, that a block keeps for its backward pass."""
    own = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice
    saved = SimpleNamespace(bytes=0)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage
            saved.bytes += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
