"""ROUTES of the service, and the application that holds them."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ibnn._version import __version__
from ibnn.app.serve import page, requests
from ibnn.app.serve.batching import OverloadedError
from ibnn.app.serve.gate import Gate
from ibnn.app.serve.schemas import Answer, Answers, Health, Number, Numbers, route_options
from ibnn.app.serve.service import Question, Row, Service, finite
from ibnn.errors import complaint

MEGABYTES = 10  # of a request
READERS = 2  # threads that read requests

_Draws = Annotated[bool, Query(description="Also returns the answer of every draw.")]


def make_app(service: Service, *, megabytes: float = MEGABYTES) -> FastAPI:
    """Returns the application; shutting it down closes the service.

    Args:
        service: Answers the requests.
        megabytes: Size of the largest request that is read.
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
        docs_url=None,  # it loads scripts from elsewhere; our /docs does not
        redoc_url=None,
    )
    app.add_middleware(Gate, counts=service.counts, most=int(megabytes * 1e6))
    app.add_exception_handler(RequestValidationError, _invalid)

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.reference(app.openapi()), headers=page.POLICY)

    app.include_router(_status(service))
    app.include_router((_labels if service.asked.classes else _numbers)(service, readers))
    return app


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """Words what FastAPI found wrong with an option."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    name, got = str(found["loc"][-1]), repr(found.get("input"))
    text = f"Expected `{name}` to be valid, but got {got[:80]}: {found['msg']}. Correct or omit it."
    return JSONResponse({"detail": text}, 422)


def _status(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def front() -> HTMLResponse:
        return HTMLResponse(page.front(service.asked), headers=page.POLICY)

    @router.get("/health", summary="What is served, and its state")
    async def health() -> Health:
        return Health(**service.health())

    @router.get("/metrics", summary="Counts in Prometheus' text format", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics(), media_type=CONTENT_TYPE_LATEST)

    return router


def _numbers(service: Service, readers: ThreadPoolExecutor) -> APIRouter:
    router, asked = APIRouter(), service.asked
    summary = "Predicts a number for every row, with its uncertainty"

    @router.post("/predict", summary=summary, **route_options(asked))
    async def number(request: Request, draws: _Draws = False) -> Numbers:
        rows = await _answered(service, readers, request, draws)
        return Numbers(target=asked.run.job.target, rows=[Number(**row) for row in rows])

    return router


def _labels(service: Service, readers: ThreadPoolExecutor) -> APIRouter:
    router, asked = APIRouter(), service.asked
    inputs = "images" if asked.units is None else "rows"
    summary = f"Labels {inputs} with their uncertainty, and abstains where a label would be wrong too often"
    about = "Accepted share of wrong answers among those given."

    @router.post("/predict", summary=summary, **route_options(asked))
    async def label(
        request: Request,
        risk: Annotated[float, Query(gt=0, le=1, description=about)] = service.risk,
        draws: _Draws = False,
    ) -> Answers:
        limit, _ = service.limit(risk)
        answers = await _answered(service, readers, request, draws)
        rows = [Answer(**row, abstain=row["total"] > limit) for row in answers]
        service.counts.abstained.inc(sum(row.abstain for row in rows))
        return Answers(classes=asked.classes, risk=risk, limit=finite(limit), rows=rows)

    return router


async def _answered(service: Service, readers: ThreadPoolExecutor, request: Request, draws: bool) -> list[Row]:
    """Reads a request in one of the readers' threads and returns its answers."""
    parts = await requests.receive(request, images=service.asked.units is None)
    try:
        loop = asyncio.get_running_loop()
        inputs, notes = await loop.run_in_executor(readers, requests.read, parts, service.asked)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    try:
        rows = await asyncio.wrap_future(service.ask(Question(inputs, draws)))
    except OverloadedError:
        raise HTTPException(503, "Too many requests are waiting. Try again later.", {"Retry-After": "1"}) from None
    for number, row in enumerate(rows):
        if not all(math.isfinite(value) for value in row.values() if isinstance(value, float)):
            expected, remedy = "close enough to the training data for finite answers", "Check its units, or omit it."
            raise HTTPException(422, complaint("inputs", expected, f"row {number}, which is too far off", remedy))
    return [row | ({"note": note} if note else {}) for row, note in zip(rows, notes, strict=True)]
