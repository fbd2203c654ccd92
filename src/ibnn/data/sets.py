"""Loads image sets by name, in one form for training, evaluation and corruption, and chooses fixed parts of them."""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn import check
from ibnn.data.images import Folder, Split, load_cifar10, load_cifar100, load_idx, normalised
from ibnn.data.tables import TABLES
from ibnn.errors import complaint

Rows = Split | Folder


@dataclass(frozen=True, eq=False)
class DataSet:
    """A set of images, and what a network needs to know about it.

    >>> digits = load("digits")
    >>> digits.train.images.shape, digits.test.images.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    >>> abs(digits.normalise(digits.train.images).mean().item()) < 1e-3
    True
    """

    name: str
    train: Rows  # as published
    test: Rows  # by which nothing may be chosen
    mean: tuple[float, ...]  # of the training pixels in [0, 1], per channel
    std: tuple[float, ...]
    classes: tuple[str, ...]  # their names
    flip: bool  # whether mirroring an image left to right keeps its class

    def normalise(self, images: Tensor) -> Tensor:
        """Turns bytes (B, C, H, W) into floats of mean 0 and standard deviation 1 over the training set."""
        return normalised(images, self.mean, self.std)


class Status(NamedTuple):
    """Whether a set is there."""

    name: str
    found: bool
    bytes: int
    where: str


class Known(NamedTuple):
    """An entry of `sets.toml`; mean, std, flip and classes are those of `DataSet`."""

    where: str  # folder of the set
    read: Callable[..., Rows]  # reads its training or test part from there
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    classes: tuple[str, ...]
    members: Mapping[str, tuple[int, str | None]]  # bytes and md5, or None, of each path that an archive brings
    url: str | None = None  # where its files are published; None if a package brings them
    files: Mapping[str, str] = {}  # md5 of each file as published

    @property
    def kept(self) -> dict[str, tuple[int | None, str | None]]:
        """Bytes and md5, where they are known, of the files that the set is read from, by path in the data folder."""
        return {**self.members} or {f"{self.where}/{file}": (None, md5) for file, md5 in self.files.items()}


def _digits(_: Path, *, train: bool) -> Rows:
    """Reads scikit-learn's 1,797 digits; always the same 360 are for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    return hold_out(Split(images, torch.from_numpy(found.target).long()), 360, seed=0)[0 if train else 1]


def _known(entry: dict[str, Any]) -> Known:
    members = {path: (member["bytes"], member.get("md5")) for path, member in entry.pop("members", {}).items()}
    entry |= {key: tuple(entry[key]) for key in ("mean", "std", "classes")}
    return Known(read=_READERS[entry.pop("format")], members=members, **entry)


PHOTOGRAPHS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation that suit most photographs
_READERS = {"idx": load_idx, "cifar-10": load_cifar10, "cifar-100": load_cifar100, "digits": _digits}
_TEXT = (resources.files("ibnn.data") / "sets.toml").read_text(encoding="utf-8")
KNOWN = {name: _known(entry) for name, entry in tomllib.loads(_TEXT).items()}


def names() -> tuple[str, ...]:
    """Returns the sets that `load` knows."""
    return tuple(KNOWN)


def known(name: str) -> Known:
    """Returns the entry of a set."""
    check.choice("name", name, KNOWN)
    return KNOWN[name]


def data_folder(folder: str | Path | None = None) -> Path:
    """Returns where sets are: the given folder, else the environment variable IBNN_DATA, else `data`."""
    return Path(folder if folder is not None else os.environ.get("IBNN_DATA") or "data")


def load(name: str, folder: str | Path | None = None, *, size: int = 224) -> DataSet:
    """Reads a known set, or a folder of images in the data folder (see `data_folder`).

    Such a folder has NAME/train/CLASS/… and NAME/val/CLASS/…; its images become `size` pixels high and wide.
    """
    root = data_folder(folder)
    if name not in KNOWN and (root / name / "train").is_dir():
        train, test = (Folder(root / name, train=part, size=size) for part in (True, False))
        return DataSet(name, train, test, *PHOTOGRAPHS, train.classes, True)
    entry = known(name)
    if missing := [path for path in entry.kept if not (root / path).is_file()]:
        raise FileNotFoundError(complaint("folder", f"one with {missing[0]}", root, f"Run: ibnn data get {name}"))
    known_train, known_test = (entry.read(root / entry.where, train=part) for part in (True, False))
    return DataSet(name, known_train, known_test, entry.mean, entry.std, entry.classes, entry.flip)


def status(folder: str | Path | None = None) -> tuple[Status, ...]:
    """Tells which sets are there, how large they are, and where.

    >>> [(row.name, row.where) for row in status("nowhere") if row.found]
    [('digits', 'scikit-learn'), ('toy-regression', 'ibnn'), ('two-moons', 'ibnn')]
    """
    rows, root = [], data_folder(folder)
    for name, entry in KNOWN.items():
        paths = [root / path for path in entry.kept]
        sizes = [path.stat().st_size for path in paths if path.is_file()]
        found = len(sizes) == len(paths) if paths else find_spec("sklearn") is not None
        rows.append(Status(name, found, sum(sizes), str(paths[0].parent) if paths else entry.where))
    own = [path.parent for path in sorted(root.glob("*/train")) if path.is_dir() and path.parent.name not in KNOWN]
    rows += [Status(place.name, True, 0, str(place)) for place in own]  # folders of images, as `load` takes them
    return (*rows, *(Status(name, True, 0, "ibnn") for name in TABLES))


def subset(split: Rows, examples: int, seed: int) -> Rows:
    """Returns so many random rows, each class in proportion to within one row, in their original order.

    >>> split = Split(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), torch.arange(100) % 4)
    >>> subset(split, 10, seed=0).labels.bincount().tolist()
    [3, 3, 2, 2]
    """
    check.integer("examples", examples, most=len(split.labels), remedy="There are no more rows.")
    return split.part(stratified(split.labels, examples, seed).nonzero()[:, 0])


def hold_out(split: Rows, valid: int, seed: int) -> tuple[Rows, Rows]:
    """Returns a stratified (train, held-out) split; the held-out rows are those of `subset`.

    >>> split = Split(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), torch.arange(100) % 4)
    >>> train, valid = hold_out(split, 20, seed=0)
    >>> train.labels.bincount().tolist(), valid.labels.bincount().tolist()
    ([20, 20, 20, 20], [5, 5, 5, 5])
    """
    check.integer("valid", valid, most=len(split.labels) - 1, remedy="There are no more rows.")
    out = stratified(split.labels, valid, seed)
    return split.part((~out).nonzero()[:, 0]), split.part(out.nonzero()[:, 0])


def stratified(labels: Tensor, rows: int, seed: int) -> Tensor:
    """Marks random rows, (N,) bool: each class's share, rounded by largest remainder."""
    share = labels.bincount() * rows
    take, lost = share // len(labels), share % len(labels)
    take[lost.argsort(descending=True, stable=True)[: rows - int(take.sum())]] += 1
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(take.tolist()):
        chosen[order[labels[order] == label][:count]] = True
    return chosen
