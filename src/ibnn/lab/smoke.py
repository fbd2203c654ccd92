"""SMOKE RUNS: jobs cut down to two steps on made-up data, to see whether they run at all."""

from typing import Any

import torch

from ibnn import nets
from ibnn.data import TABLES, DataSet, Images, Split
from ibnn.data.sets import KNOWN
from ibnn.lab.job import Job, merged
from ibnn.lab.splits import Splits

_SMALL: dict[str, dict[str, Any]] = {"wideresnet": {"depth": 10, "width": 1}, "vgg16-small": {"width": 0.125}}


def cut_down(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a job with two steps, a small network and few components."""
    if "net" not in fields:  # there is nothing to train
        return fields
    quick: dict[str, Any] = {"steps": 2, "batch_size": 8, "evaluate_every": 1}
    trains = {
        n: {k: v for k, v in fields[n].items() if k != "epochs"} | quick for n in ("train", "first") if fields.get(n)
    }
    fields = merged(fields, {"samples": 1, "net_options": _SMALL.get(fields["net"], {})})
    few = {name: min(n, 2) for name, n in fields.get("method_options", {}).items() if name in ("components", "members")}
    fields = merged(fields, {"method_options": few})
    return fields | {"train": quick, "examples": None, "weights": None} | trains


def made_data(job: Job) -> Splits | None:
    """Returns random images of a job's shape and classes, of 224 × 224 pixels only 64; None for points."""
    if job.data in TABLES:
        return None
    channels, *size = nets.input_shape(job.net)
    size = [min(side, 64) for side in size]
    classes = KNOWN[job.data].classes if job.data in KNOWN else tuple(map(str, range(1000)))
    generator = torch.Generator().manual_seed(0)

    def made(rows: int) -> Split:
        images = torch.randint(256, (rows, channels, *size), generator=generator, dtype=torch.uint8)
        return Split(images, torch.randint(len(classes), (rows,), generator=generator))

    mean, std = (0.5,) * channels, (0.25,) * channels
    whole = DataSet(job.data, made(32), made(4), mean, std, classes, True)
    valid = Images(made(24), mean=mean, std=std) if job.valid else None
    return Splits(Images(whole.train, mean=mean, std=std, augment=job.augment), valid, whole)
