"""A random factor for every entry of a convolution's input, beside the one of its channel.

A unit is a channel at one place. Its factor is u = 1 + τ ε, with a standard deviation τ for the layer and standard
normals ε. These come from a pool that is the same everywhere: a draw's address is hashed to where its window of the
pool begins. So the noise of millions of units costs a copy and no hashing, does not depend on batch or order, and is
made again in the backward pass instead of being kept for it. The pool is followed by its negative, so that the mirror
image of a draw costs no more.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn.normal import Space, address, normals, numbered_words

POOL, LONGEST = 2**20, 2**16  # normals in the pool, and in one window: longer noise has several windows
# Classes whose operations are torch's own. Others (fake, distributed) do not go through kernels, nor are they kept.
PLAIN: set[type] = {Tensor, nn.Parameter}
MIRRORED = 2**32  # the bit of a word whose noise is minus that of the word without it


_POOLS: dict[torch.device, Tensor] = {}


def pool(device: torch.device) -> Tensor:
    """Returns the pool of standard normals and their negatives, (2 · POOL,) float32."""
    if device in _POOLS:
        return _POOLS[device]
    with torch.inference_mode(False):
        at = address(0, Space.POOL, torch.arange(POOL // 1024, device="cpu"))
        made = normals(at, 1024).flatten().to(device)
        made = torch.cat([made, -made])
    if type(made) in PLAIN:  # not a fake one
        _POOLS[device] = made
    return made


# A graph reads the pool where it is, in the loop that multiplies: as torch.compiler.assume_constant_result would say,
# which takes more than a second to import.
pool._dynamo_marked_constant = True  # type: ignore[attr-defined]


def windows(words: Tensor, entries: int) -> Tensor:
    """Returns a row of standard normals for each word (R,): (R, entries)."""
    if entries > LONGEST:
        each = numbered_words(words, -(-entries // LONGEST)) | (words & MIRRORED)[:, None]
        return windows(each.flatten(), LONGEST).view(len(words), -1)[:, :entries].contiguous()
    every = pool(words.device).as_strided((2 * POOL - entries, entries), (1, 1))
    return every.index_select(0, (words & (MIRRORED - 1)) % (POOL - entries) + (words >> 32) * POOL)


class Units(NamedTuple):
    """The unit factors of one layer in one pass."""

    std: Tensor  # τ, ()
    words: Tensor  # (), one draw for all rows, or (R,), one for each

    def noise(self, x: Tensor) -> Tensor:
        """Returns ε for an input that has a row for each word, in its dtype and memory format."""
        noise = windows(self.words, x[0].numel()).view(x.shape).to(x.dtype)
        last = not x.is_contiguous() and x.movedim(1, -1).is_contiguous()  # channels
        return noise.movedim(1, -1).contiguous().movedim(-1, 1) if last else noise

    def times_(self, x: Tensor, noise: Tensor) -> Tensor:
        """Multiplies an input, which has a row for each word, by u in place."""
        if self.std.is_cpu:  # a number spares a pass
            return x.addcmul_(x, noise, value=float(self.std))
        return x.addcmul_(x, noise * self.std.to(x.dtype))  # without waiting for the device

    def factors(self, x: Tensor, axis: int, batch_axis: int, copied: bool = False) -> Tensor:
        """Returns u = 1 + τ ε, to be multiplied with any input; windows or copies of one example share them."""
        words, shape = self.words.reshape(-1), [1] * x.dim()
        shape[axis:] = x.shape[axis:]
        if self.words.dim():
            shape[batch_axis] = x.shape[batch_axis]
            times = x.shape[batch_axis] // words.shape[0]
            words = (words[None].expand(times, -1) if copied else words[:, None].expand(-1, times)).flatten()
        noise = windows(words, math.prod(shape) // words.shape[0]).view(shape)
        return 1 + self.std.to(x.dtype) * noise.to(x.dtype)


class UnitFactors(nn.Module):
    """Multiplies the input of a layer by the factors of one draw: in a plain network, what weights cannot hold."""

    std: Tensor  # τ
    word: Tensor  # the draw's

    def __init__(self, std: Tensor, word: Tensor, axis: int) -> None:
        """Takes τ and the draw's word, and the node axis of the layer's input."""
        super().__init__()
        self.axis = axis
        self.register_buffer("std", std.detach().clone())
        self.register_buffer("word", word.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Returns x ∘ u."""
        return x * Units(self.std, self.word).factors(x, self.axis, 0)

    def hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the layer, whose input comes first or by name."""
        if args:
            return (self(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self(kwargs["input"])}
