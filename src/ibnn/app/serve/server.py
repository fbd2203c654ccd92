"""Listens on a socket and runs the service until SIGTERM or Ctrl-C."""

import errno
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ibnn.errors import complaint

GRACE = 30  # seconds to finish requests after SIGTERM
CONNECTIONS = 512  # further ones get 503


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes any free port."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            expected, remedy = "a free port that may be opened", "Pass --port 0 for any free port."
            raise OSError(complaint("--port", expected, f"{port} at {host} ({reason})", remedy)) from error
        remedy = "Pass --host 127.0.0.1, or 0.0.0.0 for all its addresses."
        raise ValueError(complaint("--host", "an address of this machine", f"{host!r} ({reason})", remedy)) from error


def serve(app: FastAPI, at: socket.socket, *, ready: Callable[[], None]) -> None:
    """Calls `ready` once it accepts requests; serves until SIGTERM or Ctrl-C, then finishes those in flight."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE,
        lifespan="on",
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again at the end
    try:
        Server(config).run(sockets=[at])
    finally:
        signal.signal(signal.SIGTERM, before)
