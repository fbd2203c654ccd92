"""The kinds of inputs that models take, images and other tensors (rows of a table among them), as files and as JSON."""

import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ibnn.data.images import cropped, opened, pixels_of
from ibnn.data.table_file import numbers as cell_numbers
from ibnn.data.table_file import read_cells
from ibnn.errors import complaint

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
KNOWN = f"{', '.join(sorted(IMAGES))}, .npy, .csv or a folder of images"
BATCH = 250  # examples that are read and answered at once
PIXELS = 25_000_000  # of the largest image that is decoded
MOST = 256  # inputs of a request
LARGEST = 1e15  # number in a row: what is computed from its square is still finite

Note = Callable[[str], None]


class Example(NamedTuple):
    """An image (C, H, W) in [0, 1], or another tensor, and its origin; `row` is None for an image file."""

    file: str
    row: int | None
    x: Tensor


def listed(paths: list[Path]) -> list[Path]:
    """Returns the files to read, those of folders sorted; raises if one is missing or of an unknown kind."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES)
            if not inside:
                raise FileNotFoundError(complaint("INPUT", "a folder with images", path, f"Known: {KNOWN}."))
            found += inside
        elif not path.exists():
            raise FileNotFoundError(complaint("INPUT", "a file or folder", f"no such {path}", "Check the name."))
        elif path.suffix.lower() not in IMAGES | {".npy", ".csv"}:
            raise ValueError(complaint("INPUT", KNOWN, path, "Convert the file."))
        else:
            found.append(path)
    return found


def batches(
    files: list[Path], read: Callable[[Path], list[Example]], failed: Callable[[Exception], None], rank: int, world: int
) -> Iterator[tuple[int, list[Example]]]:
    """Yields every `world`-th batch of examples, in order and with its number, from batch `rank` on.

    A batch is 250 examples, whoever answers it, so that the number of workers changes no answer. Its images are decoded
    only by the worker that answers it. A file that cannot be read is reported to `failed`, and the others are read.
    """
    shape: torch.Size | None = None

    def found(path: Path) -> list[Example]:
        nonlocal shape
        try:
            examples = read(path)
            got = examples[0].x.shape
            shape = shape or got
            if got != shape:
                expected = f"inputs of shape {tuple(shape)}"
                raise ValueError(complaint(str(path), expected, tuple(got), "Pass files of one shape."))
        except (ValueError, OSError) as error:
            failed(error)
            return []
        return examples

    parts: Iterator[Sequence[Example | Path]]
    parts = ([path] if path.suffix.lower() in IMAGES else found(path) for path in files)
    stream = chain.from_iterable(parts)
    for number, batch in enumerate(iter(lambda: list(islice(stream, BATCH)), [])):
        if number % world == rank:
            examples = [example for each in batch for example in (found(each) if isinstance(each, Path) else [each])]
            if examples:
                yield number, examples


@dataclass(frozen=True)
class Pixels:
    """Images of one shape (C, H, W); `mean` and `std` of each channel normalise them."""

    shape: tuple[int, ...]
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    resize: int | None = None  # what the shorter side is resized to before the centre is cropped; None: fill the shape

    @property
    def facts(self) -> dict[str, Any]:
        """What /health says of the inputs."""
        return dict(zip(("channels", "height", "width"), self.shape, strict=True))

    @property
    def size(self) -> int:
        """How many numbers an input has."""
        return math.prod(self.shape)

    def prepared(self, x: Tensor) -> Tensor:
        """Returns what the network takes, from images in [0, 1]."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std if self.mean else x

    def read(self, path: Path, note: Note) -> list[Example]:
        """Reads an image, or the images of a .csv or .npy file, in [0, 1] or as bytes."""
        if path.suffix.lower() in IMAGES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pillow warns about large images; we refuse them
                return [Example(_name(path), None, self.decoded(path, str(path))[0])]
        return _rows(path, self._formed(_table(path, note, bytes_to=1.0), str(path)))

    def from_json(self, value: Any) -> Tensor:
        """Returns images (N, C, H, W) in [0, 1] from nested lists."""
        return self._formed(numbers(value).clamp(-LARGEST, LARGEST).float(), "inputs")

    def from_files(self, files: list[tuple[str, bytes]]) -> Tensor:
        """Returns images from names and contents of files."""
        images, left = list[Tensor](), PIXELS  # of all images together
        for name, content in files:
            image, pixels = self.decoded(io.BytesIO(content), name[:80], left)
            left -= pixels
            images.append(image)
        return torch.stack(images)

    def decoded(self, file: Path | BinaryIO, name: str, most: int = PIXELS) -> tuple[Tensor, int]:
        """Returns an image in the network's shape, and how many pixels it had.

        With `resize` it is made as those of a folder are in training (`ibnn.data.Folder`).
        """
        from PIL import Image, ImageOps

        channels, height, width = self.shape
        try:
            image = opened(file, "L" if channels == 1 else "RGB", most)
        except ValueError as error:
            raise ValueError(complaint(name, "a readable image", error, "Replace or omit the file.")) from error
        pixels = image.width * image.height
        if self.resize is not None:
            image = cropped(image, height, self.resize)
        elif image.size != (width, height):
            image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
        return pixels_of(image).float() / 255, pixels

    def _formed(self, pixels: Tensor, name: str) -> Tensor:
        """Returns images (N, C, H, W), from (N, C, H, W), (N, H, W) or (N, C·H·W); raises unless they are in [0, 1]."""
        shape = tuple(pixels.shape)
        if shape[1:] not in (self.shape, (self.size,)) and (self.shape[0] > 1 or shape[1:] != self.shape[1:]):
            expected = f"of shape (N, {', '.join(map(str, self.shape))}) or (N, {self.size})"
            raise ValueError(complaint(name, expected, shape, "Reshape it to what the network was trained on."))
        if not len(pixels):
            raise ValueError(complaint(name, "one or more examples", f"none, of shape {shape}", "Leave it out."))
        if not bool(((pixels >= 0) & (pixels <= 1)).all()):
            got = f"values from {pixels.amin().item():.3g} to {pixels.amax().item():.3g}"
            raise ValueError(complaint(name, "in [0, 1]", got, "Pass pixels / 255 for bytes, not normalised."))
        return pixels.reshape(-1, *self.shape)


