"""Reads a table from a .csv file: a header, one example per row, and one column that is the target.

Cells that cannot be used as they are, are refused with their row and column. Nothing is imputed, dropped or encoded.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ibnn import check
from ibnn.data.sets import stratified
from ibnn.data.tables import Points, Standardisation, Target
from ibnn.errors import complaint, did_you_mean, nearest

Task = Literal["classes", "numbers"]
MOST_CLASSES = 20  # distinct whole numbers that are still taken for classes
MISSING = frozenset({"", "na", "n/a", "nan", "null"})
NOISE = 0.5  # initial noise of the target, as a share of its standard deviation
_LARGEST, _FINEST = 1e30, 1e-3  # limits of single precision: magnitude, and rounding as a share of the spread


class Sheet(NamedTuple):
    """The cells of a .csv file, as text."""

    path: Path
    names: tuple[str, ...]
    cells: Any  # an array (rows, columns) of str

    def column(self, name: str) -> list[str]:
        """Returns the cells below a name, stripped; raises unless there is one such column."""
        return [cell.strip() for cell in self.cells[:, self._places([name])[0]]]

    def numbers(self, names: Sequence[str], remedy: str) -> Tensor:
        """Returns columns as finite numbers, (rows, columns) float64; the error names the first cell that is none."""
        import numpy as np

        cells = self.cells[:, self._places(names)]
        try:
            values = torch.from_numpy(cells.astype(np.float64))
        except ValueError:
            values = torch.tensor([[float(cell) if _is_number(cell) else torch.nan for cell in row] for row in cells])
        if wrong := (~values.isfinite()).nonzero().tolist():
            row, column = wrong[0]
            got = self.cell(row, names[column])
            raise self.error("a table with a finite number in every cell that is used", got, remedy)
        return values

    def _places(self, names: Sequence[str]) -> list[int]:
        counts, places = Counter(self.names), {name: place for place, name in enumerate(self.names)}
        for name in names:
            if not counts[name]:
                near, shown = nearest(name, self.names), ", ".join(self.names[:12])
                remedy = f"Is it called {near!r} there?" if near else f"It has {shown}."
                raise self.error(f"a table with a column {name!r}", "none", remedy)
            if counts[name] > 1:
                expected, remedy = "a table whose columns have different names", "Rename or remove all but one."
                raise self.error(expected, f"{counts[name]} called {name!r}", remedy)
        return [places[name] for name in names]

    def cell(self, row: int, name: str) -> str:
        """Describes a cell by its content and place; rows count from 1, below the header."""
        content = self.cells[row, self.names.index(name)].strip()
        return f"{repr(content[:40]) if content else 'nothing'} in row {row + 1}, column {name!r}"

    def error(self, expected: str, got: str, remedy: str) -> ValueError:
        """Returns an error about the file."""
        return ValueError(complaint(str(self.path), expected, got, remedy))


def read_sheet(path: Path, content: bytes | None = None, *, named: bool = True) -> Sheet:
    """Reads a .csv file, or its content; without `named`, columns are called "1", "2", … and need no header."""
    import pandas as pd

    sheet, text = Sheet(path, (), None), path.read_bytes() if content is None else content
    how: Any = {"header": None, "dtype": object, "na_filter": False, "encoding": "utf-8-sig"}
    try:
        cells = pd.read_csv(io.BytesIO(text), encoding_errors="strict" if named else "replace", **how).to_numpy()
    except UnicodeDecodeError as error:
        raise sheet.error("text in UTF-8", str(error), "Save it as CSV UTF-8.") from None
    except pd.errors.EmptyDataError:
        raise sheet.error("a table with a header", "an empty file", "Check the file.") from None
    except pd.errors.ParserError as error:
        got = str(error).replace("Error tokenizing data. C error: ", "").strip()
        raise sheet.error(
            "a CSV file with as many cells in every line", f"one with an error: {got}", "Mend it."
        ) from None
    names = tuple(name.strip() for name in cells[0])
    cells = cells[1:] if named or not all(map(_is_number, names)) else cells
    if not len(cells):
        raise sheet.error("a header and rows", "no row below the header", "Check the file.")
    if not named:
        cells = cells[:, (cells != "").any(0)]  # the header may be longer
        names = tuple(str(number) for number in range(1, cells.shape[1] + 1))
    return Sheet(path, names, cells)


@dataclass(frozen=True, eq=False)
class FileTable:
    """A table read from a file."""

    name: str
    columns: tuple[str, ...]  # names of the inputs
    classes: tuple[str, ...]  # their names; none for a number to predict
    train: Points  # rows for training, from which some may be held out
    test: Points  # the other rows, the same for all seeds
    sha256: str  # checksum of the file

    def split(self, examples: int | None, valid: int) -> tuple[Points, Points | None]:
        """Returns rows to train on and `valid` held-out ones, together `examples` of `train`; each time the same."""
        most = len(self.train)
        used = most if examples is None else examples
        remedy = f"{self.name} has {most + len(self.test)} rows, of which {len(self.test)} are for testing."
        check.integer("examples", used, most=most, remedy=remedy)
        check.integer("valid", valid, least=0, most=used - 1, remedy="Pass fewer, or a smaller test_share.")
        points = self.train if examples is None else _divided(self.train, examples)[0]
        held_out, train = _divided(points, valid) if valid else (None, points)
        for number, name in enumerate(self.classes):
            if not bool((train.y == number).any()):
                expected = f"a target whose classes all have rows to train on, of which there are {len(train)}"
                remedy = "Add rows, or leave that class out."
                raise ValueError(complaint("target", expected, f"none of {name!r}", remedy))
        return train, held_out

    def units(self, train: Points) -> Standardisation:
        """Returns mean and standard deviation of the training rows; 1 for a column that does not vary."""
        centre, scale = _moments(train.x.double())
        (middle, *_), (spread, *_) = _moments(train.y.view(len(train), -1).double())
        target = None if self.classes else Target(middle, spread, NOISE * spread)
        return Standardisation(self.columns, tuple(centre), tuple(scale), target, self.sha256)


def read_table(
    path: Path,
    target: str,
    *,
    name: str | None = None,
    task: Task | None = None,
    ignore: Sequence[str] = (),
    test_share: float = 0.2,
    sha256: str | None = None,
) -> FileTable:
    """Reads a table and sets its test rows apart.

    Without `task`, words in the target are classes, and so are whole numbers if at most 20 are distinct; other numbers
    are predicted as numbers. Words among numbers are refused.

    Args:
        path: The file.
        target: Name of the column to predict.
        name: What to call the table; default the path.
        task: "classes" or "numbers", whatever the target looks like.
        ignore: Names of columns that are neither inputs nor target.
        test_share: Share of the rows that are for testing, the same in each class.
        sha256: Checksum that the file must have.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, digest):
        expected = f"the table that the run was trained on (sha256 {str(sha256)[:12]}…)"
        remedy = "Bring the old file back, or train anew."
        raise ValueError(complaint("data", expected, f"{path}, which has changed ({digest[:12]}…)", remedy))
    sheet = read_sheet(path, content)
    columns = _columns(sheet, target, ignore)
    remedy = "Fill the cell or leave the row out; a column of words, encode as numbers or name under ignore."
    x = _representable(sheet, columns, sheet.numbers(columns, remedy))
    y, classes = _targets(sheet, target, task)
    rows = len(x)
    test = max(1, round(test_share * rows))
    if test >= rows:
        remedy = "Add rows." if rows < 5 else "Pass a smaller test_share."
        raise sheet.error(f"more than {test} rows, which are for testing", f"{rows}", remedy)
    tested, trained = _divided(Points(x.float(), y), test)
    return FileTable(name or str(path), columns, classes, trained, tested, digest)


