"""The history of a run: adds up what steps report, shows it, and leaves a row for each evaluation."""

import csv
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ibnn.batches import Share
from ibnn.diagnosis import diagnose
from ibnn.files.atomic import replaced
from ibnn.generators import generators_restored
from ibnn.inputs import batch_length, slice_rows
from ibnn.network import IBNN
from ibnn.progress import Bar
from ibnn.training.data import HeldOut, Split
from ibnn.training.engine import Engine
from ibnn.training.recipe import Recipe
from ibnn.training.session import State
from ibnn.training.steering import SteeringState

Callback = Callable[[dict[str, Any], Any], None]  # called with a row and the model


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
    """

    rows: tuple[dict[str, Any], ...]
    best: dict[str, Any]
    stopped: str
    summary: str = field(default="", repr=False)
    looks: tuple[dict[str, float], ...] = field(default=(), repr=False)
    seconds: float = field(default=0.0, compare=False)
    examples: int = field(default=0, repr=False)
    looked: int = field(default=0, repr=False)

    def __getitem__(self, column: str) -> list[Any]:
        """Returns a column, over the rows that have it."""
        return [row[column] for row in self.rows if column in row]


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
            text = " ".join(f"{name} {values[name]:.4g}" for name in ("loss", "nll", "kl", "beta", "lr"))
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


EXAMINED = 128  # inputs whose predictions `diagnose` examines at the end


class Journal:
    """The rows of a run: shown, written to history.csv, and handed to trackers and callbacks."""

    def __init__(self, state: State, engine: Engine, recipe: Recipe, folder: Path | None, monitor: Monitor) -> None:
        self.state, self.engine, self.recipe, self.folder, self.monitor = state, engine, recipe, folder, monitor

    def record(self, sums: Tensor, rates: Mapping[str, float], share: Share) -> None:
        """Adds the sums of loss, nll and kl over the data of a step."""
        progress, likelihood, values = self.state.progress, self.state.model.likelihood, sums.tolist()
        totals = [float(likelihood.total_weight(share.y)), float(likelihood.count(share.y))]
        progress.sums = [total + value for total, value in zip(progress.sums, [*values, *totals], strict=True)]
        progress.seen = [total + value for total, value in zip(progress.seen, (values[1], totals[1]), strict=True)]
        shown = _means(*values, *totals)
        self.monitor.step({**rates, **shown}, share.total)

    def write(
        self,
        epoch: int,
        rates: Mapping[str, float],
        held_out: HeldOut | None,
        callbacks: Sequence[Callable[[dict[str, Any], Any], None]],
    ) -> None:
        """Evaluates the held-out data, and adds a row."""
        model, progress, recipe = self.state.model, self.state.progress, self.recipe
        row: dict[str, Any] = {"epoch": epoch, "step": progress.step}
        row |= _means(*self.engine.total(progress.sums)) | dict(rates)
        progress.sums = [0.0] * 5
        row |= {"prior_std": model.prior_std} if self.state.steering is not None else {}
        if held_out is not None:
            row |= {f"valid_{name}": value for name, value in held_out.scores(recipe.eval_samples).items()}
            self.state.best.update(row, model, keep=recipe.patience > 0)
        progress.rows.append(row)
        self.monitor.row(row)
        self.engine.log(row)
        if self.folder and self.engine.main:
            columns = dict.fromkeys(column for row in progress.rows for column in row)
            with replaced(self.folder / "history.csv") as (path,), path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(progress.rows)
        for callback in callbacks:
            callback(row, model)


def _means(loss: float, nll: float, kl: float, weight: float, count: float) -> dict[str, float]:
    """Returns means of sums over data: loss and kl by their weight, nll by their number."""
    weight, count = max(weight, 1e-12), max(count, 1e-12)
    return {"loss": loss / weight, "nll": nll / count, "kl": kl / weight}


def summarise(state: State, data: Split, monitor: Monitor) -> History:
    """Leaves the model in eval mode, examines its latents, if it has any, and returns the history."""
    model, words, progress = state.model.eval(), "", state.progress
    if isinstance(model, IBNN):
        with generators_restored():
            inputs = next((data.held_out or data.train).epoch(0, 0)).x
        rows = batch_length(inputs)
        inputs = slice_rows(inputs, slice(0, EXAMINED), rows) if rows > EXAMINED else inputs
        diagnosis = diagnose(model, optimiser=state.optimisers, inputs=inputs)
        words = str(diagnosis)
        if not diagnosis.healthy:
            monitor.say(words)
    steered = state.steering.state if state.steering is not None else SteeringState()
    ending = state.best.row or progress.rows[-1], progress.finished, words
    return History(
        tuple(progress.rows), *ending, tuple(steered.looks), progress.seconds, data.train.rows, steered.looked
    )
