"""Holds points, rows of numbers with a class or a number to predict, and the sets of them that need no file."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ibnn import check


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Inputs (N, D) and targets, classes (N,) or numbers (N, 1); whole batches come from `__getitems__`."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int | slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self[torch.as_tensor(indices)]


class Target(NamedTuple):
    """Location and scale of a number to predict, and the noise at which training starts."""

    centre: float
    scale: float
    noise: float


@dataclass(frozen=True)
class Standardisation:
    """Columns of a table and how they are standardised."""

    columns: tuple[str, ...]  # names of the inputs, in order
    centre: tuple[float, ...]  # what is subtracted from each input
    scale: tuple[float, ...]  # what each input is then divided by
    target: Target | None = None  # units of the number to predict; None for classes
    sha256: str | None = None  # checksum of the file, if the points are from one

    def to_json(self) -> str:
        """Writes what `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Standardisation":
        """Reads what `to_json` wrote; raises ValueError for anything else."""
        try:
            columns, centre, scale, target, sha256 = (json.loads(text)[field.name] for field in fields(cls))
            return cls(tuple(columns), tuple(centre), tuple(scale), target and Target(*target), sha256)
        except (TypeError, KeyError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def made_up(self, rows: int) -> Tensor:
        """Returns random points (rows, D) with the location and scale of the training points."""
        normal = torch.randn(rows, len(self.columns), generator=torch.Generator().manual_seed(0))
        return normal * torch.tensor(self.scale) + torch.tensor(self.centre)


@dataclass(frozen=True, eq=False)
class Table:
    """A synthetic set: as many points as asked for, drawn from their distribution."""

    name: str
    make: Callable[[int, int], tuple[Tensor, Tensor]]  # returns inputs and targets for a number of rows and a seed
    rows: int  # default number of training rows
    units: Standardisation
    classes: tuple[str, ...] = ()  # their names; none for a number to predict

    def split(self, examples: int | None, valid: int) -> tuple[Points, Points | None]:
        """Returns points to train on and `valid` held-out ones, the last; together `examples`, in random order."""
        drawn = Points(*self.make(examples or self.rows, 0))
        check.integer("valid", valid, least=0, most=len(drawn) - 1, remedy="Pass a larger examples.")
        cut = len(drawn) - valid
        return Points(*drawn[slice(cut)]), Points(*drawn[slice(cut, None)]) if valid else None

    @property
    def test(self) -> Points:
        """A thousand test points."""
        return Points(*self.make(1000, 1000))


def two_moons(n: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draws two interleaved half circles: points (n, 2) and classes (n,), in random order.

    >>> x, y = two_moons(101, noise=0.1, seed=0)
    >>> x.shape, y.bincount().tolist()
    (torch.Size([101, 2]), [50, 51])
    """
    upper, lower = (torch.linspace(0, math.pi, count) for count in (n // 2, n - n // 2))
    x = torch.cat([torch.stack([upper.cos(), upper.sin()], 1), torch.stack([1 - lower.cos(), 0.5 - lower.sin()], 1)])
    y = torch.cat([torch.zeros(len(upper)), torch.ones(len(lower))]).long()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    return x[order] + noise * torch.randn(n, 2, generator=generator), y[order]


def toy_regression(n: int = 30, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draws the paper's curve: x ~ U(−4, 4), y = x³ + 3ε with ε ~ N(0, 1); both (n, 1).

    >>> x, y = toy_regression()
    >>> x.shape, bool((y - x**3).std() < 6)
    (torch.Size([30, 1]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(n, 1, generator=generator) - 4
    return x, x**3 + 3 * torch.randn(n, 1, generator=generator)


_CURVE = Standardisation(("x1",), (0.0,), (4.0,), Target(0.0, 24.0, 3.0))
_MOONS = Standardisation(("x1", "x2"), (0.5, 0.25), (1.0, 0.5))
TABLES = {
    "toy-regression": Table("toy-regression", toy_regression, 30, _CURVE),
    "two-moons": Table("two-moons", lambda n, seed: two_moons(n, 0.2, seed), 1000, _MOONS, ("upper", "lower")),
}