def _columns(sheet: Sheet, target: str, ignore: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the inputs; raises if there is no header, or names are missing or unknown."""
    names, left_out = sheet.names, {target, *ignore}
    if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
        remedy = "Save it with commas between the cells."
        raise sheet.error("separated by commas", f"a first line {names[0][:60]!r}", remedy)
    if target not in names and all(map(_is_number, names)):
        got = f"numbers in its first line: {', '.join(names[:4])}"
        raise sheet.error("a table with the names of its columns in the first line", got, "Add them.")
    for argument, name in (("target", target), *(("ignore", name) for name in ignore)):
        if name not in names:
            shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
            remedy = did_you_mean(name, names, otherwise="Pass one of these.")
            raise ValueError(complaint(argument, f"a column of {sheet.path}: {shown}", repr(name), remedy))
    if target in ignore:
        raise ValueError(complaint("ignore", "columns other than the target", repr(target), "Leave it out."))
    columns = tuple(name for name in names if name not in left_out)
    if "" in (target, *columns):
        remedy = "Name it, or save the table without its index (pandas: index=False)."
        raise sheet.error("a table whose columns all have names", "one without", remedy)
    if not columns:
        remedy = "Add the columns to predict it from."
        raise sheet.error("a table with inputs beside the target", f"{target!r} alone", remedy)
    return columns


def _targets(sheet: Sheet, name: str, task: Task | None) -> tuple[Tensor, tuple[str, ...]]:
    """Returns class indices (N,) and the names of the classes, or numbers (N, 1) and no names."""
    cells = sheet.column(name)
    for row, cell in enumerate(cells):
        if cell.lower() in MISSING:
            raise sheet.error("a target in every row", sheet.cell(row, name), "Fill it or leave the row out.")
    numeric = [_is_number(cell) for cell in cells]
    if task is None and any(numeric) and not all(numeric):
        row = numeric.index(sum(numeric) * 2 < len(numeric))  # the first of the rarer kind
        remedy = 'Mend the cell, or set task = "classes" where all are names.'
        raise ValueError(complaint("target", "a column of numbers or one of words", sheet.cell(row, name), remedy))
    whole = all(numeric) and all(float(cell).is_integer() and abs(float(cell)) < 2**53 for cell in cells)
    labels = [str(int(float(cell))) for cell in cells] if whole else cells
    names = sorted(set(labels), key=int) if whole else sorted(set(labels))
    if len(names) < 2:
        got = f"{names[0]!r} in every row"
        raise ValueError(complaint("target", "a column with different values", got, "Choose another target."))
    if (task or ("classes" if not all(numeric) or (whole and len(names) <= MOST_CLASSES) else "numbers")) == "classes":
        number = {label: index for index, label in enumerate(names)}
        return torch.tensor([number[label] for label in labels]), tuple(names)
    remedy = 'Fill the cell or leave the row out; set task = "classes" for a target of words.'
    return _representable(sheet, [name], sheet.numbers([name], remedy)).float(), ()


def _representable(sheet: Sheet, names: Sequence[str], values: Tensor) -> Tensor:
    """Returns columns of values; raises unless single precision can represent them and their differences."""
    largest, varies = values.abs().amax(0), values.amax(0) > values.amin(0)
    spread = torch.where(varies, values.std(0, correction=0), 0.0)
    wide = (largest > _LARGEST) | (varies & (spread < 1 / _LARGEST))
    fine = varies & (largest * torch.finfo(torch.float32).eps / 2 > _FINEST * spread)
    for column in (wide | fine).nonzero().flatten().tolist():
        name, by = names[column], f"that spread by {float(spread[column]):.3g}"
        if wide[column]:
            expected = f"numbers below {_LARGEST:g} that spread by more than {1 / _LARGEST:g}"
            got = f"values of up to {float(largest[column]):.3g} {by} in column {name!r}"
            raise sheet.error(expected, got, "Choose other units.")
        middle = f"{float(values[:, column].mean()):.9g}"
        remedy = f"Subtract {middle} from that column, or name it under ignore."
        raise sheet.error(
            "numbers that single precision can tell apart", f"values near {middle} {by} in column {name!r}", remedy
        )
    return values


def _divided(points: Points, rows: int) -> tuple[Points, Points]:
    """Returns so many random points, stratified by class, and the others."""
    chosen = stratified(points.y if points.y.dim() == 1 else torch.zeros(len(points), dtype=torch.int64), rows, seed=0)
    return Points(*points[chosen]), Points(*points[~chosen])


def _moments(values: Tensor) -> tuple[list[float], list[float]]:
    varies = values.amax(0) > values.amin(0)  # whatever rounding makes of the standard deviation
    return values.mean(0).tolist(), torch.where(varies, values.std(0, correction=0), 1.0).tolist()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
