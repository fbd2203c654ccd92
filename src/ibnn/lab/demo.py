"""The demo on scikit-learn's digits: a plain network, with a temperature, calibrated, and an iBNN; table and figures.

Few training images, so that overconfidence shows; the digits 8 and 9, inverted digits and noise should be called novel.
"""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import metrics
from ibnn.baselines import Plain, scale_temperature
from ibnn.calibration import calibrate
from ibnn.convert import convert
from ibnn.files.atomic import write_atomically
from ibnn.lab.display import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, dots, new_figure, png
from ibnn.lab.evaluation import LEVELS
from ibnn.lab.runs import versions
from ibnn.prediction import CategoricalPrediction
from ibnn.training.loop import fit

RECIPE: dict[str, Any] = {
    "data": "scikit-learn digits, classes 0-7; 8 and 9 out of distribution",
    "train_per_class": 10,
    "valid_per_class": 30,
    "net": "conv 16, conv 32, pool, linear 64, linear 8",
    "epochs": 150,
    "batch_size": 32,
    "optimiser": "Adam",
    "lr": 2e-3,
    "components": 8,
    "samples": 5,
    "evaluate_every": 10,
}
NAMES = ("plain", "plain + T", "calibrated", "iBNN")
COLOURS = ("#999999", ORANGE, SKY, BLUE)
KINDS = ("test digits 0–7", "unseen 8 and 9", "inverted digits", "noise")
KIND_COLOURS = (BLUE, VERMILION, GREEN, PURPLE)


class Digits(NamedTuple):
    """Images (N, 1, 8, 8) in [0, 1] and labels."""

    x: Tensor
    y: Tensor


def load_splits(seed: int, recipe: dict[str, Any]) -> tuple[Digits, Digits, Digits, Tensor]:
    """Returns stratified training, validation and test images, and the images of the held-out classes."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(bunch.target)
    generator = torch.Generator().manual_seed(seed)
    parts, train, valid = [], recipe["train_per_class"], recipe["valid_per_class"]
    for label in range(8):
        rows = (y == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        parts.append(rows.split([train, valid, len(rows) - train - valid]))
    train, valid, test = (Digits(x[torch.cat(part)], y[torch.cat(part)]) for part in zip(*parts, strict=True))
    return train, valid, test, x[y >= 8]


def make_net(seed: int) -> nn.Module:
    """Returns a small convolutional network."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 8)),
    )


def train_plain(data: Digits, seed: int, recipe: dict[str, Any]) -> nn.Module:
    """Trains a network by cross-entropy and Adam, in an order of its own: `fit` has another, and other bits."""
    net = make_net(seed)
    optimiser = torch.optim.Adam(net.parameters(), recipe["lr"])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(recipe["epochs"]):
        for rows in torch.randperm(len(data.x), generator=generator).split(recipe["batch_size"]):
            optimiser.zero_grad()
            F.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
            optimiser.step()
    return net.eval()


def score(seen: CategoricalPrediction, unseen: CategoricalPrediction, labels: Tensor) -> dict[str, list[float]]:
    """Returns metrics of the answers for test and OOD images with 95 % bootstrap intervals: [value, low, high]."""
    found = metrics.score_intervals(seen.probs, seen.log_probs, labels)
    del found["brier"]
    found["ood_auroc"] = metrics.bootstrap(metrics.auroc, seen.total, unseen.total, paired=False)
    return {name: [round(value, 4) for value in interval] for name, interval in found.items()}


