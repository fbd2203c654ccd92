"""Describes requests and replies for OpenAPI, and turns request bodies into tensors; nothing in a body is trusted."""

import io
import json
import math
from typing import Any

import python_multipart  # noqa: F401  starlette needs it for uploads, and complains only at the first one
import torch
from fastapi import HTTPException, Request
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from torch import Tensor

from ibnn.app.inputs import LARGEST, PIXELS, Form, decoded, formed, resized
from ibnn.app.predictor import Predictor
from ibnn.app.serve.service import MOST
from ibnn.data import Standardisation
from ibnn.errors import complaint

Parts = bytes | list[tuple[str, bytes]]  # JSON, or names and contents of image files


class Answer(BaseModel):
    """The answer for one input; entropies in nats, total = aleatoric + epistemic.

    `p_value` is that of novelty, null if the run cannot tell. `withheld` says why it abstains: "novel", "uncertain" or
    both.
    """

    label: str
    probability: float
    total: float
    aleatoric: float
    epistemic: float
    p_value: float | None
    abstain: bool
    withheld: str | None
    probabilities: list[float]
    draws: list[list[float]] | None = None
    note: str | None = None


class Answers(BaseModel):
    """Answers in the order of the inputs; `probabilities` and each of `draws` are in the order of `classes`."""

    classes: list[str]
    risk: float
    limit: float | None
    rows: list[Answer]


class Number(BaseModel):
    """The answer for one input: the 90 % interval is from low to high; aleatoric and epistemic are variances.

    `p_value` is that of novelty, null if the run cannot tell; answers for novel inputs are withheld.
    """

    mean: float
    std: float
    low: float
    high: float
    aleatoric: float
    epistemic: float
    p_value: float | None
    abstain: bool
    withheld: str | None
    draws: list[float] | None = None


class Numbers(BaseModel):
    """Answers in the order of the inputs; `target` is the predicted column."""

    target: str | None
    rows: list[Number]


class Problem(BaseModel):
    """What is wrong and what to do."""

    detail: str


class Health(BaseModel):
    """What is served, where it abstains, and whether inputs have shifted."""

    status: str
    version: str
    run: str
    classes: list[str]
    input: dict[str, Any]
    components: int
    samples: int
    seed: int
    abstention: dict[str, Any] | None
    novelty: dict[str, Any] | None
    shift: dict[str, Any] | None


_PROBLEMS = {
    400: "Not what its content type says.",
    413: "Larger than the limit.",
    415: "Neither JSON nor multipart/form-data.",
    422: "Readable, but not what the network takes.",
    503: "Too many requests are waiting.",
}


def route_options(predictor: Predictor) -> dict[str, Any]:
    """Returns what FastAPI needs to know of /predict beyond its function."""
    inputs = _image_schema(predictor.form) if predictor.units is None else _table_schema(predictor.units)
    schemas = {"application/json": {"inputs": inputs}}
    if predictor.units is None:
        files = _array({"type": "string", "format": "binary"}, 1, MOST) | {"description": "Image files."}
        schemas["multipart/form-data"] = {"image": files}
    content = {
        kind: {"schema": {"type": "object", "properties": p, "required": list(p), "additionalProperties": False}}
        for kind, p in schemas.items()
    }
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {status: {"model": Problem, "description": text} for status, text in _PROBLEMS.items()},
        "response_model_exclude_unset": True,
    }


def _array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _image_schema(form: Form) -> dict[str, Any]:
    number = {"type": "number", "minimum": 0, "maximum": 1}
    size = form.channels * form.height * form.width
    plane = _array(_array(number, form.width, form.width), form.height, form.height)
    shapes = [_array(number, size, size), _array(plane, form.channels, form.channels)]
    if form.channels == 1:
        shapes.append(plane)
    return {"oneOf": [_array(shape, 1, MOST) for shape in shapes], "description": "Pixels in [0, 1]."}


def _table_schema(units: Standardisation) -> dict[str, Any]:
    number = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
    columns = list(units.columns)
    named = {"type": "object", "properties": dict.fromkeys(columns, number), "required": columns}
    shapes = [_array(number, len(columns), len(columns)), named | {"additionalProperties": False}]
    words = f"Rows of numbers: lists in the order {', '.join(columns[:20])}{', …' * (len(columns) > 20)}, or by name."
    return {"oneOf": [_array(shape, 1, MOST) for shape in shapes], "description": words}


