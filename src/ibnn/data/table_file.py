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

    def columns(self, names: Sequence[str]) -> Any:
        """Returns the cells below these names, (rows, columns); raises unless there is one column of each."""
        counts, places = Counter(self.names), {name: place for place, name in enumerate(self.names)}
        for name in names:
            if counts[name] != 1:
                near, shown = nearest(name, self.names), ", ".join(self.names[:12])
                got, remedy = "none", f"Is it called {near!r} there?" if near else f"It has {shown}."
                if counts[name]:
                    got, remedy = f"{counts[name]} called {name!r}", "Rename or remove all but one."
                raise self.error(f"a table with a column {name!r}", got, remedy)
        return self.cells[:, [places[name] for name in names]]

    def numbers(self, names: Sequence[str], remedy: str) -> Tensor:
        """Returns columns as finite numbers, (rows, columns) float64; the error names the first cell that is none."""
        cells = self.columns(names)
        try:
            values = torch.from_numpy(cells.astype("float64"))
        except ValueError:
            values = torch.tensor([[float(cell) if _is_number(cell) else torch.nan for cell in row] for row in cells])
        if wrong := (~values.isfinite()).nonzero().tolist():
            row, column = wrong[0]
            got = self.cell(row, names[column])
            raise self.error("a table with a finite number in every cell that is used", got, remedy)
        return values

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
    except (UnicodeDecodeError, pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        expected = "CSV in UTF-8 with a header and as many cells in every line"
        raise sheet.error(expected, f"an error: {str(error).strip()}", "Mend the file.") from None
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
        if lost := [name for number, name in enumerate(self.classes) if not bool((train.y == number).any())]:
            expected = f"a target whose classes all have rows to train on, of which there are {len(train)}"
            raise ValueError(complaint("target", expected, f"none of {lost[0]!r}", "Add rows, or leave it out."))
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
        got, remedy = f"{path}, which has changed", "Bring the old file back, or train anew."
        raise ValueError(complaint("data", "the table that the run was trained on", got, remedy))
    sheet = read_sheet(path, content)
    for argument, column in (("target", target), *(("ignore", column) for column in ignore)):
        if column not in sheet.names:
            shown = ", ".join(sheet.names[:12]) + (", …" if len(sheet.names) > 12 else "")
            otherwise = "Pass one of these; the first line names the columns, with commas between."
            remedy = did_you_mean(column, sheet.names, otherwise=otherwise)
            raise ValueError(complaint(argument, f"a column of {path}: {shown}", repr(column), remedy))
    left_out = {target, *ignore}
    columns = tuple(column for column in sheet.names if column not in left_out)
    if not columns or "" in (target, *columns):
        expected, got = "a table with named columns beside the target", f"columns {list(sheet.names[:12])}"
        raise sheet.error(expected, got, "Name them, or save the table without its index (pandas: index=False).")
    remedy = "Fill the cell or leave the row out; a column of words, encode as numbers or name under ignore."
    x = _representable(sheet, columns, sheet.numbers(columns, remedy))
    y, classes = _targets(sheet, target, task)
    rows = max(1, round(test_share * len(x)))
    if rows >= len(x):
        raise sheet.error(f"more than {rows} rows, which are for testing", f"{len(x)}", "Add rows.")
    tested, trained = _divided(Points(x.float(), y), rows)
    return FileTable(name or str(path), columns, classes, trained, tested, digest)


def _targets(sheet: Sheet, name: str, task: Task | None) -> tuple[Tensor, tuple[str, ...]]:
    """Returns class indices (N,) and the names of the classes, or numbers (N, 1) and no names."""
    cells = [cell.strip() for cell in sheet.columns([name])[:, 0]]
    if empty := [row for row, cell in enumerate(cells) if cell.lower() in MISSING]:
        raise sheet.error("a target in every row", sheet.cell(empty[0], name), "Fill it or leave the row out.")
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
    if task == "classes" or (task is None and (not all(numeric) or (whole and len(names) <= MOST_CLASSES))):
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
        middle = float(values[:, column].mean())
        got = f"values near {middle:.9g} that spread by {float(spread[column]):.3g} in column {names[column]!r}"
        remedy = f"Subtract {middle:.9g} from that column, choose other units, or name it under ignore."
        raise sheet.error("numbers that single precision can tell apart", got, remedy)
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