@dataclass(frozen=True)
class Tensors:
    """What the network itself takes: a tensor, several by name, or rows of a table in its own units."""

    shape: tuple[int, ...] | None = None  # of one input, where it is known
    whole: bool = False  # whether whole numbers stay integers, as for a network with an embedding
    columns: tuple[str, ...] = ()  # of a table
    named: bool = True  # whether the columns of a file go by name; if not, by order

    @property
    def facts(self) -> dict[str, Any]:
        """What /health says of the inputs."""
        return {"columns": list(self.columns)} if self.columns else {"shape": self.shape and list(self.shape)}

    @property
    def size(self) -> int:
        """How many numbers an input has; 1 if that is not known."""
        return len(self.columns) or 1

    def prepared(self, x: Any) -> Any:
        """Returns what the network takes."""
        return x

    def read(self, path: Path, note: Note) -> list[Example]:
        """Reads the rows of a .csv or .npy file."""
        if path.suffix.lower() in IMAGES:
            raise ValueError(complaint(str(path), "a .csv or .npy file of points", path.suffix, "Use numpy.save."))
        return _rows(path, self._checked(_table(path, note, self.columns if self.named else ()), str(path)))

    def from_json(self, value: Any) -> Any:
        """Returns a tensor (N, …) from nested lists, or rows by column; a dict of tensors from an object of lists."""
        if isinstance(value, dict) and value and not self.columns:
            found = {str(name): self._typed(numbers(part, name)) for name, part in value.items()}
            if len(sizes := {len(part) for part in found.values()}) > 1:
                raise ValueError(complaint("inputs", "of one length each", sorted(sizes), "Send a row of each."))
            return found
        if self.columns and isinstance(value, list) and any(isinstance(row, dict) for row in value):
            value = [self._ordered(row) for row in value]
        return self._checked(numbers(value), "inputs")

    def _ordered(self, row: Any) -> list[Any]:
        keys, columns = set(row) if isinstance(row, dict) else set(), set(self.columns)
        if keys != columns:
            missing, unknown = sorted(columns - keys)[:3], sorted(keys - columns)[:3]
            got = " and ".join(f"{word} {some}" for word, some in (("no", missing), ("also", unknown)) if some)
            expected = f"objects with the columns {', '.join(self.columns[:20])}"
            raise ValueError(complaint("inputs", expected, got[:200], "Send every column, and no other."))
        return [row[name] for name in self.columns]

    def _checked(self, found: Tensor, name: str) -> Tensor:
        """Returns inputs of the right shape, whose numbers are finite and not too large to compute with."""
        got, shape = tuple(found.shape[1:]), (len(self.columns),) if self.columns else self.shape
        flat = shape is not None and len(shape) == 1 and not self.columns  # then an image of as many numbers is fine
        fits = shape in (None, got) or (flat and math.prod(got) == math.prod(shape or ()))
        if not fits or not len(found) or (name != "inputs" and not got):
            expected = f"of shape (N, {', '.join(map(str, shape or '…'))})"
            raise ValueError(complaint(name, expected, tuple(found.shape), "Give one row per example."))
        if not bool(found.isfinite().all()):
            raise ValueError(complaint(name, "finite", "NaN or infinity", "Leave such rows out."))
        if bool((large := (found.abs() > LARGEST).reshape(len(found), -1).any(1)).any()):
            row = f"a larger one in row {int(large.nonzero()[0])}"
            raise ValueError(complaint(name, f"numbers up to {LARGEST:g}", row, "Leave such rows out."))
        return self._typed(found)

    def _typed(self, x: Tensor) -> Tensor:
        return x.long() if self.whole and bool((x == x.round()).all()) else x.float()


