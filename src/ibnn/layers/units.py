"""UNITS: a random factor for every entry of a convolution's input, beside the one of its channel.

A unit is a channel at one place. Its factor is u = 1 + τ ε, with a standard deviation τ for the layer and standard
normals ε. These come from a pool that is the same everywhere: a draw's address is hashed to where its window of the
pool begins. So the noise of millions of units costs a copy and no hashing, does not depend on batch or order, and is
made again in the backward pass instead of being kept for it. The pool is followed by its negative, so that the mirror
image of a draw costs no more.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.normal import Space, address, normals, numbered_words

POOL, LONGEST = 2**20, 2**16  # normals in the pool, and in one window: longer noise has several windows
MIRRORED = 2**32  # the bit of a word whose noise is minus that of the word without it
WIDE = 16  # channels whose windows are worth a copy of the pool if they are last in memory
_AT_ONCE = 2**18  # entries of a product that stay in the cache with what they are made of


_POOLS: dict[torch.device, Tensor] = {}
_TURNED: dict[tuple[int, torch.device], Tensor] = {}  # by number of places, the last few


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


# A graph reads the pool where it is, in the loop that multiplies: as torch.compiler.assume_constant_result would say,
# which takes more than a second to import.
pool._dynamo_marked_constant = True  # type: ignore[attr-defined]


def pools() -> list[Tensor]:
    """Returns the pools that have been made, one for each device in use, and their copies."""
    return [*_POOLS.values(), *_TURNED.values()]


def windows(at: Tensor, entries: int) -> Tensor:
    """Returns a row of standard normals for each word (R,): (R, entries).

    >>> rows = windows(torch.tensor([5, 6, 5]), 4)
    >>> bool((rows[0] == rows[2]).all()), bool((rows[0] == rows[1]).any())
    (True, False)
    >>> torch.equal(windows(torch.tensor([5 | MIRRORED]), 4)[0], -rows[0])
    True
    """
    if entries > LONGEST:
        each = numbered_words(at, -(-entries // LONGEST)) | (at & MIRRORED)[:, None]
        return windows(each.flatten(), LONGEST).view(len(at), -1)[:, :entries].contiguous()
    every = pool(at.device).as_strided((2 * POOL - entries, entries), (1, 1))
    return every.index_select(0, (at & (MIRRORED - 1)) % (POOL - entries) + (at >> 32) * POOL)


def _turned(at: Tensor, channels: int, places: int) -> Tensor:
    """Returns windows (R, channels · places) with channels last, (R, places, channels).

    Entry o + c · places + p of the pool is in row (o mod places) + p, column o // places + c of a copy, 8 MB large, in
    which a window of channels is in one piece: a copy of rows costs a fraction of a transposition.
    """
    columns = POOL // places
    if (copied := _TURNED.get((places, at.device))) is None:
        with torch.inference_mode(False):
            padded = F.pad(pool(at.device)[:POOL], (0, 2 * places))
            copied = padded.as_strided((2 * places - 1, columns), (1, places)).contiguous()
        while len(_TURNED) >= 8:
            _TURNED.pop(next(iter(_TURNED)), None)
        if type(copied) is Tensor:  # not a fake one
            _TURNED[places, at.device] = copied
    begin, mirrored = (at & (MIRRORED - 1)) % (POOL - channels * places), at >= MIRRORED
    every = copied.as_strided((places * columns - channels + 1, places, channels), (1, columns, 1))
    found = every.index_select(0, begin % places * columns + begin // places)
    return found.mul_(torch.where(mirrored, -1.0, 1.0)[:, None, None]) if mirrored.any() else found


class Units(NamedTuple):
    """The unit factors of one layer in one pass."""

    std: Tensor  # τ, ()
    at: Tensor  # words: (), one draw for all rows, or (R,), one for each

    def placed(self, shape: Sequence[int], axis: int, batch_axis: int, copied: bool = False) -> "Placed":
        """Returns the factors of an input of some shape; windows or copies of one example share them."""
        at, view = self.at.reshape(-1), [1] * len(shape)
        view[axis:] = shape[axis:]
        if self.at.dim():
            view[batch_axis] = shape[batch_axis]
            times = shape[batch_axis] // at.shape[0]
            many = at[None].expand(times, -1) if copied else at[:, None].expand(-1, times)
            at = many.flatten() if times > 1 else at
        return Placed(self.std, at, tuple(view))


class Placed(NamedTuple):
    """Unit factors that broadcast to an input."""

    std: Tensor
    at: Tensor  # (R,)
    shape: tuple[int, ...]  # of the factors

    def of_rows(self, rows: slice) -> "Placed":
        """Returns the factors of some rows of an input."""
        if self.shape[0] != self.at.shape[0] or self.shape[0] == 1:  # one for all, or the channels of an input alone
            return self
        at = self.at[rows]
        return Placed(self.std, at, (at.shape[0], *self.shape[1:]))

    def noise(self, like: Tensor) -> Tensor:
        """Returns ε in the shape of the factors, in the dtype of an input, and in its memory format."""
        (rows, channels, *places), words = self.shape, self.at.shape[0]
        entries = math.prod(self.shape) // words
        if rows != words or torch.compiler.is_compiling() or not channels_last(like):
            return windows(self.at, entries).view(self.shape).to(like.dtype)
        if channels >= WIDE and entries <= LONGEST:
            turned = _turned(self.at, channels, entries // channels)
        else:
            turned = windows(self.at, entries).view(rows, channels, -1).transpose(1, 2).contiguous()
        return turned.view(rows, *places, channels).movedim(-1, 1).to(like.dtype)

    def factors(self, like: Tensor) -> Tensor:
        """Returns u = 1 + τ ε like `noise`."""
        return 1 + self.std.to(like.dtype) * self.noise(like)

    def times(self, x: Tensor, noise: Tensor, out: Tensor) -> Tensor:
        """Returns x ∘ u from the noise of its units, in memory that may be that of x."""
        if self.shape[0] != x.shape[0]:
            return torch.mul(x, 1 + self.std.to(x.dtype) * noise, out=out)
        if self.std.is_cpu:  # a number spares a pass
            return torch.addcmul(x, x, noise, value=float(self.std), out=out)
        return torch.addcmul(x, x, noise * self.std.to(x.dtype), out=out)  # without waiting for the device

    def pieces(self, x: Tensor) -> list[slice]:
        """Returns slices of the rows of an input that are worth computing at once."""
        return pieces(x, _AT_ONCE) if self.shape[0] == x.shape[0] == self.at.shape[0] else [slice(None)]


def pieces(x: Tensor, entries: int) -> list[slice]:
    """Returns slices of the rows of an input, of (nearly) equal length and about so many entries each."""
    rows = x.shape[0]
    count = min(rows, -(-x.numel() // entries))
    if count < 2:
        return [slice(None)]
    at_once = -(-rows // count)
    return [slice(begin, begin + at_once) for begin in range(0, rows, at_once)]


def channels_last(x: Tensor) -> bool:
    """Whether channels are last in memory."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


