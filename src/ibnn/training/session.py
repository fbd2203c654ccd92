"""SESSION: what training changes, and how a run is saved, resumed, and stopped by a signal."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ibnn.files.atomic import write_atomically
from ibnn.training.averaging import Average, Best
from ibnn.training.checkpoint import Checkpoint, Checkpoints, pack_optimiser, unpack_optimiser
from ibnn.training.engine import Engine
from ibnn.training.interrupts import Interrupts
from ibnn.training.steering import Found, Steering
from ibnn.training.trainable import Trainable


@dataclass
class Progress:
    """Where a run is."""

    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)  # loss, nll, kl, each × mass of the targets; mass
    seen: list[float] = field(default_factory=lambda: [0.0] * 2)  # nll × mass and mass since the last look
    rows: list[dict[str, Any]] = field(default_factory=list)
    finished: str = ""
    seconds: float = 0.0  # of training, over all resumed parts


@dataclass
class State:
    """All that training changes: what a checkpoint holds."""

    model: Trainable
    optimisers: list[Optimizer]
    steering: Steering | None = None
    progress: Progress = field(default_factory=Progress)
    average: Average = field(default_factory=Average)
    best: Best = field(default_factory=Best)

    def save(self, checkpoints: Checkpoints) -> None:
        """Writes a checkpoint."""
        found = asdict(self.steering.found) if self.steering is not None else {}
        progress = asdict(self.progress) | found | {"best": self.best.best, "waited": self.best.waited}
        states = {"model": self.model.state_dict(), "average": self.average.state, "best": self.best.state}
        tensors: dict[str, Tensor] = {f"{kind}/{n}": value for kind, s in states.items() for n, value in s.items()}
        optimisers = []
        for number, optimiser in enumerate(self.optimisers):
            packed, data = pack_optimiser(optimiser, f"optimiser{number}")
            tensors |= packed
            optimisers.append(data)
        checkpoints.save(tensors, progress, optimisers=optimisers, averaged=self.average.count)

    def restore(self, saved: Checkpoint, engine: Engine) -> None:
        """Takes over a checkpoint."""
        names, progress = self.model.state_dict().keys(), saved.data["progress"]
        self.model.load_state_dict(saved.state("model", names))
        self.average.state, self.average.count = engine.to_device(saved.state("average")), saved.data["averaged"]
        self.best = Best(**_fields(Best, progress), state=saved.state("best", names))
        self.progress = Progress(**_fields(Progress, progress))
        if self.steering is not None:
            self.steering.found = Found(**_fields(Found, progress))
        for number, (optimiser, data) in enumerate(zip(self.optimisers, saved.data["optimisers"], strict=True)):
            unpack_optimiser(optimiser, f"optimiser{number}", saved.tensors, data)
        if not engine.main:
            self.progress.sums, self.progress.seen = [0.0] * 4, [0.0] * 2


def _fields(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a checkpoint that are fields of a dataclass."""
    return {field.name: data[field.name] for field in fields(cls) if field.name in data}


class Stopped(SystemExit):
    """A signal ended a run that is saved."""


class Session:
    """Resumes a run, saves it when that is due, and stops it on SIGINT and SIGTERM if it can be resumed."""

    def __init__(self, state: State, engine: Engine, checkpoints: Checkpoints, total: int) -> None:
        """Takes what training changes, where it runs, where it is saved, and its number of steps."""
        self.state, self.engine, self.checkpoints, self.total = state, engine, checkpoints, total
        self.every, self.interrupts, self._since = checkpoints.recipe.checkpoint_every, Interrupts(), time.monotonic()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """With a run folder, signals let the current step of a block finish, which then says how to go on and exits."""
        with self.interrupts.caught() if self.checkpoints.folder else nullcontext():
            try:
                yield
            except Stopped:
                at = f"step {self.state.progress.step} of {self.total}; saved in {self.checkpoints.folder}"
                print(f"Stopped at {at}: the same call goes on from there.", file=sys.stderr)
                raise

    def resume(self, how: str) -> None:
        """Restores the newest checkpoint, if there is one and it is wanted; writes recipe.toml."""
        folder = self.checkpoints.folder
        if how == "never" and self.engine.main:
            self.checkpoints.clear()
        self.engine.accelerator.wait_for_everyone()
        if (saved := self.checkpoints.find(required=how == "must")) is not None:
            self.state.restore(saved, self.engine)
        if folder is not None and self.engine.main:
            write_atomically(folder / "recipe.toml", self.checkpoints.recipe.to_toml().encode())
        self._since = time.monotonic()

    def after_step(self, *, at_epoch: bool = False) -> None:
        """Saves a checkpoint where one is due, and exits if a signal came."""
        progress = self.state.progress
        due = progress.step % self.every == 0 if self.every else at_epoch
        stop, now = self._signal(at_epoch), time.monotonic()
        progress.seconds, self._since = progress.seconds + now - self._since, now
        if self.checkpoints.folder and (due or stop or progress.finished):
            self._save()
        if stop and not progress.finished:
            raise Stopped(128 + stop)

    def _signal(self, at_epoch: bool) -> int:
        """Returns the signal to stop on. Several workers must stop at the same step, and rarely ask each other."""
        asks = self.checkpoints.folder is not None and (at_epoch or self.state.progress.step % 10 == 0)
        if self.engine.worker.world > 1 and not asks:
            return 0
        return self.engine.highest(self.interrupts.number)

    def _save(self) -> None:
        progress = self.state.progress
        progress.sums, progress.seen = (self.engine.moved_to_main(sums) for sums in (progress.sums, progress.seen))
        if self.engine.main:
            self.state.save(self.checkpoints)
