"""Defines the routes of the service, and its pages, which load nothing from elsewhere."""

import asyncio
import base64
import contextlib
import hashlib
import json
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from ibnn._version import __version__
from ibnn.app import finite
from ibnn.app.inputs import Pixels, Rows, Tensors
from ibnn.app.predictor import Predictor
from ibnn.app.serve import requests
from ibnn.app.serve.gate import Gate, busy
from ibnn.app.serve.requests import Answer, Answers, Health, receive, route_options
from ibnn.app.serve.service import Busy, Question, Row, Service
from ibnn.errors import complaint
from ibnn.lab.pages import environment, inlined, style
from ibnn.monitoring.abstention import Threshold, rows_needed

READERS = 2  # threads that read requests
_RISK = "Accepted share of wrong answers among those given; default: the service's."
_Risk = Annotated[float | None, Query(gt=0, le=1, description=_RISK)]
_Draws = Annotated[bool, Query(description="Also returns the answer of every draw.")]
_ASSETS = {"script": inlined("ibnn.app.serve", "page.js"), "style": style("ibnn.app.serve", "serve.css")}
_SCRIPT, _STYLE = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in _ASSETS.values())
_POLICY = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'sha256-{_SCRIPT}'; style-src 'sha256-{_STYLE}'; "
    "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_TEMPLATES = environment("ibnn.app.serve")
_TEMPLATES.globals |= _ASSETS | {"json": partial(json.dumps, indent=1)}


def make_app(service: Service, *, megabytes: float = 10) -> FastAPI:
    """Returns an application that reads requests of at most so many megabytes; shutting it down closes the service."""
    readers = ThreadPoolExecutor(READERS, "ibnn-reader")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        readers.shutdown()
        await asyncio.to_thread(service.close)  # meanwhile cancelled requests get their replies

    app = FastAPI(
        title="ibnn",
        version=__version__,
        description=f"Answers with uncertainty: {service.predictor.name}.",
        lifespan=lifespan,
        docs_url=None,  # it loads scripts from elsewhere; our /docs does not
        redoc_url=None,
    )
    app.add_middleware(Gate, service=service, most=int(megabytes * 1e6))
    app.add_exception_handler(RequestValidationError, _invalid)
    _add_status(app, service)
    _add_predict(app, service, readers)
    return app


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """Words what FastAPI found wrong with an option."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    name, got = str(found["loc"][-1]), repr(found.get("input"))
    text = f"Expected `{name}` to be valid, but got {got[:80]}: {found['msg']}. Correct or omit it."
    return JSONResponse({"detail": text}, 422)


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return _page("docs.html.j2", schema=app.openapi())

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def front() -> HTMLResponse:
        return _front(service.predictor)

    @app.get("/health", summary="What is served, and its state")
    async def health() -> Health:
        return Health(**service.health())

    @app.get("/metrics", summary="Counts in Prometheus' text format", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics(), media_type=CONTENT_TYPE_LATEST)


def _page(template: str, **values: Any) -> HTMLResponse:
    return HTMLResponse(_TEMPLATES.get_template(template).render(**values), headers=_POLICY)


def _front(predictor: Predictor) -> HTMLResponse:
    """Returns the page where a user drops an image, fills in a row, or writes tensors."""
    kind = predictor.kind
    fields = list(zip(kind.columns, kind.start or [""] * kind.size, strict=True)) if isinstance(kind, Rows) else []
    return _page("front.html.j2", predictor=predictor, form=getattr(kind, "form", None), fields=fields)


def _add_predict(app: FastAPI, service: Service, readers: ThreadPoolExecutor) -> None:
    predictor, inputs = service.predictor, service.predictor.kind.word
    most = None if predictor.ranked is not None else 0  # a model that cannot tell refuses to
    words = "p-value up to which an input is withheld as novel."
    level = Query(service.novelty, ge=0, lt=1, le=most, description=words)
    summary = f"Predicts a number for all {inputs}, with its uncertainty, and abstains from novel ones"
    if predictor.labels:
        summary = f"Labels {inputs} with their uncertainty, and abstains where a label would be wrong too often"

    @app.post("/predict", summary=summary, **route_options(predictor.kind))
    async def answers(request: Request, risk: _Risk = None, novelty: float = level, draws: _Draws = False) -> Answers:
        rule = _rule(service, risk, novelty)
        rows = [Answer(**row) for row in await _answered(service, readers, request, draws, rule)]
        if not predictor.labels:
            return Answers(target=predictor.target, rows=rows)
        found = rows[0].probabilities
        classes = predictor.names(len(found) if isinstance(found, list) else 1)
        used = service.risk if risk is None else risk
        return Answers(classes=classes, risk=used, limit=finite(rule.limit), rows=rows)


def _rule(service: Service, risk: float | None, novelty: float) -> Threshold:
    """Returns where to abstain; raises for a risk or a p-value that is smaller than the held-out inputs allow."""
    try:
        level = service.predictor.novelty_level(novelty)
        rule, facts = service.rule(service.risk if risk is None else risk, level)
        if risk is not None and not service.predictor.labels:
            raise ValueError(complaint("risk", "absent: the model predicts no classes", risk, "Leave it out."))
        known = 0 if facts is None else facts["known"]
        if risk is not None and risk < 1 and known < (needed := rows_needed(risk)):
            expected = f"one that {known:,} held-out inputs can show; this one needs {needed:,}"
            raise ValueError(complaint("risk", expected, risk, "Pass a larger risk, or leave it out."))
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    return rule


async def _answered(
    service: Service, readers: ThreadPoolExecutor, request: Request, draws: bool, rule: Threshold
) -> list[Row]:
    """Reads a request in one of the readers' threads and returns its answers; counts those withheld."""
    kind = service.predictor.kind
    try:
        parts = await receive(request, images=isinstance(kind, Pixels))
    except ClientDisconnect:  # nobody reads the reply; 499 is what proxies count
        raise HTTPException(499, "The client has disconnected.") from None
    try:
        inputs, notes = await asyncio.get_running_loop().run_in_executor(readers, requests.read, parts, kind)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    try:
        rows = await asyncio.wrap_future(service.ask(Question(inputs, draws, rule)))
    except Busy as full:
        raise busy(full.seconds) from None
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        if isinstance(kind, Tensors) or draws:  # the network does not take such inputs
            raise HTTPException(422, str(error).strip()[:500]) from None
        raise
    for number, row in enumerate(rows):
        if not all(math.isfinite(value) for value in row.values() if isinstance(value, float)):
            expected, remedy = "close enough to the training data for finite answers", "Check its units, or omit it."
            raise HTTPException(422, complaint("inputs", expected, f"row {number}, which is too far off", remedy))
    service.counts.abstained.inc(sum(row["abstain"] for row in rows))
    service.counts.novel.inc(sum("novel" in (row["withheld"] or "") for row in rows))
    return [row | ({"note": note} if note else {}) for row, note in zip(rows, notes, strict=True)]
