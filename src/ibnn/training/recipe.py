"""Every number of a training run, as frozen, validated data that reads and writes TOML."""

import inspect
import math
import tomllib
from importlib import import_module, resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import tomli_w
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch.optim import Optimizer

from ibnn import check
from ibnn.errors import complaint, did_you_mean
from ibnn.files.atomic import read_toml
from ibnn.mixture import KLKind

_RECIPES = resources.files("ibnn.training") / "recipes"
NOISE_LR = 0.02  # least rate of log σ of learnt noise, chosen on held-out rows of four tables
EPOCHS, LEAST, MOST = 30, 2000, 3000  # default length: so many epochs; on few data, from LEAST to MOST steps
EVALUATIONS, WAIT = 60, 12  # on few data: most evaluations, and how many of them without progress end training


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Schedule(_Frozen):
    """A factor on a learning rate over training; t, 0 … 1, is the share of training done.

    After a linear warm-up the factor is 1 until `start`, falls to `final` at `end` (on a line or half a cosine), and
    stays there. "constant" never falls.

    >>> [round(Schedule(kind="linear").factor(t), 3) for t in (0.0, 0.5, 0.7, 0.9, 1.0)]
    [1.0, 1.0, 0.505, 0.01, 0.01]
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    start: float = Field(0.5, ge=0, le=1)
    end: float = Field(0.9, ge=0, le=1)
    final: float = Field(0.01, ge=0)
    warmup: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.kind != "constant" and not self.start < self.end:
            raise ValueError(f"start ({self.start}) must come before end ({self.end})")
        return self

    def factor(self, t: float) -> float:
        """Returns the factor at t."""
        warm = min(1.0, t / self.warmup) if self.warmup else 1.0
        if self.kind == "constant":
            return warm
        done = min(max((t - self.start) / (self.end - self.start), 0.0), 1.0)
        fallen = done if self.kind == "linear" else (1 - math.cos(math.pi * done)) / 2
        return warm * (1 - (1 - self.final) * fallen)


def optimiser_class(name: str) -> type[Optimizer]:
    """Returns the class of an optimiser: "adam" (AdamW), "sgd", a name in torch.optim, or "package.module:Class"."""
    module, _, inner = name.rpartition(":")
    name = {"adam": "AdamW", "sgd": "SGD"}.get(name, inner)
    found = getattr(import_module(module or "torch.optim"), name, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        known = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
        hint = did_you_mean(name, known, otherwise='a class elsewhere is "package.module:Class"')
        raise ValueError(f"'adam', 'sgd' or a class of torch.optim ({hint})")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError("one that steps without a closure")
    return found


def _optimiser_name(value: Any) -> Any:
    if isinstance(value, type):
        known = getattr(torch.optim, value.__name__, None) is value
        value = value.__name__ if known else f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, str):
        optimiser_class(value)
    return value


OptimiserName = Annotated[str, BeforeValidator(_optimiser_name)]
ScheduleOrKind = Annotated[
    Schedule, BeforeValidator(lambda v: {"kind": v, "start": 0.0, "end": 1.0} if isinstance(v, str) else v)
]


class Length(NamedTuple):
    """How long a run trains."""

    total: int  # steps at most; schedules are shares of them
    least: int  # steps before which it does not stop early
    patience: int  # evaluations without a lower held-out NLL after which it stops; 0: it never does
    every: int = 1  # epochs between evaluations, and between checkpoints, unless the recipe says otherwise

    def __str__(self) -> str:
        if not self.least:
            return f"{self.total:,} steps"
        return f"at least {self.least:,} and at most {self.total:,} steps, until the held-out NLL stops falling"


class Recipe(_Frozen):
    """How `fit` trains. The defaults train without diverging on every kind of network the tests sweep over."""

    #: Passes over the training set; give this or `steps`. Default 30; on few data 2,000 to 3,000 steps, until the
    #: held-out NLL stops falling, with the best weights.
    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)  #: Optimiser steps instead of epochs.
    batch_size: int = Field(128, ge=1)  #: B, examples per step over all workers together.
    samples: int = Field(1, ge=1)  #: S, copies of every example, each with its own draw.

    #: Optimiser of the weights: "adam" (AdamW), "sgd" (Nesterov), a class of torch.optim, or "package.module:Class".
    optimiser: OptimiserName = "adam"
    lr: float = Field(1e-3, gt=0)  #: Learning rate of the weights, λ0.
    latent_optimiser: OptimiserName = "adam"  #: Optimiser of the latents, likewise.
    latent_lr: float = Field(1e-2, ge=0)  #: Learning rate of the latents, λ1.
    #: Multiplies the latents' gradient by K, by which the mean over the batch divides it; the paper does not.
    undo_k: bool = True
    momentum: float = Field(0.9, ge=0, lt=1)  #: Momentum of "sgd".
    weight_decay: float = Field(0.0, ge=0)  #: Weight decay of the weights alone.
    #: Schedule of `lr`. "cosine" and "linear" fall from the first step to the last; "constant" does not.
    schedule: ScheduleOrKind = Schedule(kind="linear", warmup=0.02)
    latent_schedule: ScheduleOrKind = Schedule()  #: Schedule of `latent_lr`, likewise.
    clip: float = Field(1.0, ge=0)  #: Largest gradient norm of the weights, and of the latents; 0 for no limit.

    #: Weight of the KL at the end of its warm-up. With "auto" held-out labels steer the noise: those of the validation
    #: data or of a tenth of the training data. It stands for 1 with fewer than 500 examples, or a sampler of your own.
    beta: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    beta_warmup: float = Field(2 / 3, ge=0, le=1)  #: Share of training over which a fixed β rises linearly from 0.
    #: Starts untrained latents from what `ibnn.calibrate` finds on the held-out data; for trained weights.
    calibrate: bool = False
    freeze_batchnorm: bool = False  #: Keeps BatchNorm's running statistics, and normalises by them in training too.
    gamma: float = Field(0.0, ge=0)  #: Weight of the posterior's entropy.
    kl: KLKind | None = None  #: Which KL; default the one that the model was converted with.
    spread: bool = False  #: Sends the copies of an example to different components.

    precision: Literal["no", "bf16", "fp16"] = "no"  #: "no", "bf16" or "fp16" (mixed precision).
    #: Pieces in which a worker computes its share of a batch, to save memory; the result is the same.
    accumulate: int = Field(1, ge=1)
    seed: int = Field(0, ge=0)  #: Decides order, dropout and draws. The latents' start was decided by `convert`.
    workers: int = Field(0, ge=0)  #: Number of processes that load a Dataset.

    #: Epochs between evaluations on the validation data. Default 1; on few data so that there are at most 60.
    evaluate_every: int | None = Field(None, ge=1)
    eval_samples: int = Field(1, ge=1)  #: Draws per component in evaluations.
    #: Evaluations without a lower validation NLL after which training stops and goes back to the best; 0 for never.
    patience: int = Field(0, ge=0)
    ema: float = Field(0.0, ge=0, lt=1)  #: Decay of a moving average that replaces all parameters at the end; 0: none.
    #: Share of training after which parameters are averaged once an epoch to replace them at the end; 1 for none.
    swa: float = Field(1.0, ge=0, le=1)
    checkpoint_every: int = Field(0, ge=0)  #: Steps between checkpoints in the run folder; 0 for one per epoch.
    trackers: tuple[str, ...] = ()  #: Names of accelerate trackers ("tensorboard", …), written to the run folder.

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(explain(error, type(self))) from None

    @model_validator(mode="after")
    def _length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if (self.ema > 0) + (self.swa < 1) + (self.patience > 0) > 1:
            raise ValueError("give one of ema, swa and patience: each decides which weights remain")
        return self

    def length(self, per_epoch: int, *, held_out: bool) -> Length:
        """Returns how long to train where an epoch has so many steps."""
        if self.steps or self.epochs or EPOCHS * per_epoch >= MOST:
            return Length(self.steps or (self.epochs or EPOCHS) * per_epoch, 0, self.patience)
        epochs = -(-(MOST if held_out else max(LEAST, EPOCHS * per_epoch)) // per_epoch)
        every = -(-epochs // EVALUATIONS)
        if self.ema or self.swa < 1 or self.patience or not held_out:
            return Length(epochs * per_epoch, 0, self.patience, every)
        return Length(epochs * per_epoch, LEAST, WAIT, self.evaluate_every or every)

    def beta_at(self, t: float) -> float:
        """Returns a fixed β when the share t of training is done."""
        assert not isinstance(self.beta, str), "the noise is steered"
        return self.beta * (min(1.0, t / self.beta_warmup) if self.beta_warmup else 1.0)

    def but(self, **changes: Any) -> "Recipe":
        """Returns a copy with some fields changed, validated anew.

        >>> Recipe(epochs=3).but(lr=0.1).lr
        0.1
        """
        excluded = {"epochs": "steps", "steps": "epochs"}
        gone = {other for name, other in excluded.items() if name in changes and changes.get(other) is None}
        return Recipe(**{name: getattr(self, name) for name in self.model_fields_set - gone} | changes)

    @classmethod
    def from_toml(cls, source: str | Path) -> "Recipe":
        """Reads a TOML file (a Path, or a string that ends in .toml) or text."""
        a_file = isinstance(source, Path) or source.endswith(".toml")
        fields = read_toml(Path(source)) if a_file else tomllib.loads(str(source))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def to_toml(self) -> str:
        """Returns all fields as TOML; `from_toml` gives back an equal recipe."""
        return to_toml(self.model_dump())

    @classmethod
    def named(cls, name: str) -> "Recipe":
        """Returns a recipe that comes with the library; `Recipe.names()` lists them."""
        check.choice("recipe", name, cls.names())
        return cls.from_toml((_RECIPES / f"{name}.toml").read_text(encoding="utf-8"))

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of the recipes that come with the library."""
        return sorted(entry.name.removesuffix(".toml") for entry in _RECIPES.iterdir() if entry.name.endswith(".toml"))


