"""OWN TABLES: a .csv file with a header, a row an example, one of its columns the target.

Whatever cannot be used as it is, is refused with its row and column; nothing is filled in, dropped or encoded.
"""

import csv
import difflib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ibnn.data.sets import stratified
from ibnn.data.tables import Points, Target, Units
from ibnn.errors import complaint

Task = Literal["classes", "numbers"]
MOST_CLASSES = 20  # different whole numbers that are still taken for classes
MISSING = frozenset({"", "na", "n/a", "nan", "null"})
NOISE = 0.5  # of the target's spread: where learning its noise starts
_LARGEST, _FINEST = 1e30, 1e-3  # what single precision bears: size, and rounding as a share of the spread


class Sheet(NamedTuple):
    """The cells of a .csv file; `lines` says where in the file each row ends."""

    path: Path
    names: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]

    def column(self, name: str) -> list[str]:
        """The cells below a name, which is there once."""
        if self.names.count(name) != 1:
            raise ValueError(_no_column(self, name))
        place = self.names.index(name)
        return [row[place] for row in self.rows]

    def numbers(self, name: str, remedy: str) -> Tensor:
        """A column as finite numbers, (N,) float64; the first cell that is none is named."""
        cells = self.column(name)
        try:
            values = torch.tensor(list(map(float, cells)), dtype=torch.float64)
        except ValueError:
            wrong = next(row for row, cell in enumerate(cells) if not _is_number(cell))
        else:
            if bool(values.isfinite().all()):
                return values
            wrong = int((~values.isfinite()).nonzero()[0])
        got = f"{_shown(cells[wrong])} in {self.place(wrong, name)}"
        raise ValueError(complaint(str(self.path), "a finite number in every cell that is used", got, remedy))

    def place(self, row: int, name: str) -> str:
        """Words for a cell; rows count from 1."""
        return f"row {row + 1} (line {self.lines[row]}), column {name!r}"


def read_sheet(path: Path, content: bytes | None = None) -> Sheet:
    """Reads a .csv file in UTF-8 with commas and a header; blank lines are left out.

    Args:
        path: The file.
        content: Its bytes, if they are there already.
    """
    try:
        text = (path.read_bytes() if content is None else content).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(complaint(str(path), "text in UTF-8", error, "Save it as CSV UTF-8.")) from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows, lines = [], []
    try:
        for cells in reader:
            if cells:
                rows.append(cells)
                lines.append(reader.line_num)
    except csv.Error as error:
        got = f"one with an error in line {reader.line_num}: {error}"
        raise ValueError(complaint(str(path), "a CSV file", got, "Mend the file.")) from None
    if not rows:
        raise ValueError(complaint(str(path), "a table with a header", "an empty file", "Check the file."))
    names = tuple(name.strip() for name in rows[0])
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(names):
            expected = f"a table of {len(names)} cells a line, as its first"
            raise ValueError(complaint(str(path), expected, f"{len(row)} in line {line}", "Mend the file."))
    if len(rows) == 1:
        raise ValueError(complaint(str(path), "a header and rows", "no row below the header", "Check the file."))
    return Sheet(path, names, rows[1:], lines[1:])


