"""The kinds of inputs that models take, images, rows of a table and plain tensors, read from files and from JSON."""

import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ibnn.data.images import cropped, opened, pixels_of
from ibnn.data.table_file import read_sheet
from ibnn.errors import complaint

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
KNOWN = f"{', '.join(sorted(IMAGES))}, .npy, .csv or a folder of images"
BATCH = 250  # examples that are read and answered at once
PIXELS = 25_000_000  # of the largest image that is decoded
MOST = 256  # inputs of a request
LARGEST = 1e15  # number in a row: what is computed from its square is still finite
_DIVIDE = "Send pixels that are not normalised, divided by the value of white: 255 for bytes."
_SCALE = "Pass --scale with the value of white, 255 for bytes or 16 for scikit-learn's digits, and unnormalised pixels."

Note = Callable[[str], None]


class Form(NamedTuple):
    """Shape of the images that a network takes."""

    channels: int
    height: int
    width: int


class Example(NamedTuple):
    """An image (C, H, W) in [0, 1], or a point (D,), and its origin; `row` is None for an image file."""

    file: str
    row: int | None
    pixels: Tensor


Reader = Callable[[Path], list[Example]]  # reads the examples of a file


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
    files: list[Path], read: Reader, failed: Callable[[Exception], None], *, rank: int = 0, world: int = 1
) -> Iterator[tuple[int, list[Example]]]:
    """Yields every `world`-th batch of examples, in order and with its number, from batch `rank` on.

    A batch is 250 examples, whoever answers it, so that the number of workers changes no answer. Its images are decoded
    only by the worker that answers it. A file that cannot be read is reported to `failed`, and the others are read.
    """

    def found(path: Path) -> list[Example]:
        try:
            return read(path)
        except (ValueError, OSError) as error:
            failed(error)
            return []

    def all_examples() -> Iterator[Example | Path]:
        for path in files:
            yield from [path] if path.suffix.lower() in IMAGES else found(path)

    stream = all_examples()
    for number in count():
        if not (batch := list(islice(stream, BATCH))):
            return
        if number % world == rank:
            examples = [example for each in batch for example in (found(each) if isinstance(each, Path) else [each])]
            if examples:
                yield number, examples


