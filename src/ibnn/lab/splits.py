"""SPLITS: the training, held-out and test data of a job, the same for all seeds."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ibnn import data, nets
from ibnn.data.sets import KNOWN, data_folder
from ibnn.errors import complaint
from ibnn.lab.job import Job


@dataclass(frozen=True)
class Splits:
    """Training data, held-out data to choose by, and the whole set with its test part; of points also their units."""

    train: data.Images | data.Points
    valid: data.Images | data.Points | None
    whole: data.DataSet | data.Table | data.OwnTable
    units: data.Units | None = None


def make_data(job: Job, folder: str | Path | None = None, units: data.Units | None = None) -> Splits:
    """Returns the splits of a job.

    Args:
        job: Whose data.
        folder: Where data sets are; see `ibnn.data.load`.
        units: Those of a finished run on a .csv file; the file must not have changed since.
    """
    if job.augment and (job.data in data.TABLES or job.has_file):
        raise ValueError(complaint("augment", "false for points", "true", "Leave it out."))
    if job.data in data.TABLES:
        return _points(job, data.TABLES[job.data])
    check_data(job.data, folder)
    if job.has_file:
        return _rows_of_file(job, folder, units)
    whole = data.load(job.data, folder, size=_side(job))
    train, held_out = whole.train, None
    if job.examples is not None:
        train = data.subset(train, job.examples, seed=0)
    if job.valid:
        train, held_out = data.hold_out(train, job.valid, seed=0)
    images = data.Images(train, mean=whole.mean, std=whole.std, augment=job.augment, flip=whole.flip)
    return Splits(images, data.Images(held_out, mean=whole.mean, std=whole.std) if held_out else None, whole)


def _points(job: Job, table: data.Table) -> Splits:
    """Holds out the last points: they are in random order."""
    drawn = table.draw(job.examples)
    if job.valid >= len(drawn):
        raise ValueError(complaint("valid", f"below the {len(drawn)} points", job.valid, "Pass a larger examples."))
    cut = len(drawn) - job.valid
    train, held_out = (data.Points(drawn.x[part], drawn.y[part]) for part in (slice(cut), slice(cut, None)))
    return Splits(train, held_out if job.valid else None, table, table.units)


def _rows_of_file(job: Job, folder: str | Path | None, units: data.Units | None) -> Splits:
    assert job.target is not None, "checked"
    options = {"task": job.task, "ignore": job.ignore, "test_share": job.test_share}
    sha256 = units.sha256 if units else None
    table = data.read_table(_file(job.data, folder), job.target, name=job.data, sha256=sha256, **options)  # type: ignore[arg-type]
    train, held_out = table.split(job.examples, job.valid)
    return Splits(train, held_out, table, units or table.units(train))


def _file(name: str, folder: str | Path | None) -> Path:
    """Returns the path of a .csv file in the current folder or else in the data folder."""
    return next((path for path in (Path(name), data_folder(folder) / name) if path.is_file()), Path(name))


def check_data(name: str, folder: str | Path | None = None) -> None:
    """Raises for data that are neither a known set, nor a folder of images or a table that exists."""
    place, known = data_folder(folder) / name, (*data.names(), *data.TABLES)
    if name.lower().endswith(".csv"):
        if not _file(name, folder).is_file():
            remedy = "Run it from the folder of the table, or name its folder by --data or IBNN_DATA."
            raise FileNotFoundError(complaint("data", "a table", f"neither {Path.cwd() / name} nor {place}", remedy))
    elif name not in known and not (place / "train").is_dir():
        where = f"{place}/train/CLASS/*.jpg and {place}/val/CLASS/*.jpg (or .png)"
        remedy = f"Put images of your own into {where}, or name the folder above by --data or IBNN_DATA."
        expected = f"the name of a set, {', '.join(known)}, of a folder of images, or of a .csv file"
        raise FileNotFoundError(complaint("data", expected, repr(name), remedy))


def _side(job: Job) -> int:
    """Returns the height and width that images of a folder, which have 3 channels, are resized to."""
    if job.image_size is not None or job.has_code:
        return job.image_size or 224
    shape = nets.input_shape(job.net, **job.net_options)
    if len(shape) > 1 or job.data in data.names():
        return shape[-1]
    side = math.isqrt(shape[0] // 3)
    if 3 * side**2 != shape[0]:
        remedy = "Pass 3072 for images of 32 × 32."
        raise ValueError(complaint("net_options.inputs", "3 · side² for a folder of images", shape[0], remedy))
    return side


def made_data(job: Job) -> Splits | None:
    """Returns random images of a job's shape and classes, of 224 × 224 pixels only 64; None for points."""
    if job.data in data.TABLES:
        return None
    channels, *size = nets.input_shape(job.net)
    size = [min(side, 64) for side in size]
    classes = KNOWN[job.data].classes if job.data in KNOWN else tuple(map(str, range(1000)))
    generator = torch.Generator().manual_seed(0)

    def made(rows: int) -> data.Split:
        images = torch.randint(256, (rows, channels, *size), generator=generator, dtype=torch.uint8)
        return data.Split(images, torch.randint(len(classes), (rows,), generator=generator))

    mean, std = (0.5,) * channels, (0.25,) * channels
    whole = data.DataSet(job.data, made(32), made(4), mean, std, classes, True)
    valid = data.Images(made(24), mean=mean, std=std) if job.valid else None
    return Splits(data.Images(whole.train, mean=mean, std=std, augment=job.augment), valid, whole)
