"""EYES: what one sees of a run while it goes on: a progress bar or plain lines, and the history on disk."""

import csv
import io
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ibnn.files.atomic import write_atomically
from ibnn.progress import Bar

_LIVE = ("loss", "nll", "kl", "beta", "lr")


@dataclass(frozen=True)
class History:
    """What `fit` returns: a row an evaluation, and how it ended.

    Attributes:
        rows: One dict a row: epoch, step, loss, nll, kl, beta, lr, latent_lr, and valid_nll and others with validation.
        best: The row of the lowest validation NLL; the last row without validation.
        stopped: "finished" or "patience".
        summary: What the posterior doctor says (`ibnn.diagnose`), as text.
        looks: Where held-out labels steered the noise: step, temperature (above 1: overconfident), training_nll,
            held_out_nll (at that temperature), and prior_std from then on.
        seconds: How long training took, over all sittings.
        examples: How many an epoch has.
        looked: Rows that went through the network for the looks and for what they settle at the end.
        first: With `refit`, the history of the training that found the strengths.
    """

    rows: tuple[dict[str, Any], ...]
    best: dict[str, Any]
    stopped: str
    summary: str = field(default="", repr=False)
    looks: tuple[dict[str, float], ...] = field(default=(), repr=False)
    seconds: float = field(default=0.0, compare=False)
    examples: int = field(default=0, repr=False)
    looked: int = field(default=0, repr=False)
    first: "History | None" = field(default=None, repr=False)

    def __getitem__(self, column: str) -> list[Any]:
        """A column, over the rows that have it."""
        return [row[column] for row in self.rows if column in row]


def write_history(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows as CSV, atomically."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


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
