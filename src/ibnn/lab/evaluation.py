"""EVALUATION: everything that is measured of a trained method, the same for each.

On the test set, on corrupted and ever noisier versions of its first images, and on images of another kind; each time
as the method answers, and with the temperature that held-out labels ask for (temperature scaling). For points, on the
test points alone. Draws are made once and read at both temperatures.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn import data, metrics
from ibnn.baselines.plain import find_temperature
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, Prediction, draws
from ibnn.training.trainable import Trainable

OUTSIDERS = {"fashion-mnist": "mnist", "mnist": "fashion-mnist"}  # images of another kind, of the same shape
SEVERITIES = (1, 3, 5)
GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the mix with Gaussian noise, in normalised space
SALTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # probabilities that a pixel turns black or white
SHIFTED = 300  # test images that are corrupted
SHOWN = 8  # of the least certain test images, and of the most certain ones
BATCH = 250

Damage = Callable[..., Tensor]  # of images, and by keyword the place of the first


@dataclass(frozen=True)
class Evaluation:
    """What was measured."""

    result: dict[str, Any]  # scores, curves and the like, as plain data
    answers: dict[str, Tensor]  # tensors behind them, for a report


def evaluate(
    model: Trainable,
    whole: data.DataSet | data.Table | data.OwnTable,
    valid: data.Images | data.Points | None,
    *,
    samples: int = 5,
    shifted: int = SHIFTED,
    data_folder: str | Path | None = None,
) -> Evaluation:
    """Measures a trained method on the test images or points of a set.

    Args:
        model: The method.
        whole: Data set whose test split informed no choice.
        valid: Held-out images or points, for temperature scaling; None leaves it out.
        samples: Draws per component.
        shifted: How many of the test images are corrupted.
        data_folder: Where the images of another kind are; default as `ibnn.data.load`.
    """
    own = float(model.likelihood.temperature)
    scaled = own if valid is None else find_temperature(model, valid, samples=samples)
    answers = _Answers(model, samples, (own, scaled))
    if isinstance(whole, data.DataSet):
        measure: _Images | _Points = _Images(answers, whole, shifted, data_folder)
    else:
        measure = _Points(answers, whole.test)
    tempered = {} if valid is None else {"tempered": measure.result(scaled)}
    return Evaluation(measure.result(own) | tempered, measure.tensors(own))


@dataclass(frozen=True)
class _Answers:
    """Answers by temperature; the draws are made once."""

    model: Trainable
    samples: int
    temperatures: tuple[float, ...]

    @torch.no_grad()
    def draw_logits(self, x: Tensor) -> Tensor:
        return self.model.draw_logits(x.to(next(self.model.parameters()).device), self.samples, 0)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> dict[float, Any]:
        drawn = draws(self.model, x.to(next(self.model.parameters()).device), samples=self.samples, batch_size=BATCH)
        return {t: self.model.likelihood.summarise(drawn, t).to("cpu") for t in self.temperatures}


class _Points:
    """Answers for test points, and what is measured of them."""

    def __init__(self, answers: _Answers, test: data.Points) -> None:
        self.answers, self.test = answers(test.x), test

    def result(self, temperature: float) -> dict[str, Any]:
        """Returns everything that is measured at a temperature."""
        answer, y = self.answers[temperature], self.test.y
        found = {"temperature": temperature, "outsiders": {}}
        if isinstance(answer, GaussianPrediction):
            scores = {"nll": float(-answer.log_prob(y).mean()), "rmse": metrics.rmse(answer.mean, y)}
            return found | {"scores": scores | {"coverage": metrics.coverage(*answer.interval(0.9), y)}}
        return found | {"scores": _scores(answer, y), "reliability": _reliability(answer, y)}

    def tensors(self, temperature: float) -> dict[str, Tensor]:
        """Returns the answers at a temperature."""
        answer = self.answers[temperature]
        known = "targets" if isinstance(answer, GaussianPrediction) else "labels"
        return {known: self.test.y, **_fields(answer)}


class _Images:
    """Answers for test images, damaged images and images of another kind, and what is measured of them."""

    def __init__(self, answers: _Answers, whole: data.DataSet, shifted: int, data_folder: str | Path | None) -> None:
        self.answers, self.whole, test = answers, whole, whole.test
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (whole.mean, whole.std))
        self.part = part = test.part(torch.arange(min(shifted, len(test.labels))))
        self.clean = self._answered(test)
        damages = {kind: [partial(data.corrupt, kind=kind, severity=s) for s in SEVERITIES] for kind in data.KINDS}
        self.corrupted = {kind: [self._answered(part, damage=damage) for damage in of] for kind, of in damages.items()}
        self.gaussian = [self._answered(part, noise=partial(data.gaussian_mix, gamma=gamma)) for gamma in GAMMAS]
        self.salt = [self._answered(part, damage=partial(data.salt_and_pepper, p=p)) for p in SALTS]
        self.outsiders = self._outsiders(shifted * 4, data_folder)

    def _answered(
        self, images: data.Split | data.Folder, *, damage: Damage | None = None, noise: Damage | None = None
    ) -> dict[float, CategoricalPrediction]:
        """Returns answers for images damaged as pixels in [0, 1] or noisy as what the network sees."""
        parts = []
        for rows in torch.arange(len(images.labels)).split(BATCH):
            x, first = images.rows(rows).images.float() / 255, int(rows[0])
            x = ((damage(x, first=first) if damage else x) - self.mean) / self.std
            parts.append(self.answers(noise(x, first=first) if noise else x))
        return {t: CategoricalPrediction.cat([part[t] for part in parts]) for t in self.answers.temperatures}

    def _outsiders(self, rows: int, folder: str | Path | None) -> dict[str, dict[float, CategoricalPrediction]]:
        """Returns answers for another kind of images, if there is one and it is on disk."""
        if (name := OUTSIDERS.get(self.whole.name)) is None:
            return {}
        try:
            test = data.load(name, folder).test
        except FileNotFoundError:
            return {}
        return {name: self._answered(test.part(torch.arange(min(rows, len(test.labels)))))}

    def _strange(self, t: float) -> dict[str, CategoricalPrediction]:
        """Returns the answers for what the method was not trained on."""
        worst = CategoricalPrediction.cat([of[-1][t] for of in self.corrupted.values()])
        return {f"corrupted {SEVERITIES[-1]}": worst} | {name: of[t] for name, of in self.outsiders.items()}

    def result(self, temperature: float) -> dict[str, Any]:
        """Returns everything that is measured at a temperature."""
        clean, labels = self.clean[temperature], self.whole.test.labels
        corrupted = {kind: [answers[temperature] for answers in of] for kind, of in self.corrupted.items()}
        corrupted["all"] = [answer for of in corrupted.values() for answer in of]
        doubts = _doubts(clean)
        return {
            "temperature": temperature,
            "scores": _scores(clean, labels),
            "reliability": _reliability(clean, labels),
            "corrupted": {kind: self._pooled(answers) for kind, answers in corrupted.items()},
            "gaussian": self._noisy([answers[temperature] for answers in self.gaussian], GAMMAS),
            "salt": self._noisy([answers[temperature] for answers in self.salt], SALTS),
            "outsiders": {
                name: {score: metrics.auroc(doubts[score], own) for score, own in _doubts(answer).items()}
                for name, answer in self._strange(temperature).items()
            },
        }

    def _pooled(self, answers: list[CategoricalPrediction]) -> dict[str, float]:
        return _scores(CategoricalPrediction.cat(answers), self.part.labels.repeat(len(answers)))

    def _noisy(self, answers: list[CategoricalPrediction], levels: Iterable[float]) -> list[dict[str, float]]:
        """Returns how the entropies grow with the noise."""
        return [
            {"level": level}
            | {name: round(float(getattr(a, name).mean()), 5) for name in ("total", "aleatoric", "epistemic")}
            | {"error": metrics.error(a.probs, self.part.labels)}
            for level, a in zip(levels, answers, strict=True)
        ]

    def tensors(self, temperature: float) -> dict[str, Tensor]:
        """Returns the answers at a temperature, and the least and the most certain images with all their draws."""
        clean = self.clean[temperature]
        order = clean.total.argsort(descending=True)
        rows = torch.cat([order[:SHOWN], order[-SHOWN:]])
        images = self.whole.test.rows(rows).images.contiguous()
        drawn = self.answers.draw_logits((images.float() / 255 - self.mean) / self.std)
        probs = (drawn / temperature).softmax(2).movedim(0, 1).contiguous().cpu()  # (images, draws, classes)
        strange = self._strange(temperature).items()
        ood = {f"ood/{name}/{key}": values for name, answer in strange for key, values in _fields(answer).items()}
        shown = {"shown/rows": rows, "shown/images": images, "shown/draws": probs}
        return {"labels": self.whole.test.labels.contiguous(), **_fields(clean), **ood, **shown}


def _doubts(answer: CategoricalPrediction) -> dict[str, Tensor]:
    """Returns scores that grow with uncertainty."""
    return {"max_prob": 1 - answer.probs.amax(1), "total": answer.total, "epistemic": answer.epistemic}


def _scores(answer: CategoricalPrediction, labels: Tensor) -> dict[str, float]:
    return metrics.scores(answer.probs, answer.log_probs, labels)


def _reliability(answer: CategoricalPrediction, labels: Tensor) -> dict[str, list[float]]:
    """Returns confidence, accuracy and count of every bin that is not empty."""
    curve = metrics.reliability_curve(answer.probs, labels)
    kept = curve.count > 0
    names = ("confidence", "accuracy", "count")
    return {name: [round(float(value), 5) for value in getattr(curve, name)[kept]] for name in names}


def _fields(answer: Prediction) -> dict[str, Tensor]:
    first = "mean" if isinstance(answer, GaussianPrediction) else "probs"
    return {name: getattr(answer, name).contiguous() for name in (first, "aleatoric", "between", "within")}