@dataclass(frozen=True)
class Pixels:
    """Images of one shape; `mean` and `std` of each channel normalise them."""

    form: Form
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    resize: int | None = None  # what the shorter side is resized to before the centre is cropped; None: fill the shape
    word = "images"

    @property
    def facts(self) -> dict[str, Any]:
        """What /health says of the inputs."""
        return self.form._asdict()

    @property
    def size(self) -> int:
        """How many numbers an input has."""
        return math.prod(self.form)

    def prepared(self, x: Tensor) -> Tensor:
        """Returns what the network takes, from images in [0, 1]."""
        if not self.mean:
            return x
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (x - mean) / std

    def reader(self, scale: float | None, note: Note) -> Reader:
        """Returns a function that reads images and resizes them; it notes each source size once; `scale` is white."""
        noted: set[tuple[int, int]] = set()

        def read(path: Path) -> list[Example]:
            if path.suffix.lower() not in IMAGES:
                return _rows(path, _pixels(path, self.form, scale, note))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pillow warns about large images; we refuse them
                pixels, size = decoded(path, self.form, name=str(path), resize=self.resize)
            if size not in noted and (done := resized(size, self.form, self.resize)):
                note(f"{path} and others of its size: {done}")
                noted.add(size)
            return [Example(_name(path), None, pixels)]

        return read

    def from_json(self, value: Any) -> Tensor:
        """Returns images (N, C, H, W) in [0, 1] from nested lists."""
        return formed(numbers(value).clamp(-LARGEST, LARGEST).float(), "inputs", self.form)

    def from_files(self, files: list[tuple[str, bytes]]) -> tuple[Tensor, list[str | None]]:
        """Returns images from names and contents of files, and a note for each that was resized."""
        images: list[Tensor] = []
        notes: list[str | None] = []
        left = PIXELS  # of all images together; decoded, a pixel has one byte or three
        for name, content in files:
            image, size = decoded(io.BytesIO(content), self.form, name=name[:80], most=left, resize=self.resize)
            left -= size[0] * size[1]
            images.append(image)
            notes.append(resized(size, self.form, self.resize))
        return torch.stack(images), notes

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the inputs of a request."""
        number, (channels, height, width) = {"type": "number", "minimum": 0, "maximum": 1}, self.form
        plane = array(array(number, width, width), height, height)
        shapes = [array(number, self.size, self.size), array(plane, channels, channels)]
        shapes += [plane] if channels == 1 else []
        return {"oneOf": [array(shape, 1, MOST) for shape in shapes], "description": "Pixels in [0, 1]."}


@dataclass(frozen=True)
class Rows:
    """Rows of a table, in its own units."""

    columns: tuple[str, ...]
    named: bool = True  # whether the columns of a file go by name; if not, by order
    start: tuple[str, ...] = ()  # what the fields of the page begin with
    word = "rows"

    @property
    def facts(self) -> dict[str, Any]:
        """What /health says of the inputs."""
        return {"columns": list(self.columns)}

    @property
    def size(self) -> int:
        """How many numbers an input has."""
        return len(self.columns)

    def prepared(self, x: Tensor) -> Tensor:
        """Returns what the network takes."""
        return x

    def reader(self, scale: float | None, note: Note) -> Reader:
        """Returns a function that reads rows of numbers from .csv and .npy files."""
        _no_scale(scale, "points")

        def read(path: Path) -> list[Example]:
            if path.suffix.lower() == ".npy":
                found = _array(path)[0]
            elif path.suffix.lower() == ".csv":
                found = _table(path, note, self.columns if self.named else ())
            else:
                remedy = "Convert the file."
                raise ValueError(complaint(str(path), "a .csv or .npy file of points", path.suffix, remedy))
            if found.ndim != 2 or found.shape[1] != self.size or not len(found):
                expected, remedy = f"of shape (N, {self.size})", "Give one row per example, one column per input."
                raise ValueError(complaint(str(path), expected, tuple(found.shape), remedy))
            return _rows(path, checked(found, str(path)))

        return read

    def from_json(self, value: Any) -> Tensor:
        """Returns points (N, D), given as lists or as objects by the names of columns."""
        if isinstance(value, list) and any(isinstance(row, dict) for row in value):
            value = [self._ordered(row) for row in value]
        found = numbers(value)
        if found.dim() != 2 or found.shape[1] != self.size:
            remedy = "Send one row per example, one number per column."
            raise ValueError(complaint("inputs", f"of shape (N, {self.size})", tuple(found.shape), remedy))
        return checked(found, "inputs").float()

    def _ordered(self, row: Any) -> list[Any]:
        keys, columns = set(row) if isinstance(row, dict) else set(), set(self.columns)
        if keys != columns:
            missing, unknown = sorted(columns - keys)[:3], sorted(keys - columns)[:3]
            got = " and ".join(f"{word} {some}" for word, some in (("no", missing), ("also", unknown)) if some)
            expected = f"objects with the columns {', '.join(self.columns[:20])}"
            raise ValueError(complaint("inputs", expected, got[:200], "Send every column, and no other."))
        return [row[name] for name in self.columns]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the inputs of a request."""
        number, columns = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}, list(self.columns)
        named = {"type": "object", "properties": dict.fromkeys(columns, number), "required": columns}
        shapes = [array(number, self.size, self.size), named | {"additionalProperties": False}]
        order = f"{', '.join(columns[:20])}{', …' * (self.size > 20)}"
        words = f"Rows of numbers: lists in the order {order}, or by name."
        return {"oneOf": [array(shape, 1, MOST) for shape in shapes], "description": words}


