"""SESSION: what training changes, which weights remain, and how a run is saved, resumed, and stopped by a signal.

A checkpoint is tensors and plain data in one safetensors file, atomic, checked, the last few kept. Its name carries the
first half of its SHA-256, so that a file that is damaged, or was never finished, is known by its name alone. Nothing is
unpickled.
"""

import hashlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import update_bn

from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.inputs import call_arguments
from ibnn.training import sharding
from ibnn.training.engine import Engine
from ibnn.training.recipe import Recipe
from ibnn.training.steering import Found, Steering
from ibnn.training.trainable import Trainable


class Average:
    """An average of a model's floating-point parameters and buffers, by name; empty until the first update."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.count = 0  # updates so far

    def update(self, model: Trainable, decay: float | None = None) -> None:
        """Moves the average towards the model: by 1 − decay (EMA), or so that it is the mean of all so far (SWA).

        The decay of an EMA starts small, so that short runs are not averages of their start. Numbers of the state that
        are neither parameters nor buffers (an IBNN's `prior_std`) are not averaged.
        """
        self.count += 1
        share = 1 / self.count if decay is None else 1 - min(decay, self.count / (9 + self.count))
        kinds = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        tensors = {name for named in kinds for name, _ in named}
        for name, value in model.state_dict().items():
            if name in tensors and value.is_floating_point():
                self.state.setdefault(name, value.clone()).lerp_(value, share)

    def end_epoch(self, model: Trainable, *, collect: bool, last: bool) -> bool:
        """Collects the weights into an SWA, or has the method do it (see `Trainable.end_epoch`).

        Returns whether an average took the weights' place.
        """
        own = model.end_epoch(collect=collect, last=last)
        if collect and not own:
            self.update(model)
        if last and not own and self.state:
            model.load_state_dict(self.state, strict=False)
        return last and (own or bool(self.state))


@dataclass
class Best:
    """The evaluation with the lowest validation NLL so far."""

    best: dict[str, Any] | None = None  # its row of the history
    waited: int = 0  # evaluations since
    state: dict[str, Tensor] = field(default_factory=dict)  # the model's then, by name, if it was kept

    def update(self, row: dict[str, Any], model: Trainable, *, keep: bool) -> None:
        """Compares an evaluation with the best; `keep` copies the model's state if it is better."""
        self.waited += 1
        if self.best is None or row["valid_nll"] < self.best["valid_nll"]:
            self.best, self.waited = row, 0
            if keep:
                self.state = {name: value.clone() for name, value in model.state_dict().items()}


class _Call(nn.Module):
    """A model that takes all its inputs as one argument, as torch's `update_bn` passes them."""

    def __init__(self, model: Trainable) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        args, kwargs = call_arguments(inputs)
        return self.model(*args, **kwargs)


def estimate_statistics(model: Trainable, inputs: Iterable[Any]) -> None:
    """Estimates BatchNorm's running statistics anew, as plain means over batches; an average of weights needs it."""
    examples = model.examples.clone()
    update_bn(([x] for x in inputs), _Call(model))
    model.examples.copy_(examples)


log = logging.getLogger("ibnn")


class Checkpoint(NamedTuple):
    """What was saved at a step."""

    tensors: dict[str, Tensor]
    data: dict[str, Any]

    def state(self, kind: str, names: Container[str] = ()) -> dict[str, Tensor]:
        """Returns the tensors of a kind ("model", "average", "best") by their own names.

        Runs from before `prior_std` was part of a model's state saved it beside: it is added if it is one of `names`.
        """
        found = {name.partition("/")[2]: v for name, v in self.tensors.items() if name.startswith(f"{kind}/")}
        progress = self.data["progress"]
        beside = (progress if kind == "model" else progress.get("best") or {}).get("prior_std")
        if found and beside and "prior_std" in names:
            found.setdefault("prior_std", torch.tensor(beside, dtype=torch.float64))
        return found


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], data: Mapping[str, Any], *, keep: int
) -> Path:
    """Saves a checkpoint and removes all but the last `keep`."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = safetensors.torch.save(whole, metadata={"data": json.dumps(data)})
    path = folder / f"step-{step:09d}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors"
    write_atomically(path, content)
    for old in _paths(folder)[:-keep]:
        old.unlink()
    return path


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint of a folder; damaged ones are named in the log."""
    for path in reversed(_paths(folder)):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest()[:32] != path.stem.rpartition("-")[2]:
            log.warning("%s is damaged or truncated; using the one before it.", path)
            continue
        with safetensors.safe_open(path, "pt") as file:
            data = json.loads(file.metadata()["data"])
        return Checkpoint(safetensors.torch.load(content), data)
    return None


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*-*.safetensors"))


