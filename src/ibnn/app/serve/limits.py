"""Bounds what clients may take: the size, time and number of request bodies, connections, and time to finish."""

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ibnn.errors import complaint

GRACE = 30  # seconds to finish requests after SIGTERM
CONNECTIONS = 512  # in all
PER_ADDRESS = 256  # connections from one address
HEAD = 10  # seconds for the head of a request
BODY = 20  # seconds for its body
UNREAD = 30  # seconds for which a client may leave a reply unread
IN_FLIGHT = 64_000_000  # bytes of all bodies together; small ones are read in any case
SMALL = 65_536  # bytes
_HEADERS = {b"x-content-type-options": b"nosniff", b"cache-control": b"no-store"}


class Busy(HTTPException):
    """Refuses work that cannot be finished in time; says after how many seconds to try again."""

    def __init__(self, seconds: float) -> None:
        headers = {"Retry-After": str(max(1, math.ceil(seconds)))}
        super().__init__(503, "Too many requests are waiting. Try again later.", headers)


def reply(refusal: HTTPException) -> JSONResponse:
    """Returns a refusal as an application, which closes the connection."""
    headers = {**(refusal.headers or {}), "Connection": "close"}
    return JSONResponse({"detail": refusal.detail}, refusal.status_code, headers)


class Gate:
    """Wraps an application; refuses requests that are too large, too slow or too many."""

    def __init__(self, app: ASGIApp, *, service: Any, most: int) -> None:
        self.app, self.service, self.most = app, service, most
        self.held = 0  # bytes of bodies in flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection as ASGI specifies."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
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
            self.service.statuses[status or 500] += 1

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


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any free port."""
    try:
        at = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        expected, got = "an address of this machine with a free port", f"{host!r}, {port} ({error})"
        remedy = "Pass --port 0 for any free port, --host 127.0.0.1 for this machine."
        raise OSError(complaint("--host and --port", expected, got, remedy)) from error
    at.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: no reply waits for an ACK
    return at


def make_server(app: ASGIApp, *, drain: Callable[[], None]) -> uvicorn.Server:
    """Returns a server with the limits of this file; calls `drain` before it waits for requests in flight."""

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            drain()
            await super().shutdown(sockets)

    quiet: Any = {"log_level": "warning", "access_log": False, "server_header": False}
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="on", timeout_graceful_shutdown=GRACE, **quiet)
    return Server(config)


class Connection(H11Protocol):
    """An HTTP connection with time limits, which gives way to others while it has no complete request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock of the first request, and closes an idle connection if there are too many."""
        super().connection_made(transport)
        self._clock: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._watch()
        open_ones: list[Any] = [each for each in self.connections if not each.transport.is_closing()]
        near = [each for each in open_ones if each.client and self.client and each.client[0] == self.client[0]]
        for some, most in ((near, PER_ADDRESS), (open_ones, CONNECTIONS)):
            if len(some) > most:
                idle = [each for each in some if each._is_idle() and each is not self]
                if idle:
                    min(idle, key=lambda each: each.since).transport.close()
                else:
                    self.app = reply(Busy(1))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        super().connection_lost(exc)
        for clock in filter(None, (self._clock, self._unread)):
            clock.cancel()

    def data_received(self, data: bytes) -> None:
        """Stops the clock of a request whose head is complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Starts the clock of the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Gives a client that does not read its reply some time to do so."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD, self.transport.abort)

    def resume_writing(self) -> None:
        """Goes on when the client has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _is_idle(self) -> bool:  # no complete request is being answered
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _watch(self) -> None:
        begun = self.cycle is not None and not self.cycle.response_complete
        if begun and self._clock is not None:
            self._clock.cancel()
            self._clock = None
        elif not begun and self._clock is None:
            self.since = self.loop.time()
            self._clock = self.loop.call_later(HEAD, self.transport.close)
