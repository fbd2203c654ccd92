"""The state of a run, its checkpoints (sealed files; nothing is unpickled), and how it is resumed or stopped."""

import logging
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ibnn.errors import DamagedError, complaint
from ibnn.files import sealed
from ibnn.files.atomic import locked, write_atomically
from ibnn.training.averaging import Average
from ibnn.training.engine import Engine
from ibnn.training.recipe import Length, Recipe
from ibnn.training.steering import Steering, SteeringState
from ibnn.training.trainable import Trainable

log = logging.getLogger("ibnn")

KEPT = 2  # checkpoints of a run: should the last be damaged, there is one before it


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Saves a checkpoint and removes all but the last `KEPT` up to this step; later ones were found damaged."""
    path = folder / f"step-{step:09d}.safetensors"
    sealed.write_tensors(path, tensors, facts)
    for other in set(paths(folder)) - set([other for other in paths(folder) if other <= path][-KEPT:]):
        other.unlink()
    return path


def latest(folder: Path) -> sealed.Sealed | None:
    """Returns the newest undamaged checkpoint of a folder; damaged ones are named in the log."""
    for path in reversed(paths(folder)):
        try:
            return sealed.read_tensors(path)
        except DamagedError:
            log.warning("%s is damaged or truncated; using the one before it.", path)
    return None


def paths(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, the oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def pack_optimiser(optimiser: Optimizer, prefix: str) -> dict[str, Tensor]:
    """Returns an optimiser's state as named tensors (plain numbers as "name#")."""
    tensors = {}
    for number, entries in optimiser.state_dict()["state"].items():
        for name, value in entries.items():
            mark = "" if isinstance(value, Tensor) else "#"
            dtype = torch.float64 if isinstance(value, float) else None
            tensors[f"{prefix}/{number}/{name}{mark}"] = torch.as_tensor(value, dtype=dtype)
    return tensors


