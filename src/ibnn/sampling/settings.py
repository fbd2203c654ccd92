"""The settings of a sampling run, which steps it has, and which of them it keeps."""

from dataclasses import dataclass
from typing import Literal, get_args

from ibnn import check

Sampler = Literal["hmc"]
SAMPLERS: tuple[str, ...] = get_args(Sampler)
FEWEST = 4  # samples of a chain: two halves, each with a variance


@dataclass(frozen=True)
class Settings:
    """The arguments of `ibnn.sample` that decide how chains move, checked."""

    method: str = "hmc"
    samples: int = 100
    warmup: int = 300
    thin: int = 1
    temperature: float = 1.0
    step_size: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check.choice("method", self.method, SAMPLERS, {"nuts": "hmc", "mcmc": "hmc", "sghmc": "hmc"})
        if self.step_size is not None:
            check.number("step_size", self.step_size, above=0, remedy="Leave it out.")
        for name, least in {"samples": FEWEST, "warmup": 0 if self.step_size else 10, "thin": 1}.items():
            check.integer(name, getattr(self, name), least=least)
        check.number("temperature", self.temperature, above=0, remedy="Pass 1.0 for Bayes.")
        check.seed(self.seed)

    @property
    def total(self) -> int:
        """The number of trajectories, warm-up included."""
        return self.warmup + self.samples * self.thin

    def index(self, step: int) -> int | None:
        """Returns the number of the sample that a step ends with; None if it is not kept."""
        since = step - self.warmup + 1
        return since // self.thin - 1 if since > 0 and since % self.thin == 0 else None
