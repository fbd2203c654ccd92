"""Reads input files: images as pixels in [0, 1], and rows of numbers."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ibnn.data import Standardisation
from ibnn.data.images import cropped, opened, pixels_of
from ibnn.data.table_file import read_sheet
from ibnn.errors import complaint

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
KINDS = f"{', '.join(sorted(IMAGES))}, .npy, .csv or a folder of images"
BATCH = 250  # examples that are read and answered at once
PIXELS = 25_000_000  # of the largest image that is decoded
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
                raise FileNotFoundError(complaint("INPUT", "a folder with images", path, f"Known: {KINDS}."))
            found += inside
        elif not path.exists():
            raise FileNotFoundError(complaint("INPUT", "a file or folder", f"no such {path}", "Check the name."))
        elif path.suffix.lower() not in IMAGES | {".npy", ".csv"}:
            raise ValueError(complaint("INPUT", KINDS, path, "Convert the file."))
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


def image_reader(form: Form, note: Note, scale: float | None = None, resize: int | None = None) -> Reader:
    """Returns a function that reads images and resizes them; it notes each source size once; `scale` is white."""
    noted: set[tuple[int, int]] = set()

    def read(path: Path) -> list[Example]:
        if path.suffix.lower() not in IMAGES:
            return _rows(path, _pixels(path, form, scale, note))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pillow warns about large images; we refuse them
            pixels, size = decoded(path, form, name=str(path), resize=resize)
        if size not in noted and (done := resized(size, form, resize)):
            note(f"{path} and others of its size: {done}")
            noted.add(size)
        return [Example(_name(path), None, pixels)]

    return read


def read_points(path: Path, *, units: Standardisation, note: Note) -> list[Example]:
    """Reads rows of numbers; columns go by name if the network was trained on a table of your own, else by order."""
    if path.suffix.lower() == ".npy":
        found = _array(path)[0]
    elif path.suffix.lower() == ".csv":
        found = _table(path, note, () if units.sha256 is None else units.columns)
    else:
        raise ValueError(complaint(str(path), "a .csv or .npy file of points", path.suffix, "Convert the file."))
    if found.ndim != 2 or found.shape[1] != len(units.columns) or not len(found):
        expected, remedy = f"of shape (N, {len(units.columns)})", "Give one row per example, one column per input."
        raise ValueError(complaint(str(path), expected, tuple(found.shape), remedy))
    if not bool(found.isfinite().all()):
        raise ValueError(complaint(str(path), "finite", "NaN or infinity", "Leave such rows out."))
    if bool((large := (found.abs() > LARGEST).any(1)).any()):
        got = f"a larger one in row {int(large.nonzero()[0])}"
        raise ValueError(complaint(str(path), f"numbers up to {LARGEST:g}", got, "Leave such rows out."))
    return _rows(path, found)


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
