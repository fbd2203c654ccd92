"""EVALUATION: everything that is measured of a trained classifier of images, the same for every method.

On the test set, on corrupted and ever noisier versions of its first images, and on images of another kind; each time
as the method answers, and with the temperature that held-out labels ask for (temperature scaling).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.baselines import scale_temperature
from ibnn.data import KINDS, DataSet, Images, Split, corrupt, gaussian_mix, load, salt_and_pepper
from ibnn.inputs import evaluating
from ibnn.prediction import CategoricalPrediction
from ibnn.training import Trainable

OUTSIDERS = {"fashion-mnist": "mnist", "mnist": "fashion-mnist"}  # images of another kind, of the same shape
SEVERITIES = (1, 3, 5)
GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the mix with Gaussian noise, in normalised space
SALTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # probabilities that a pixel turns black or white
SHIFTED = 300  # test images that are corrupted
BATCH = 250


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
    model: Trainable, test: Split, valid: Images | None, whole: DataSet, *, samples: int = 5, shifted: int = SHIFTED
) -> Evaluation:
    """Measures a trained method on a test set.

    Args:
        model: The method.
        test: Images and labels that nothing was chosen by.
        valid: Held-out images, for temperature scaling; None leaves it out.
        whole: The set they are of, which knows how to normalise.
        samples: Draws per component.
        shifted: How many of the test images are corrupted.
    """
    own, temperatures = float(model.likelihood.temperature), [float(model.likelihood.temperature)]
    if valid is not None:
        temperatures.append(scale_temperature(model, valid, samples=samples))
    measure = _Measure(model, whole, temperatures, samples)
    try:
        clean = measure.answers(pixels(test.images))
        part = Split(test.images[:shifted], test.labels[:shifted])
        corrupted = {k: {s: measure.corrupted(part, k, s) for s in SEVERITIES} for k in KINDS}
        noisy = {"gaussian": [measure.mixed(part, g) for g in GAMMAS], "salt": [measure.salted(part, p) for p in SALTS]}
        outsider = measure.outsider(shifted * 4)
    finally:
        model.likelihood.temperature.fill_(own)
    results = []
    for index in range(len(temperatures)):
        reading = _Reading(test.labels, part.labels, clean[index])
        result = {"temperature": temperatures[index], "scores": scores(clean[index], test.labels)}
        result |= {"reliability": reliability(clean[index], test.labels)}
        result |= {
            "corrupted": reading.corrupted({k: {s: a[index] for s, a in v.items()} for k, v in corrupted.items()})
        }
        result |= {
            n: reading.noisy([a[index] for a in answers], levels)
            for (n, answers), levels in zip(noisy.items(), (GAMMAS, SALTS), strict=True)
        }
        strange = {
            f"corrupted {SEVERITIES[-1]}": CategoricalPrediction.cat(
                [v[SEVERITIES[-1]][index] for v in corrupted.values()]
            )
        }
        strange |= {name: answers[index] for name, answers in outsider.items()}
        results.append(result | {"outsiders": {name: reading.outsiders(answer) for name, answer in strange.items()}})
        if index == 0:
            tensors = _tensors(clean[0], test.labels) | {
                f"ood/{name}/{key}": value for name, answer in strange.items() for key, value in _fields(answer).items()
            }
    tensors |= measure.shown(test, clean[0])
    return Evaluation(results[0] | ({"tempered": results[1]} if len(results) > 1 else {}), tensors)


class _Measure:
    """Answers of a method at several temperatures; the draws are made once."""

    def __init__(self, model: Trainable, whole: DataSet, temperatures: list[float], samples: int) -> None:
        self.model, self.whole, self.temperatures, self.samples = model, whole, temperatures, samples
        self.device = next(model.parameters()).device

    def answers(self, images: Tensor, *, normal: bool = False) -> list[CategoricalPrediction]:
        """For images in [0, 1], or normalised ones."""
        parts: list[list[Any]] = [[] for _ in self.temperatures]
        for x in images.split(BATCH):
            draws = self._draws(x if normal else self._normalised(x)).unflatten(0, (self.model.components, -1))
            for temperature, answers in zip(self.temperatures, parts, strict=True):
                self.model.likelihood.temperature.fill_(temperature)
                answers.append(self.model.likelihood.summarise(draws).to("cpu"))
        return [CategoricalPrediction.cat(answers) for answers in parts]

    def _normalised(self, x: Tensor) -> Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.whole.mean, self.whole.std))
        return (x - mean) / std

    @torch.no_grad()
    def _draws(self, x: Tensor) -> Tensor:
        with evaluating(self.model):
            return self.model.draw_logits(x.to(self.device), self.samples, 0)

    def corrupted(self, part: Split, kind: str, severity: int) -> list[CategoricalPrediction]:
        return self.answers(corrupt(pixels(part.images), kind, severity))

    def mixed(self, part: Split, gamma: float) -> list[CategoricalPrediction]:
        return self.answers(gaussian_mix(self._normalised(pixels(part.images)), gamma), normal=True)

    def salted(self, part: Split, p: float) -> list[CategoricalPrediction]:
        return self.answers(salt_and_pepper(pixels(part.images), p))

    def outsider(self, rows: int) -> dict[str, list[CategoricalPrediction]]:
        """Of another kind of images, if there is one and it is on disk."""
        name = OUTSIDERS.get(self.whole.name)
        if name is None:
            return {}
        try:
            strangers = load(name).test.images[:rows]
        except FileNotFoundError:
            return {}
        return {name: self.answers(pixels(strangers))}

    def shown(self, test: Split, clean: CategoricalPrediction, each: int = 8) -> dict[str, Tensor]:
        """The least and the most certain images with all their draws."""
        order = clean.total.argsort(descending=True)
        rows = torch.cat([order[:each], order[-each:]])
        draws = self._draws(self._normalised(pixels(test.images[rows]))) / self.temperatures[0]
        return {
            "shown/rows": rows,
            "shown/images": test.images[rows].contiguous(),
            "shown/draws": draws.softmax(2).movedim(0, 1).contiguous().cpu(),
        }


class _Reading:
    """Numbers from answers at one temperature."""

    def __init__(self, labels: Tensor, shifted: Tensor, clean: CategoricalPrediction) -> None:
        self.labels, self.shifted, self.clean = labels, shifted, clean

    def corrupted(self, answers: dict[str, dict[int, CategoricalPrediction]]) -> dict[str, Any]:
        """Scores of every kind over all severities, and of all together."""
        kinds = {kind: list(of_kind.values()) for kind, of_kind in answers.items()}
        read = {kind: self._pooled(parts) for kind, parts in kinds.items()}
        return read | {"all": self._pooled([part for parts in kinds.values() for part in parts])}

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


def pixels(images: Tensor) -> Tensor:
    """Bytes as numbers in [0, 1]."""
    return images.float() / 255


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


def reliability(answer: CategoricalPrediction, labels: Tensor) -> dict[str, list[float]]:
    """Confidence, accuracy and count of every bin that is not empty."""
    curve = metrics.reliability_curve(answer.probs, labels)
    kept = curve.count > 0
    named = {"confidence": curve.confidence, "accuracy": curve.accuracy, "count": curve.count}
    return {name: [round(float(v), 5) for v in values[kept]] for name, values in named.items()}


def _fields(answer: CategoricalPrediction) -> dict[str, Tensor]:
    return {name: getattr(answer, name).contiguous() for name in ("probs", "aleatoric", "between", "within")}


def _tensors(answer: CategoricalPrediction, labels: Tensor) -> dict[str, Tensor]:
    return {"labels": labels.contiguous(), **_fields(answer)}
