"""MONITOR: shows a run while it goes on, as a live bar in a terminal or as plain lines."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from ibnn.progress import Bar

_LIVE = ("loss", "nll", "kl", "beta", "lr")  # values beside the bar


class Monitor:
    """Shows a run on stderr: a live bar in a terminal, a line a row otherwise, nothing when quiet."""

    def __init__(self, total: int, done: int, *, quiet: bool) -> None:
        self.total, self.done, self.rows, self.since = total, done, 0, time.monotonic()
        self._quiet = quiet
        self._bar = Bar("", total, done=done, shown=not quiet)

    def step(self, values: Mapping[str, float], rows: int) -> None:
        """Counts a step of so many rows; `values` are shown live."""
        self.done += 1
        self.rows += rows
        now = time.monotonic()
        if self._bar.drawn and (now - self.since > 0.5 or self.done == self.total):
            text = " ".join(f"{name} {values[name]:.4g}" for name in _LIVE)
            speed = self.rows / (now - self.since)
            self._bar.update(done=self.done, title=f"{text} {speed:,.0f} rows/s")
            self.rows, self.since = 0, now

    def row(self, row: Mapping[str, Any]) -> None:
        """Shows a finished row of the history."""
        text = "  ".join(f"{name} {value:.5g}" for name, value in row.items() if name != "step")
        self.say(f"[{row['step']}/{self.total}] {text}")

    def say(self, text: str) -> None:
        """Shows a line."""
        if self._bar.drawn:
            self._bar.say(text)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the bar down."""
        self._bar.close()
