"""The settings of a sampling run, which steps it has, and which of them it keeps."""

from dataclasses import dataclass
from typing import Literal, get_args

from ibnn import check

Sampler = Literal["sghmc", "hmc"]
SAMPLERS: tuple[str, ...] = get_args(Sampler)
FEWEST = 4  # samples of a chain: two halves, each with a variance
_SYNONYMS = {"langevin": "sghmc", "sgld": "sghmc", "nuts": "hmc", "mcmc": "hmc"}


@dataclass(frozen=True)
class Settings:
    """The arguments of `ibnn.sample` that decide how chains move, checked, with their defaults filled in."""

    method: str = "sghmc"
    samples: int = 100
    warmup: int = None  # type: ignore[assignment]  # the default is the method's
    thin: int = None  # type: ignore[assignment]  # likewise
    temperature: float = 1.0
    batch_size: int = 512
    step_size: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check.choice("method", self.method, SAMPLERS, _SYNONYMS)
        for name, default in {"warmup": (300, 500), "thin": (1, 10)}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default[self.method == "sghmc"])
        if self.step_size is not None:
            check.number("step_size", self.step_size, above=0, remedy="Leave it out.")
        least = {"samples": FEWEST, "warmup": 0 if self.step_size else 10, "thin": 1, "batch_size": 2}
        for name, lowest in least.items():
            check.integer(name, getattr(self, name), least=lowest)
        check.number("temperature", self.temperature, above=0, remedy="Pass 1.0 for Bayes.")
        check.seed(self.seed)

    @property
    def total(self) -> int:
        """The number of steps, warm-up included; a step of HMC is a trajectory."""
        return self.warmup + self.samples * self.thin

    def index(self, step: int) -> int | None:
        """Returns the number of the sample that a step ends with; None if it is not kept."""
        since = step - self.warmup + 1
        return since // self.thin - 1 if since > 0 and since % self.thin == 0 else None
