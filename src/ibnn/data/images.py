"""Reads image sets and folders of images as uint8 tensors, and makes normalised, augmented batches. No pickles."""

import copy
import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from ibnn import check
from ibnn.errors import DamagedError, complaint

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Numbers = Sequence[float]
PADDING = 4  # black pixels on each side, zero before normalising, for random crops
_DENSEST = 1100  # bytes that gzip packs into one, at most
_PIXELS = 3 * 32 * 32  # of a CIFAR image
_SUFFIXES = {".png", ".jpg", ".jpeg"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # that pillow may try


class Split(NamedTuple):
    """Images (N, channels, height, width) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def rows(self, index: Tensor) -> "Split":
        """Returns the given rows, in the given order."""
        return Split(self.images.index_select(0, index), self.labels[index])

    def part(self, index: Tensor) -> "Split":
        """Returns the given rows; `Folder.part` does so without decoding them."""
        return self.rows(index)


def load_idx(folder: str | Path, *, train: bool) -> Split:
    """Reads MNIST or Fashion-MNIST from its idx .gz files."""
    prefix = "train" if train else "t10k"
    path = Path(folder) / f"{prefix}-labels-idx1-ubyte.gz"
    images, labels = _read_idx(path.with_name(f"{prefix}-images-idx3-ubyte.gz"), dims=3), _read_idx(path, dims=1)
    if len(images) != len(labels):
        raise _damaged(path, "a file with a label per image", f"{len(images)} images and {len(labels)} labels")
    return Split(images.unsqueeze(1), labels.long())


def load_cifar10(folder: str | Path, *, train: bool) -> Split:
    """Reads CIFAR-10 from the files of its binary version."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    return _cifar([Path(folder) / name for name in names], classes=(10,))


def load_cifar100(folder: str | Path, *, train: bool) -> Split:
    """Reads CIFAR-100, with its fine labels, from the files of its binary version."""
    return _cifar([Path(folder) / ("train.bin" if train else "test.bin")], classes=(20, 100))


def _read_idx(path: Path, *, dims: int) -> Tensor:
    """Reads an idx .gz file: two zero bytes, type (8: unsigned byte), number of dimensions, the dimensions, values.

    It unpacks no more than the header promises, and gzip cannot pack a byte for more than about a thousand.
    """
    magic, packed = bytes([0, 0, 8, dims]), path.stat().st_size
    try:
        with gzip.open(path) as file:
            if (start := file.read(4)) != magic or len(sizes := file.read(4 * dims)) < 4 * dims:
                raise _damaged(path, f"an idx file that starts {magic.hex(' ')}", start.hex(" ") or "nothing")
            shape = struct.unpack(f">{dims}I", sizes)
            promised = math.prod(shape)
            values = file.read(promised) if promised < _DENSEST * packed else b""
            more = file.read(1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, "a whole gzip file", f"a broken one ({error})") from None
    if len(values) != promised or more or not values:
        got = f"{'more than ' if more else ''}{len(values)}"
        raise _damaged(path, f"{promised} values, as its header {shape} says, and more than none", got)
    return _tensor(values).view(shape)


def _cifar(paths: list[Path], *, classes: tuple[int, ...]) -> Split:
    """Reads rows of label bytes, one for each of `classes`, and 3 × 32 × 32 pixels; the last label is the finest."""
    width, parts = len(classes) + _PIXELS, []
    for path in paths:
        content = path.read_bytes()
        if len(content) % width or not content:
            raise _damaged(path, f"whole rows of {width} bytes, at least one", f"{len(content)} bytes")
        rows = _tensor(content).view(-1, width)
        highest = rows[:, : len(classes)].amax(0).tolist()
        if any(label >= count for label, count in zip(highest, classes, strict=True)):
            raise _damaged(path, f"a file whose labels are below {classes}", f"labels up to {tuple(highest)}")
        parts.append(rows)
    whole = torch.cat(parts)
    return Split(whole[:, len(classes) :].reshape(-1, 3, 32, 32), whole[:, len(classes) - 1].long())


def _damaged(path: Path, expected: str, got: object) -> DamagedError:
    remedy = "Delete the file and get the set again: ibnn data get NAME."
    return DamagedError(complaint(str(path), expected, got, remedy))


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def opened(file: Path | BinaryIO, mode: str, most: int | None = None) -> "Picture":
    """Returns an image upright and in mode "L" or "RGB"; raises a ValueError for damage, or more than `most` pixels."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file, formats=FORMATS) as image:  # reads only the header
            if most is not None and image.size[0] * image.size[1] > most:
                raise ValueError(f"{image.size[0]}×{image.size[1]} pixels, more than {most:,}")
            ImageOps.exif_transpose(image, in_place=True)
            return flattened(image, mode)
    except UnidentifiedImageError as error:
        raise ValueError(f"no image, a damaged one, or of another kind than {', '.join(FORMATS)}") from error
    except Exception as error:  # damaged bytes make decoders raise whatever comes
        raise ValueError(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}") from error


def cropped(image: "Picture", size: int, resize: int) -> "Picture":
    """Returns the centre of an image, size × size, of which the shorter side was resized first."""
    from PIL import Image

    width, height = (side * resize // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def shorter_side(size: int) -> int:
    """Returns what the shorter side of an image is resized to before the crop, 8/7 of it: 256 for 224."""
    return size * 8 // 7


def pixels_of(image: "Picture") -> Tensor:
    """Returns the bytes of an image in mode "L" or "RGB", (C, H, W)."""
    return _tensor(image.tobytes()).view(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def flattened(image: "Picture", mode: str) -> "Picture":
    """Converts a pillow image to mode "L" or "RGB": puts transparent pixels on white, scales 16-bit greys to 8."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        scale = [round(value / 257) for value in range(1 << 16)]
        image = image.convert("I").point(scale, "L")
        if "transparency" in image.info:  # a grey that stands for it
            image.info["transparency"] = scale[image.info["transparency"]]
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"{image.mode}, more than 16 bits a pixel")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert(mode)


