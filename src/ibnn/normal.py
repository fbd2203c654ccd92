"""RANDOMNESS: standard normals that are a pure function of their address.

Every draw has an address (seed, space, …), such as (seed, Space.PREDICT, component, draw). Integer hashing turns it
into random bits, and Box-Muller turns these into normals. So a draw does not depend on the batch size, the number of
workers, the order of calls or the device, and there is no generator state to save. For `torch.compile`, `words` and
`normals` are operators of their own, which it calls as they are, so a compiled network draws the same numbers.
"""

import hashlib
import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, unique

import torch
from torch import Tensor

from ibnn.errors import complaint

_WORD = 0xFFFFFFFF  # words have 32 bits and are carried in int64, so that no product overflows


@unique
class Space(IntEnum):
    """Second part of every address, after the seed: no two uses share a draw.

    Renumbering a space changes its draws: weights, predictions, streams and references depend on all but 7 to 10.
    """

    INIT_MEAN = 0  # network: initial means of the latents, by component
    INIT_STD = 1  # network: their initial standard deviations, by component
    TRAIN = 2  # network: latents of a training example, by example and copy
    ASSIGN = 3  # network: which component a training example gets, by example
    PREDICT = 4  # network: latents of a prediction, by component and draw
    KL = 5  # network: draws of the Monte Carlo KL, by examples seen and component
    TIES = 6  # shift: order of equal scores, by place in the stream
    NOISE = 7  # corruptions: pixel noise, by image
    ROTATION = 8  # corruptions: direction of the rotation, by image
    SALT = 9  # corruptions: salt and pepper, by image and pixel
    MIX = 10  # corruptions: noise mixed into inputs, by row
    PROJECTION = 11  # novelty: projections of wide layers, by layer and node
    POOL = 12  # units: the pool that their noise comes from, by row
    TRAIN_UNITS = 13  # network: units of a training example, by example, copy and layer
    PREDICT_UNITS = 14  # network: units of a prediction, by component, draw and layer
    SEARCH = 101  # calibration: latents of the search, by draw and row
    SEARCH_UNITS = 102  # calibration: units of the search, by draw, row and layer
    PRUNE = 201  # pruning: which channels a row goes without, by row and channel


@unique
class Stream(IntEnum):
    """Last part of what seeds the global generators in a training step: (seed, step, worker, stream)."""

    LOADING = 1  # augmentation and whatever else loading a batch draws
    FORWARD = 2  # dropout and whatever else the network draws, however the batch was loaded


def check_seed(seed: int) -> None:
    """Raises unless a seed fits into a buffer."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(complaint("seed", "an integer in 0 … 2⁶³ − 1", seed, "Pass seed=0."))


def address(*parts: Tensor | int) -> Tensor:
    """Broadcasts the parts of addresses, integers or integer tensors, to columns (parts, R).

    >>> address(7, Space.PREDICT, torch.arange(2)).tolist()
    [[7, 7], [4, 4], [0, 1]]
    """
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    columns = torch.broadcast_tensors(*[torch.as_tensor(part, device=device) for part in parts])
    return torch.stack([column.flatten() for column in columns])


def words(at: Tensor) -> Tensor:
    """Hashes addresses (parts, R) to 32-bit words, (R,) int64.

    >>> words(address(0, torch.arange(2))).tolist() == [words(address(0, i)).item() for i in (0, 1)]
    True
    >>> bool(words(address(0, 1)) == words(address(1, 0)))
    False
    """
    found: Tensor = _words(at) if torch.compiler.is_compiling() else _hash(at)
    return found


def normals(at: Tensor, nodes: int) -> Tensor:
    """Draws one row of float32 standard normals for each address (parts, R): (R, nodes).

    >>> rows = normals(address(0, torch.arange(4)), 3)
    >>> torch.equal(rows[2:3], normals(address(0, 2), 3))
    True
    """
    found: Tensor = _normals(at, nodes) if torch.compiler.is_compiling() else _draw(at, nodes)
    return found


def _draw(at: Tensor, nodes: int) -> Tensor:
    half = (nodes + 1) // 2
    columns = mixed(torch.arange(2 * half, device=at.device) + 0x5BD1E995)
    bits = mixed(_hash(at)[:, None] ^ columns).to(torch.float32)  # (R, 2·half), uniform on [0, 2³²]
    radius = bits[:, :half].add(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = bits[:, half:].mul(2.0 * math.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :nodes].contiguous()


def numbered_seed(seed: int, number: int) -> int:
    """Returns the generator seed of an epoch's order, or of a baseline's draw, by its number.

    The address has no space, for trained weights depend on it. The n-th epoch and the n-th draw of the same seed share
    a number, which does no harm: one permutes rows, the other perturbs weights.

    >>> numbered_seed(0, 1) == int(words(address(0, 1)))
    True
    """
    return int(words(address(seed, number)))


def _hash(at: Tensor) -> Tensor:
    word = torch.full_like(at[0], 0x9E3779B9)
    for part in at:
        low, high = part & _WORD, (part >> 32) & _WORD
        word = mixed((mixed((word + low) & _WORD) + high) & _WORD)
    return word


@torch.library.custom_op("ibnn::words", mutates_args=())
def _words(at: Tensor) -> Tensor:
    return _hash(at)


@torch.library.custom_op("ibnn::normals", mutates_args=())
def _normals(at: Tensor, nodes: int) -> Tensor:
    return _draw(at, nodes)


_words.register_fake(lambda at: torch.empty_like(at[0]))
_normals.register_fake(lambda at, nodes: at.new_empty((at.shape[1], nodes), dtype=torch.float32))


def numbered_words(words: Tensor, count: int) -> Tensor:
    """Returns words of numbers 0 … count − 1 for each word (R,): (R, count)."""
    numbers = 0x9E3779B9 * torch.arange(1, count + 1, device=words.device)
    return mixed((words[:, None] + numbers) & _WORD)


def mixed(x: Tensor) -> Tensor:
    """Permutes 32-bit words so that every input bit reaches every output bit (multiply-xorshift finaliser)."""
    x = x ^ (x >> 16)
    x.mul_(0x21F0AAAD).bitwise_and_(_WORD).bitwise_xor_(x >> 15)
    x.mul_(0x735A2D97).bitwise_and_(_WORD)
    return x.bitwise_xor_(x >> 15)


def seed_generators(*parts: int) -> None:
    """Seeds the global generators of torch, numpy and Python with a hash of integers."""
    seed = int.from_bytes(hashlib.blake2b(repr(tuple(map(int, parts))).encode(), digest_size=4).digest(), "big")
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond where there is no GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restores the global generators of torch, numpy and Python at the end of a block."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
