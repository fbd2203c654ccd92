"""EVALUATION: everything that is measured of a trained method, the same for each.

On the test set, on corrupted and ever noisier versions of its first images, and on images of another kind; each time
as the method answers, and with the temperature that held-out labels ask for (temperature scaling). Of points, on the
test points alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.baselines import scale_temperature
from ibnn.data import (
    KINDS,
    DataSet,
    Folder,
    Images,
    OwnTable,
    Points,
    Split,
    Table,
    corrupt,
    gaussian_mix,
    load,
    salt_and_pepper,
)
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, draws
from ibnn.training.trainable import Trainable

OUTSIDERS = {"fashion-mnist": "mnist", "mnist": "fashion-mnist"}  # images of another kind, of the same shape
SEVERITIES = (1, 3, 5)
GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the mix with Gaussian noise, in normalised space
SALTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # probabilities that a pixel turns black or white
SHIFTED = 300  # test images that are corrupted
BATCH = 250

Damage = Callable[[Tensor, int], Tensor]  # of images and the place of the first


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        result: Scores, curves and the like, as plain data.
        answers: Tensors behind them, for a report.
    """

    result: dict[str, Any]
    answers: dict[str, Tensor]


def evaluate(
    model: Trainable,
    whole: DataSet | Table | OwnTable,
    valid: Images | Points | None,
    *,
    samples: int = 5,
    shifted: int = SHIFTED,
    data_folder: str | Path | None = None,
) -> Evaluation:
    """Measures a trained method on the test images or points of a set.

    Args:
        model: The method.
        whole: The set, of whose test part nothing was chosen by.
        valid: Held-out images or points, for temperature scaling; None leaves it out.
        samples: Draws per component.
        shifted: How many of the test images are corrupted.
        data_folder: Where the images of another kind are; default as `ibnn.data.load`.
    """
    own = float(model.likelihood.temperature)
    temperatures = [own]
    if valid is not None:
        temperatures.append(scale_temperature(model, valid, samples=samples))
        model.likelihood.set_temperature(own)
    if not isinstance(whole, DataSet):
        return _of_points(model, whole.test, temperatures, samples)
    test = whole.test
    measure = _Measure(model, whole, temperatures, samples)
    clean = measure.answers(test)
    part = test.part(torch.arange(min(shifted, len(test.labels))))
    corrupted = {kind: [measure.corrupted(part, kind, severity) for severity in SEVERITIES] for kind in KINDS}
    noisy = {"gaussian": [measure.mixed(part, g) for g in GAMMAS], "salt": [measure.salted(part, p) for p in SALTS]}
    outsider = measure.outsider(shifted * 4, data_folder)
    shown = measure.shown(clean[0])
    results = []
    for index, temperature in enumerate(temperatures):
        reading = _Reading(part.labels, clean[index])
        of_kind = {kind: [severity[index] for severity in severities] for kind, severities in corrupted.items()}
        strange = {f"corrupted {SEVERITIES[-1]}": CategoricalPrediction.cat([a[-1] for a in of_kind.values()])}
        strange |= {name: answers[index] for name, answers in outsider.items()}
        results.append(
            {
                "temperature": temperature,
                "scores": scores(clean[index], test.labels),
                "reliability": reliability(clean[index], test.labels),
                "corrupted": reading.corrupted(of_kind),
                "gaussian": reading.noisy([a[index] for a in noisy["gaussian"]], GAMMAS),
                "salt": reading.noisy([a[index] for a in noisy["salt"]], SALTS),
                "outsiders": {name: reading.outsiders(answer) for name, answer in strange.items()},
            }
        )
        if index == 0:
            ood = {f"ood/{name}/{key}": v for name, answer in strange.items() for key, v in _fields(answer).items()}
    tensors = {"labels": test.labels.contiguous(), **_fields(clean[0]), **ood, **shown}
    return Evaluation(results[0] | ({"tempered": results[1]} if len(results) > 1 else {}), tensors)


def _of_points(model: Trainable, test: Points, temperatures: list[float], samples: int) -> Evaluation:
    """What is measured of test points; the method's own temperature is the first."""
    results: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    drawn = draws(model, test.x, samples=samples, batch_size=BATCH).to(next(model.parameters()).device)
    for temperature in reversed(temperatures):
        answer = model.likelihood.summarise(drawn, temperature).to("cpu")
        found: dict[str, Any] = {"temperature": temperature, "outsiders": {}}
        if isinstance(answer, GaussianPrediction):
            found |= {"scores": regression_scores(answer, test.y)}
            named = ("mean", "aleatoric", "between", "within")
            tensors = {"targets": test.y} | {name: getattr(answer, name).contiguous() for name in named}
        else:
            assert isinstance(answer, CategoricalPrediction)
            found |= {"scores": scores(answer, test.y), "reliability": reliability(answer, test.y)}
            tensors = {"labels": test.y, **_fields(answer)}
        results.insert(0, found)
    return Evaluation(results[0] | ({"tempered": results[1]} if len(results) > 1 else {}), tensors)


