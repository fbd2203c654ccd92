"""Standard normals that are a pure function of their address.

Every draw has an address (seed, space, …), such as (seed, Space.PREDICT, component, draw). Integer hashing turns an
address into a 32-bit word, and Box-Muller turns a word into normals. So a draw does not depend on the batch size, the
number of workers, the order of calls or the device, and there is no generator state to save.
"""

import math
from enum import IntEnum, unique
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_BLOCK = 2**13  # training asks for the next words at every step: hashed a block at a time, they cost almost nothing
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
    PREDICT = 4  # network: latents of a prediction, by pair of components and draw
    KL = 5  # network: draws of the Monte Carlo KL, by examples seen and component
    TIES = 6  # shift: order of equal scores, by place in the stream
    NOISE = 7  # corruptions: pixel noise, by image
    ROTATION = 8  # corruptions: direction of the rotation, by image
    SALT = 9  # corruptions: salt and pepper, by image and pixel
    MIX = 10  # corruptions: noise mixed into inputs, by row
    PROJECTION = 11  # novelty: projections of wide layers, by layer and node
    POOL = 12  # units: the pool that their noise comes from, by row
    TRAIN_UNITS = 13  # network: units of a training example, by example, copy and layer
    PREDICT_UNITS = 14  # network: units of a prediction, by pair of components, draw and layer
    BANK = 21  # network: order of a bank's samples in predictions, by component and sample
    CHAIN_START = 22  # sampling: where a chain starts, by chain
    CHAIN = 23  # sampling: noise of a step, by step and chain
    CHAIN_BATCH = 24  # sampling: rows of a minibatch, by step and place
    CHAIN_CHOICE = 25  # sampling: whether a proposal is accepted, and its length, by step, chain and purpose
    CHAIN_PROBE = 26  # sampling: direction in which curvature is measured, by step and chain
    SEARCH = 101  # calibration: latents of the search, by draw and row
    SEARCH_UNITS = 102  # calibration: units of the search, by draw, row and layer
    PRUNE = 201  # pruning: which channels a row goes without, by row and channel


Address = tuple[Tensor | int, ...]  # its parts broadcast to a column of addresses


def address(*parts: Tensor | int) -> Address:
    """Returns the address, or the addresses, of these parts: integers, or integer tensors that broadcast."""
    return parts


def words(at: Address) -> Tensor:
    """Hashes R addresses to 32-bit words, (R,) int64.

    >>> words(address(0, torch.arange(2))).tolist() == [words(address(0, i)).item() for i in (0, 1)]
    True
    >>> bool(words(address(0, 1)) == words(address(1, 0)))
    False
    """
    if torch.compiler.is_compiling():  # as one operator: its many small integer steps would take minutes to compile
        hashed: Tensor = _words_operator([torch.as_tensor(part) for part in at])
        return hashed
    return _hashed(at)


def _hashed(at: Address) -> Tensor:
    word: Tensor | int = 0x9E3779B9
    for part in at:
        low, high = part & _WORD, (part >> 32) & _WORD
        word = _mixed((_mixed((word + low) & _WORD) + high) & _WORD)
    return word.flatten() if isinstance(word, Tensor) else torch.tensor([word])


def next_words(seed: Tensor, past: Tensor, space: Space, first: int, rows: int, samples: int = 0) -> Tensor:
    """Returns the words of rows past + first, past + first + 1, … of a stream, (rows,).

    With `samples` there are that many for each row: addresses end in a copy's number, (samples · rows,), copy-major.
    """
    if past.is_cpu and not torch.compiler.is_compiling():
        begin, found = int(past) + first, []
        blocks = range(begin // _BLOCK, (begin + rows - 1) // _BLOCK + 1)
        for copy in range(max(samples, 1)):
            parts = [_block(int(seed), int(space), number, *((copy,) if samples else ())) for number in blocks]
            hashed = parts[0] if len(parts) == 1 else torch.cat(parts)
            found.append(hashed[begin - blocks[0] * _BLOCK :][:rows])
        return found[0] if len(found) == 1 else torch.cat(found)
    row = past + first + torch.arange(rows, device=past.device)
    copies = (torch.arange(samples, device=past.device)[:, None],) if samples else ()
    return words(address(seed, int(space), row, *copies))


@lru_cache(maxsize=32)
def _block(seed: int, space: int, number: int, *more: int) -> Tensor:
    """Returns the words of the addresses of one block."""
    with torch.inference_mode(False):
        return words(address(seed, space, torch.arange(number * _BLOCK, (number + 1) * _BLOCK), *more))


def numbered_words(words: Tensor, count: int) -> Tensor:
    """Returns words of numbers 0 … count − 1 for each word (R,): (R, count)."""
    numbers = 0x9E3779B9 * torch.arange(1, count + 1, device=words.device)
    mixed: Tensor = _mixed((words[:, None] + numbers) & _WORD)
    return mixed


def _mixed(x: Any) -> Any:
    """Permutes 32-bit words so that every input bit reaches every output bit (multiply-xorshift finaliser)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def numbered_seed(seed: int, number: int) -> int:
    """Returns the generator seed of an epoch's order, or of a baseline's draw, by its number.

    The address has no space, for trained weights depend on it. An epoch and a draw may share a number: one permutes
    rows, the other perturbs weights.
    """
    return int(words(address(seed, number)))


def normals(at: Address, nodes: int) -> Tensor:
    """Draws one row of float32 standard normals for each of R addresses: (R, nodes)."""
    return normals_of(words(at), nodes)


def normals_of(words: Tensor, nodes: int) -> Tensor:
    """Draws the row of float32 standard normals of each word (R,) of an address: (R, nodes).

    A compiled graph calls an operator, and so draws the same numbers: a compiler's own logarithms round differently.
    """
    drawn: Tensor = _operator(words, nodes) if torch.compiler.is_compiling() else _box_muller(words, nodes)
    return drawn


def _box_muller(words: Tensor, nodes: int) -> Tensor:
    half = (nodes + 1) // 2
    columns = _mixed(torch.arange(2 * half, device=words.device) + 0x5BD1E995).to(torch.int32)
    bits = words.to(torch.int32)[:, None] ^ columns  # (R, 2·half), 32 random bits each
    spare = torch.empty_like(bits)
    # What `_mixed` does, in int32 and in place: shifts keep the sign there, products drop what overflows.
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        torch.bitwise_right_shift(bits, shift, out=spare).bitwise_and_((1 << (32 - shift)) - 1)
        bits.bitwise_xor_(spare)
        if factor > 1:
            bits.mul_(factor)
    uniform = spare.view(torch.float32).copy_(bits.view(torch.uint32))  # on [0, 2³²]
    radius = uniform[:, :half].add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = uniform[:, half:].mul_(2.0 * math.pi * 2.0**-32)
    both = bits.view(torch.float32)
    torch.mul(radius, angle.cos(), out=both[:, :half])
    torch.mul(radius, angle.sin_(), out=both[:, half:])
    drawn: Tensor = both if nodes == 2 * half else both[:, :nodes].contiguous()
    return drawn


_operator = torch.library.custom_op("ibnn::normals", _box_muller, mutates_args=())
_operator.register_fake(lambda words, nodes: words.new_empty((words.shape[0], nodes), dtype=torch.float32))


def _hashed_tensors(parts: list[Tensor]) -> Tensor:
    device = next((part.device for part in parts if part.dim()), parts[0].device)
    return _hashed(tuple(part.to(device) for part in parts))


_words_operator = torch.library.custom_op("ibnn::words", _hashed_tensors, mutates_args=())
_words_operator.register_fake(_hashed_tensors)