class Folder(Dataset[tuple[Tensor, Tensor]]):
    """Images of a folder as uint8 (3, size, size): the shorter side is resized (256 for 224), then the centre cropped.

    Photographs are turned as their camera says. Transparent images are composited on white; 16-bit greys become 8-bit.
    `Images` takes a folder in place of a `Split` and decodes each batch as it is needed (so give the loader some
    `num_workers`). `classes` are the sorted names of the classes of train and val together; `paths` are the files,
    sorted by class and name; `labels` (N,) are indices of their classes.
    """

    def __init__(self, root: str | Path, *, train: bool, size: int) -> None:
        check.integer("size", size)
        self.size = size
        part = Path(root) / ("train" if train else "val")
        both = (path for name in ("train", "val") for path in (Path(root) / name).glob("*"))
        self.classes = tuple(sorted({path.name for path in both if path.is_dir()}))
        files = (path for name in self.classes for path in sorted((part / name).glob("*")))
        self.paths = [path for path in files if path.suffix.lower() in _SUFFIXES]
        if not self.paths:
            expected, remedy = f"a folder with {part.name}/CLASS/*.png or *.jpg", "Put one folder per class there."
            raise FileNotFoundError(complaint("root", expected, root, remedy))
        self.labels = torch.tensor([self.classes.index(path.parent.name) for path in self.paths])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._decode(self.paths[index]), self.labels[index]

    def rows(self, index: Tensor) -> Split:
        """Decodes the given rows."""
        return Split(torch.stack([self._decode(self.paths[i]) for i in index.tolist()]), self.labels[index])

    def part(self, index: Tensor) -> "Folder":
        """Returns the given rows, not yet decoded."""
        found = copy.copy(self)
        found.paths, found.labels = [self.paths[i] for i in index.tolist()], self.labels[index]
        return found

    def _decode(self, path: Path) -> Tensor:
        try:
            image = opened(path, "RGB")
        except ValueError as error:
            remedy = "Replace or delete the file."
            raise DamagedError(complaint(str(path), "a readable image", error, remedy)) from error
        return pixels_of(cropped(image, self.size, shorter_side(self.size)))


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Normalised images and labels; `__getitems__` returns whole batches.

    Augmentation draws from torch's global generator, for the whole batch at once: two numbers an image for the crop
    and, with `flip`, one for the mirror image. In a DataLoader of your own, pass `collate_fn=tuple`: batches are
    already collated.

    >>> split = Split(torch.full((8, 1, 4, 4), 255, dtype=torch.uint8), torch.arange(8))
    >>> images = Images(split, mean=(0.5,), std=(0.25,))
    >>> x, y = next(iter(torch.utils.data.DataLoader(images, batch_size=3, collate_fn=tuple)))
    >>> x.shape, x.max().item(), y.tolist()
    (torch.Size([3, 1, 4, 4]), 2.0, [0, 1, 2])
    """

    def __init__(
        self, data: Split | Folder, *, mean: Numbers, std: Numbers, augment: bool = False, flip: bool = True
    ) -> None:
        """Takes images; `mean` and `std` of each channel are for pixels in [0, 1].

        `augment` crops randomly from the image padded by 4 black pixels; `flip` then also mirrors half of the images.
        """
        channels = data.images.shape[1] if isinstance(data, Split) else 3
        if not len(mean) == len(std) == channels:
            got = f"{len(mean)} and {len(std)}"
            raise ValueError(complaint("mean and std", f"{channels} numbers each", got, "Pass one for each channel."))
        self.data, self.labels, self.augment, self.flip = data, data.labels, augment, flip
        self.mean, self.std = tuple(mean), tuple(std)

    def __len__(self) -> int:
        return len(self.data.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.__getitems__([index])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns a batch: float32 (B, C, H, W) and int64 (B,)."""
        images, labels = self.data.rows(torch.as_tensor(indices))
        if self.augment:
            images = _augmented(images, self.flip)
        return normalised(images, self.mean, self.std), labels


def normalised(images: Tensor, mean: Numbers, std: Numbers) -> Tensor:
    """Turns bytes (B, C, H, W) into float32 (pixel − mean) / std, for pixels in [0, 1]."""
    centre, spread = (torch.tensor(values).view(-1, 1, 1).to(images.device) * 255 for values in (mean, std))
    return images.float().sub_(centre).div_(spread)


def _augmented(images: Tensor, flip: bool) -> Tensor:
    """Crops each padded image at its own place, and mirrors half of them, with one gather for the batch."""
    batch, channels, height, width = images.shape
    down, right = torch.randint(2 * PADDING + 1, (2, batch, 1))
    rows, columns = torch.arange(height), torch.arange(width)
    if flip:
        columns = torch.where(torch.rand(batch, 1) < 0.5, width - 1 - columns, columns)
    rows, columns = (rows + down) * (width + 2 * PADDING), columns + right  # (B, H), (B, W)
    places = (rows[:, :, None] + columns[:, None, :]).view(batch, 1, -1).expand(-1, channels, -1)
    return F.pad(images, (PADDING,) * 4).flatten(2).gather(2, places).view(images.shape)
