"""RANDOMNESS: standard normals that are a pure function of their address.

Every draw has an address (seed, space, …), such as (seed, Space.PREDICT, component, draw). Integer hashing turns it
into random bits, and Box-Muller turns these into normals. So a draw does not depend on the batch size, the number of
workers, the order of calls or the device, and there is no generator state to save. For `torch.compile`, `words`,
`next_words` and `normals` are operators of their own: a graph calls them as they are, and draws the same numbers.
"""

import math
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


def check_seed(seed: int, least: int = 0) -> None:
    """Raises unless a seed fits into a buffer."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not least <= seed < 2**63:
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
    return normals_of(words(at), nodes)


def normals_of(words: Tensor, nodes: int) -> Tensor:
    """Draws the row of float32 standard normals of each word (R,) of an address: (R, nodes).

    >>> at = address(0, torch.arange(4))
    >>> torch.equal(normals_of(words(at), 3), normals(at, 3))
    True
    """
    found: Tensor = _normals(words, nodes) if torch.compiler.is_compiling() else _draw(words, nodes)
    return found


def _draw(words: Tensor, nodes: int) -> Tensor:
    half = (nodes + 1) // 2
    bits = words.to(torch.int32)[:, None] ^ _columns(half, words.device)  # (R, 2·half), 32 random bits each
    spare = torch.empty_like(bits)
    _mix(bits, spare)
    uniform = spare.view(torch.float32).copy_(bits.view(torch.uint32))  # on [0, 2³²]
    radius = uniform[:, :half].add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = uniform[:, half:].mul_(2.0 * math.pi * 2.0**-32)
    both = bits.view(torch.float32)
    torch.mul(radius, angle.cos(), out=both[:, :half])
    torch.mul(radius, angle.sin_(), out=both[:, half:])
    return both if nodes == 2 * half else both[:, :nodes].contiguous()


def _mix(bits: Tensor, spare: Tensor) -> None:
    """Does what `mixed` does to words in int32, in place: shifts there keep the sign, products drop what overflows."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        torch.bitwise_right_shift(bits, shift, out=spare).bitwise_and_((1 << (32 - shift)) - 1)
        bits.bitwise_xor_(spare)
        if factor > 1:
            bits.mul_(factor)


_COLUMNS: dict[tuple[int, torch.device], Tensor] = {}  # of the last width
_BLOCK = 2**13  # consecutive words that are hashed at once
_BLOCKS: dict[tuple[int, ...], Tensor] = {}  # the last few


def _columns(half: int, device: torch.device) -> Tensor:
    if (found := _COLUMNS.get((half, device))) is None:
        with torch.inference_mode(False):
            found = mixed(torch.arange(2 * half, device=device) + 0x5BD1E995).to(torch.int32)
        if type(found) is Tensor:  # not a fake one
            _COLUMNS.clear()
            _COLUMNS[half, device] = found
    return found


def consecutive_words(seed: int, space: Space, first: int, count: int, *more: int) -> Tensor:
    """Returns the words of addresses (seed, space, first … first + count − 1, *more), on the CPU.

    They are hashed in blocks, which are kept: step after step of training asks for the next ones.

    >>> at = address(3, Space.TRAIN, torch.arange(10, 14), 1)
    >>> torch.equal(consecutive_words(3, Space.TRAIN, 10, 4, 1), words(at))
    True
    """
    parts = []
    for number in range(first // _BLOCK, (first + count - 1) // _BLOCK + 1):
        start, key = number * _BLOCK, (seed, space, number, *more)
        if (block := _BLOCKS.get(key)) is None:
            with torch.inference_mode(False):
                block = _hash(address(seed, space, torch.arange(start, start + _BLOCK), *more))
            while len(_BLOCKS) >= 32:
                _BLOCKS.pop(next(iter(_BLOCKS)), None)
            _BLOCKS[key] = block
        parts.append(block[max(first - start, 0) : first + count - start])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def next_words(seed: Tensor, past: Tensor, space: Space, first: int, rows: int, samples: int = 0) -> Tensor:
    """Returns the words of rows past + first, past + first + 1, … of a stream, (rows,).

    With `samples` there are so many for each row: addresses end in a copy's number, (samples · rows,), copy-major.

    >>> seed, past = torch.tensor(3), torch.tensor(10)
    >>> torch.equal(next_words(seed, past, Space.TRAIN, 2, 4), words(address(3, Space.TRAIN, torch.arange(12, 16))))
    True
    """
    find = _next_words if torch.compiler.is_compiling() else _following
    found: Tensor = find(seed, past, int(space), first, rows, samples)
    return found


def _following(seed: Tensor, past: Tensor, space: int, first: int, rows: int, samples: int) -> Tensor:
    if past.device.type == "cpu" and type(past) is Tensor:
        at = (int(seed), Space(space), int(past) + first, rows)
        copies: list[tuple[int, ...]] = [(number,) for number in range(samples)] or [()]
        parts = [consecutive_words(*at, *copy) for copy in copies]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    row = past + first + torch.arange(rows, device=past.device)
    last = (torch.arange(samples, device=past.device)[:, None],) if samples else ()
    return _hash(address(seed, space, row, *last))


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
def _normals(words: Tensor, nodes: int) -> Tensor:
    return _draw(words, nodes)


@torch.library.custom_op("ibnn::next_words", mutates_args=())
def _next_words(seed: Tensor, past: Tensor, space: int, first: int, rows: int, samples: int) -> Tensor:
    return _following(seed, past, space, first, rows, samples).clone()  # blocks are kept


_next_words.register_fake(
    lambda seed, past, space, first, rows, samples: past.new_empty((rows * max(samples, 1),), dtype=torch.int64)
)
_words.register_fake(lambda at: torch.empty_like(at[0]))
_normals.register_fake(lambda words, nodes: words.new_empty((words.shape[0], nodes), dtype=torch.float32))


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
