"""SETS: image sets by name, in one form for training, evaluation and corruption, and fixed parts of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.data.files import Split, load_cifar10, load_cifar100, load_idx
from ibnn.data.folder import Folder
from ibnn.data.images import normalised
from ibnn.data.sources import SOURCES
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

    Attributes:
        name: Its name for `load`.
        train: Training images, as published.
        test: Test images, by which nothing may be chosen.
        mean: Mean of the training pixels in [0, 1], per channel.
        std: Their standard deviation.
        classes: Names of the classes.
        flip: Whether mirroring an image left to right keeps its class.
    """

    name: str
    train: Rows
    test: Rows
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    flip: bool

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
    """What is known of a set before it is read: `read` finds `files` in the folder `where`."""

    where: str
    files: tuple[str, ...]
    read: Callable[..., Rows]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    flip: bool


def _digits(_: Path, *, train: bool) -> Rows:
    """Reads scikit-learn's 1,797 digits; always the same 360 are for testing."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"The digits come with {error.name}: pip install 'ibnn[demo]'") from error
    found = load_digits()
    images = torch.from_numpy(found.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    return hold_out(Split(images, torch.from_numpy(found.target).long()), 360, seed=0)[0 if train else 1]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.replace("_", " ").split(","))


PHOTOGRAPHS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation that suit most photographs
_DIGITS = tuple("0123456789")
_CLOTHES = _words("T-shirt,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot")
_CIFAR10 = _words("airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck")
_CIFAR100 = _words(
    "apple,aquarium_fish,baby,bear,beaver,bed,bee,beetle,bicycle,bottle,bowl,boy,bridge,bus,butterfly,camel,can,castle,"
    "caterpillar,cattle,chair,chimpanzee,clock,cloud,cockroach,couch,crab,crocodile,cup,dinosaur,dolphin,elephant,"
    "flatfish,forest,fox,girl,hamster,house,kangaroo,keyboard,lamp,lawn_mower,leopard,lion,lizard,lobster,man,"
    "maple_tree,motorcycle,mountain,mouse,mushroom,oak_tree,orange,orchid,otter,palm_tree,pear,pickup_truck,pine_tree,"
    "plain,plate,poppy,porcupine,possum,rabbit,raccoon,ray,road,rocket,rose,sea,seal,shark,shrew,skunk,skyscraper,"
    "snail,snake,spider,squirrel,streetcar,sunflower,sweet_pepper,table,tank,telephone,television,tiger,tractor,train,"
    "trout,tulip,turtle,wardrobe,whale,willow_tree,wolf,woman,worm"
)
_STATISTICS = {  # mean and standard deviation per channel
    "cifar-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar-100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
KNOWN = {
    "mnist": Known("mnist", SOURCES["mnist"].kept, load_idx, (0.1307,), (0.3081,), _DIGITS, False),
    "fashion-mnist": Known(
        "fashion-mnist", SOURCES["fashion-mnist"].kept, load_idx, (0.2860,), (0.3530,), _CLOTHES, True
    ),
    "cifar-10": Known(
        "cifar-10-batches-bin", SOURCES["cifar-10"].kept, load_cifar10, *_STATISTICS["cifar-10"], _CIFAR10, True
    ),
    "cifar-100": Known(
        "cifar-100-binary", SOURCES["cifar-100"].kept, load_cifar100, *_STATISTICS["cifar-100"], _CIFAR100, True
    ),
    "digits": Known("scikit-learn", (), _digits, (0.3058,), (0.3759,), _DIGITS, False),
}


def names() -> tuple[str, ...]:
    """Returns the sets that `load` knows.

    >>> names()
    ('mnist', 'fashion-mnist', 'cifar-10', 'cifar-100', 'digits')
    """
    return tuple(KNOWN)


def known(name: str) -> Known:
    """Returns the entry of a set."""
    if name not in KNOWN:
        remedy = f"Pass one of {', '.join(names())}, or a folder of the data folder with train/CLASS/*.png and val/."
        raise ValueError(complaint("name", "the name of a set", repr(name), remedy))
    return KNOWN[name]


def data_folder(folder: str | Path | None = None) -> Path:
    """Returns where sets are: the given folder, else the environment variable IBNN_DATA, else `data`.

    >>> data_folder("here").name
    'here'
    """
    return Path(folder if folder is not None else os.environ.get("IBNN_DATA") or "data")


def load(name: str, folder: str | Path | None = None, *, size: int = 224) -> DataSet:
    """Reads a known set, or a folder of images in the data folder: NAME/train/CLASS/… and NAME/val/CLASS/….

    >>> load("digits").classes[:3]
    ('0', '1', '2')

    Args:
        name: One of `names()`, or that of a folder of images, such as "imagenet".
        folder: Where sets are; see `data_folder`.
        size: Height and width that images of a folder are resized to.
    """
    root = data_folder(folder)
    if name not in KNOWN and (root / name / "train").is_dir():
        train, test = (Folder(root / name, train=part, size=size) for part in (True, False))
        return DataSet(name, train, test, *PHOTOGRAPHS, train.classes, True)
    entry = known(name)
    place = root / entry.where
    missing = [file for file in entry.files if not (place / file).is_file()]
    if missing:
        remedy = f"Run: ibnn data get {name}"
        raise FileNotFoundError(complaint("folder", f"one with {entry.where}/{missing[0]}", root, remedy))
    found, tested = (entry.read(place, train=part) for part in (True, False))
    return DataSet(name, found, tested, entry.mean, entry.std, entry.classes, entry.flip)


def status(folder: str | Path | None = None) -> tuple[Status, ...]:
    """Tells which sets are there, how large they are, and where.

    >>> [(row.name, row.where) for row in status("nowhere") if row.found]
    [('digits', 'scikit-learn'), ('toy-regression', 'ibnn'), ('two-moons', 'ibnn')]
    """
    rows = []
    for name, entry in KNOWN.items():
        paths = [data_folder(folder) / entry.where / file for file in entry.files]
        sizes = [path.stat().st_size for path in paths if path.is_file()]
        found = len(sizes) == len(paths) if paths else find_spec("sklearn") is not None
        rows.append(Status(name, found, sum(sizes), str(paths[0].parent) if paths else entry.where))
    return (*rows, *(Status(name, True, 0, "ibnn") for name in TABLES))


def subset(split: Rows, n: int, seed: int) -> Rows:
    """Returns `n` random rows, each class in proportion to within one row, in their original order.

    >>> split = Split(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), torch.arange(100) % 4)
    >>> subset(split, 10, seed=0).labels.bincount().tolist()
    [3, 3, 2, 2]
    """
    _check_rows(n, len(split.labels), "n")
    return split.part(stratified(split.labels, n, seed).nonzero()[:, 0])


def hold_out(split: Rows, rows: int, seed: int) -> tuple[Rows, Rows]:
    """Returns a stratified (train, held-out) split; the held-out rows are those of `subset`.

    >>> split = Split(torch.zeros(100, 1, 1, 1, dtype=torch.uint8), torch.arange(100) % 4)
    >>> train, valid = hold_out(split, 20, seed=0)
    >>> train.labels.bincount().tolist(), valid.labels.bincount().tolist()
    ([20, 20, 20, 20], [5, 5, 5, 5])
    """
    _check_rows(rows, len(split.labels) - 1, "rows")
    out = stratified(split.labels, rows, seed)
    return split.part((~out).nonzero()[:, 0]), split.part(out.nonzero()[:, 0])


def _check_rows(rows: int, most: int, argument: str) -> None:
    if not 1 <= rows <= most:
        expected = f"a number of rows from 1 to {most}"
        raise ValueError(complaint(argument, expected, rows, f"There are no more than {most} to choose."))


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