@dataclass(frozen=True)
class Tensors:
    """What the network itself takes: a tensor, or several by name; nothing is known of how it is prepared."""

    shape: tuple[int, ...] | None = None  # of one input, where it is known
    whole: bool = False  # whether whole numbers stay integers, as for a network with an embedding
    word, size = "inputs", 1

    @property
    def facts(self) -> dict[str, Any]:
        """What /health says of the inputs."""
        return {"shape": self.shape and list(self.shape)}

    def prepared(self, x: Any) -> Any:
        """Returns what the network takes."""
        return x

    def reader(self, scale: float | None, note: Note) -> Reader:
        """Returns a function that reads .npy files (N, …), or the rows of .csv files."""
        _no_scale(scale, "tensors")
        seen: list[tuple[int, ...]] = [] if self.shape is None else [self.shape]

        def read(path: Path) -> list[Example]:
            if path.suffix.lower() not in (".npy", ".csv"):
                expected, remedy = "a .npy or .csv file", "Save what the network takes by numpy.save."
                got = f"{path.suffix}, and the model does not say how images are normalised"
                raise ValueError(complaint(str(path), expected, got, remedy))
            found = _table(path, note) if path.suffix.lower() == ".csv" else _array(path)[0]
            seen.append(tuple(found.shape[1:]))
            if found.ndim < 2 or not len(found) or not same(seen[0], seen[-1]):
                expected = f"of shape (N, {', '.join(map(str, seen[0])) or '…'})"
                raise ValueError(complaint(str(path), expected, tuple(found.shape), "Pass files of one shape."))
            return _rows(path, self._typed(checked(found, str(path))))

        return read

    def from_json(self, value: Any) -> Any:
        """Returns a tensor (N, …) from nested lists, or a dict of them from an object."""
        if isinstance(value, dict) and value:
            found = {str(name): self._typed(numbers(part, name)) for name, part in value.items()}
            if len(sizes := {len(part) for part in found.values()}) > 1:
                raise ValueError(complaint("inputs", "of one length each", sorted(sizes), "Send a row of each."))
            return found
        x = self._typed(checked(numbers(value), "inputs"))
        if self.shape is not None and not same(self.shape, tuple(x.shape[1:])):
            expected = f"of shape (N, {', '.join(map(str, self.shape))})"
            raise ValueError(complaint("inputs", expected, tuple(x.shape), "Send what the network takes."))
        return x

    def _typed(self, x: Tensor) -> Tensor:
        return x.long() if self.whole and bool((x == x.round()).all()) else x.float()

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the inputs of a request."""
        words = "What the network takes: nested lists of numbers (N, …), or an object of such lists by name."
        return {"anyOf": [array({}, 1, MOST), {"type": "object"}], "description": words}


Kind = Pixels | Rows | Tensors


def same(expected: tuple[int, ...], got: tuple[int, ...]) -> bool:
    """Whether shapes agree, or a flat input has as many numbers as an image."""
    return expected == got or (len(expected) == 1 and math.prod(got) == expected[0])


def array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    """Returns the JSON schema of a list."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def checked(found: Tensor, name: str) -> Tensor:
    """Returns numbers that are finite and not too large to compute with; raises for others."""
    if not bool(found.isfinite().all()):
        raise ValueError(complaint(name, "finite", "NaN or infinity", "Leave such rows out."))
    if bool((large := (found.abs() > LARGEST).reshape(len(found), -1).any(1)).any()):
        got = f"a larger one in row {int(large.nonzero()[0])}"
        raise ValueError(complaint(name, f"numbers up to {LARGEST:g}", got, "Leave such rows out."))
    return found


def _no_scale(scale: float | None, kind: str) -> None:
    if scale is not None:
        remedy = f"Leave it out: {kind} are taken as they are."
        raise ValueError(complaint("--scale", f"absent for a model that takes {kind}", scale, remedy))


def _rows(path: Path, values: Tensor) -> list[Example]:
    return [Example(_name(path), row, x) for row, x in enumerate(values)]


