"""Stands before the routes: bounds the size, time and number of request bodies, counts requests, adds headers."""

import asyncio
import contextlib
import time

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ibnn.app.serve.service import Busy, Service
from ibnn.errors import complaint

BODY = 20  # seconds for the body of a request
IN_FLIGHT = 64_000_000  # bytes of all bodies together; small ones are read in any case
SMALL = 65_536  # bytes
_PATHS = ("/", "/docs", "/openapi.json", "/predict", "/health", "/metrics")
_HEADERS = {b"x-content-type-options": b"nosniff", b"referrer-policy": b"no-referrer", b"cache-control": b"no-store"}


class Gate:
    """Wraps an application; refuses requests that are too large, too slow or too many."""

    def __init__(self, app: ASGIApp, *, service: Service, most: int) -> None:
        self.app, self.service, self.most = app, service, most
        self.held = 0  # bytes of bodies in flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection as ASGI specifies."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        begin, status, read, more = time.perf_counter(), 0, 0, True

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *_HEADERS.items()]
            await send(message)

        async def receiving() -> Message:
            nonlocal read, more
            try:
                async with asyncio.timeout(begin + BODY - time.perf_counter() if more else None):
                    message = await receive()
            except TimeoutError:
                detail = complaint("body", f"complete after {BODY} s", f"{read:,} bytes", "Send it faster.")
                raise HTTPException(408, detail, {"Connection": "close"}) from None
            size, more = len(message.get("body", b"")), message.get("more_body", False)
            read, self.held = read + size, self.held + size
            if read > self.most or (read > SMALL and self.held > IN_FLIGHT):
                if more:
                    await self._discard(receive)
                raise self._too_large(f"more than {self.most:,}") if read > self.most else Busy(1)
            return message

        try:
            if (refusal := self._refusal(scope)) is None:
                await self.app(scope, receiving, sending)
            else:
                await self._discard(receive)
                await reply(refusal)(scope, receive, sending)
        except asyncio.CancelledError:  # the time to finish after SIGTERM is over
            if status:
                raise
            await reply(Busy(1))(scope, receive, sending)
        finally:
            self.held -= read
            self.service.counts.requests.labels(path, status or 500).inc()
            self.service.counts.seconds.labels(path).observe(time.perf_counter() - begin)

    def _refusal(self, scope: Scope) -> HTTPException | None:
        """Returns why a request is refused before its body is read."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most:
            return self._too_large(f"{int(length):,}")
        wait = self.service.wait if scope["path"] == "/predict" or self.service.draining else 0
        return Busy(wait) if wait else None

    async def _discard(self, receive: Receive) -> None:
        """Lets a client finish that is not far above the limit; many clients read a reply only then."""
        read, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while more and read < 10 * self.most:
                    message = await receive()
                    read, more = read + len(message.get("body", b"")), message.get("more_body", False)

    def _too_large(self, got: str) -> HTTPException:
        return HTTPException(413, complaint("body", f"at most {self.most:,} bytes", got, "Send fewer inputs."))


def reply(refusal: HTTPException) -> JSONResponse:
    """Returns a refusal as an application, which closes the connection."""
    headers = {**(refusal.headers or {}), "Connection": "close"}
    return JSONResponse({"detail": refusal.detail}, refusal.status_code, headers)
