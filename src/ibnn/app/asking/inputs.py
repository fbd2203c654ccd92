"""INPUTS: images and numbers as pixels in [0, 1] of one form; files of them one example after another."""

import csv
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TextIO

from ibnn.errors import complaint

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ibnn.data import Units

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # of pillow: what these files are, and nothing else
KINDS = f"{', '.join(sorted(IMAGES))}, .npy, .csv or a folder of images"
PIXELS = 25_000_000  # of the largest image that is decoded
_LIST = "Clean the file."
_DIVIDE = "Give pixels before any normalising, divided by the value of white: 255 for bytes."
_SCALE = "Pass --scale with the value of white, 255 for bytes or 16 for scikit-learn's digits, and unnormalised pixels."


class Form(NamedTuple):
    """What a network takes."""

    channels: int
    height: int
    width: int


class Example(NamedTuple):
    """An image (C, H, W) in [0, 1], or a point (D,), and where it came from; `row` is None for a file of its own."""

    file: str
    row: int | None
    pixels: "Tensor"


def listed(paths: list[Path]) -> list[Path]:
    """The files to read, those of folders sorted; everything is there and of a kind that can be read."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES)
            if not inside:
                raise FileNotFoundError(complaint("INPUT", "a folder with images", path, f"Known: {KINDS}."))
            found += inside
        elif not path.exists():
            raise FileNotFoundError(complaint("INPUT", "a file or folder", f"no such {path}", "Check it."))
        elif path.suffix.lower() not in IMAGES | {".npy", ".csv"}:
            raise ValueError(complaint("INPUT", KINDS, path, "Convert the file."))
        else:
            found.append(path)
    return found


def examples(
    files: list[Path],
    form: Form,
    note: Callable[[str], None],
    failed: Callable[[Exception], None],
    scale: float | None = None,
) -> Iterator[Example]:
    """All examples in order; images are brought to the form, which is said once a size.

    Args:
        files: What `listed` found.
        form: What the network takes.
        note: Told what was done to files.
        failed: Told of every file that cannot be read; the others are.
        scale: The value of white in .csv and .npy files; None for 255 in .npy files of bytes (uint8), else 1.
    """
    noted: set[tuple[int, int]] = set()

    def read(path: Path) -> list[Example]:
        if path.suffix.lower() in IMAGES:
            return [Example(str(path), None, _image(path, form, noted, note))]
        return [Example(str(path), row, pixels) for row, pixels in enumerate(_pixels(path, form, scale, note))]

    return _readable(files, read, failed)


def points(
    files: list[Path], units: "Units", note: Callable[[str], None], failed: Callable[[Exception], None]
) -> Iterator[Example]:
    """All rows of numbers in order, as they are.

    For a network of a table of your own, the columns of a .csv file go by their names; all others go by their order.

    Args:
        files: What `listed` found.
        units: Of the network's inputs.
        note: Told which columns are not used.
        failed: Told of every file that cannot be read; the others are.
    """

    def read(path: Path) -> list[Example]:
        if path.suffix.lower() not in (".csv", ".npy"):
            raise ValueError(complaint(str(path), "a .csv or .npy file of points", path.suffix, "Convert the file."))
        named = units.sha256 is not None and path.suffix.lower() == ".csv"
        return _points(path, _named(path, units.columns, note) if named else None, len(units.columns))

    return _readable(files, read, failed)


def _readable(
    files: list[Path], read: Callable[[Path], list[Example]], failed: Callable[[Exception], None]
) -> Iterator[Example]:
    for path in files:
        try:
            found = read(path)
        except (ValueError, OSError) as error:
            failed(error)
        else:
            yield from found


def _image(path: Path, form: Form, noted: set[tuple[int, int]], note: Callable[[str], None]) -> "Tensor":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pillow warns of large images; we refuse them
        pixels, size = decoded(path, form, name=str(path))
    if size != (form.width, form.height) and size not in noted:
        note(f"{path} and others of its size: {resized(size, form)}")
        noted.add(size)
    return pixels


def resized(size: tuple[int, int], form: Form) -> str:
    """What was done to an image of another size."""
    cut = "" if size[0] * form.height == size[1] * form.width else ", what is too long cut off evenly"
    return f"resized from {size[0]}×{size[1]} to {form.width}×{form.height}{cut}."


def decoded(file: Path | BinaryIO, form: Form, *, name: str, most: int = PIXELS) -> tuple["Tensor", tuple[int, int]]:
    """An image brought to the form, what is transparent on white, and the width and height it had.

    Args:
        file: Where the bytes of the image are.
        form: What the network takes.
        name: Of the image, for messages.
        most: Pixels of the largest image that is decoded.
    """
    import torch
    from PIL import Image, ImageOps, UnidentifiedImageError

    from ibnn.data.folder import flattened

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(file, formats=FORMATS) as image:  # only its head is read so far
            size = image.size
            if size[0] * size[1] > most:
                raise ValueError(f"{size[0]}×{size[1]} pixels, more than {most:,}")
            ImageOps.exif_transpose(image, in_place=True)
            upright = flattened(image, "L" if form.channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, *bombs) as error:  # all that pillow raises
        got = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, UnidentifiedImageError):
            got = f"no image, a damaged one, or one of another kind than {', '.join(FORMATS)}"
        remedy = "Replace or leave out the file."
        raise ValueError(complaint(name, "a readable image", got, remedy)) from error
    size = upright.size
    if size != (form.width, form.height):
        upright = ImageOps.fit(upright, (form.width, form.height), Image.Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(upright.tobytes()), dtype=torch.uint8)
    return pixels.view(form.height, form.width, form.channels).permute(2, 0, 1).float() / 255, size


def _array(path: Path, fits: "Callable[[np.dtype[Any]], bool]", expected: str) -> "tuple[Tensor, np.dtype[Any]]":
    """The numbers of an .npy file, and what they were."""
    import numpy as np
    import torch

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(complaint(str(path), "an .npy file of numbers", error, "Save it by numpy.save.")) from error
    if not isinstance(array, np.ndarray) or not fits(array.dtype):
        got = getattr(array, "dtype", type(array).__name__)
        raise ValueError(complaint(str(path), expected, got, "Convert the array."))
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)), array.dtype


def _pixels(path: Path, form: Form, scale: float | None, note: Callable[[str], None]) -> "Tensor":
    """The images of a .csv or .npy file."""
    white = 1.0
    if path.suffix.lower() == ".csv":
        values = _values(path)
    else:
        values, of = _array(path, lambda of: of.kind in "iuf", "an array of numbers")
        if of.str == "|u1":
            white = 255.0
            if scale is None and values.numel() and values.amax() < 128:
                high = f"{values.amax().item():g}"
                note(f"{path}: read as bytes from 0 to 255, the largest being {high}. Is white {high}? --scale {high}")
    return formed(values, path, form, scale=scale or white, remedy=_SCALE)


def _named(path: Path, columns: Sequence[str], note: Callable[[str], None]) -> "Tensor":
    """The columns of these names, in this order."""
    import torch

    from ibnn.data.own import read_sheet

    sheet = read_sheet(path)
    found = torch.stack([sheet.numbers(name, "Fill the cell or leave the row out.") for name in columns], 1)
    if others := [repr(name) for name in sheet.names if name not in columns]:
        note(f"{path}: not used: {', '.join(others)}.")
    return found.float()


def _points(path: Path, found: "Tensor | None", columns: int) -> list[Example]:
    if found is None and path.suffix.lower() == ".csv":
        found = _values(path)
    elif found is None:
        found = _array(path, lambda of: of.kind in "iuf", "an array of numbers")[0]
    if found.ndim != 2 or found.shape[1] != columns or not len(found):
        remedy = "Give a row an example, a column for each of the network's inputs."
        raise ValueError(complaint(str(path), f"of shape (N, {columns})", tuple(found.shape), remedy))
    if not bool(found.isfinite().all()):
        raise ValueError(complaint(str(path), "finite", "NaN or infinity", "Leave such rows out."))
    return [Example(str(path), row, x) for row, x in enumerate(found)]


def _values(path: Path) -> "Tensor":
    """A row an example; a first row of words is a header."""
    import torch

    rows: list[list[float]] = []
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        for number, cells in enumerate(_lines(file, path), 1):
            try:
                values = [float(cell) for cell in cells]
            except ValueError as error:
                if number == 1:
                    continue
                raise ValueError(complaint(str(path), "numbers", f"{error} in line {number}", _LIST)) from None
            if rows and len(values) != len(rows[0]):
                got = f"{len(values)} in line {number}"
                raise ValueError(complaint(str(path), f"{len(rows[0])} values a line", got, _LIST))
            rows += [values] if values else []
    if not rows:
        raise ValueError(complaint(str(path), "a row an example", "no row of numbers", _LIST))
    return torch.tensor(rows)


def _lines(file: TextIO, path: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(file)
    except csv.Error as error:
        raise ValueError(complaint(str(path), "a CSV file", f"one with an error: {error}", _LIST)) from None


def formed(pixels: "Tensor", name: object, form: Form, *, scale: float = 1.0, remedy: str = _DIVIDE) -> "Tensor":
    """Returns images (N, C, H, W) in [0, 1].

    Args:
        pixels: Of that shape, (N, H, W) or (N, C·H·W), in [0, scale].
        name: Of the pixels, for messages.
        form: What the network takes.
        scale: The value of white.
        remedy: What to do about values out of that range.
    """
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