def _name(path: Path) -> str:
    """Returns the name of a file as text that can be written; bytes that are no text are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def resized(size: tuple[int, int], form: Form, resize: int | None = None) -> str | None:
    """Describes what was done to an image of some size; None if nothing was."""
    if resize is not None:
        return f"the shorter side resized from {min(size)} to {resize}, the centre cropped, as in training."
    if size == (form.width, form.height):
        return None
    cropped = "" if size[0] * form.height == size[1] * form.width else ", the longer side cropped"
    return f"resized from {size[0]}×{size[1]} to {form.width}×{form.height}{cropped}."


def decoded(
    file: Path | BinaryIO, form: Form, *, name: str, most: int = PIXELS, resize: int | None = None
) -> tuple[Tensor, tuple[int, int]]:
    """Returns an image of at most so many pixels in the network's shape, and its original width and height.

    With `resize` it is made as those of a folder are in training (`ibnn.data.Folder`), else resized to fill the shape.
    """
    from PIL import Image, ImageOps

    try:
        image = opened(file, "L" if form.channels == 1 else "RGB", most)
    except ValueError as error:
        raise ValueError(complaint(name, "a readable image", error, "Replace or omit the file.")) from error
    size = image.size
    if resize is not None:
        image = cropped(image, form.height, resize)
    elif size != (form.width, form.height):
        image = ImageOps.fit(image, (form.width, form.height), Image.Resampling.BILINEAR)
    return pixels_of(image).float() / 255, size


def _array(path: Path) -> tuple[Tensor, np.dtype[Any]]:
    """Returns the rows of an .npy file as floats, and their original type."""
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # damaged headers make numpy raise whatever comes
        raise ValueError(complaint(str(path), "an .npy file of numbers", error, "Save it by numpy.save.")) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
        got = getattr(array, "dtype", type(array).__name__)
        raise ValueError(complaint(str(path), "an array of numbers", got, "Convert the array."))
    return torch.from_numpy(np.require(array, np.float32, ["C", "W"])), array.dtype


def _pixels(path: Path, form: Form, scale: float | None, note: Note) -> Tensor:
    """Returns the images of a .csv or .npy file."""
    white = 1.0
    if path.suffix.lower() == ".csv":
        values = _table(path, note)
    else:
        values, dtype = _array(path)
        if dtype.str == "|u1":
            white = 255.0
            if scale is None and values.numel() and values.amax() < 128:
                high = f"{values.amax().item():g}"
                note(f"{path}: read as bytes from 0 to 255, the largest being {high}. Is white {high}? --scale {high}")
    return formed(values, path, form, scale=scale or white, remedy=_SCALE)


def _table(path: Path, note: Note, columns: Sequence[str] = ()) -> Tensor:
    """Returns the columns of a .csv file that have these names, in this order; without names, all columns."""
    sheet = read_sheet(path, named=bool(columns))
    wanted = columns or sheet.names
    found = sheet.numbers(wanted, "Fill the cell or leave the row out.")
    used = set(wanted)
    if others := [repr(name) for name in sheet.names if name not in used]:
        note(f"{path}: not used: {', '.join(others)}.")
    return found.float()


def formed(pixels: Tensor, name: object, form: Form, *, scale: float = 1.0, remedy: str = _DIVIDE) -> Tensor:
    """Returns images (N, C, H, W) in [0, 1], from pixels of that shape, (N, H, W) or (N, C·H·W), in [0, scale]."""
    shape, size = tuple(pixels.shape), form.channels * form.height * form.width
    fits: tuple[Any, ...] = (tuple(form), tuple(form)[1:] if form.channels == 1 else None, (size,))
    if len(shape) < 2 or shape[1:] not in fits:
        expected = f"of shape (N, {', '.join(map(str, form))}) or (N, {size})"
        raise ValueError(complaint(str(name), expected, shape, "Reshape it to what the network was trained on."))
    if not len(pixels):
        raise ValueError(complaint(str(name), "one or more examples", f"none, of shape {shape}", "Leave it out."))
    if not bool(((pixels >= 0) & (pixels <= scale)).all()):
        low, high = pixels.amin().item(), pixels.amax().item()
        raise ValueError(complaint(str(name), f"in [0, {scale:g}]", f"values from {low:.3g} to {high:.3g}", remedy))
    return pixels.reshape(-1, *form) / scale


def numbers(nested: Any, name: str = "inputs") -> Tensor:
    """Returns nested lists of floats as a float64 tensor; raises ValueError for anything else, as for ragged lists."""
    if not isinstance(nested, list) or not 1 <= len(nested) <= MOST:
        got = f"{len(nested)} of them" if nested and isinstance(nested, list) else json.dumps(nested)[:40]
        remedy = f"Send 1 … {MOST} inputs, and more in further requests."
        raise ValueError(complaint(name, f"a list of at most {MOST} inputs", got, remedy))
    shape, flat = [len(nested)], nested
    while isinstance(flat[0], list) and flat[0] and len(shape) < 6:
        shape.append(len(flat[0]))
        for each in flat:
            if not isinstance(each, list) or len(each) != shape[-1]:
                got = f"one of {len(each)}" if isinstance(each, list) else json.dumps(each)[:40]
                expected, remedy = f"lists of equal lengths, here {shape[-1]}", "Give all inputs the same shape."
                raise ValueError(complaint(name, expected, got, remedy))
        flat = [entry for each in flat for entry in each]
    for number in flat:
        if not isinstance(number, float) or not math.isfinite(number):
            got = json.dumps(number)[:40]
            raise ValueError(complaint(name, "finite numbers in lists", got, "Correct or omit that input."))
    return torch.tensor(flat, dtype=torch.float64).view(shape)
