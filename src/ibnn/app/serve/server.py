"""RUNNING the service until it is told to stop."""

import errno
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ibnn.errors import complaint

GRACE = 30  # seconds that requests have to end after SIGTERM
CONNECTIONS = 512  # more are refused with 503


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 takes any that is free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            expected, remedy = "a port that is free and may be opened", "Pass --port 0 for any that is free."
            raise OSError(complaint("--port", expected, f"{port} at {host} ({reason})", remedy)) from error
        expected, remedy = "an address of this machine", "Pass --host 127.0.0.1, or 0.0.0.0 for all its addresses."
        raise ValueError(complaint("--host", expected, f"{host!r} ({reason})", remedy)) from error


def serve(app: FastAPI, at: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, then finishes what is in flight.

    Args:
        app: What `make_app` made.
        at: A socket of `listen`.
        ready: Called when requests are taken.
    """

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
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when all is done
    try:
        Server(config).run(sockets=[at])
    finally:
        signal.signal(signal.SIGTERM, before)
