"""REQUESTS: bodies of /predict as tensors. Nothing in them is trusted; every refusal says what to send instead."""

import io
import json
import math
from collections.abc import Iterator
from typing import Any

import python_multipart  # noqa: F401  starlette needs it for uploads, and complains only at the first one
import torch
from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from torch import Tensor

from ibnn.app.asking.inputs import PIXELS, decoded, formed, resized
from ibnn.app.asking.run import Asked
from ibnn.app.serve.schemas import LARGEST
from ibnn.app.serve.service import MOST
from ibnn.data import Units
from ibnn.errors import complaint

Parts = bytes | list[tuple[str, bytes]]  # JSON, or names and contents of image files


async def receive(request: Request, *, images: bool) -> Parts:
    """Returns the JSON or, if the network takes images, the uploaded files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await request.body()
    if kind != "multipart/form-data" or not images:
        expected = "application/json" + (" or multipart/form-data" if images else "")
        remedy = 'Send {"inputs": [...]}' + (", or files named image." if images else ".")
        raise HTTPException(415, complaint("Content-Type", expected, kind or "none", remedy))
    async with request.form(max_files=MOST, max_fields=8) as sent:  # 400 if it is not multipart
        named = sent.multi_items()
        wrong = [name for name, value in named if name != "image" or not isinstance(value, UploadFile)]
        if wrong or not named:
            got = f"a field {wrong[0][:80]!r}" if wrong else "none"
            remedy = "curl -F image=@a.png does so."
            raise HTTPException(422, complaint("image", "one or more files, and nothing else", got, remedy))
        files = [file for _, file in named if isinstance(file, UploadFile)]
        return [(file.filename or f"image {number}", await file.read()) for number, file in enumerate(files)]


def read(parts: Parts, asked: Asked) -> tuple[Tensor, list[str | None]]:
    """Returns images (N, C, H, W) in [0, 1] or points (N, D), and a note for each that was resized.

    Raises:
        ValueError: If the network does not take them.
    """
    if not isinstance(parts, bytes):
        return _images(parts, asked)
    inputs = _inputs(parts)
    if asked.units is None:
        rows = formed(_numbers(inputs).clamp(-LARGEST, LARGEST).float(), "inputs", asked.form)
    else:
        rows = _points(inputs, asked.units)
    return rows, [None] * len(rows)


def _images(files: list[tuple[str, bytes]], asked: Asked) -> tuple[Tensor, list[str | None]]:
    form = asked.form
    images: list[Tensor] = []
    notes: list[str | None] = []
    left = PIXELS  # of all images together; decoded, a pixel has one byte or three
    for name, content in files:
        image, size = decoded(io.BytesIO(content), form, name=name[:80], most=left)
        left -= size[0] * size[1]
        images.append(image)
        notes.append(resized(size, form) if size != (form.width, form.height) else None)
    return torch.stack(images), notes


def _points(rows: Any, units: Units) -> Tensor:
    """Returns points (N, D), given as lists or as objects by the names of columns."""
    if isinstance(rows, list) and any(isinstance(row, dict) for row in rows):
        rows = [_ordered(row, units.columns) for row in rows]
    found = _numbers(rows)
    if found.dim() != 2 or found.shape[1] != len(units.columns):
        remedy = "Send one row per example, one number per column."
        raise ValueError(complaint("inputs", f"of shape (N, {len(units.columns)})", tuple(found.shape), remedy))
    if float(found.abs().max()) > LARGEST:
        raise ValueError(complaint("inputs", f"numbers up to {LARGEST:g}", "a larger one", "Correct or omit it."))
    return found.float()


def _ordered(row: Any, columns: tuple[str, ...]) -> list[Any]:
    keys = set(row) if isinstance(row, dict) else set()
    if keys != set(columns):
        missing, unknown = sorted(set(columns) - keys)[:3], sorted(keys - set(columns))[:3]
        got = " and ".join(f"{word} {some}" for word, some in (("no", missing), ("also", unknown)) if some)
        expected = f"objects with the columns {', '.join(columns[:20])}"
        raise ValueError(complaint("inputs", expected, got[:200], "Send every column, and no other."))
    return [row[name] for name in columns]


def _inputs(text: bytes) -> Any:
    """Returns what JSON has under "inputs", every number as a float."""
    remedy = 'Send {"inputs": [...]}.'
    try:
        found = json.loads(text.decode(), parse_int=float)  # int() refuses thousands of digits
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, complaint("body", "JSON", f"{type(error).__name__}: {error}", remedy)) from None
    if not isinstance(found, dict) or list(found) != ["inputs"]:
        got = f"the keys {sorted(found)}"[:200] if isinstance(found, dict) else type(found).__name__
        raise ValueError(complaint("body", 'an object with "inputs" alone', got, remedy))
    return found["inputs"]


def _numbers(nested: Any) -> Tensor:
    """Returns nested lists of floats as a float64 tensor; raises ValueError for anything else, as for ragged lists."""
    shape: list[int] = []
    level = nested
    while isinstance(level, list) and level and len(shape) < 5:
        shape.append(len(level))
        level = level[0]
    if not shape or shape[0] > MOST:
        got = f"{shape[0]} of them" if shape else json.dumps(nested)[:40]
        remedy = f"Send 1 … {MOST} inputs, and more in further requests."
        raise ValueError(complaint("inputs", f"a list of at most {MOST} inputs", got, remedy))
    return torch.tensor(list(_flat(nested, shape)), dtype=torch.float64).view(shape)


def _flat(nested: Any, shape: list[int]) -> Iterator[float]:
    if not shape:
        if not isinstance(nested, float) or not math.isfinite(nested):
            got = json.dumps(nested)[:40]
            raise ValueError(complaint("inputs", "finite numbers in lists", got, "Correct or omit that input."))
        yield nested
        return
    if not isinstance(nested, list) or len(nested) != shape[0]:
        got = f"one of {len(nested)}" if isinstance(nested, list) else json.dumps(nested)[:40]
        remedy = "Give all inputs the same shape."
        raise ValueError(complaint("inputs", f"lists of equal lengths, here {shape[0]}", got, remedy))
    for each in nested:
        yield from _flat(each, shape[1:])
