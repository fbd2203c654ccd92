"""Cuts jobs down, and makes data up, to see whether an experiment runs at all."""

from typing import Any

import torch

from ibnn import data, nets
from ibnn.data.sets import KNOWN
from ibnn.lab.job import Job, merged
from ibnn.lab.parts import Splits

_SMALL = {  # options for smoke runs
    "wideresnet": {"depth": 10, "width": 1},
    "vgg16-small": {"width": 0.125},
    "resnet20": {"width": 0.5},  # torch 2.13 crashes in 1 × 1 convolutions of stride 2, channels last, of fewer than 8
}


def cut_down(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a job with two steps, a small network and few components."""
    quick: dict[str, Any] = {"steps": 2, "batch_size": 8, "evaluate_every": 1}
    given = {name: fields[name] for name in ("train", "first") if fields.get(name)}
    trains = {name: {k: v for k, v in table.items() if k != "epochs"} | quick for name, table in given.items()}
    few = {name: min(n, 2) for name, n in fields.get("method_options", {}).items() if name in ("components", "members")}
    small = {"samples": 1, "net_options": _SMALL.get(fields["net"], {}), "method_options": few}
    return merged(fields, small) | {"train": quick, "examples": None, "weights": None} | trains


def made_data(job: Job) -> Splits | None:
    """Returns random images of a job's shape and classes, of 224 × 224 pixels only 64; None for points."""
    if job.data in data.TABLES:
        return None
    channels, *size = (1, 28, 28) if job.net == "mlp" else nets.input_shape(job.net)
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
