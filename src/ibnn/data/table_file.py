"""Reads a table from a .csv file: a header, one example per row, and one column that is the target.

Cells that cannot be used as they are, are refused with their row and column. Nothing is imputed, dropped or encoded.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ibnn import check
from ibnn.data.sets import stratified
from ibnn.data.tables import Points, Standardisation, Target
from ibnn.errors import complaint, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

Task = Literal["classes", "numbers"]
MOST_CLASSES = 20  # distinct whole numbers that are still taken for classes
MISSING = frozenset({"", "na", "n/a", "nan", "null"})
NOISE = 0.5  # initial noise of the target, as a share of its standard deviation
_LARGEST = 1e30  # magnitude that single precision still takes


def read_cells(path: Path, content: bytes | None = None, *, named: bool = True) -> "pd.DataFrame":
    """Reads a .csv file, or its content, as text; without `named`, columns are called "1", "2", … and need no header.

    Rows count from 1, below the header.
    """
    import pandas as pd

    text = path.read_bytes() if content is None else content
    how: Any = {"header": None, "dtype": object, "na_filter": False, "encoding": "utf-8-sig"}
    try:
        cells = pd.read_csv(io.BytesIO(text), encoding_errors="strict" if named else "replace", **how)
    except (UnicodeDecodeError, pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        expected = "CSV in UTF-8 with a header and as many cells in every line"
        got = f"an error: {str(error).strip()}"
        raise ValueError(complaint(str(path), expected, got, "Mend the file.")) from None
    names = [name.strip() for name in cells.iloc[0]]
    cells = cells[1:] if named or not all(map(_is_number, names)) else cells
    if not len(cells):
        raise ValueError(complaint(str(path), "a header and rows", "no row below the header", "Check the file."))
    if not named:
        cells = cells.loc[:, (cells != "").any()]  # the header may be longer
        names = [str(number) for number in range(1, cells.shape[1] + 1)]
    return cells.set_axis(names, axis=1).set_axis(range(1, len(cells) + 1))


def numbers(path: Path, cells: "pd.DataFrame", names: Sequence[str], remedy: str) -> Tensor:
    """Returns columns as finite numbers, (rows, columns) float64; the error names the first cell that is none."""
    counts = Counter(cells.columns)
    for name in names:
        if counts[name] != 1:
            similar = did_you_mean(name, counts, otherwise=f"It has {', '.join(list(counts)[:12])}.")
            got, mend = f"{counts[name] or 'none'} called {name!r}", "Rename all but one." if counts[name] else similar
            raise ValueError(complaint(str(path), f"a table with a column {name!r}", got, mend))
    found = cells[list(names)].to_numpy()
    try:
        values = torch.from_numpy(found.astype("float64"))
    except ValueError:
        values = torch.tensor([[float(cell) if _is_number(cell) else torch.nan for cell in row] for row in found])
    if wrong := (~(values.abs() <= _LARGEST)).nonzero().tolist():
        row, column = wrong[0]
        expected = f"a table with a finite number, up to {_LARGEST:g}, in every cell that is used"
        raise ValueError(complaint(str(path), expected, _told(found[row, column], row + 1, names[column]), remedy))
    return values


def _told(cell: str, row: int, name: str) -> str:
    """Describes a cell by its content and place."""
    return f"{repr(cell.strip()[:40]) if cell.strip() else 'nothing'} in row {row}, column {name!r}"


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
    are predicted as numbers. Words among numbers are refused. Columns to `ignore` are neither inputs nor target. The
    share of the rows that are for testing is the same in each class. `sha256` is the checksum that the file must have.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, digest):
        got, remedy = f"{path}, which has changed", "Bring the old file back, or train anew."
        raise ValueError(complaint("data", "the table that the run was trained on", got, remedy))
    cells = read_cells(path, content)
    names = list(cells.columns)
    for argument, column in (("target", target), *(("ignore", column) for column in ignore)):
        if column not in names:
            shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
            otherwise = "Pass one of these; the first line names the columns, with commas between."
            remedy = did_you_mean(column, names, otherwise=otherwise)
            raise ValueError(complaint(argument, f"a column of {path}: {shown}", repr(column), remedy))
    left_out = {target, *ignore}
    columns = tuple(column for column in names if column not in left_out)
    if not columns or "" in (target, *columns):
        expected, got = "a table with named columns beside the target", f"columns {names[:12]}"
        remedy = "Name them, or save the table without its index (pandas: index=False)."
        raise ValueError(complaint(str(path), expected, got, remedy))
    remedy = "Fill the cell or leave the row out; a column of words, encode as numbers or name under ignore."
    x = numbers(path, cells, columns, remedy)
    y, classes = _targets(path, cells, target, task)
    rows = max(1, round(test_share * len(x)))
    if rows >= len(x):
        raise ValueError(complaint(str(path), f"more than {rows} rows, which are for testing", len(x), "Add rows."))
    tested, trained = _divided(Points(x.float(), y), rows)
    return FileTable(name or str(path), columns, classes, trained, tested, digest)


def _targets(path: Path, table: "pd.DataFrame", name: str, task: Task | None) -> tuple[Tensor, tuple[str, ...]]:
    """Returns class indices (N,) and the names of the classes, or numbers (N, 1) and no names."""
    if list(table.columns).count(name) > 1:
        raise ValueError(complaint(str(path), f"a table with a column {name!r}", f"2 called {name!r}", "Rename one."))
    cells = [cell.strip() for cell in table[name]]
    if empty := [row for row, cell in enumerate(cells) if cell.lower() in MISSING]:
        got = _told(cells[empty[0]], empty[0] + 1, name)
        raise ValueError(complaint(str(path), "a target in every row", got, "Fill it or leave the row out."))
    numeric = [_is_number(cell) for cell in cells]
    if task is None and any(numeric) and not all(numeric):
        row = numeric.index(sum(numeric) * 2 < len(numeric))  # the first of the rarer kind
        remedy = 'Mend the cell, or set task = "classes" where all are names.'
        got = _told(cells[row], row + 1, name)
        raise ValueError(complaint("target", "a column of numbers or one of words", got, remedy))
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
    return numbers(path, table, [name], remedy).float(), ()


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
