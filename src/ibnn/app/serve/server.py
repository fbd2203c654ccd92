"""Listens on a socket and runs the service until SIGTERM or Ctrl-C; bounds connections and their time."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ibnn.app.serve.gate import reply
from ibnn.app.serve.service import Busy
from ibnn.errors import complaint

GRACE = 30  # seconds to finish requests after SIGTERM
CONNECTIONS = 512  # in all
PER_ADDRESS = 256  # connections from one address
HEAD = 10  # seconds for the head of a request
UNREAD = 30  # seconds for which a client may leave a reply unread


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any free port."""
    try:
        at = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            got = f"{port} at {host} ({reason})"
            raise OSError(complaint("--port", "a free port that may be opened", got, "Pass --port 0.")) from error
        got = f"{host!r} ({reason})"
        raise ValueError(complaint("--host", "an address of this machine", got, "Pass --host 127.0.0.1.")) from error
    at.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: no reply waits for an ACK
    return at


def serve(app: FastAPI, at: socket.socket, *, ready: Callable[[], None], drain: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, then finishes requests in flight.

    `ready` is called once requests are accepted, `drain` before the service waits for those in flight.
    """
    server = make_server(app, ready=ready, drain=drain)
    if threading.current_thread() is not threading.main_thread():  # signals are not this thread's business
        return server.run(sockets=[at])
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again at the end
    try:
        server.run(sockets=[at])
    finally:
        signal.signal(signal.SIGTERM, before)


def make_server(app: FastAPI, *, ready: Callable[[], None], drain: Callable[[], None]) -> uvicorn.Server:
    """Returns a server with the limits of this file."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            drain()
            await super().shutdown(sockets)

    options: Any = {"log_level": "warning", "access_log": False, "server_header": False}
    return Server(
        uvicorn.Config(app, http=Connection, ws="none", lifespan="on", timeout_graceful_shutdown=GRACE, **options)
    )


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

    def _is_idle(self) -> bool:
        """Whether no complete request is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _watch(self) -> None:
        begun = self.cycle is not None and not self.cycle.response_complete
        if begun and self._clock is not None:
            self._clock.cancel()
            self._clock = None
        elif not begun and self._clock is None:
            self.since = self.loop.time()
            self._clock = self.loop.call_later(HEAD, self.transport.close)