def to_toml(fields: dict[str, Any]) -> str:
    """Returns nested fields as TOML, without those that are None."""

    def given(tree: Any) -> Any:
        return {n: given(value) for n, value in tree.items() if value is not None} if isinstance(tree, dict) else tree

    return tomli_w.dumps(given(fields))


# What others call some fields, where spelling alone does not lead to them.
_SYNONYMS = {"bs": "batch_size", "kl_weight": "beta", "kl_annealing": "beta_warmup", "save_steps": "checkpoint_every"}
_SYNONYMS |= {"ema_decay": "ema", "check_val_every_n_epoch": "evaluate_every", "gradient_clip_val": "clip"}
_SYNONYMS |= {"learning_rate": "lr", "rate": "lr", "max_norm": "clip"}
_SYNONYMS |= {"early_stopping": "patience", "random_state": "seed", "iterations": "steps", "max_steps": "steps"}
_SYNONYMS |= {"latent_learning_rate": "latent_lr", "minibatch": "batch_size", "wd": "weight_decay"}
_SYNONYMS |= {"gradient_accumulation_steps": "accumulate", "amp": "precision", "logger": "trackers"}
_SYNONYMS |= {"report_to": "trackers", "log_with": "trackers", "decay": "weight_decay"}


def explain(error: ValidationError, model: type[BaseModel], table: str = "") -> str:
    """Words an error of pydantic in our four parts; `table` is the TOML table it is about."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    for depth, part in enumerate(place[:-1], 1):
        nested = model.model_fields[part].annotation
        if not (isinstance(nested, type) and issubclass(nested, BaseModel)):  # one of several types
            place = place[:depth]
            break
        model = nested
    name = ".".join(filter(None, (table, *place))) or "recipe"
    if first["type"] == "extra_forbidden":
        remedy = did_you_mean(place[-1], model.model_fields, _SYNONYMS, otherwise="Leave it out.")
        return complaint(name, "a key of the recipe", repr(first["input"]), remedy)
    if first["type"] == "missing":
        return complaint(name, "given", "none", f"Add {name} = …")
    messages = (e["msg"].removeprefix("Value error, ").removeprefix("Input should be ") for e in error.errors())
    expected = " or ".join(messages) if len(place) < len(first["loc"]) else next(messages)  # one of several types
    if not place:
        return complaint(name, "consistent", "fields that exclude each other", f"{expected[0].upper()}{expected[1:]}.")
    return complaint(name, expected, f"{first['input']!r} ({type(first['input']).__name__})", f"Change {name}.")
