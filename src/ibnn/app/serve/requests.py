"""Describes requests and replies for OpenAPI, and receives request bodies; nothing in a body is trusted."""

import json
from typing import Any

import python_multipart  # noqa: F401  starlette needs it for uploads, and complains only at the first one
from fastapi import HTTPException, Request
from pydantic import BaseModel

from ibnn.app.inputs import MOST, Kind, Pixels, array
from ibnn.errors import complaint
from ibnn.inputs import Inputs, batch_length

Parts = bytes | list[tuple[str, bytes]]  # JSON, or names and contents of image files
Value = float | list[Any]  # of an input: a number or, for networks with outputs of more axes, nested lists


class Answer(BaseModel, extra="allow"):
    """The answer for one input; a network of several heads gives each head's under "head.name".

    Classes: label, its probability, probabilities; entropies in nats, total = aleatoric + epistemic. Numbers: mean,
    std, the ends of the 90 % interval, aleatoric and epistemic variance. `p_value` is that of novelty, null if the
    model cannot tell. `withheld` says why it abstains: "novel", "uncertain" or both.
    """

    label: str = ""
    probability: float = 0
    probabilities: Value = 0
    mean: Value = 0
    std: Value = 0
    low: Value = 0
    high: Value = 0
    total: Value = 0
    aleatoric: Value = 0
    epistemic: Value = 0
    p_value: float | None
    abstain: bool
    withheld: str | None
    draws: list[Any] | None = None
    note: str | None = None


class Answers(BaseModel):
    """Answers in the order of the inputs; `probabilities` and each of `draws` are in the order of `classes`.

    `limit` is the total uncertainty above which answers are withheld at this risk, null for none; `target` is the name
    of a predicted number.
    """

    classes: list[str] = []
    risk: float = 1
    limit: float | None = None
    target: str | None = None
    rows: list[Answer]


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


def route_options(kind: Kind) -> dict[str, Any]:
    """Returns what FastAPI needs to know of /predict beyond its function."""
    schemas = {"application/json": {"inputs": kind.schema}}
    if isinstance(kind, Pixels):
        files = array({"type": "string", "format": "binary"}, 1, MOST) | {"description": "Image files."}
        schemas["multipart/form-data"] = {"image": files}
    content = {
        media: {"schema": {"type": "object", "properties": p, "required": list(p), "additionalProperties": False}}
        for media, p in schemas.items()
    }
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {status: {"model": Problem, "description": text} for status, text in _PROBLEMS.items()},
        "response_model_exclude_unset": True,
    }


async def receive(request: Request, *, images: bool) -> Parts:
    """Returns the JSON or, if the network takes images, the uploaded files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await request.body()
    if kind != "multipart/form-data" or not images:
        expected = "application/json" + (" or multipart/form-data" if images else "")
        raise HTTPException(415, complaint("Content-Type", expected, kind or "none", 'Send {"inputs": [...]}.'))
    try:
        async with request.form(max_files=MOST, max_fields=8) as sent:  # 400 if it is not multipart
            items: Any = sent.multi_items()
            wrong = [name for name, file in items if name != "image" or isinstance(file, str)]
            found = [] if wrong else [(file.filename or "image", await file.read()) for _, file in items]
    except UnicodeError as error:
        wrong_names = complaint("Content-Type", "with the charset of the names", error, "Leave the charset out.")
        raise HTTPException(400, wrong_names) from None
    if not found:
        got, remedy = f"a field {wrong[0][:80]!r}" if wrong else "none", "curl -F image=@a.png does so."
        raise ValueError(complaint("image", "one or more files, and nothing else", got, remedy))
    return [(name.encode(errors="replace").decode(), content) for name, content in found]


def read(parts: Parts, kind: Kind) -> tuple[Inputs, list[str | None]]:
    """Returns the inputs of a request, and a note for each image that was resized."""
    if not isinstance(parts, bytes):
        assert isinstance(kind, Pixels), "as `receive` sees to"
        return kind.from_files(parts)
    inputs = kind.from_json(_inputs(parts))
    return inputs, [None] * batch_length(inputs)


def _inputs(text: bytes) -> Any:
    """Returns what JSON has under "inputs", every number as a float."""
    try:
        found = json.loads(text.decode(), parse_int=float)  # int() refuses thousands of digits
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, complaint("body", "JSON", f"{type(error).__name__}: {error}", "Send JSON.")) from None
    if not isinstance(found, dict) or list(found) != ["inputs"]:
        got = f"the keys {sorted(found)}"[:200] if isinstance(found, dict) else type(found).__name__
        raise ValueError(complaint("body", 'an object with "inputs" alone', got, 'Send {"inputs": [...]}.'))
    return found["inputs"]
