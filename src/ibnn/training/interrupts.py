"""INTERRUPTS: SIGINT and SIGTERM let the current step finish and be saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Notes a signal for the loop to act on between steps; a second one has its usual effect.

    Attributes:
        number: The signal that came, 0 if none.
    """

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catches signals for the length of a block, where Python lets us: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            self.number = number
            signal.signal(number, before[signal.Signals(number)])

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