@dataclass(frozen=True, eq=False)
class OwnTable:
    """A table read from a file.

    Attributes:
        name: What the job calls it.
        columns: Names of the inputs.
        classes: Names of the classes; none for a number to predict.
        train: Rows to train on and to hold out of.
        test: The others, the same for all seeds.
        sha256: Of the file.
    """

    name: str
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    train: Points
    test: Points
    sha256: str

    def split(self, examples: int | None, valid: int) -> tuple[Points, Points | None]:
        """Rows to train on, and held-out ones; both stratified by class, and the same for all seeds.

        Args:
            examples: How many of the training rows are used, held-out ones included; None for all.
            valid: How many of these are held out.
        """
        most = len(self.train)
        if not 1 <= (used := examples or most) <= most:
            remedy = f"{self.name} has {most + len(self.test)}, of which {len(self.test)} are for testing."
            raise ValueError(complaint("examples", f"a number of rows from 1 to {most}", examples, remedy))
        if valid >= used:
            expected = f"below the {used} rows to train on"
            raise ValueError(complaint("valid", expected, valid, "Pass fewer, or a smaller test_share."))
        points = self.train if examples is None else _parted(self.train, examples)[0]
        held_out, train = _parted(points, valid) if valid else (None, points)
        for number, name in enumerate(self.classes):
            if not bool((train.y == number).any()):
                expected = f"a target whose classes all have rows to train on, of which there are {len(train)}"
                raise ValueError(
                    complaint("target", expected, f"none of {name!r}", "Add rows, or leave that class out.")
                )
        return train, held_out

    def units(self, train: Points) -> Units:
        """Mean and standard deviation of the rows that are trained on; 1 for a column that does not vary."""
        (centre, scale), (middle, spread) = (
            _moments(values.double()) for values in (train.x, train.y.view(len(train), -1))
        )
        target = None if self.classes else Target(middle[0], spread[0], NOISE * spread[0])
        return Units(self.columns, tuple(centre), tuple(scale), target, self.sha256)


