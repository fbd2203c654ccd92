"""SETTINGS: every number of a sampling run, checked before anything is touched."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ibnn.errors import complaint, nearest
from ibnn.normal import check_seed

Sampler = Literal["sghmc", "sgld", "cyclical", "hmc"]
SAMPLERS: tuple[str, ...] = get_args(Sampler)
FEWEST = 4  # samples of a chain: two halves, each with a variance
_SYNONYMS = {"langevin": "sgld", "csgmcmc": "cyclical", "csgld": "cyclical", "nuts": "hmc", "mcmc": "hmc"}


@dataclass(frozen=True)
class Settings:
    """How chains move.

    Attributes:
        method: "sghmc", "sgld", "cyclical" (SGHMC whose step sizes fall and rise again) or "hmc" (on all data).
        samples: S, samples kept of each chain.
        warmup: Steps before the first one that may be kept, in which scales and step size adapt; default 500, for
            "hmc" 300.
        thin: Steps from one kept sample to the next; default 10, for "hmc" 1.
        temperature: T; chains sample p(z | data)^(1/T). 1 is Bayes; below 1 the posterior is cold.
        batch_size: Rows of a chain's minibatch, drawn with replacement; all data if they are at most four of them.
            Not of "hmc".
        step_size: Length of a step, in standard deviations of the nodes if they are `preconditioned`; default adapts.
        precondition: Scales each node by its standard deviation, found in the warm-up; False for no scales.
        friction: γ of "sghmc" and "cyclical": velocities are forgotten over a time of 1/γ.
        cycles: Of "cyclical".
        explore: Share of a cycle without injected noise, of which nothing is kept.
        trajectory: Time of a trajectory of "hmc"; each is between half and one and a half times as long.
        seed: Decides starts, minibatches and noise.

    >>> Settings(method="hmc").total  # steps, a trajectory each
    400
    """

    method: str = "sghmc"
    samples: int = 100
    warmup: int = -1
    thin: int = -1
    temperature: float = 1.0
    batch_size: int = 512
    step_size: float | None = None
    precondition: bool = True
    friction: float = 1.0
    cycles: int = 4
    explore: float = 0.5
    trajectory: float = math.pi / 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in SAMPLERS:
            remedy = f"Did you mean {nearest(self.method, SAMPLERS, _SYNONYMS)!r}?"
            raise ValueError(complaint("method", f"one of {', '.join(SAMPLERS)}", repr(self.method), remedy))
        whole = self.method == "hmc"
        for name, default in (("warmup", 300 if whole else 500), ("thin", 1 if whole else 10)):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, default)
        least = {"samples": FEWEST, "warmup": 0 if self.step_size else 10, "thin": 1, "batch_size": 2, "cycles": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                remedy = f"Pass {name}={max(lowest, getattr(type(self), name))}."
                raise ValueError(complaint(name, f"an integer of at least {lowest}", repr(value), remedy))
        for name in ("temperature", "friction", "trajectory", *(["step_size"] if self.step_size is not None else [])):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                remedy = "Pass 1.0 for Bayes." if name == "temperature" else "Leave it out."
                raise ValueError(complaint(name, "positive and finite", repr(value), remedy))
        if not 0 <= self.explore < 1:
            raise ValueError(complaint("explore", "in [0, 1)", repr(self.explore), "Pass 0.5."))
        if self.method == "cyclical" and self.samples % self.cycles:
            remedy = f"Pass samples={self.cycles * -(-self.samples // self.cycles)}."
            raise ValueError(complaint("samples", f"a multiple of the {self.cycles} cycles", self.samples, remedy))
        check_seed(self.seed)

    @property
    def cycle(self) -> int:
        """Steps of a cycle."""
        return math.ceil(self.samples // self.cycles * self.thin / (1 - self.explore))

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.warmup + (self.cycles * self.cycle if self.method == "cyclical" else self.samples * self.thin)

    def place(self, step: int) -> float | None:
        """Returns how far a step is in its cycle, 0 … 1; None outside of cycles."""
        return (
            None if self.method != "cyclical" or step < self.warmup else (step - self.warmup) % self.cycle / self.cycle
        )

    def begins(self, step: int) -> bool:
        """Returns whether the part of a cycle that injects noise begins with a step."""
        now, before = self.place(step), self.place(step - 1)
        return now is not None and now >= self.explore and (before is None or before > now or before < self.explore)

    def keeps(self, step: int) -> bool:
        """Returns whether what a step leads to is a sample."""
        if step < self.warmup:
            return False
        since = step - self.warmup + 1
        if self.method == "cyclical":
            since = since % self.cycle or self.cycle
            since -= self.cycle - self.samples // self.cycles * self.thin
        return since > 0 and since % self.thin == 0


def settings(method: str, options: dict[str, Any]) -> Settings:
    """Returns the settings of a call; raises for an option that does not exist."""
    names = [field.name for field in fields(Settings)][1:]
    for name, value in options.items():
        if name not in names:
            remedy = f"Did you mean {nearest(name, names)!r}?"
            if "weights" in name:
                remedy = "Weights stay as they are: only latents are sampled, thousands in place of millions."
            raise TypeError(complaint(name, f"an option of sample: {', '.join(names)}", repr(value), remedy))
    return Settings(method, **options)