class _Measure:
    """Answers of a method at several temperatures; the draws are made once."""

    def __init__(self, model: Trainable, whole: DataSet, temperatures: list[float], samples: int) -> None:
        self.model, self.whole, self.temperatures, self.samples = model, whole, temperatures, samples
        self.device = next(model.parameters()).device
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (whole.mean, whole.std))

    def answers(
        self, images: Split | Folder, *, damage: Damage | None = None, noise: Damage | None = None
    ) -> list[CategoricalPrediction]:
        """For images, damaged as pixels in [0, 1] or noisy as what the network sees; a batch at a time."""
        parts: list[list[Any]] = [[] for _ in self.temperatures]
        for rows in torch.arange(len(images.labels)).split(BATCH):
            x, first = images.rows(rows).images.float() / 255, int(rows[0])
            x = ((damage(x, first) if damage else x) - self.mean) / self.std
            drawn = self._draws(noise(x, first) if noise else x).unflatten(0, (self.model.components, -1))
            for temperature, answers in zip(self.temperatures, parts, strict=True):
                answers.append(self.model.likelihood.summarise(drawn, temperature).to("cpu"))
        return [CategoricalPrediction.cat(answers) for answers in parts]

    @torch.no_grad()
    def _draws(self, x: Tensor) -> Tensor:
        return self.model.draw_logits(x.to(self.device), self.samples, 0)

    def corrupted(self, part: Split | Folder, kind: str, severity: int) -> list[CategoricalPrediction]:
        return self.answers(part, damage=lambda x, first: corrupt(x, kind, severity, first=first))

    def mixed(self, part: Split | Folder, gamma: float) -> list[CategoricalPrediction]:
        return self.answers(part, noise=lambda x, first: gaussian_mix(x, gamma, first=first))

    def salted(self, part: Split | Folder, p: float) -> list[CategoricalPrediction]:
        return self.answers(part, damage=lambda x, first: salt_and_pepper(x, p, first=first))

    def outsider(self, rows: int, folder: str | Path | None) -> dict[str, list[CategoricalPrediction]]:
        """Of another kind of images, if there is one and it is on disk."""
        name = OUTSIDERS.get(self.whole.name)
        if name is None:
            return {}
        try:
            strangers = load(name, folder).test
        except FileNotFoundError:
            return {}
        return {name: self.answers(strangers.part(torch.arange(min(rows, len(strangers.labels)))))}

    def shown(self, clean: CategoricalPrediction, each: int = 8) -> dict[str, Tensor]:
        """The least and the most certain images with all their draws."""
        order = clean.total.argsort(descending=True)
        rows = torch.cat([order[:each], order[-each:]])
        images = self.whole.test.rows(rows).images.contiguous()
        draws = self._draws((images.float() / 255 - self.mean) / self.std) / self.temperatures[0]
        probs = draws.softmax(2).movedim(0, 1).contiguous().cpu()  # (images, draws, classes)
        return {"shown/rows": rows, "shown/images": images, "shown/draws": probs}


class _Reading:
    """Numbers from answers at one temperature."""

    def __init__(self, shifted: Tensor, clean: CategoricalPrediction) -> None:
        self.shifted, self.clean = shifted, clean

    def corrupted(self, answers: dict[str, list[CategoricalPrediction]]) -> dict[str, Any]:
        """Scores of every kind over all severities, and of all together."""
        read = {kind: self._pooled(parts) for kind, parts in answers.items()}
        return read | {"all": self._pooled([part for parts in answers.values() for part in parts])}

    def _pooled(self, parts: list[CategoricalPrediction]) -> dict[str, float]:
        return scores(CategoricalPrediction.cat(parts), self.shifted.repeat(len(parts)))

    def noisy(self, answers: list[CategoricalPrediction], levels: Iterable[float]) -> list[dict[str, float]]:
        """How the entropies grow with the noise."""
        return [
            {"level": level}
            | {name: round(float(getattr(a, name).mean()), 5) for name in ("total", "aleatoric", "epistemic")}
            | {"error": metrics.error(a.probs, self.shifted)}
            for level, a in zip(levels, answers, strict=True)
        ]

    def outsiders(self, strange: CategoricalPrediction) -> dict[str, float]:
        """AUROC of telling them from test images, by three scores."""
        return {
            name: metrics.auroc(a, b) for (name, a), (_, b) in zip(_doubts(self.clean), _doubts(strange), strict=True)
        }


def _doubts(answer: CategoricalPrediction) -> Iterator[tuple[str, Tensor]]:
    yield "max_prob", 1 - answer.probs.amax(1)
    yield "total", answer.total
    yield "epistemic", answer.epistemic


def scores(answer: CategoricalPrediction, labels: Tensor) -> dict[str, float]:
    """Error, NLL, ECE, Brier score and the area under the risk-coverage curve."""
    confidence, predicted = answer.probs.max(1)
    return {
        "error": metrics.error(answer.probs, labels),
        "nll": metrics.nll(answer.log_probs, labels),
        "ece": metrics.ece(answer.probs, labels),
        "brier": metrics.brier(answer.probs, labels),
        "aurc": metrics.risk_coverage(1 - confidence, predicted == labels).area,
    }


def regression_scores(answer: GaussianPrediction, targets: Tensor) -> dict[str, float]:
    """NLL, root mean squared error, and the share of targets inside the 90 % interval."""
    low, high = answer.interval(0.9)
    return {
        "nll": float(-answer.log_prob(targets).mean()),
        "rmse": float((answer.mean - targets).square().mean().sqrt()),
        "coverage": float(((low <= targets) & (targets <= high)).float().mean()),
    }


def reliability(answer: CategoricalPrediction, labels: Tensor) -> dict[str, list[float]]:
    """Confidence, accuracy and count of every bin that is not empty."""
    curve = metrics.reliability_curve(answer.probs, labels)
    kept = curve.count > 0
    named = {"confidence": curve.confidence, "accuracy": curve.accuracy, "count": curve.count}
    return {name: [round(float(v), 5) for v in values[kept]] for name, values in named.items()}


def _fields(answer: CategoricalPrediction) -> dict[str, Tensor]:
    return {name: getattr(answer, name).contiguous() for name in ("probs", "aleatoric", "between", "within")}
