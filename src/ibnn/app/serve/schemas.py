"""SCHEMAS: the JSON that the routes take and return, as OpenAPI documents it."""

from typing import Any

from pydantic import BaseModel

from ibnn.app.asking.inputs import Form
from ibnn.app.asking.run import Asked
from ibnn.app.serve.service import MOST
from ibnn.data import Units

LARGEST = 1e15  # number in a row: what is computed from its square is still finite


class Answer(BaseModel):
    """The answer for one input; entropies in nats, total = aleatoric + epistemic."""

    label: str
    probability: float
    total: float
    aleatoric: float
    epistemic: float
    abstain: bool
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
    """The answer for one input: the 90 % interval is from low to high; aleatoric and epistemic are variances."""

    mean: float
    std: float
    low: float
    high: float
    aleatoric: float
    epistemic: float
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
    shift: dict[str, Any] | None


_PROBLEMS = {
    400: "Not what its content type says.",
    413: "Larger than the limit.",
    415: "Neither JSON nor multipart/form-data.",
    422: "Readable, but not what the network takes.",
    503: "Too many requests are waiting.",
}


def route_options(asked: Asked) -> dict[str, Any]:
    """Returns what FastAPI needs to know of /predict beyond its function."""
    return {
        "openapi_extra": {"requestBody": _body(asked)},
        "responses": {status: {"model": Problem, "description": text} for status, text in _PROBLEMS.items()},
        "response_model_exclude_unset": True,
    }


def _body(asked: Asked) -> dict[str, Any]:
    schemas = {"application/json": {"inputs": _images(asked.form) if asked.units is None else _table(asked.units)}}
    if asked.units is None:
        files = _array({"type": "string", "format": "binary"}, 1, MOST) | {"description": "Image files."}
        schemas["multipart/form-data"] = {"image": files}
    content = {
        kind: {"schema": {"type": "object", "properties": p, "required": list(p), "additionalProperties": False}}
        for kind, p in schemas.items()
    }
    return {"required": True, "content": content}


def _array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _images(form: Form) -> dict[str, Any]:
    number = {"type": "number", "minimum": 0, "maximum": 1}
    size = form.channels * form.height * form.width
    plane = _array(_array(number, form.width, form.width), form.height, form.height)
    shapes = [_array(number, size, size), _array(plane, form.channels, form.channels)]
    if form.channels == 1:
        shapes.append(plane)
    return {"oneOf": [_array(shape, 1, MOST) for shape in shapes], "description": "Pixels in [0, 1]."}


def _table(units: Units) -> dict[str, Any]:
    number = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
    columns = list(units.columns)
    named = {"type": "object", "properties": dict.fromkeys(columns, number), "required": columns}
    shapes = [_array(number, len(columns), len(columns)), named | {"additionalProperties": False}]
    words = f"Rows of numbers: lists in the order {', '.join(columns[:20])}{', …' * (len(columns) > 20)}, or by name."
    return {"oneOf": [_array(shape, 1, MOST) for shape in shapes], "description": words}
