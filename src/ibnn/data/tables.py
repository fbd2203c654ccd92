"""TABLES: embedded sets of points: rows of numbers, each with a class or a number to predict."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ibnn.data.sets import toy_regression, two_moons


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Inputs (N, D) and targets, classes (N,) or numbers (N, 1); whole batches come from `__getitems__`.

    >>> Points(*two_moons(8, noise=0.1, seed=0)).__getitems__([0, 3])[0].shape
    torch.Size([2, 2])
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch."""
        index = torch.as_tensor(indices)
        return self.x[index], self.y[index]


class Target(NamedTuple):
    """Units of a number to predict: where it lies, how it spreads, and the noise that learning starts from."""

    centre: float
    scale: float
    noise: float


@dataclass(frozen=True)
class Units:
    """What a network of points needs to know of its columns.

    Attributes:
        columns: Names of the inputs, in order.
        centre: Of the inputs, a number for each.
        scale: What they are divided by.
        target: Units of the number to predict; None for classes.
        sha256: Of the file, where the points are from one.
    """

    columns: tuple[str, ...]
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    target: Target | None = None
    sha256: str | None = None

    def to_json(self) -> str:
        """As `from_json` reads it.

        >>> units = Units(("x", "y"), (0.0, 1.0), (1.0, 2.0), Target(3.0, 4.0, 2.0), "ab12")
        >>> Units.from_json(units.to_json()) == units
        True
        """
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Units":
        """Raises ValueError for what `to_json` did not write."""
        try:
            columns, centre, scale, target, sha256 = (json.loads(text)[field.name] for field in fields(cls))
            numbers = torch.tensor([centre, scale, [0.0] * len(columns)], dtype=torch.float64)  # of equal lengths
            target = target and Target(*map(float, target))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not bool(numbers.isfinite().all()) or not bool((numbers[1] > 0).all()):
            raise ValueError("a scale that is not positive and finite")
        return cls(tuple(map(str, columns)), tuple(centre), tuple(scale), target, sha256)

    def made_up(self, rows: int) -> Tensor:
        """Made-up points (rows, D), spread as the training points are."""
        normal = torch.randn(rows, len(self.columns), generator=torch.Generator().manual_seed(0))
        return normal * torch.tensor(self.scale) + torch.tensor(self.centre)


@dataclass(frozen=True, eq=False)
class Table:
    """A set of points, drawn anew from their law as many as are asked for.

    >>> TABLES["toy-regression"].draw().x.shape, TABLES["two-moons"].test.x.shape
    (torch.Size([30, 1]), torch.Size([1000, 2]))

    Attributes:
        name: What jobs know it by.
        make: Inputs and targets, of a number of rows and a seed.
        rows: Training rows unless a job says otherwise.
        centre: Of the inputs, a number for each.
        scale: What they are divided by.
        classes: Names of the classes; none for a number to predict.
        target: Units of the number to predict; None for classes.
    """

    name: str
    make: Callable[[int, int], tuple[Tensor, Tensor]]
    rows: int
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    classes: tuple[str, ...] = ()
    target: Target | None = None

    def draw(self, rows: int | None = None) -> Points:
        """Points to train on, in random order, the same each time."""
        return Points(*self.make(rows or self.rows, 0))

    @property
    def test(self) -> Points:
        """A thousand others."""
        return Points(*self.make(1000, 1000))

    @property
    def units(self) -> Units:
        """Of its inputs and targets."""
        columns = tuple(f"x{number}" for number in range(1, len(self.centre) + 1))
        return Units(columns, self.centre, self.scale, self.target)


def _moons(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    return two_moons(rows, noise=0.2, seed=seed)


TABLES = {
    table.name: table
    for table in (
        Table("toy-regression", toy_regression, 30, (0.0,), (4.0,), target=Target(0.0, 24.0, 3.0)),
        Table("two-moons", _moons, 1000, (0.5, 0.25), (1.0, 0.5), ("upper", "lower")),
    )
}
