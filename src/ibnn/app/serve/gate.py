"""GATE: middleware that limits the size of requests, counts them, and adds headers to the replies."""

import asyncio
import contextlib
import time

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ibnn.app.serve.service import Counts
from ibnn.errors import complaint

_PATHS = ("/", "/docs", "/openapi.json", "/predict", "/health", "/metrics")
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


class Gate:
    """Wraps an application; reads at most so many bytes of a request."""

    def __init__(self, app: ASGIApp, *, counts: Counts, most: int) -> None:
        self.app, self.counts, self.most = app, counts, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection as ASGI specifies."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        start, status = time.perf_counter(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        try:
            length = dict(scope["headers"]).get(b"content-length", b"0")
            if length.isdigit() and int(length) > self.most:
                await self._discard(receive)
                refusal = JSONResponse({"detail": self._too_large(f"{int(length):,}")}, 413, {"Connection": "close"})
                await refusal(scope, receive, sending)
            else:
                await self.app(scope, self._limited(receive), sending)
        finally:
            self.counts.requests.labels(path, status).inc()
            self.counts.seconds.labels(path).observe(time.perf_counter() - start)

    def _limited(self, receive: Receive) -> Receive:
        read = 0

        async def receiving() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                if message.get("more_body", False):
                    await self._discard(receive)
                raise HTTPException(413, self._too_large(f"more than {self.most:,}"))
            return message

        return receiving

    async def _discard(self, receive: Receive) -> None:
        """Lets a client finish that is not far above the limit; many clients read a reply only then."""
        read, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while more and read < 10 * self.most:
                    message = await receive()
                    read, more = read + len(message.get("body", b"")), message.get("more_body", False)

    def _too_large(self, got: str) -> str:
        return complaint("body", f"at most {self.most:,} bytes", got, "Send fewer inputs, or a smaller image.")