Kind = Pixels | Tensors


def _rows(path: Path, values: Tensor) -> list[Example]:
    return [Example(_name(path), row, x) for row, x in enumerate(values)]


def _name(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")  # bytes that are no text are escaped


def _table(path: Path, note: Note, columns: Sequence[str] = (), bytes_to: float = 255.0) -> Tensor:
    """Returns the rows of an .npy file, 255 of its bytes as `bytes_to`, or of a .csv file the named columns alone."""
    if path.suffix.lower() == ".csv":
        cells = read_cells(path, named=bool(columns))
        names = list(columns or cells.columns)
        if others := [repr(name) for name in cells.columns if name not in set(names)]:
            note(f"{path}: not used: {', '.join(others)}.")
        return cell_numbers(path, cells, names, "Fill the cell or leave the row out.").float()
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # damaged headers make numpy raise whatever comes
        raise ValueError(complaint(str(path), "an .npy file of numbers", error, "Save it by numpy.save.")) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
        got = getattr(array, "dtype", type(array).__name__)
        raise ValueError(complaint(str(path), "an array of numbers", got, "Convert the array."))
    values = torch.from_numpy(np.require(array, np.float32, ["C", "W"]))
    return values * (bytes_to / 255) if array.dtype == np.uint8 else values


def numbers(nested: Any, name: str = "inputs") -> Tensor:
    """Returns nested lists of floats as a float64 tensor; raises ValueError for anything else, as for ragged lists."""
    if not isinstance(nested, list) or not 1 <= len(nested) <= MOST:
        got = f"{len(nested)} of them" if nested and isinstance(nested, list) else json.dumps(nested)[:40]
        raise ValueError(complaint(name, f"a list of at most {MOST} inputs", got, "Send several requests."))
    found = np.array(nested, dtype=object)  # lists of different lengths stay entries
    for entry in found.flat:
        if not isinstance(entry, float) or not math.isfinite(entry):
            got = "lists of different lengths" if isinstance(entry, list) else json.dumps(entry)[:40]
            raise ValueError(complaint(name, "finite numbers in lists", got, "Correct or omit that input."))
    return torch.from_numpy(found.astype(np.float64))
