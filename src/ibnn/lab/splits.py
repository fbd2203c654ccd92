"""SPLITS: the training, held-out and test data of a job, the same for all seeds."""

import math
from dataclasses import dataclass
from pathlib import Path

from ibnn import nets
from ibnn.data import (
    TABLES,
    DataSet,
    Images,
    OwnTable,
    Points,
    Table,
    Units,
    hold_out,
    load,
    names,
    read_table,
    subset,
)
from ibnn.data.sets import data_folder
from ibnn.errors import complaint
from ibnn.lab.job import Job


@dataclass(frozen=True)
class Splits:
    """Training data, held-out data to choose by, and the whole set with its test part; of points also their units."""

    train: Images | Points
    valid: Images | Points | None
    whole: DataSet | Table | OwnTable
    units: Units | None = None


def make_data(job: Job, folder: str | Path | None = None, units: Units | None = None) -> Splits:
    """Returns the splits of a job.

    Args:
        job: Whose data.
        folder: Where data sets are; see `ibnn.data.load`.
        units: Those of a finished run on a .csv file; the file must not have changed since.
    """
    if job.augment and (job.data in TABLES or job.has_file):
        raise ValueError(complaint("augment", "false for points", "true", "Leave it out."))
    if job.data in TABLES:
        return _points(job, TABLES[job.data])
    check_data(job.data, folder)
    if job.has_file:
        return _rows_of_file(job, folder, units)
    whole = load(job.data, folder, size=_side(job))
    train, held_out = whole.train, None
    if job.examples is not None:
        train = subset(train, job.examples, seed=0)
    if job.valid:
        train, held_out = hold_out(train, job.valid, seed=0)
    images = Images(train, mean=whole.mean, std=whole.std, augment=job.augment, flip=whole.flip)
    return Splits(images, Images(held_out, mean=whole.mean, std=whole.std) if held_out else None, whole)


def _points(job: Job, table: Table) -> Splits:
    """Holds out the last points: they are in random order."""
    drawn = table.draw(job.examples)
    if job.valid >= len(drawn):
        raise ValueError(complaint("valid", f"below the {len(drawn)} points", job.valid, "Pass a larger examples."))
    cut = len(drawn) - job.valid
    train, held_out = (Points(drawn.x[part], drawn.y[part]) for part in (slice(cut), slice(cut, None)))
    return Splits(train, held_out if job.valid else None, table, table.units)


def _rows_of_file(job: Job, folder: str | Path | None, units: Units | None) -> Splits:
    assert job.target is not None, "checked"
    options = {"task": job.task, "ignore": job.ignore, "test_share": job.test_share}
    sha256 = units.sha256 if units else None
    table = read_table(_file(job.data, folder), job.target, name=job.data, sha256=sha256, **options)  # type: ignore[arg-type]
    train, held_out = table.split(job.examples, job.valid)
    return Splits(train, held_out, table, units or table.units(train))


def _file(name: str, folder: str | Path | None) -> Path:
    """Returns the path of a .csv file in the current folder or else in the data folder."""
    return next((path for path in (Path(name), data_folder(folder) / name) if path.is_file()), Path(name))


def check_data(name: str, folder: str | Path | None = None) -> None:
    """Raises for data that are neither a known set, nor a folder of images or a table that exists."""
    place = data_folder(folder) / name
    if name.lower().endswith(".csv"):
        if not _file(name, folder).is_file():
            remedy = "Run it from the folder of the table, or name its folder by --data or IBNN_DATA."
            raise FileNotFoundError(complaint("data", "a table", f"neither {Path.cwd() / name} nor {place}", remedy))
    elif name not in (*names(), *TABLES) and not (place / "train").is_dir():
        where = f"{place}/train/CLASS/*.jpg and {place}/val/CLASS/*.jpg (or .png)"
        remedy = f"Put images of your own into {where}, or name the folder above by --data or IBNN_DATA."
        expected = f"the name of a set, {', '.join((*names(), *TABLES))}, of a folder of images, or of a .csv file"
        raise FileNotFoundError(complaint("data", expected, repr(name), remedy))


def _side(job: Job) -> int:
    """Returns the height and width that images of a folder, which have 3 channels, are resized to."""
    if job.image_size is not None or job.has_code:
        return job.image_size or 224
    shape = nets.input_shape(job.net, **job.net_options)
    if len(shape) > 1 or job.data in names():
        return shape[-1]
    side = math.isqrt(shape[0] // 3)
    if 3 * side**2 != shape[0]:
        remedy = "Pass 3072 for images of 32 × 32."
        raise ValueError(complaint("net_options.inputs", "3 · side² for a folder of images", shape[0], remedy))
    return side
