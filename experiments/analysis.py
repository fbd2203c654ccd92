"""What some figures show of a finished run beyond its scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import metrics
from ibnn.convert import revert
from ibnn.data import DataSet, Points
from ibnn.lab.jobs import read_run
from ibnn.lab.parts import Splits
from ibnn.lab.runs import RunFolder
from ibnn.network import IBNN, prior_stds
from ibnn.prediction import GaussianPrediction, predict


def curve(folder: Path, splits: Splits) -> dict[str, Any]:
    """Returns the predictive distribution of y = x³ for x from -6 to 6, and the training points."""
    found = read_run(folder)
    train = splits.train
    assert isinstance(train, Points)
    line = torch.linspace(-6, 6, 121)[:, None]
    answer = predict(found.model, line, samples=found.job.samples)
    assert isinstance(answer, GaussianPrediction)
    parts = {"x": line, "mean": answer.mean, "train_x": train.x, "train_y": train.y}
    parts |= {"aleatoric_std": answer.aleatoric.sqrt(), "epistemic_std": answer.epistemic.sqrt()}
    return {name: _numbers(values) for name, values in parts.items()}


def softmax(folder: Path, splits: Splits) -> dict[str, Any]:
    """Returns the least and the most certain test images, and every draw's probabilities for them."""
    found, run = RunFolder(folder).answers(), read_run(folder, trust_code=True)
    assert isinstance(splits.whole, DataSet), "of images"
    classes, x, entries = run.result["classes"], splits.whole.normalise(found["shown/images"]), []
    with torch.no_grad():
        logits = run.model.draw_logits(x, run.job.samples, 0) / run.model.likelihood.temperature
    probs = logits.softmax(2).movedim(0, 1)  # (images, draws, classes)
    for row, image, draws in zip(found["shown/rows"], found["shown/images"], probs, strict=True):
        words = {"label": classes[found["labels"][row]], "predicted": classes[found["probs"][row].argmax()]}
        entries.append(words | {"image": image.tolist(), "draws": [_numbers(draw) for draw in draws]})
    half = len(entries) // 2
    return {"classes": classes, "least": entries[:half], "most": entries[half:]}


def pca(folder: Path, splits: Splits, *, points: int = 15, rows: int = 1000) -> Any:
    """Returns training loss and test error over the plane that the components' weights U diag(μₖ) span around U."""
    found = read_run(folder)
    model = found.model
    assert isinstance(model, IBNN), "only components span a plane"
    assert isinstance(splits.whole, DataSet), "of images"
    members = torch.stack([_flat(model.component(k)) for k in range(model.components)])
    net = revert(model).eval()
    base = _flat(net)
    away = members - base
    _, values, axes = torch.linalg.svd(away, full_matrices=False)
    places = away @ axes[:2].T  # (K, 2)
    reach = float(places.abs().amax() * 1.3)
    line = torch.linspace(-reach, reach, points)
    x, y = splits.train.__getitems__(list(range(min(rows, len(splits.train)))))
    test = splits.whole.test.rows(torch.arange(min(rows, len(splits.whole.test.labels))))
    test_x = splits.whole.normalise(test.images)
    loss, error = torch.zeros(points, points), torch.zeros(points, points)
    for i, b in enumerate(line):
        for j, a in enumerate(line):
            _put(net, base + a * axes[0] + b * axes[1])
            loss[i, j] = F.cross_entropy(_outputs(net, x), y)
            error[i, j] = metrics.error(_outputs(net, test_x).softmax(1), test.labels)
    return {
        "plane_x": _numbers(line),
        "plane_y": _numbers(line),
        "train_loss": [_numbers(row) for row in loss],
        "test_error": [_numbers(row) for row in error],
        "components": [_numbers(place) for place in places],
        "centre": [0.0, 0.0],
        "explained": _numbers(values[:2].square() / values.square().sum()),
    }


def posterior(folder: Path, splits: Splits) -> dict[str, float]:
    """Returns how far a posterior has left its prior: how its means and σ differ; nothing for a plain network."""
    model = read_run(folder).model
    if not isinstance(model, IBNN):
        return {}
    q = model.posterior()
    mean, ratio = q.mean.detach(), (q.std / prior_stds(model)).detach().flatten()
    found = {
        "prior_std": model.prior_std,
        "distance_of_means": float((mean - 1).abs().mean()),
        "spread_of_means": float(mean.std(0, correction=0).mean()),
        "low_std": float(ratio.quantile(0.05)),
        "high_std": float(ratio.quantile(0.95)),
    }
    return {name: round(value, 4) for name, value in found.items()}


def _flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@torch.no_grad()
def _put(net: nn.Module, weights: Tensor) -> None:
    for p, part in zip(net.parameters(), weights.split([p.numel() for p in net.parameters()]), strict=True):
        p.copy_(part.view_as(p))


@torch.no_grad()
def _outputs(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([net(part) for part in x.split(250)])


def _numbers(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values.flatten()]


ANALYSES: dict[str, Callable[..., Any]] = {"curve": curve, "pca": pca, "posterior": posterior, "softmax": softmax}
