"""RECOMPUTATION: for its backward pass a layer keeps x and z instead of x ∘ z, and multiplies them again there.

x is kept anyway by whatever made it (an activation needs its output for its own backward pass), so a converted network
keeps hardly more than the plain one. Autograd's saved-tensor hooks around one call of one layer do this: they know
nothing about the layer, and tensors that it derives from the product (a padded copy) are kept as usual.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ibnn.errors import complaint
from ibnn.layers.units import Placed
from ibnn.layers.units import product as multiplied


class _Kept(NamedTuple):
    """What replaces a tensor that shares the product's memory: packed x and z, units, layouts of product and tensor."""

    x: Any
    z: Any
    units: Placed | None
    whole: tuple[torch.Size, tuple[int, ...]]
    part: tuple[torch.Size, tuple[int, ...], int]
    like: tuple[torch.dtype, torch.device]


class Recomputation:
    """Hooks that are active during a layer's call, between `open` and `close`.

    Outer hooks (gradient checkpointing, offloading) get to pack x, z and all other tensors.
    """

    def __init__(self, x: Tensor, z: Tensor, product: Tensor, units: Placed | None = None) -> None:
        """Takes a fresh product x ∘ z, z broadcast, or with units x ∘ z ∘ u."""
        self._parts: tuple[Tensor, Tensor, Tensor] | None = (x.detach(), z.detach(), product)
        self._version = product._version  # as made
        self._units = units and units._replace(std=units.std.detach())
        before = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._keep: Callable[[Tensor], Any]
        self._fetch: Callable[[Any], Tensor]
        self._keep, self._fetch = before or (_keep, _fetch)

    @staticmethod
    def possible(product: Tensor) -> bool:
        """Whether a backward pass may need the product, outside of `torch.func` transforms."""
        return (
            torch.is_grad_enabled()
            and product.is_floating_point()
            and product.layout == torch.strided
            and torch._C._functorch.peek_interpreter_stack() is None
            and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        )

    def open(self) -> Self:
        """Installs the hooks."""
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        return self

    def close(self) -> None:
        """Removes the hooks and drops the tensors that were not packed."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._parts = None

    def _pack(self, tensor: Tensor) -> Any:
        if self._parts is None or not _shares_memory(tensor, self._parts[2]) or tensor._version != self._version:
            return self._keep(tensor)
        x, z, product = self._parts
        whole, part = (product.shape, product.stride()), (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return _Kept(self._keep(x), self._keep(z), self._units, whole, part, (product.dtype, product.device))

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Kept):
            return self._fetch(packed)
        dtype, device = packed.like
        product = torch.empty_strided(*packed.whole, dtype=dtype, device=device)
        x, z = self._fetch(packed.x), self._fetch(packed.z)
        with torch.no_grad():
            torch.mul(x, z, out=product) if packed.units is None else multiplied(x, z, packed.units, product)
        return product.as_strided(*packed.part)


def _shares_memory(tensor: Tensor, product: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.dtype == product.dtype
        and tensor.untyped_storage()._cdata == product.untyped_storage()._cdata
    )


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _fetch(packed: tuple[Tensor, int]) -> Tensor:
    """Returns a kept tensor; raises if it was changed in place, which autograd leaves to hooks to notice."""
    tensor, version = packed
    if tensor._version != version:
        got = f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} modified by an inplace operation after it"
        remedy = "Replace the inplace operation, or move it before the forward pass or behind the backward pass."
        raise RuntimeError(complaint("forward pass", "followed by its backward pass unchanged", got, remedy))
    return tensor
