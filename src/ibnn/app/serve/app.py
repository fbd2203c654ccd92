"""Defines the routes of the service, and reads what they are sent; nothing in a body is trusted."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import python_multipart  # noqa: F401  starlette needs it for uploads, and complains only at the first one
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ibnn.app import finite
from ibnn.app.inputs import MOST, Kind, Pixels
from ibnn.app.serve.limits import Gate
from ibnn.app.serve.service import Row, Service
from ibnn.errors import complaint
from ibnn.inputs import Inputs

READERS = 2  # threads that read requests
Parts = bytes | list[tuple[str, bytes]]  # JSON, or names and contents of image files


def make_app(service: Service, *, megabytes: float = 10) -> Starlette:
    """Returns an application that reads requests of at most so many megabytes; shutting it down closes the service."""
    readers, predictor = ThreadPoolExecutor(READERS, "ibnn-reader"), service.predictor

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        readers.shutdown()
        await asyncio.to_thread(service.close)  # meanwhile cancelled requests get their replies

    async def health(_: Request) -> Response:
        return JSONResponse(service.health())

    async def predict(request: Request) -> Response:
        parts = await _received(request, images=isinstance(predictor.kind, Pixels))
        inputs = await asyncio.get_running_loop().run_in_executor(readers, _read, parts, predictor.kind)
        rows = await _answered(service, inputs)
        facts: dict[str, Any] = {"target": predictor.target}
        if predictor.labels:
            probabilities = rows[0]["probabilities"]
            classes = predictor.names(len(probabilities) if isinstance(probabilities, list) else 1)
            facts = {"classes": classes, "risk": service.risk, "limit": service.rule.limit}
        return JSONResponse(finite(facts | {"rows": rows}))

    async def refused(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
        left = isinstance(error, ClientDisconnect)  # nobody reads that reply; 499 is what proxies count
        return JSONResponse({"detail": str(error)[:1000]}, 499 if left else 422)

    routes = [Route("/predict", predict, methods=["POST"]), Route("/health", health)]
    gate = Middleware(Gate, service=service, most=int(megabytes * 1e6))
    handlers: Any = dict.fromkeys((HTTPException, ValueError, OverflowError, ClientDisconnect), refused)
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers, lifespan=lifespan)


async def _answered(service: Service, inputs: Inputs) -> list[Row]:
    """Returns the answers for inputs; raises if they are none that the network takes."""
    try:
        rows: list[Row] = await asyncio.wrap_future(service.ask(inputs))
    except (TypeError, RuntimeError, IndexError) as error:
        if isinstance(service.predictor.kind, Pixels) or service.predictor.kind.columns:
            raise
        raise ValueError(str(error).strip()[:500]) from None  # the network does not take such inputs
    for number, row in enumerate(rows):
        if not all(math.isfinite(value) for value in row.values() if isinstance(value, float)):
            got = f"row {number}, which is too far off"
            raise ValueError(complaint("inputs", "close enough to training data for finite answers", got, "Omit it."))
    return rows


async def _received(request: Request, *, images: bool) -> Parts:
    """Returns the JSON or, if the network takes images, the uploaded files."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await request.body()
    if kind != "multipart/form-data" or not images:
        expected = "application/json" + (" or multipart/form-data" if images else "")
        raise HTTPException(415, complaint("Content-Type", expected, kind or "none", 'Send {"inputs": [...]}.'))
    async with request.form(max_files=MOST, max_fields=8) as sent:  # 400 if it is not multipart
        items: Any = sent.multi_items()
        wrong = [name for name, file in items if name != "image" or isinstance(file, str)]
        found = [] if wrong else [(file.filename or "image", await file.read()) for _, file in items]
    if not found:
        got, remedy = f"a field {wrong[0][:80]!r}" if wrong else "none", "curl -F image=@a.png does so."
        raise ValueError(complaint("image", "one or more files, and nothing else", got, remedy))
    return [(name.encode(errors="replace").decode(), content) for name, content in found]


def _read(parts: Parts, kind: Kind) -> Inputs:
    if not isinstance(parts, bytes):
        assert isinstance(kind, Pixels), "as `_received` sees to"
        return kind.from_files(parts)
    try:
        found = json.loads(parts.decode(), parse_int=float)  # int() refuses thousands of digits
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, complaint("body", "JSON", f"{type(error).__name__}: {error}", "Send JSON.")) from None
    if not isinstance(found, dict) or list(found) != ["inputs"]:
        got = f"the keys {sorted(found)}"[:200] if isinstance(found, dict) else type(found).__name__
        raise ValueError(complaint("body", 'an object with "inputs" alone', got, 'Send {"inputs": [...]}.'))
    return kind.from_json(found["inputs"])