@torch.no_grad()
def product(x: Tensor, z: Tensor, units: Placed, out: Tensor | None = None) -> Tensor:
    """Returns x ∘ z ∘ u, a few rows at a time, so that nothing but the product goes through memory."""
    out = torch.empty_like(x) if out is None else out
    if z.shape[0] == 1:
        return torch.mul(x, z * units.factors(x), out=out)
    for rows in units.pieces(x):
        part, own = torch.mul(x[rows], z[rows], out=out[rows]), units.of_rows(rows)
        own.times(part, own.noise(part), part)
    return out


def gradients_of_product(
    gradient: Tensor, x: Tensor, z: Tensor, units: Placed, to_x: Tensor, to_std: Tensor | None = None
) -> Tensor:
    """Returns the gradient of z from that of x ∘ z ∘ u, and writes those of x and τ, a few rows at a time."""
    to_z = torch.zeros_like(z)
    for rows in units.pieces(x):
        own = units.of_rows(rows)
        part, noise, its = gradient[rows], own.noise(x), rows if z.shape[0] > 1 else slice(None)
        if to_std is not None:
            to_std += (part * x[rows]).mul_(z[its]).mul_(noise).sum()
        scaled = own.times(part, noise, to_x[rows])
        to_z[its] += (scaled * x[rows]).sum_to_size(z[its].shape)
        scaled.mul_(z[its])
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
            noise = units.noise(x)
            factor, both = 1 + std * noise, gradient * x
            to_std = (both * z * noise).sum().to(std.dtype) if needs[2] else None
            return gradient * z * factor, (both * factor).sum_to_size(z.shape), to_std, None, None
        to_x, to_std = torch.empty_like(gradient), torch.zeros_like(std) if needs[2] else None
        to_z = gradients_of_product(gradient, x, z, units, to_x, to_std)
        return to_x if needs[0] else None, to_z, to_std, None, None


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

    def _load_from_state_dict(self, *args: Any) -> None:
        """Makes the factors again, of the draw that was loaded."""
        super()._load_from_state_dict(*args)
        self.factors = self.std.new_zeros(0)

    def hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the layer, whose input comes first or by name."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self(kwargs["input"])}
