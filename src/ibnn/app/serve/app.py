"""THE WEB side of the service: routes, what they accept, and what is said of what they do not."""

import asyncio
import contextlib
import io
import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import python_multipart  # noqa: F401  starlette reads uploads by it, and says so only when there is one
import torch
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import UploadFile
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from ibnn._version import __version__
from ibnn.app.asking.inputs import PIXELS, Form, decoded, formed, resized
from ibnn.app.asking.run import Asked
from ibnn.app.serve import page
from ibnn.app.serve.batching import OverloadedError
from ibnn.app.serve.service import MOST, Question, Row, Service, finite
from ibnn.data import Units
from ibnn.errors import complaint

MEGABYTES = 10  # of a request
READERS = 2  # threads that read requests
LARGEST = 1e15  # number of a row: the squares of what comes of it are still finite

_PATHS = ("/", "/docs", "/openapi.json", "/predict", "/health", "/metrics")
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


class Answer(BaseModel):
    """What is told of one input; entropies in nats, total = aleatoric + epistemic."""

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
    """Answers in the order of the inputs; `probabilities` and each of `draws` in that of `classes`."""

    classes: list[str]
    risk: float
    limit: float | None
    rows: list[Answer]


class Number(BaseModel):
    """What is told of one input: the 90 % interval is from low to high; aleatoric and epistemic are variances."""

    mean: float
    std: float
    low: float
    high: float
    aleatoric: float
    epistemic: float
    draws: list[float] | None = None


class Numbers(BaseModel):
    """Answers in the order of the inputs; `target` is the column that is predicted."""

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


