"""FORMATS: the canonical files of MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, as uint8 tensors. No pickles."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.errors import DamagedError, complaint

_PIXELS = 3 * 32 * 32  # of a CIFAR image
_REMEDY = "Delete the file and get the set again: ibnn data get NAME."


class Split(NamedTuple):
    """Images (N, channels, height, width) uint8 and labels (N,) int64.

    >>> split = Split(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([5, 6, 7]))
    >>> split.rows(torch.tensor([2, 0])).labels.tolist()
    [7, 5]
    """

    images: Tensor
    labels: Tensor

    def rows(self, index: Tensor) -> "Split":
        """Returns the given rows, in the given order."""
        return Split(self.images.index_select(0, index), self.labels[index])

    def part(self, index: Tensor) -> "Split":
        """Returns the given rows, as `Folder.part` does without decoding them."""
        return self.rows(index)


def load_idx(folder: str | Path, *, train: bool) -> Split:
    """Reads MNIST or Fashion-MNIST from its idx .gz files.

    >>> load_idx("data/mnist", train=True).images.shape  # doctest: +SKIP
    torch.Size([60000, 1, 28, 28])
    """
    prefix = Path(folder) / ("train" if train else "t10k")
    images = _read_idx(Path(f"{prefix}-images-idx3-ubyte.gz"), dims=3)
    path = Path(f"{prefix}-labels-idx1-ubyte.gz")
    labels = _read_idx(path, dims=1)
    if len(images) != len(labels):
        got = f"{len(images)} images and {len(labels)} labels"
        raise DamagedError(complaint("folder", f"one with a label in {path} per image", got, _REMEDY))
    return Split(images.unsqueeze(1), labels.long())


def load_cifar10(folder: str | Path, *, train: bool) -> Split:
    """Reads CIFAR-10 from the files of its binary version.

    >>> load_cifar10("data/cifar-10-batches-bin", train=False).images.shape  # doctest: +SKIP
    torch.Size([10000, 3, 32, 32])
    """
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    return _cifar([Path(folder) / name for name in names], classes=(10,))


def load_cifar100(folder: str | Path, *, train: bool) -> Split:
    """Reads CIFAR-100, with its fine labels, from the files of its binary version.

    >>> load_cifar100("data/cifar-100-binary", train=True).images.shape  # doctest: +SKIP
    torch.Size([50000, 3, 32, 32])
    """
    return _cifar([Path(folder) / ("train.bin" if train else "test.bin")], classes=(20, 100))


def _read_idx(path: Path, *, dims: int) -> Tensor:
    """Reads an idx .gz file of unsigned bytes with `dims` dimensions.

    The header is two zero bytes, the type (8 is an unsigned byte), the number of dimensions, and each of them as a
    big-endian 32-bit integer; then come the values, the last dimension fastest.
    """
    try:
        content = gzip.decompress(_read(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedError(complaint(str(path), "a whole gzip file", f"a broken one ({error})", _REMEDY)) from None
    magic = bytes([0, 0, 8, dims])
    if content[:4] != magic or len(content) < 4 + 4 * dims:
        start = content[:4].hex(" ") or "nothing"
        raise DamagedError(complaint(str(path), f"an idx file that starts {magic.hex(' ')}", start, _REMEDY))
    shape = struct.unpack_from(f">{dims}I", content, 4)
    values = content[4 + 4 * dims :]
    if len(values) != math.prod(shape) or not values:
        expected = f"{math.prod(shape)} values, as its header {shape} says, and more than none"
        raise DamagedError(complaint(str(path), expected, len(values), _REMEDY))
    return _tensor(values).view(shape)


def _cifar(paths: list[Path], *, classes: tuple[int, ...]) -> Split:
    """Reads rows of label bytes, one for each of `classes`, and 3 × 32 × 32 pixels; the last label is the finest."""
    width, parts = len(classes) + _PIXELS, []
    for path in paths:
        content = _read(path)
        if len(content) % width or not content:
            expected = f"whole rows of {width} bytes, at least one"
            raise DamagedError(complaint(str(path), expected, f"{len(content)} bytes", _REMEDY))
        rows = _tensor(content).view(-1, width)
        highest = rows[:, : len(classes)].amax(0).tolist()
        if any(label >= count for label, count in zip(highest, classes, strict=True)):
            expected = f"a file whose labels are below {classes}"
            raise DamagedError(complaint(str(path), expected, f"labels up to {tuple(highest)}", _REMEDY))
        parts.append(rows)
    whole = torch.cat(parts)
    return Split(whole[:, len(classes) :].reshape(-1, 3, 32, 32), whole[:, len(classes) - 1].long())


def _read(path: Path) -> bytes:
    if not path.is_file():
        remedy = "Put the set's files there: ibnn data get NAME."
        raise FileNotFoundError(complaint("folder", f"one with {path.name}", path.parent, remedy))
    return path.read_bytes()


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