async def receive(request: Request, *, images: bool) -> Parts:
    """Returns the JSON or, if the network takes images, the uploaded files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await request.body()
    if kind != "multipart/form-data" or not images:
        expected = "application/json" + (" or multipart/form-data" if images else "")
        remedy = 'Send {"inputs": [...]}' + (", or files named image." if images else ".")
        raise HTTPException(415, complaint("Content-Type", expected, kind or "none", remedy))
    try:
        async with request.form(max_files=MOST, max_fields=8) as sent:  # 400 if it is not multipart
            return await _files(sent)
    except UnicodeError as error:
        remedy = "Leave the charset out: names are then read as UTF-8."
        raise HTTPException(400, complaint("Content-Type", "with the charset of the names", error, remedy)) from None


async def _files(sent: FormData) -> list[tuple[str, bytes]]:
    """Returns names, in which what is no text is replaced, and contents of uploaded files."""
    named = sent.multi_items()
    wrong = [name for name, value in named if name != "image" or not isinstance(value, UploadFile)]
    if wrong or not named:
        got = f"a field {wrong[0][:80]!r}" if wrong else "none"
        remedy = "curl -F image=@a.png does so."
        raise HTTPException(422, complaint("image", "one or more files, and nothing else", got, remedy))
    files = [file for _, file in named if isinstance(file, UploadFile)]
    names = [file.filename or f"image {number}" for number, file in enumerate(files)]
    return [(n.encode(errors="replace").decode(), await file.read()) for n, file in zip(names, files, strict=True)]


def read(parts: Parts, predictor: Predictor) -> tuple[Tensor, list[str | None]]:
    """Returns images (N, C, H, W) in [0, 1] or points (N, D), and a note for each that was resized."""
    if not isinstance(parts, bytes):
        return _images(parts, predictor.form, predictor.resize)
    inputs = _inputs(parts)
    if predictor.units is None:
        rows = formed(_numbers(inputs).clamp(-LARGEST, LARGEST).float(), "inputs", predictor.form)
    else:
        rows = _points(inputs, predictor.units)
    return rows, [None] * len(rows)


def _images(files: list[tuple[str, bytes]], form: Form, resize: int | None) -> tuple[Tensor, list[str | None]]:
    images: list[Tensor] = []
    notes: list[str | None] = []
    left = PIXELS  # of all images together; decoded, a pixel has one byte or three
    for name, content in files:
        image, size = decoded(io.BytesIO(content), form, name=name[:80], most=left, resize=resize)
        left -= size[0] * size[1]
        images.append(image)
        notes.append(resized(size, form, resize))
    return torch.stack(images), notes


def _points(rows: Any, units: Standardisation) -> Tensor:
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
    if not isinstance(nested, list) or not 1 <= len(nested) <= MOST:
        got = f"{len(nested)} of them" if nested and isinstance(nested, list) else json.dumps(nested)[:40]
        remedy = f"Send 1 … {MOST} inputs, and more in further requests."
        raise ValueError(complaint("inputs", f"a list of at most {MOST} inputs", got, remedy))
    shape, flat = [len(nested)], nested
    while isinstance(flat[0], list) and flat[0] and len(shape) < 5:
        shape.append(len(flat[0]))
        for each in flat:
            if not isinstance(each, list) or len(each) != shape[-1]:
                got = f"one of {len(each)}" if isinstance(each, list) else json.dumps(each)[:40]
                expected, remedy = f"lists of equal lengths, here {shape[-1]}", "Give all inputs the same shape."
                raise ValueError(complaint("inputs", expected, got, remedy))
        flat = [entry for each in flat for entry in each]
    for number in flat:
        if not isinstance(number, float) or not math.isfinite(number):
            got = json.dumps(number)[:40]
            raise ValueError(complaint("inputs", "finite numbers in lists", got, "Correct or omit that input."))
    return torch.tensor(flat, dtype=torch.float64).view(shape)
