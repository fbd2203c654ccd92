"""The history of a run: adds up what steps report, shows it, and leaves a row for each evaluation."""

import csv
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

STILL_FALLING = "The held-out NLL was still falling at the end: pass a larger `epochs`."
EXAMINED = 128  # inputs whose predictions `diagnose` examines at the end


@dataclass(frozen=True)
class History:
    """What `fit` returns."""

    #: A dict for each evaluation, with epoch, step, loss, nll, kl, beta, lr, latent_lr, and valid_nll and others with
    #: validation data.
    rows: tuple[dict[str, Any], ...]
    best: dict[str, Any]  #: The row with the lowest validation NLL; the last row without validation data.
    stopped: str  #: "finished" or "patience".
    summary: str = field(default="", repr=False)  #: The report of `ibnn.diagnose`, as text.
    #: The steering evaluations on held-out data, with step, temperature (above 1 if overconfident), training_nll,
    #: held_out_nll (at that temperature), and prior_std from then on.
    looks: tuple[dict[str, float], ...] = field(default=(), repr=False)
    seconds: float = field(default=0.0, compare=False)  #: Training time, over all resumed parts.
    examples: int = field(default=0, repr=False)  #: Number of training examples.
    #: Forward passes, in rows, for the looks and for the temperature that is set at the end.
    looked: int = field(default=0, repr=False)

    @property
    def falling(self) -> bool:
        """Whether more than a quarter of the fall of the held-out NLL came in the second half of a finished run."""
        losses = self["valid_nll"]
        if self.stopped != "finished" or len(losses) < 5:
            return False
        first, middle, last = losses[0], losses[len(losses) // 2], losses[-1]
        return bool(middle - last > max(0.25 * (first - last), 0.005 * abs(middle)))

    def __str__(self) -> str:
        last, best = self.rows[-1], self.best
        steps = f"{last['epoch']:,} epochs, {last['step']:,} steps"
        ended = "stopped early at the best evaluation" if self.stopped == "patience" else "finished"
        lines = [f"Trained on {self.examples:,} rows for {steps} in {self.seconds:.3g} s; {ended}."]
        lines += [f"Training: loss {last['loss']:.4g}, NLL {last['nll']:.4g}, KL {last['kl']:.4g} nats"]
        scores = [f"{name.removeprefix('valid_')} {value:.4g}" for name, value in best.items() if name[:6] == "valid_"]
        lines += [f"Held out, best at epoch {best['epoch']:,}: {', '.join(scores)}"] if scores else []
        return "\n".join(lines + ([STILL_FALLING] if self.falling else []))

    def plot(self, ax: Any = None) -> Any:
        """Draws training and held-out NLL over the epochs (with matplotlib), into new axes by default; returns them."""
        from matplotlib import pyplot

        ax = pyplot.subplots()[1] if ax is None else ax
        for column, label in (("nll", "training"), ("valid_nll", "held out")):
            if self[column]:
                ax.plot([row["epoch"] for row in self.rows if column in row], self[column], label=label)
        ax.set(xlabel="epoch", ylabel="NLL (nats per target)")
        ax.legend()
        return ax

    def __getitem__(self, column: str) -> list[Any]:
        """Returns a column, over the rows that have it."""
        return [row[column] for row in self.rows if column in row]


def joined(histories: Sequence[History]) -> History:
    """Returns the histories of an ensemble's members as one, whose rows say which member they are of."""
    return History(
        rows=tuple({"member": number, **row} for number, own in enumerate(histories) for row in own.rows),
        best=min((own.best for own in histories), key=lambda row: row.get("valid_nll", 0.0)),
        stopped="patience" if any(own.stopped == "patience" for own in histories) else histories[0].stopped,
        summary="\n".join(f"Member {number}\n{own.summary}" for number, own in enumerate(histories) if own.summary),
        seconds=sum(own.seconds for own in histories),
        examples=histories[0].examples,
        looked=sum(own.looked for own in histories),
    )


class Journal:
    """The rows of a run: shown (a live bar in a terminal, else lines), written to history.csv, and handed on."""

    def __init__(self, session: Session, *, quiet: bool) -> None:
        self.session, self.state, self.quiet, self.total = session, session.state, quiet, session.length.total
        self._rows, self._since = 0, time.monotonic()
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

    def record(self, sums: Sequence[float], rates: Mapping[str, float], rows: int) -> None:
        """Adds the sums over the data of a step."""
        progress = self.state.progress
        progress.sums = [total + value for total, value in zip(progress.sums, sums, strict=True)]
        progress.seen = [progress.seen[0] + sums[1], progress.seen[1] + sums[4]]
        self._rows += rows
        passed = time.monotonic() - self._since
        if self._bar.drawn and (passed > 0.5 or progress.step == self.total):
            shown = {**_means(*sums), "beta": rates["beta"], "lr": rates["lr"]}
            text = " ".join(f"{name} {value:.4g}" for name, value in shown.items())
            self._bar.update(done=progress.step, title=f"{text} {self._rows / passed:,.0f} rows/s")
            self._rows, self._since = 0, time.monotonic()

    def write(
        self, epoch: int, rates: Mapping[str, float], held_out: HeldOut | None, callbacks: Sequence[Callback]
    ) -> None:
        """Evaluates the held-out data, and adds a row."""
        model, progress, session = self.state.model, self.state.progress, self.session
        row: dict[str, Any] = {"epoch": epoch, "step": progress.step}
        row |= _means(*session.engine.total(progress.sums)) | dict(rates)
        progress.sums = [0.0] * 5
        row |= {"prior_std": model.prior_std} if self.state.steering is not None else {}
        if held_out is not None:
            row |= {f"valid_{name}": value for name, value in held_out.scores(session.recipe.eval_samples).items()}
            progress.waited += 1
            if progress.best is None or row["valid_nll"] < progress.best["valid_nll"]:
                progress.best, progress.waited = row, 0
                if session.length.patience:
                    self.state.best = {name: value.clone() for name, value in model.state_dict().items()}
        progress.rows.append(row)
        text = "  ".join(f"{name} {value:.5g}" for name, value in row.items() if name != "step")
        self.say(f"[{row['step']}/{self.total}] {text}")
        session.engine.log(row)
        if session.folder and session.engine.main:
            columns = dict.fromkeys(column for row in progress.rows for column in row)
            place = session.folder / "history.csv"
            with replaced(place) as (path,), path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(progress.rows)
        for callback in callbacks:
            callback(row, model)


def _means(loss: float, nll: float, kl: float, weight: float, count: float) -> dict[str, float]:
    """Returns means of sums over data: loss and kl by their weight, nll by their number."""
    weight, count = max(weight, 1e-12), max(count, 1e-12)
    return {"loss": loss / weight, "nll": nll / count, "kl": kl / weight}


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
    history = History(
        rows=tuple(progress.rows),
        best=progress.best or progress.rows[-1],
        stopped=progress.finished,
        summary=words,
        looks=tuple(steered.looks),
        seconds=progress.seconds,
        examples=data.train.rows,
        looked=steered.looked,
    )
    if history.falling:
        journal.say(STILL_FALLING)
    return history
