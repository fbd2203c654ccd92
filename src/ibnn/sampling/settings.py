"""The settings of a sampling run, which steps it has, and which of them it keeps."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ibnn import check
from ibnn.errors import complaint
from ibnn.normal import check_seed

Sampler = Literal["sghmc", "sgld", "cyclical", "hmc"]
SAMPLERS: tuple[str, ...] = get_args(Sampler)
FEWEST = 4  # samples of a chain: two halves, each with a variance
_SYNONYMS = {"langevin": "sgld", "csgmcmc": "cyclical", "csgld": "cyclical", "nuts": "hmc", "mcmc": "hmc"}


@dataclass(frozen=True)
class Settings:
    """The arguments of `ibnn.sample` that decide how chains move, checked, with their defaults filled in.

    >>> Settings(method="hmc").total  # steps, a trajectory each
    400
    """

    method: str = "sghmc"
    samples: int = 100
    warmup: int = None  # type: ignore[assignment]  # the default is the method's
    thin: int = None  # type: ignore[assignment]  # likewise
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
        check.choice("method", self.method, SAMPLERS, _SYNONYMS)
        whole = self.method == "hmc"
        for name, default in (("warmup", 300 if whole else 500), ("thin", 1 if whole else 10)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        least = {"samples": FEWEST, "warmup": 0 if self.step_size else 10, "thin": 1, "batch_size": 2, "cycles": 1}
        for name, lowest in least.items():
            check.integer(name, getattr(self, name), least=lowest)
        check.number("temperature", self.temperature, above=0, remedy="Pass 1.0 for Bayes.")
        for name in ("friction", "trajectory", *(["step_size"] if self.step_size is not None else [])):
            check.number(name, getattr(self, name), above=0, remedy="Leave it out.")
        check.number("explore", self.explore, least=0, below=1, remedy="Pass 0.5.")
        if self.method == "cyclical" and self.samples % self.cycles:
            remedy = f"Pass samples={self.cycles * -(-self.samples // self.cycles)}."
            raise ValueError(complaint("samples", f"a multiple of the {self.cycles} cycles", self.samples, remedy))
        check_seed(self.seed)

    @property
    def total(self) -> int:
        """The number of steps, warm-up included."""
        return self.warmup + (self.cycles * self.cycle if self.method == "cyclical" else self.samples * self.thin)

    @property
    def cycle(self) -> int:
        """The number of steps of a cycle."""
        return math.ceil(self.samples // self.cycles * self.thin / (1 - self.explore))

    def progress(self, step: int) -> float | None:
        """Returns how far a step is in its cycle, in [0, 1); None outside of cycles."""
        inside = self.method == "cyclical" and step >= self.warmup
        return (step - self.warmup) % self.cycle / self.cycle if inside else None

    def noise_begins(self, step: int) -> bool:
        """Returns whether the part of a cycle that injects noise begins with a step."""
        now, before = self.progress(step), self.progress(step - 1)
        return now is not None and now >= self.explore and (before is None or before > now or before < self.explore)

    def index(self, step: int) -> int | None:
        """Returns the number of the sample that a step ends with; None if it is not kept.

        >>> [Settings(samples=4, warmup=10, thin=2).index(step) for step in range(9, 14)]
        [None, None, 0, None, 1]
        """
        before, since = 0, step - self.warmup + 1
        if self.method == "cyclical" and since > 0:
            per_cycle = self.samples // self.cycles
            cycle, place = divmod(step - self.warmup, self.cycle)
            before, since = cycle * per_cycle, place + 1 - (self.cycle - per_cycle * self.thin)
        return before + since // self.thin - 1 if since > 0 and since % self.thin == 0 else None
