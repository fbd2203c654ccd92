"""RUNNING the service until it is told to stop."""

import errno
import os
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ibnn.errors import complaint

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
GRACE = 30  # seconds that requests have to end after SIGTERM
CONNECTIONS = 512  # more are refused with 503


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 takes any that is free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        bad_name = isinstance(error, UnicodeError | socket.gaierror)
        number = getattr(error, "errno", None)
        reason = str(error) if bad_name or number is None else os.strerror(number)
        if bad_name or number in _NOT_HERE:
            remedy = "Pass --host 127.0.0.1 for this machine alone, or 0.0.0.0 for all its addresses."
            raise ValueError(
                complaint("--host", "an address of this machine", f"{host!r} ({reason})", remedy)
            ) from None
        expected, remedy = "a port that is free and may be opened", "Pass --port 0 for any that is free."
        raise OSError(complaint("--port", expected, f"{port} at {host} ({reason})", remedy)) from error


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
