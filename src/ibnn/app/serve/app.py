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

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from ibnn._version import __version__
from ibnn.app import finite
from ibnn.app.inputs import Pixels
from ibnn.app.serve import requests
from ibnn.app.serve.gate import Gate
from ibnn.app.serve.requests import Answer, Answers, Health
from ibnn.app.serve.service import Question, Row, Service
from ibnn.errors import complaint
from ibnn.lab.pages import environment, inlined, style
from ibnn.monitoring.abstention import Threshold, rows_needed

READERS = 2  # threads that read requests
_RISK = "Accepted share of wrong answers among those given; default: the service's."
_Draws = Annotated[bool, Query(description="Also returns the answer of every draw.")]
_NOVELTY = "p-value up to which an input is withheld as novel."
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
    readers, predictor = ThreadPoolExecutor(READERS, "ibnn-reader"), service.predictor
    kind = predictor.kind

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        readers.shutdown()
        await asyncio.to_thread(service.close)  # meanwhile cancelled requests get their replies

    app = FastAPI(
        title="ibnn",
        version=__version__,
        description=f"Answers with uncertainty: {predictor.name}.",
        lifespan=lifespan,
        docs_url=None,  # it loads scripts from elsewhere; our /docs does not
        redoc_url=None,
    )
    app.add_middleware(Gate, service=service, most=int(megabytes * 1e6))
    app.add_exception_handler(RequestValidationError, _invalid)
    for refused in (ValueError, OverflowError):  # such as a risk of 5e-324
        app.add_exception_handler(refused, lambda _, error: JSONResponse({"detail": str(error)[:1000]}, 422))
    # nobody reads that reply; 499 is what proxies count
    app.add_exception_handler(ClientDisconnect, lambda *_: JSONResponse({"detail": "The client has left."}, 499))

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        return _page("docs.html.j2", schema=app.openapi())

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def front() -> HTMLResponse:
        fields = list(zip(kind.columns, getattr(kind, "start", ()) or [""] * kind.size, strict=False))
        return _page("front.html.j2", predictor=predictor, form=getattr(kind, "form", None), fields=fields)

    @app.get("/health", summary="What is served, and its state")
    async def health() -> Health:
        return Health(**service.health())

    @app.get("/metrics", summary="Counts in Prometheus' text format", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics(), media_type=CONTENT_TYPE_LATEST)

    most = None if predictor.ranked is not None else 0  # a model that cannot tell refuses to
    level = Query(service.novelty, ge=0, lt=1, le=most, description=_NOVELTY)
    share = Query(None, gt=0, le=1 if predictor.labels else 0, description=_RISK)  # without classes there is none
    summary = f"Predicts a number for all {kind.word}, with its uncertainty, and abstains from novel ones"
    if predictor.labels:
        summary = f"Labels {kind.word} with their uncertainty, and abstains where a label would be wrong too often"

    @app.post("/predict", summary=summary, **requests.route_options(kind))
    async def answers(
        request: Request, risk: float | None = share, novelty: float = level, draws: _Draws = False
    ) -> Answers:
        rule = _rule(service, risk, novelty)
        parts = await requests.receive(request, images=isinstance(kind, Pixels))
        inputs, notes = await asyncio.get_running_loop().run_in_executor(readers, requests.read, parts, kind)
        found = await _answered(service, Question(inputs, draws, rule))
        rows = [Answer(**row, **({"note": note} if note else {})) for row, note in zip(found, notes, strict=True)]
        if not predictor.labels:
            return Answers(target=predictor.target, rows=rows)
        probabilities = rows[0].probabilities
        classes = predictor.names(len(probabilities) if isinstance(probabilities, list) else 1)
        used = service.risk if risk is None else risk
        return Answers(classes=classes, risk=used, limit=finite(rule.limit), rows=rows)

    return app


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """Words what FastAPI found wrong with an option."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    text = complaint(
        str(found["loc"][-1]), "valid", f"{found.get('input')!r:.80}: {found['msg']}", "Correct or omit it."
    )
    return JSONResponse({"detail": text}, 422)


def _page(template: str, **values: Any) -> HTMLResponse:
    return HTMLResponse(_TEMPLATES.get_template(template).render(**values), headers=_POLICY)


def _rule(service: Service, risk: float | None, novelty: float) -> Threshold:
    """Returns where to abstain; raises for a risk or a p-value that is smaller than the held-out inputs allow."""
    level = service.predictor.novelty_level(novelty)
    rule, facts = service.rule(service.risk if risk is None else risk, level)
    known = 0 if facts is None else facts["known"]
    if risk is not None and risk < 1 and known < (needed := rows_needed(risk)):
        expected = f"one that {known:,} held-out inputs can show; this one needs {needed:,}"
        raise ValueError(complaint("risk", expected, risk, "Pass a larger risk, or leave it out."))
    return rule


async def _answered(service: Service, question: Question) -> list[Row]:
    """Returns the answers to a question; counts those withheld."""
    try:
        rows: list[Row] = await asyncio.wrap_future(service.ask(question))
    except (TypeError, RuntimeError, IndexError) as error:
        if isinstance(service.predictor.kind, Pixels) or service.predictor.kind.columns:
            raise
        raise ValueError(str(error).strip()[:500]) from None  # the network does not take such inputs
    for number, row in enumerate(rows):
        if not all(math.isfinite(value) for value in row.values() if isinstance(value, float)):
            got = f"row {number}, which is too far off"
            raise ValueError(complaint("inputs", "close enough to training data for finite answers", got, "Omit it."))
    service.counts.abstained.inc(sum(row["abstain"] for row in rows))
    service.counts.novel.inc(sum("novel" in (row["withheld"] or "") for row in rows))
    return rows