def pack_optimiser(optimiser: Optimizer, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns an optimiser's state as named tensors and plain data."""
    state = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}/{number}/{name}"] = value
            else:
                scalars.setdefault(str(number), {})[name] = value
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def unpack_optimiser(optimiser: Optimizer, prefix: str, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Restores what `pack_optimiser` took."""
    state: dict[int, dict[str, Any]] = {int(number): dict(entries) for number, entries in data["scalars"].items()}
    for key, value in tensors.items():
        if key.startswith(prefix + "/"):
            _, number, name = key.split("/", 2)
            state.setdefault(int(number), {})[name] = value
    optimiser.load_state_dict({"state": state, "param_groups": data["groups"]})


class Interrupts:
    """Notes a signal for the loop to act on between steps; a second one has its usual effect."""

    number = 0  # of the signal that came, 0 if none

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


@dataclass
class Progress:
    """Where a run is."""

    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # over data: loss, nll, kl; their weight, their number
    seen: list[float] = field(default_factory=lambda: [0.0] * 2)  # sum of −log p, and of data, since the last look
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

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns it as named tensors and plain data."""
        states = {"model": self.model.state_dict(), "average": self.average.state, "best": self.best.state}
        tensors: dict[str, Tensor] = {f"{kind}/{n}": value for kind, s in states.items() for n, value in s.items()}
        optimisers = []
        for number, optimiser in enumerate(self.optimisers):
            packed, data = pack_optimiser(optimiser, f"optimiser{number}")
            tensors |= packed
            optimisers.append(data)
        found = asdict(self.steering.found) if self.steering is not None else {}
        progress = asdict(self.progress) | found | {"best": self.best.best, "waited": self.best.waited}
        return tensors, {"progress": progress, "optimisers": optimisers, "averaged": self.average.count}

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
            self.progress.sums, self.progress.seen = [0.0] * 5, [0.0] * 2


def _fields(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a checkpoint that are fields of a dataclass."""
    return {field.name: data[field.name] for field in fields(cls) if field.name in data}


class Stopped(SystemExit):
    """A signal ended a run that is saved."""


@dataclass
class Session:
    """Saves a run when that is due, resumes it, and stops it on SIGINT and SIGTERM if it can be resumed."""

    state: State
    engine: Engine
    recipe: Recipe
    folder: Path | None  # the run folder, if there is one
    facts: Mapping[str, Any]  # what besides the recipe makes a run what it is
    total: int  # steps
    interrupts: Interrupts = field(default_factory=Interrupts)
    _since: float = field(default_factory=time.monotonic)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """With a run folder, a signal lets the current step of a block finish; then it says how to go on, and exits."""
        with self.interrupts.caught() if self.folder else nullcontext():
            try:
                yield
            except Stopped:
                at = f"step {self.state.progress.step} of {self.total}; saved in {self.folder}"
                print(f"Stopped at {at}: the same call goes on from there.", file=sys.stderr)
                raise

    def resume(self, how: str) -> None:
        """Restores the newest checkpoint, if there is one and it is wanted; writes recipe.toml."""
        saved = None
        if self.folder is not None:
            places = [self.folder / "checkpoints", self.folder / "refit" / "checkpoints"]
            if how == "never" and self.engine.main:
                for place in places:
                    sharding.remove(place)
                    for old in _paths(place):
                        old.unlink()
            self.engine.accelerator.wait_for_everyone()
            saved = self._latest(places[0])
        if saved is None and how == "must":
            remedy = 'Pass resume="auto".'
            raise ValueError(complaint("run_dir", "a folder with a whole checkpoint", self.folder, remedy))
        if saved is not None:
            self._check_same_run(saved)
            self.state.restore(saved, self.engine)
        if self.folder is not None and self.engine.main:
            write_atomically(self.folder / "recipe.toml", self.recipe.to_toml().encode())
        self._since = time.monotonic()

    def _latest(self, folder: Path) -> Checkpoint | None:
        """Returns the newest checkpoint; raises if those that are there are of the other kind."""
        whole, parts, sharded = _paths(folder), sharding.checkpoints(folder), self.engine.sharded
        if (whole and sharded) or (parts and not sharded):
            got = "of a sharded model" if parts else "of a model that is not sharded"
            remedy = "Call ibnn.training.shard(model) first." if parts else "Leave ibnn.training.shard out."
            raise ValueError(complaint("run_dir", "a folder of checkpoints like the model", f"one {got}", remedy))
        if not sharded:
            return latest_checkpoint(folder)
        state = self.state.model.state_dict()
        return Checkpoint(*sharding.load(parts[-1], state, self.state.optimisers)) if parts else None

    def _check_same_run(self, saved: Checkpoint) -> None:
        mine = self.recipe.model_dump() | dict(self.facts)
        theirs = Recipe.from_toml(saved.data["recipe"]).model_dump() | saved.data["facts"]
        changed = [name for name in mine if name in theirs and mine[name] != theirs[name]]
        if changed:
            names = ", ".join(f"{name} = {theirs[name]}" for name in changed)
            remedy = 'Use another run_dir, or resume="never" to start anew.'
            raise ValueError(complaint("run_dir", "a folder of the same run", f"one with {names}", remedy))

    def after_step(self, *, at_epoch: bool = False) -> None:
        """Saves a checkpoint where one is due, and exits if a signal came."""
        progress, every = self.state.progress, self.recipe.checkpoint_every
        due = progress.step % every == 0 if every else at_epoch
        # Several workers must stop at the same step, and rarely ask each other.
        asks = self.folder is not None and (at_epoch or progress.step % 10 == 0)
        stop = self.engine.highest(self.interrupts.number) if asks or self.engine.worker.world == 1 else 0
        now = time.monotonic()
        progress.seconds, self._since = progress.seconds + now - self._since, now
        if self.folder is not None and (due or stop or progress.finished):
            progress.sums, progress.seen = map(self.engine.moved_to_main, (progress.sums, progress.seen))
            if self.engine.main or self.engine.sharded:
                tensors, data = self.state.packed()
                data |= {"recipe": self.recipe.to_toml(), "facts": self.facts}
                save = sharding.save if self.engine.sharded else save_checkpoint
                save(self.folder / "checkpoints", progress.step, tensors, data, keep=self.recipe.keep)
        if stop and not progress.finished:
            raise Stopped(128 + stop)
