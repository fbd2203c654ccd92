"""JOURNAL: adds up what the steps report, and makes a row of the history of it at each evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ibnn.batches import Share
from ibnn.diagnosis import diagnose
from ibnn.inputs import batch_length, slice_rows
from ibnn.normal import generators_restored
from ibnn.training.checks import Callback
from ibnn.training.engine import Engine
from ibnn.training.heldout import HeldOut, Split
from ibnn.training.history import History, write_history
from ibnn.training.monitor import Monitor
from ibnn.training.recipe import Recipe
from ibnn.training.session import State
from ibnn.training.steering import Found

EXAMINED = 128  # inputs whose predictions `diagnose` examines at the end


class Journal:
    """The rows of a run: shown, written to history.csv, and handed to trackers and callbacks."""

    def __init__(self, state: State, engine: Engine, recipe: Recipe, folder: Path | None, monitor: Monitor) -> None:
        self.state, self.engine, self.recipe, self.folder, self.monitor = state, engine, recipe, folder, monitor

    def record(self, sums: Tensor, rates: Mapping[str, float], share: Share) -> None:
        """Adds the sums of loss, nll and kl × mass of a step."""
        progress, values = self.state.progress, sums.tolist()
        mass = float(self.state.model.likelihood.mass(share.y))
        progress.sums = [total + value for total, value in zip(progress.sums, [*values, mass], strict=True)]
        progress.seen = [progress.seen[0] + values[1], progress.seen[1] + mass]
        shown = {name: value / max(mass, 1e-12) for name, value in zip(("loss", "nll", "kl"), values, strict=True)}
        self.monitor.step({**rates, **shown}, share.total)

    def write(
        self, epoch: int, rates: Mapping[str, float], held_out: HeldOut | None, callbacks: Sequence[Callback]
    ) -> None:
        """Evaluates the held-out data, and adds a row."""
        model, progress, recipe = self.state.model, self.state.progress, self.recipe
        loss, nll, kl, mass = self.engine.total(progress.sums)
        progress.sums = [0.0] * 4
        row: dict[str, Any] = {"epoch": epoch, "step": progress.step}
        row |= {"loss": loss / mass, "nll": nll / mass, "kl": kl / mass, **rates}
        row |= {"prior_std": model.prior_std} if self.state.steering is not None else {}
        if held_out is not None:
            row |= {f"valid_{name}": value for name, value in held_out.scores(recipe.eval_samples).items()}
            self.state.best.update(row, model, keep=recipe.patience > 0)
        progress.rows.append(row)
        self.monitor.row(row)
        self.engine.log(row)
        if self.folder and self.engine.main:
            write_history(self.folder / "history.csv", progress.rows)
        for callback in callbacks:
            callback(row, model)


def summarise(state: State, data: Split, monitor: Monitor) -> History:
    """Leaves the model in eval mode, examines its latents, if it has any, and returns the history."""
    model, words, progress = state.model.eval(), "", state.progress
    if model.nodes:
        with generators_restored():
            inputs = next((data.held_out or data.train).epoch(0, 0)).x
        rows = batch_length(inputs)
        inputs = slice_rows(inputs, slice(0, EXAMINED), rows) if rows > EXAMINED else inputs
        diagnosis = diagnose(cast(Any, model), optimiser=state.optimisers, inputs=inputs)
        words = str(diagnosis)
        if not diagnosis.healthy:
            monitor.say(words)
    found = state.steering.found if state.steering is not None else Found()
    ending = state.best.best or progress.rows[-1], progress.finished, words
    return History(
        tuple(progress.rows), *ending, tuple(found.looks), progress.seconds, data.train.rows, looked=found.looked
    )