def novelty_shares(answers: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns what share of every kind of images is called novel, and how sure the answers for them are."""
    found = {}
    for kind, answer in answers.items():
        shares = {f"{level}": float(answer.novel(level).double().mean()) for level in LEVELS}
        shares["auroc"] = metrics.auroc(-answers[KINDS[0]].p_value, -answer.p_value)
        shares["confidence"] = float(answer.probs.amax(1).double().mean())
        found[kind] = {name: round(value, 4) for name, value in shares.items()}
    return found


def run(out: Path, seed: int = 0, recipe: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trains, chooses on validation data, evaluates on test data once, writes figures and results.json."""
    recipe = RECIPE | (recipe or {})
    start = time.monotonic()
    train, valid, test, ood = load_splits(seed, recipe)
    net = train_plain(train, seed, recipe)
    model = convert(make_net(seed), components=recipe["components"], seed=seed)
    options = {name: recipe[name] for name in ("epochs", "batch_size", "lr", "evaluate_every")}
    history = fit(model, train, valid, seed=seed, quiet=True, **options)
    scaled, calibrated = Plain(net), convert(net, components=recipe["components"], seed=seed)
    temperature = scale_temperature(scaled, valid)
    report = calibrate(calibrated, valid, samples=recipe["samples"])
    methods: dict[str, Any] = dict(zip(NAMES, (Plain(net), scaled, calibrated, model), strict=True))
    alone: Any = {"samples": recipe["samples"], "novelty": False}
    answers = {n: [m.predict(x, **alone) for x in (test.x, ood)] for n, m in methods.items()}
    seen, unseen = answers[NAMES[-1]]
    noise = torch.rand(test.x[::5].shape, generator=torch.Generator().manual_seed(seed))
    inputs = dict(zip(KINDS, (test.x, ood, 1 - test.x[::5], noise), strict=True))
    kinds = {kind: model.predict(x, samples=recipe["samples"]) for kind, x in inputs.items()}
    steered = [round(look["prior_std"], 4) for look in history.looks]
    result = {
        "metrics": {name: score(a, b, test.y) for name, (a, b) in answers.items()},
        "ood_auroc_of_epistemic": round(metrics.auroc(seen.epistemic, unseen.epistemic), 4),
        "novelty": novelty_shares(kinds),
        "images": {"train": len(train.y), "valid": len(valid.y), "test": len(test.y), "ood": len(ood)},
        "chosen": {
            "temperature": round(temperature, 3),
            "calibrated": {"scale": round(report.scale, 4), "temperature": round(report.temperature, 3)},
            "iBNN": {"prior_std": steered, "temperature": round(float(model.likelihood.temperature), 3)},
        },
        "nodes": model.nodes,
        "weights": sum(p.numel() for p in net.parameters()),
        "recipe": recipe,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
        "versions": versions(),
    }
    _draw_reliability(out / "reliability.png", answers, test.y)
    _draw_novelty(out / "novelty.png", inputs, kinds)
    write_atomically(out / "results.json", json.dumps(result, indent=1).encode() + b"\n")
    return result


def table(result: dict[str, Any]) -> list[list[str]]:
    """Returns the result as rows of text, the header first."""
    rows = [["", "error %", "NLL", "ECE", "OOD AUROC"]]
    for name, values in result["metrics"].items():
        texts = [[f"{100 * v:.1f}" for v in values["error"]]]
        texts += [[f"{v:.3f}" for v in values[metric]] for metric in ("nll", "ece", "ood_auroc")]
        rows.append([name, *(f"{value} ({low}–{high})" for value, low, high in texts)])
    return rows


def novelty_table(result: dict[str, Any]) -> list[list[str]]:
    """Returns what the iBNN calls novel as rows of text, the header first."""
    rows = [["", *(f"called novel at p ≤ {level}" for level in LEVELS), "AUROC", "mean confidence"]]
    for kind, found in result["novelty"].items():
        shares = [f"{100 * found[f'{level}']:.1f} %" for level in LEVELS]
        auroc = "–" if kind == KINDS[0] else f"{found['auroc']:.3f}"
        rows.append([kind, *shares, auroc, f"{found['confidence']:.2f}"])
    return rows


def _draw_novelty(file: Path, inputs: dict[str, Tensor], answers: dict[str, Any]) -> None:
    """Draws the p-values of every kind of images, and images of each."""
    figure = new_figure(9.6, 4.4)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15))
    axes, grid = left.add_subplot(), right.subplots(len(KINDS), 6)
    for (kind, answer), colour, row in zip(answers.items(), KIND_COLOURS, grid, strict=True):
        filled = {"histtype": "stepfilled", "alpha": 0.4} if kind == KINDS[0] else {"histtype": "step", "lw": 1.8}
        bins: Any = {"bins": [number / 20 for number in range(21)], "weights": [1 / len(answer)] * len(answer)}
        axes.hist(answer.p_value.tolist(), color=colour, label=kind, **bins, **filled)
        for picture, number in zip(row, torch.linspace(0, len(answer) - 1, 6).long().tolist(), strict=True):
            picture.imshow(inputs[kind][number, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
            picture.set(xticks=[], yticks=[])
            says = f"{int(answer.labels[number])}: {float(answer.probs[number].max()):.0%}"
            picture.set_title(f"p = {float(answer.p_value[number]):.3f}\n{says}", fontsize=6.5, pad=2)
        row[0].set_ylabel(kind.replace(" ", "\n", 1), fontsize=8, rotation=0, ha="right", va="center")
    axes.axhline(1 / 20, color="black", lw=0.8, ls=":")
    axes.set(xlabel="p-value of novelty", ylabel="share of images", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)
    title = "Known images fill the p-values evenly; novel ones are at the left (answer: class and probability)"
    figure.suptitle(title, fontsize=10)
    write_atomically(file, png(figure, dpi=130))


def _draw_reliability(file: Path, answers: dict[str, list[CategoricalPrediction]], labels: Tensor) -> None:
    """Draws accuracy over confidence for every method."""
    figure = new_figure(6.4, 4.6)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="black", lw=0.8, ls=":")
    for (name, (seen, _)), colour in zip(answers.items(), COLOURS, strict=True):
        curve = metrics.reliability_curve(seen.probs, labels, bins=8)
        areas = 6 + 260 * curve.count / len(labels)
        points = torch.stack([curve.confidence, curve.accuracy, areas], 1)[curve.count >= 5]  # fewer say nothing
        dots(axes, points.tolist(), lw=1.2, color=colour, label=name)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0.2, 1.02), ylim=(0, 1.04))
    title = "Below the diagonal: more confident than right"
    axes.set_title(f"{title}\n(dot area: share of the test images; bins of fewer than 5 left out)", fontsize=10)
    for handle in axes.legend(loc="lower right", frameon=False).legend_handles:
        handle.set_sizes([40])
    write_atomically(file, png(figure, dpi=130))
