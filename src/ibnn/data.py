"""DATA: real image sets from their canonical files in a folder, as uint8 tensors."""

import gzip
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.errors import complaint


class Split(NamedTuple):
    """Images (N, channels, height, width) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor


def load_idx(folder: str | Path, *, train: bool) -> Split:
    """MNIST or Fashion-MNIST from its idx .gz files."""
    prefix = "train" if train else "t10k"
    images = _idx(Path(folder) / f"{prefix}-images-idx3-ubyte.gz", header=16)
    labels = _idx(Path(folder) / f"{prefix}-labels-idx1-ubyte.gz", header=8)
    return Split(images.view(-1, 1, 28, 28), labels.long())


def load_cifar10(folder: str | Path, *, train: bool) -> Split:
    """CIFAR-10 from the files of its binary version."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    rows = torch.cat([_bytes(Path(folder) / name, compressed=False) for name in names]).view(-1, 3073)
    return Split(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long())


def _idx(path: Path, header: int) -> Tensor:
    return _bytes(path, compressed=True)[header:]


def _bytes(path: Path, *, compressed: bool) -> Tensor:
    if not path.exists():
        raise FileNotFoundError(complaint("folder", f"one with {path.name}", path.parent, "Put the set's files there."))
    content = gzip.decompress(path.read_bytes()) if compressed else path.read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