def unpack_optimiser(optimiser: Optimizer, prefix: str, tensors: Mapping[str, Tensor], groups: list[Any]) -> None:
    """Restores what `pack_optimiser` took, and the groups."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        if key.startswith(f"{prefix}/"):
            _, number, name = key.split("/", 2)
            state.setdefault(int(number), {})[name.rstrip("#")] = value.item() if name.endswith("#") else value
    optimiser.load_state_dict({"state": state, "param_groups": groups})


class Interrupts:
    """Notes a signal for the loop to act on between steps; a second one has its usual effect."""

    number = 0  # of the signal that came, 0 if none

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catches signals for the length of a block, where Python lets us: in the main thread."""

        def note(number: int, frame: Any) -> None:
            self.number = number
            signal.signal(number, before[number])

        main = threading.current_thread() is threading.main_thread()
        before = {int(number): signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM) if main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Progress:
    """Where a run is."""

    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # over data: loss, nll, kl; their weight, their number
    seen: list[float] = field(default_factory=lambda: [0.0] * 2)  # sum of −log p, and of data, since the last look
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None  # the row with the lowest validation NLL
    waited: int = 0  # evaluations since
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
    best: dict[str, Tensor] = field(default_factory=dict)  # state of the model at the best evaluation, if it is kept

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns it as named tensors and plain data."""
        states = {"model": self.model.state_dict(), "average": self.average.state, "best": self.best}
        tensors: dict[str, Tensor] = {f"{kind}/{n}": value for kind, s in states.items() for n, value in s.items()}
        for number, optimiser in enumerate(self.optimisers):
            tensors |= pack_optimiser(optimiser, f"optimiser{number}")
        facts = {
            "progress": asdict(self.progress),
            "steering": asdict(self.steering.state) if self.steering is not None else {},
            "averaged": self.average.count,
            "optimisers": [optimiser.state_dict()["param_groups"] for optimiser in self.optimisers],
        }
        return tensors, facts

    def restore(self, saved: sealed.Sealed, engine: Engine) -> None:
        """Takes over a checkpoint."""
        tensors, facts = saved

        def state(kind: str) -> dict[str, Tensor]:
            return {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(f"{kind}/")}

        self.model.load_state_dict(state("model"))
        self.average = Average(engine.to_device(state("average")), facts["averaged"])
        self.best, self.progress = state("best"), Progress(**facts["progress"])
        if self.steering is not None:
            self.steering.state = SteeringState(**facts["steering"])
        for number, (optimiser, groups) in enumerate(zip(self.optimisers, facts["optimisers"], strict=True)):
            unpack_optimiser(optimiser, f"optimiser{number}", tensors, groups)
        if not engine.main:  # the main worker's are the sums over all
            self.progress.sums, self.progress.seen = [0.0] * 5, [0.0] * 2


@dataclass
class Session:
    """Saves a run when that is due, resumes it, and stops it on SIGINT and SIGTERM if it can be resumed."""

    state: State
    engine: Engine
    recipe: Recipe
    folder: Path | None  # the run folder, if there is one
    facts: Mapping[str, Any]  # what besides the recipe makes a run what it is
    length: Length
    interrupts: Interrupts = field(default_factory=Interrupts)
    _since: float = field(default_factory=time.monotonic)

    @contextmanager
    def opened(self, resume: bool) -> Iterator[None]:
        """Restores the newest checkpoint if `resume`. With a run folder, a signal stops the block."""
        with ExitStack() as held:
            if self.folder is not None:
                self._take_up(self.folder, resume, held)
            self._since = time.monotonic()
            yield

    def _take_up(self, folder: Path, resume: bool, held: ExitStack) -> None:
        """Locks the folder and restores its newest checkpoint; a finished run is only read: it may be read-only."""
        place = folder / "checkpoints"
        saved = latest(place) if resume else None
        finished = saved is not None and saved.facts["progress"]["finished"]
        if self.engine.main and not finished:
            held.enter_context(locked(place / ".lock", note=log.warning))
            for path in () if resume else paths(place):
                path.unlink()
        self.engine.accelerator.wait_for_everyone()
        if not finished:
            held.enter_context(self.interrupts.caught())
            saved = latest(place)  # another process may have written it before the lock was free
        if saved is not None:
            mine = tomllib.loads(self.recipe.to_toml()) | dict(self.facts)
            theirs = tomllib.loads(saved.facts["recipe"]) | saved.facts["facts"]
            if changed := [name for name in mine if mine[name] != theirs.get(name)]:
                got = ", ".join("other data" if name == "data" else f"{name} = {theirs.get(name)}" for name in changed)
                remedy = "Use another run_dir, or resume=False to start anew."
                raise ValueError(complaint("run_dir", "a folder of the same run", f"one with {got}", remedy))
            self.state.restore(saved, self.engine)
        if self.engine.main and not self.state.progress.finished:
            write_atomically(folder / "recipe.toml", self.recipe.to_toml().encode())

    def after_step(self, *, at_epoch: bool = False) -> None:
        """Saves a checkpoint where one is due, and exits if a signal came."""
        progress, every = self.state.progress, self.recipe.checkpoint_every
        due = progress.step % every == 0 if every else at_epoch
        stop = self.interrupts.number
        if self.engine.worker.world > 1:  # they must stop at the same step, and rarely ask each other
            asks = self.folder is not None and (at_epoch or progress.step % 10 == 0)
            stop = self.engine.highest(stop) if asks else 0
        now = time.monotonic()
        progress.seconds, self._since = progress.seconds + now - self._since, now
        if self.folder is not None and (due or stop or progress.finished):
            sums = self.engine.total([*progress.sums, *progress.seen], for_main=True)
            progress.sums, progress.seen = sums[:5], sums[5:]
            if self.engine.main:
                tensors, facts = self.state.packed()
                facts |= {"recipe": self.recipe.to_toml(), "facts": dict(self.facts)}
                save(self.folder / "checkpoints", progress.step, tensors, facts)
        if stop and not progress.finished:
            at = f"step {progress.step} of {self.length.total}; saved in {self.folder}"
            print(f"Stopped at {at}: the same call goes on from there.", file=sys.stderr)
            raise SystemExit(128 + stop)