def read_table(
    path: Path,
    target: str,
    *,
    name: str | None = None,
    task: Task | None = None,
    ignore: Sequence[str] = (),
    test_share: float = 0.2,
    sha256: str | None = None,
) -> OwnTable:
    """Reads a table and sets its test rows apart.

    Without `task`, a target of words is one of classes, and so is one of whole numbers if there are at most 20
    different ones; any other numbers are predicted as numbers. Words among numbers are refused.

    Args:
        path: The file.
        target: Name of the column to predict.
        name: What it is called; default the path.
        task: "classes" or "numbers", whatever the target looks like.
        ignore: Names of columns that are neither inputs nor target.
        test_share: Share of the rows that are for testing; of each class as many.
        sha256: What the file must have.
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
    x = torch.stack([_held(sheet, column, sheet.numbers(column, remedy)) for column in columns], 1)
    y, classes = _targets(sheet, target, task)
    rows = len(x)
    test = max(1, round(test_share * rows))
    if test >= rows:
        remedy = "Add rows." if rows < 5 else "Pass a smaller test_share."
        raise ValueError(complaint(str(path), f"more than {test} rows, which are for testing", rows, remedy))
    tested, trained = _parted(Points(x.float(), y), test)
    return OwnTable(name or str(path), columns, classes, trained, tested, digest)


def _columns(sheet: Sheet, target: str, ignore: Sequence[str]) -> tuple[str, ...]:
    """The inputs; complains of a header that is none, of names that are twice or not there."""
    path, names = str(sheet.path), sheet.names
    if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
        remedy = "Save it with commas between the cells."
        raise ValueError(complaint(path, "separated by commas", f"a first line {names[0][:60]!r}", remedy))
    if target not in names and all(map(_is_number, names)):
        got = f"numbers in its first line: {', '.join(names[:4])}"
        raise ValueError(complaint(path, "a table with the names of its columns in the first line", got, "Add them."))
    for argument, name in (("target", target), *(("ignore", name) for name in ignore)):
        if name not in names:
            raise ValueError(_no_column(sheet, name, argument))
    if target in ignore:
        raise ValueError(complaint("ignore", "columns other than the target", repr(target), "Leave it out."))
    columns = tuple(name for name in names if name != target and name not in ignore)
    for name in (target, *columns):
        if names.count(name) > 1:
            got, remedy = f"{names.count(name)} called {name!r}", "Rename or remove all but one."
            raise ValueError(complaint(path, "a table whose columns have different names", got, remedy))
        if not name:
            remedy = "Name it, or save the table without its index (pandas: index=False)."
            raise ValueError(complaint(path, "a table whose columns all have names", "one without", remedy))
    if not columns:
        got, remedy = f"{target!r} alone", "Add the columns to predict it from."
        raise ValueError(complaint(path, "a table with inputs beside the target", got, remedy))
    return columns


def _no_column(sheet: Sheet, name: str, argument: str | None = None) -> str:
    near = difflib.get_close_matches(name, sheet.names, n=1, cutoff=0.0)[0]
    if (often := sheet.names.count(name)) > 1:
        return complaint(
            str(sheet.path), f"a table with one column {name!r}", f"{often}", "Rename or remove the others."
        )
    if argument is None:
        return complaint(str(sheet.path), f"a table with a column {name!r}", "none", f"Is it called {near!r} there?")
    shown = ", ".join(sheet.names[:12]) + (", …" if len(sheet.names) > 12 else "")
    return complaint(argument, f"a column of {sheet.path}: {shown}", repr(name), f"Did you mean {near!r}?")


def _targets(sheet: Sheet, name: str, task: Task | None) -> tuple[Tensor, tuple[str, ...]]:
    """Class indices (N,) and the names of the classes, or numbers (N, 1) and none."""
    cells = [cell.strip() for cell in sheet.column(name)]
    for row, cell in enumerate(cells):
        if cell.lower() in MISSING:
            got, remedy = f"{_shown(cell)} in {sheet.place(row, name)}", "Fill it or leave the row out."
            raise ValueError(complaint(str(sheet.path), "a target in every row", got, remedy))
    numeric = [_is_number(cell) for cell in cells]
    if task is None and any(numeric) and not all(numeric):
        row = numeric.index(False) if sum(numeric) * 2 >= len(numeric) else numeric.index(True)
        got = f"{_shown(cells[row])} in {sheet.place(row, name)}"
        remedy = 'Mend the cell, or set task = "classes" where all are names.'
        raise ValueError(complaint("target", "a column of numbers or one of words", got, remedy))
    whole = all(numeric) and all(float(cell).is_integer() and abs(float(cell)) < 2**53 for cell in cells)
    if whole:
        labels = [str(int(float(cell))) for cell in cells]
        names = sorted(set(labels), key=int)
    else:
        labels, names = cells, sorted(set(cells))
    if len(names) < 2:
        remedy = "Choose another target." if names else "Add rows."
        raise ValueError(complaint("target", "a column with different values", f"{names[0]!r} in every row", remedy))
    if (task or ("classes" if not all(numeric) or (whole and len(names) <= MOST_CLASSES) else "numbers")) == "classes":
        number = {label: index for index, label in enumerate(names)}
        return torch.tensor([number[label] for label in labels]), tuple(names)
    remedy = 'Fill the cell or leave the row out; set task = "classes" for a target of words.'
    return _held(sheet, name, sheet.numbers(name, remedy)).float().unsqueeze(1), ()


def _held(sheet: Sheet, name: str, values: Tensor) -> Tensor:
    """The values, if single precision holds their size and their differences."""
    largest = float(values.abs().max())
    spread = float(values.std(correction=0)) if bool(values.max() > values.min()) else 0.0
    if largest > _LARGEST or 0 < spread < 1 / _LARGEST:
        got = f"values of up to {largest:.3g} that spread by {spread:.3g} in column {name!r}"
        expected = f"numbers below {_LARGEST:g} that spread by more than {1 / _LARGEST:g}"
        raise ValueError(complaint(str(sheet.path), expected, got, "Choose other units."))
    if spread and largest * torch.finfo(torch.float32).eps / 2 > _FINEST * spread:
        middle = float(values.mean())
        got = f"values near {middle:.9g} that spread by {spread:.3g} in column {name!r}"
        remedy = f"Subtract {middle:.9g} from that column, or name it under ignore."
        raise ValueError(complaint(str(sheet.path), "numbers that single precision can tell apart", got, remedy))
    return values


def _parted(points: Points, rows: int) -> tuple[Points, Points]:
    """So many points at random, of each class in proportion, and the others."""
    chosen = stratified(points.y if points.y.dim() == 1 else torch.zeros(len(points), dtype=torch.int64), rows, seed=0)
    taken, left = (Points(points.x[part], points.y[part]) for part in (chosen, ~chosen))
    return taken, left


def _moments(values: Tensor) -> tuple[list[float], list[float]]:
    varies = values.amax(0) > values.amin(0)  # whatever rounding says of the deviation
    return values.mean(0).tolist(), torch.where(varies, values.std(0, correction=0), 1.0).tolist()


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _shown(cell: str) -> str:
    return repr(cell[:40]) if cell.strip() else "nothing"
