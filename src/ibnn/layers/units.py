"""UNITS: a random factor for every entry of a convolution's input, beside the one of its channel.

A unit is a channel at one place. Its factor is u = 1 + τ ε, with a standard deviation τ for the layer and standard
normals ε. These come from a pool that is the same everywhere: a draw's address is hashed to where its window of the
pool begins. So the noise of millions of units costs a copy and no hashing, does not depend on batch or order, and is
made again in the backward pass instead of being kept for it. The pool is followed by its negative, so that the mirror
image of a draw costs no more.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn.normal import Space, address, normals, numbered_words

POOL, LONGEST = 2**20, 2**16  # normals in the pool, and in one window: longer noise has several windows
MIRRORED = 2**32  # the bit of a word whose noise is minus that of the word without it
_AT_ONCE = 2**17  # entries of a product that stay in the cache with what they are made of


_POOLS: dict[torch.device, Tensor] = {}


def pool(device: torch.device) -> Tensor:
    """Returns the pool of standard normals and their negatives, (2 · POOL,) float32."""
    if device in _POOLS:
        return _POOLS[device]
    with torch.inference_mode(False):
        at = address(0, Space.POOL, torch.arange(POOL // 1024, device="cpu"))
        made = normals(at, 1024).flatten().to(device)
        made = torch.cat([made, -made])
    if type(made) is Tensor:  # not a fake one
        _POOLS[device] = made
    return made


def pools() -> list[Tensor]:
    """Returns the pools that have been made, one for each device in use."""
    return list(_POOLS.values())


def windows(at: Tensor, entries: int) -> Tensor:
    """Returns a row of standard normals for each word (R,): (R, entries).

    >>> rows = windows(torch.tensor([5, 6, 5]), 4)
    >>> bool((rows[0] == rows[2]).all()), bool((rows[0] == rows[1]).any())
    (True, False)
    >>> torch.equal(windows(torch.tensor([5 | MIRRORED]), 4)[0], -rows[0])
    True
    """
    found: Tensor = _windows(at, entries) if torch.compiler.is_compiling() else _copied(at, entries)
    return found


def _copied(at: Tensor, entries: int) -> Tensor:
    if entries > LONGEST:
        each = numbered_words(at, -(-entries // LONGEST)) | (at & MIRRORED)[:, None]
        return _copied(each.flatten(), LONGEST).view(len(at), -1)[:, :entries].contiguous()
    every = pool(at.device).as_strided((2 * POOL - entries, entries), (1, 1))
    return every.index_select(0, at % MIRRORED % (POOL - entries) + at // MIRRORED * POOL)


@torch.library.custom_op("ibnn::windows", mutates_args=())
def _windows(at: Tensor, entries: int) -> Tensor:
    return _copied(at, entries)


_windows.register_fake(lambda at, entries: at.new_empty((at.shape[0], entries), dtype=torch.float32))


class Units(NamedTuple):
    """The unit factors of one layer in one pass."""

    std: Tensor  # τ, ()
    at: Tensor  # words: (), one draw for all rows, or (R,), one for each

    def placed(self, shape: Sequence[int], axis: int, batch_axis: int) -> "Placed":
        """Returns the factors of an input of some shape; windows of one example, rows of the batch, share them."""
        at, view = self.at.reshape(-1), [1] * len(shape)
        view[axis:] = shape[axis:]
        if self.at.dim():
            view[batch_axis] = shape[batch_axis]
            times = shape[batch_axis] // at.shape[0]
            at = at[:, None].expand(-1, times).flatten() if times > 1 else at
        return Placed(self.std, at, tuple(view))


class Placed(NamedTuple):
    """Unit factors that broadcast to an input."""

    std: Tensor
    at: Tensor  # (R,)
    shape: tuple[int, ...]  # of the factors

    def noise(self, rows: slice = slice(None)) -> Tensor:
        """Returns ε of some rows, in the shape of the factors."""
        at, shape = self.at[rows], list(self.shape)
        entries = math.prod(shape) // self.at.shape[0]
        if rows != slice(None):
            shape[0] = len(at)
        return windows(at, entries).view(shape)

    def factors(self, like: Tensor) -> Tensor:
        """Returns u = 1 + τ ε in the dtype of an input."""
        return 1 + self.std.to(like.dtype) * self.noise().to(like.dtype)

    def pieces(self, x: Tensor) -> Iterator[slice]:
        """Yields slices of the rows of an input that are worth computing at once."""
        rows, first = x.shape[0], self.shape[0]
        at_once = max(1, _AT_ONCE * rows // max(1, x.numel())) if first == rows > 1 else rows
        yield from (
            (slice(begin, begin + at_once) for begin in range(0, rows, at_once)) if at_once < rows else [slice(None)]
        )


@torch.no_grad()
def product(x: Tensor, z: Tensor, units: Placed, out: Tensor | None = None) -> Tensor:
    """Returns x ∘ z ∘ u, a few rows at a time, so that nothing but the product goes through memory."""
    out = torch.empty_like(x) if out is None else out
    for rows in units.pieces(x):
        factor = units.noise(rows).to(x.dtype).mul_(units.std).add_(1)
        torch.mul(x[rows], factor * (z[rows] if z.shape[0] > 1 else z), out=out[rows])
    return out


def gradients_of_product(
    gradient: Tensor, x: Tensor, z: Tensor, units: Placed, to_x: Tensor | None, to_std: Tensor | None = None
) -> Tensor:
    """Returns the gradient of z from that of x ∘ z ∘ u, and writes those of x and τ, a few rows at a time.

    `to_x` may be the gradient itself.
    """
    to_z = torch.zeros_like(z)
    for rows in units.pieces(x):
        noise, own = units.noise(rows).to(x.dtype), z[rows] if z.shape[0] > 1 else z
        both = gradient[rows] * x[rows]
        if to_std is not None:
            to_std += (both * own).mul_(noise).sum()
        factor = noise.mul_(units.std).add_(1)
        to_z[rows if z.shape[0] > 1 else slice(None)] += both.mul_(factor).sum_to_size(own.shape)
        if to_x is not None:
            torch.mul(gradient[rows], factor * own, out=to_x[rows])
    return to_z


class UnitProduct(torch.autograd.Function):
    """x ∘ z ∘ u with z broadcast; the backward pass makes u again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, std: Tensor, at: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Keeps x and z, and where u comes from."""
        ctx.save_for_backward(x, z, std, at)
        ctx.shape = shape
        return product(x, z, Placed(std.detach(), at, shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x, z and τ."""
        (gradient,), (x, z, std, at) = gradients, ctx.saved_tensors
        units, needs = Placed(std, at, ctx.shape), ctx.needs_input_grad
        if torch.is_grad_enabled():  # this gradient is to have one, too
            noise = units.noise().to(x.dtype)
            factor, both = 1 + std * noise, gradient * x
            to_std = (both * z * noise).sum().to(std.dtype) if needs[2] else None
            return gradient * z * factor, (both * factor).sum_to_size(z.shape), to_std, None, None
        to_x, to_std = torch.empty_like(gradient) if needs[0] else None, torch.zeros_like(std) if needs[2] else None
        return to_x, gradients_of_product(gradient, x, z, units, to_x, to_std), to_std, None, None


class UnitFactors(nn.Module):
    """Multiplies the input of a layer by the factors of one draw: in a plain network, what weights cannot hold.

    Attributes:
        std: τ.
        at: The draw's word.
        factors: u of the last input, (C, …): made for the first input, and again for inputs of another size.
    """

    std: Tensor
    at: Tensor
    factors: Tensor

    def __init__(self, std: Tensor, at: Tensor, axis: int) -> None:
        """Takes τ and the draw's word, and the node axis of the layer's input."""
        super().__init__()
        self.axis = axis
        self.register_buffer("std", std.detach().clone())
        self.register_buffer("at", at.detach().reshape(1).clone())
        self.register_buffer("factors", std.new_zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x ∘ u."""
        shape, factors = x.shape[self.axis :], self.factors
        if factors.shape != shape:
            with torch.inference_mode(False), torch.no_grad():
                noise = windows(self.at.clone(), math.prod(shape)).view(shape)
                self.factors = factors = 1 + self.std.to(torch.float64) * noise.to(torch.float64)
        return x * factors.to(x.dtype)

    def hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the layer, whose input comes first or by name."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self(kwargs["input"])}