def make_app(service: Service, *, megabytes: float = MEGABYTES) -> FastAPI:
    """The application; ends the service when it is shut down.

    Args:
        service: What answers.
        megabytes: Of the largest request that is read.
    """
    readers = ThreadPoolExecutor(READERS, "ibnn-reader")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        readers.shutdown()
        service.close()

    app = FastAPI(
        title="ibnn",
        version=__version__,
        description=f"Answers with uncertainty: {service.asked.run.result['name']}.",
        lifespan=lifespan,
        docs_url=None,  # they load scripts from elsewhere; /docs below does not
        redoc_url=None,
    )
    app.add_middleware(Gate, service=service, most=int(megabytes * 1e6))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()[0]
        name, got = str(found["loc"][-1]), repr(found.get("input"))
        text = f"Expected `{name}` to be valid, but got {got[:80]}: {found['msg']}. Correct or leave it out."
        return JSONResponse({"detail": text}, 422)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(page.front(service.asked), headers=page.POLICY)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.reference(app.openapi()), headers=page.POLICY)

    @app.get("/health", summary="What is served, and how it is")
    async def health() -> Health:
        return Health(**service.health())

    @app.get("/metrics", summary="Counts in Prometheus' text format", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def answered(request: Request, draws: bool) -> list[Row]:
        loop = asyncio.get_running_loop()
        parts = await _parts(request, service.asked.units is None)
        try:
            inputs, notes = await loop.run_in_executor(readers, _read, parts, service.asked)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        try:
            rows = await asyncio.wrap_future(service.ask(Question(inputs, draws)))
        except OverloadedError:
            raise HTTPException(503, "Too many requests wait. Try again later.", {"Retry-After": "1"}) from None
        for number, row in enumerate(rows):
            if not all(math.isfinite(value) for value in row.values() if isinstance(value, float)):
                expected = "near enough to the training data for finite answers"
                remedy = "Check its units, or leave it out."
                raise HTTPException(422, complaint("inputs", expected, f"row {number}, which is too far off", remedy))
        return [row | ({"note": note} if note else {}) for row, note in zip(rows, notes, strict=True)]

    route: dict[str, Any] = {
        "openapi_extra": {"requestBody": _body(service.asked)},
        "responses": {status: {"model": Problem, "description": text} for status, text in _PROBLEMS.items()},
        "response_model_exclude_unset": True,
    }
    wants_draws = Query(description="Also returns what every draw says.")
    if not service.asked.classes:

        @app.post("/predict", summary="Predicts a number for every row, and says how uncertain it is", **route)
        async def number(request: Request, draws: Annotated[bool, wants_draws] = False) -> Numbers:
            rows = await answered(request, draws)
            return Numbers(target=service.asked.run.job.target, rows=[Number(**row) for row in rows])

        return app

    what = "images" if service.asked.units is None else "rows"

    @app.post(
        "/predict",
        summary=f"Labels {what}, says how uncertain each label is, and abstains where it would be wrong too often",
        **route,
    )
    async def label(
        request: Request,
        risk: Annotated[
            float, Query(gt=0, le=1, description="Share of wrong answers, among those given, that is accepted.")
        ] = service.risk,
        draws: Annotated[bool, wants_draws] = False,
    ) -> Answers:
        limit, _ = service.limit(risk)
        rows = [row | {"abstain": row["total"] > limit} for row in await answered(request, draws)]
        service.counts.abstained.inc(sum(row["abstain"] for row in rows))
        return Answers(
            classes=service.asked.classes, risk=risk, limit=finite(limit), rows=[Answer(**row) for row in rows]
        )

    return app


_PROBLEMS = {
    400: "Not what its content type says.",
    413: "Larger than is read.",
    415: "Neither JSON nor multipart/form-data.",
    422: "Read, but not what the network takes.",
    503: "Too many requests wait.",
}


# ------------------------------------------------------------------------------------------------------- what is taken


def _body(asked: Asked) -> dict[str, Any]:
    """The request body of /predict, as OpenAPI says it."""
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


async def _parts(request: Request, images: bool) -> bytes | list[tuple[str, bytes]]:
    """The JSON or, of images, names and contents of the files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await request.body()
    if kind != "multipart/form-data" or not images:
        expected = "application/json" + (" or multipart/form-data" if images else "")
        remedy = 'Send {"inputs": [...]}' + (", or files called image." if images else ".")
        raise HTTPException(415, complaint("Content-Type", expected, kind or "none", remedy))
    async with request.form(max_files=MOST, max_fields=8) as sent:  # 400 if it is none
        named = sent.multi_items()
        wrong = [name for name, value in named if name != "image" or not isinstance(value, UploadFile)]
        if wrong or not named:
            got = f"a field {wrong[0][:80]!r}" if wrong else "none"
            remedy = "curl -F image=@a.png does so."
            raise HTTPException(422, complaint("image", "one or more files, and nothing beside", got, remedy))
        files = [file for _, file in named if isinstance(file, UploadFile)]
        return [(file.filename or f"image {number}", await file.read()) for number, file in enumerate(files)]


def _read(parts: bytes | list[tuple[str, bytes]], asked: Asked) -> tuple[Tensor, list[str | None]]:
    """Images (N, C, H, W) in [0, 1] or points (N, D), and what was done to each; raises ValueError."""
    if asked.units is not None:
        assert isinstance(parts, bytes), "checked"
        points = _points(_inputs(parts), asked.units)
        return points, [None] * len(points)
    form = asked.form
    if isinstance(parts, bytes):
        pixels = formed(_numbers(_inputs(parts), "inputs").clamp(-LARGEST, LARGEST).float(), "inputs", form)
        return pixels, [None] * len(pixels)
    images: list[Tensor] = []
    notes: list[str | None] = []
    left = PIXELS  # of all images together, which decoded have so many bytes or three times as many
    for name, content in parts:
        image, size = decoded(io.BytesIO(content), form, name=name[:80], most=left)
        left -= size[0] * size[1]
        images.append(image)
        notes.append(resized(size, form) if size != (form.width, form.height) else None)
    return torch.stack(images), notes


def _points(rows: Any, units: Units) -> Tensor:
    """Rows (N, D) of lists, or of objects by the names of columns."""
    if isinstance(rows, list) and any(isinstance(row, dict) for row in rows):
        for row in rows:
            if not isinstance(row, dict) or set(row) != set(units.columns):
                keys = set(row) if isinstance(row, dict) else set()
                lacking, strange = (sorted(some)[:3] for some in (set(units.columns) - keys, keys - set(units.columns)))
                got = " and ".join(f"{word} {some}" for word, some in (("no", lacking), ("also", strange)) if some)
                expected = f"objects with the columns {', '.join(units.columns[:20])}"
                raise ValueError(complaint("inputs", expected, got[:200], "Send every column, and no other."))
        rows = [[row[name] for name in units.columns] for row in rows]
    found = _numbers(rows, "inputs")
    if found.dim() != 2 or found.shape[1] != len(units.columns):
        remedy = "Send a row an example, a number for each column."
        raise ValueError(complaint("inputs", f"of shape (N, {len(units.columns)})", tuple(found.shape), remedy))
    if float(found.abs().max()) > LARGEST:
        raise ValueError(complaint("inputs", f"numbers up to {LARGEST:g}", "a larger one", "Clean or leave it out."))
    return found.float()


def _inputs(text: bytes) -> Any:
    """What JSON has under "inputs"."""

    def refuse(name: str) -> Any:
        raise ValueError(complaint("inputs", "finite numbers", name, "Clean or leave out that input."))

    def integer(digits: str) -> int:
        return int(digits) if len(digits) <= 400 else refuse(f"one of {len(digits):,} digits")  # Python has a limit

    try:
        found = json.loads(text.decode(), parse_constant=refuse, parse_int=integer)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        remedy = 'Send {"inputs": [...]}.'
        raise HTTPException(400, complaint("body", "JSON", f"{type(error).__name__}: {error}", remedy)) from None
    if not isinstance(found, dict) or list(found) != ["inputs"]:
        got = f"the keys {sorted(found)}"[:200] if isinstance(found, dict) else type(found).__name__
        raise ValueError(complaint("body", 'an object with "inputs" alone', got, 'Send {"inputs": [...]}.'))
    return found["inputs"]


def _numbers(nested: Any, name: str) -> Tensor:
    """Nested lists of numbers as a float64 tensor; raises ValueError for anything else, ragged ones too."""
    shape: list[int] = []
    level = nested
    while isinstance(level, list) and level and len(shape) < 5:
        shape.append(len(level))
        level = level[0]
    if not shape or shape[0] > MOST:
        got = f"{shape[0]} of them" if shape else f"{json.dumps(nested)[:40]}"
        remedy = f"Send 1 … {MOST} inputs, more in further requests."
        raise ValueError(complaint(name, f"a list of at most {MOST} inputs", got, remedy))
    values = list(_flat(nested, shape, name))
    return torch.tensor(values, dtype=torch.float64).view(shape)


def _flat(nested: Any, shape: list[int], name: str) -> Iterator[float]:
    if not shape:
        if type(nested) not in (int, float) or not math.isfinite(nested := _float(nested)):
            got = json.dumps(nested)[:40]
            raise ValueError(complaint(name, "finite numbers in lists", got, "Clean or leave out that input."))
        yield nested
        return
    if not isinstance(nested, list) or len(nested) != shape[0]:
        got = f"one of {len(nested)}" if isinstance(nested, list) else f"{json.dumps(nested)[:40]}"
        remedy = "Give all inputs the same shape."
        raise ValueError(complaint(name, f"lists of equal lengths, here {shape[0]}", got, remedy))
    for each in nested:
        yield from _flat(each, shape[1:], name)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


# -------------------------------------------------------------------------------------------------------- at the gate


class Gate:
    """Reads no more than so many bytes of a request, counts requests, and adds headers to the answers."""

    def __init__(self, app: ASGIApp, *, service: Service, most: int) -> None:
        self.app, self.counts, self.most = app, service.counts, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI asks."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        start, status, read = time.perf_counter(), 500, 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        async def receiving() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                await self._discard(receive)
                raise HTTPException(413, self._too_large(f"more than {self.most:,}"))
            return message

        try:
            told = dict(scope["headers"]).get(b"content-length", b"0")
            if told.isdigit() and int(told) > self.most:
                await self._discard(receive)
                refusal = JSONResponse({"detail": self._too_large(f"{int(told):,}")}, 413, {"Connection": "close"})
                await refusal(scope, receive, sending)
            else:
                await self.app(scope, receiving, sending)
        finally:
            self.counts.requests.labels(path, status).inc()
            self.counts.seconds.labels(path).observe(time.perf_counter() - start)

    async def _discard(self, receive: Receive) -> None:
        """Lets a client finish that is not far above the limit; many hear an answer only then."""
        read, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while more and read < 10 * self.most:
                    message = await receive()
                    read, more = read + len(message.get("body", b"")), message.get("more_body", False)

    def _too_large(self, got: str) -> str:
        return complaint("body", f"at most {self.most:,} bytes", got, "Send fewer inputs, or a smaller image.")
