"""HISTORY: what a run leaves behind: a row an evaluation, what steered it, and how it ended."""

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ibnn.files.atomic import write_atomically


@dataclass(frozen=True)
class History:
    """What `fit` returns.

    Attributes:
        rows: A dict for each evaluation: epoch, step, loss, nll, kl, beta, lr, latent_lr, and valid_nll and others with
            validation data.
        best: The row with the lowest validation NLL; the last row without validation data.
        stopped: "finished" or "patience".
        summary: The report of `ibnn.diagnose`, as text.
        looks: The steering evaluations on held-out data: step, temperature (above 1: overconfident), training_nll,
            held_out_nll (at that temperature), and prior_std from then on.
        seconds: Training time, over all resumed parts.
        examples: Number of training examples.
        looked: Forward passes, in rows, for the looks and for the temperature that is set at the end.
        first: With `refit`, the history of the training that found the noise.
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
        """Returns a column, over the rows that have it."""
        return [row[column] for row in self.rows if column in row]


def write_history(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows as CSV, atomically."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
