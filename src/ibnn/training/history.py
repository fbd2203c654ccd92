"""The history of a run: adds up what steps report, shows it, and leaves a row for each evaluation."""

import csv
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from ibnn.training.session import Session
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


class Journal:
    """The rows of a run: shown, written to history.csv, and handed to trackers and callbacks.

    A terminal shows a live bar, any other stderr a line for each row, and a quiet run nothing.
    """

    def __init__(self, session: Session, *, quiet: bool) -> None:
        self.state, self.engine, self.recipe, self.folder = (
            session.state,
            session.engine,
            session.recipe,
            session.folder,
        )
        self.total, self.quiet, self._rows, self._since = session.total, quiet, 0, time.monotonic()
        self._bar = Bar("", self.total, done=self.state.progress.step, shown=not quiet)

    def say(self, text: str) -> None:
        """Shows a line."""
        if self._bar.drawn:
            self._bar.say(text)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the bar down."""
        self._bar.close()

    def record(self, sums: Tensor, rates: Mapping[str, float], share: Share) -> None:
        """Adds the sums of loss, nll and kl over the data of a step."""
        progress, likelihood, values = self.state.progress, self.state.model.likelihood, sums.tolist()
        totals = [float(likelihood.total_weight(share.y)), float(likelihood.count(share.y))]
        progress.sums = [total + value for total, value in zip(progress.sums, [*values, *totals], strict=True)]
        progress.seen = [total + value for total, value in zip(progress.seen, (values[1], totals[1]), strict=True)]
        self._rows += share.total
        passed = time.monotonic() - self._since
        if self._bar.drawn and (passed > 0.5 or progress.step == self.total):
            shown = {**_means(*values, *totals), "beta": rates["beta"], "lr": rates["lr"]}
            text = " ".join(f"{name} {value:.4g}" for name, value in shown.items())
            self._bar.update(done=progress.step, title=f"{text} {self._rows / passed:,.0f} rows/s")
            self._rows, self._since = 0, time.monotonic()

    def write(
        self, epoch: int, rates: Mapping[str, float], held_out: HeldOut | None, callbacks: Sequence[Callback]
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
        text = "  ".join(f"{name} {value:.5g}" for name, value in row.items() if name != "step")
        self.say(f"[{row['step']}/{self.total}] {text}")
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


EXAMINED = 128  # inputs whose predictions `diagnose` examines at the end


def summarise(journal: Journal, data: Split) -> History:
    """Leaves the model in eval mode, examines its latents, if it has any, and returns the history."""
    state, progress, words = journal.state, journal.state.progress, ""
    model = state.model.eval()
    if isinstance(model, IBNN):
        with generators_restored():
            inputs = next((data.held_out or data.train).epoch(0, 0)).x
        rows = batch_length(inputs)
        inputs = slice_rows(inputs, slice(0, EXAMINED), rows) if rows > EXAMINED else inputs
        diagnosis = diagnose(model, optimiser=state.optimisers, inputs=inputs)
        words = str(diagnosis)
        if not diagnosis.healthy:
            journal.say(words)
    steered = state.steering.state if state.steering is not None else SteeringState()
    return History(
        rows=tuple(progress.rows),
        best=state.best.row or progress.rows[-1],
        stopped=progress.finished,
        summary=words,
        looks=tuple(steered.looks),
        seconds=progress.seconds,
        examples=data.train.rows,
        looked=steered.looked,
    )
