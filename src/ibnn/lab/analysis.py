"""ANALYSIS: the cells of experiments that are no plain job, what is looked at inside trained models, and smoke runs."""

import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import metrics, nets
from ibnn.baselines import MeanField
from ibnn.convert import convert
from ibnn.data import DataSet, Images, Split, toy_regression
from ibnn.data.sets import KNOWN
from ibnn.lab import sizes
from ibnn.lab.jobs import Job, Splits, make_data, merged, read_run
from ibnn.lab.provenance import provenance
from ibnn.lab.runs import ANSWERS, RunFolder
from ibnn.likelihood import Gaussian
from ibnn.network import IBNN
from ibnn.normal import generators_restored, seed_generators
from ibnn.prediction import GaussianPrediction
from ibnn.training.loop import fit
from ibnn.training.recipe import Recipe


def key(fields: dict[str, Any]) -> str:
    """A short hash of a cell's fields."""
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------- other cells


def table1(fields: dict[str, Any]) -> dict[str, Any]:
    """Weights, nodes and their ratio of the paper's networks."""
    return {"rows": [row._asdict() for row in sizes.table1()], "provenance": provenance()}


def regression(fields: dict[str, Any]) -> dict[str, Any]:
    """y = x³ from 30 points: the predictive distribution over a range of x, and its scores on fresh points."""
    seed, layers = fields["seed"], fields["layers"]
    x, y = toy_regression(30, seed=seed)
    centre, scale = y.mean(), y.std()
    with generators_restored():
        seed_generators(seed, layers)
        net = nets.mlp(1, 1, hidden=fields.get("hidden", 256), layers=layers)
    likelihood = Gaussian(init_std=float(3 / scale))
    options = fields.get("method_options", {})
    model = (
        MeanField(net, likelihood, **options)
        if fields["method"] == "vi"
        else convert(net, likelihood=likelihood, copy=False, seed=seed, **options)
    )
    recipe = Recipe(**({"seed": seed} | fields.get("train", {})))
    began = time.monotonic()
    fit(model, (x / 4, (y - centre) / scale), recipe=recipe, quiet=True)
    seconds, draws = time.monotonic() - began, 5 * model.components if isinstance(model, IBNN) else 40

    def answer(points: Tensor) -> GaussianPrediction:
        prediction = model.predict(points / 4, samples=draws // model.components)
        assert isinstance(prediction, GaussianPrediction)
        return prediction

    line = torch.linspace(-6, 6, 121)[:, None]
    drawn, units = answer(line), float(scale)
    fresh_x, fresh_y = toy_regression(1000, seed=seed + 1000)
    tested = answer(fresh_x)
    low, high = tested.interval(0.9)
    targets = (fresh_y - centre) / scale
    return {
        "layers": layers,
        "x": _numbers(line),
        "mean": _numbers(drawn.mean * scale + centre),
        "aleatoric_std": _numbers(drawn.aleatoric.sqrt() * units),
        "epistemic_std": _numbers(drawn.epistemic.sqrt() * units),
        "train_x": _numbers(x),
        "train_y": _numbers(y),
        "scores": {
            "nll": float(scale.log() - tested.log_prob(targets).mean()),
            "rmse": float((tested.mean - targets).square().mean().sqrt() * scale),
            "coverage": float(((low <= targets) & (targets <= high)).float().mean()),
        },
        "costs": {
            "train_seconds": round(seconds, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "forwards": draws,
        },
        "job": fields,
        "provenance": provenance(),
    }


def _numbers(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values.flatten()]


# ------------------------------------------------------------------------------------------------ inside trained models


def softmax(folder: Path, data: str | Path | None, splits: Splits | None) -> dict[str, Any]:
    """The least and the most certain test images, and what every draw says of them."""
    home = RunFolder(folder)
    found, classes = home.tensors(ANSWERS), home.result["classes"]
    entries = []
    for row, image, draws in zip(found["shown/rows"], found["shown/images"], found["shown/draws"], strict=True):
        words = {"label": classes[found["labels"][row]], "predicted": classes[found["probs"][row].argmax()]}
        said = [[round(float(p), 4) for p in draw] for draw in draws]
        entries.append(words | {"image": image.tolist(), "draws": said})
    half = len(entries) // 2
    return {"classes": classes, "least": entries[:half], "most": entries[half:]}


def pca(folder: Path, data: str | Path | None, splits: Splits | None, *, points: int = 15, rows: int = 1000) -> Any:
    """Training loss and test error over the plane that the components' weights U diag(μₖ) span around U."""
    found = read_run(folder)
    model, splits = found.model, splits or make_data(found.job, data)
    assert isinstance(model, IBNN), "only components span a plane"
    assert isinstance(splits.whole, DataSet), "of images"
    base, members = _flat(plain_of(model)), [_flat(model.component(k)) for k in range(model.components)]
    away = torch.stack(members) - base
    _, values, axes = torch.linalg.svd(away, full_matrices=False)
    places = away @ axes[:2].T  # (K, 2)
    reach = places.abs().amax() * 1.3
    line = torch.linspace(-float(reach), float(reach), points)
    train = splits.train.__getitems__(list(range(min(rows, len(splits.train)))))
    part = splits.whole.test.rows(torch.arange(min(rows, len(splits.whole.test.labels))))
    test = splits.whole.normalise(part.images), part.labels
    net = plain_of(model)
    loss, error = torch.zeros(points, points), torch.zeros(points, points)
    for i, b in enumerate(line):
        for j, a in enumerate(line):
            _put(net, base + a * axes[0] + b * axes[1])
            loss[i, j] = F.cross_entropy(_outputs(net, train[0]), train[1])
            error[i, j] = metrics.error(_outputs(net, test[0]).softmax(1), test[1])
    return {
        "plane_x": _numbers(line),
        "plane_y": _numbers(line),
        "train_loss": [_numbers(row) for row in loss],
        "test_error": [_numbers(row) for row in error],
        "components": [_numbers(place) for place in places],
        "centre": [0.0, 0.0],
        "explained": _numbers(values[:2].square() / values.square().sum()),
    }


def plain_of(model: IBNN) -> nn.Module:
    """The network at z = 1: the weights U alone."""
    return model.folded(torch.ones(model.nodes))


def _flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def _put(net: nn.Module, weights: Tensor) -> None:
    with torch.no_grad():
        for p, part in zip(net.parameters(), weights.split([p.numel() for p in net.parameters()]), strict=True):
            p.copy_(part.view_as(p))


@torch.no_grad()
def _outputs(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net(part) for part in x.split(250)])


# --------------------------------------------------------------------------------------------------------- smoke runs

_SMALL: dict[str, dict[str, Any]] = {"wideresnet": {"depth": 10, "width": 1}, "vgg16-small": {"width": 0.125}}


def smoked(fields: dict[str, Any]) -> dict[str, Any]:
    """A cell's fields, cut down to two steps of a small network."""
    if "net" not in fields:  # regression, or nothing to train
        return merged(fields, {"train": {"steps": 2}})
    quick: dict[str, Any] = {"steps": 2, "batch_size": 8, "evaluate_every": 1}
    trains = {
        n: {k: v for k, v in fields[n].items() if k != "epochs"} | quick for n in ("train", "first") if fields.get(n)
    }
    fields = merged(fields, {"samples": 1, "net_options": _SMALL.get(fields["net"], {})})
    few = {name: min(n, 2) for name, n in fields.get("method_options", {}).items() if name in ("components", "members")}
    fields = merged(fields, {"method_options": few})
    return fields | {"train": quick, "examples": None, "weights": None} | trains


def made_data(job: Job) -> Splits:
    """Random images of a job's shape and classes; of 224 × 224 pixels only 64."""
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
