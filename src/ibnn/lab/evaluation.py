"""Everything that is measured of a trained method, the same for each.

On the test set, on corrupted and ever noisier versions of its first images, and on images of another kind; each time
as the method answers, and with the temperature that held-out labels ask for (temperature scaling). For points, on the
test points alone. Draws are made once and read at both temperatures. If the method can tell novel inputs, the p-values
of novelty are measured, too.
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
from ibnn.novelty import Novelty
from ibnn.novelty import measure as novelty_of
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, Prediction, draws
from ibnn.training.trainable import Trainable

OUTSIDERS = {"fashion-mnist": "mnist", "mnist": "fashion-mnist"}  # images of another kind, of the same shape
SEVERITIES = (1, 3, 5)
GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the mix with Gaussian noise, in normalised space
SALTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # probabilities that a pixel turns black or white
SHIFTED = 300  # test images that are corrupted
SHOWN = 8  # of the least certain test images, of the most certain ones, and of the most novel inputs of each kind
MOST = 1e9  # what is stored of a score of novelty that is higher still
LEVELS = (0.01, 0.05)  # p-values from which down inputs are called novel
BATCH = 250

Damage = Callable[..., Tensor]  # of images, and by keyword the place of the first
Images = data.Split | data.Folder


@dataclass(frozen=True)
class Evaluation:
    """What was measured."""

    result: dict[str, Any]  # scores, curves and the like, as plain data
    answers: dict[str, Tensor]  # tensors behind them, for a report


def evaluate(
    model: Trainable,
    whole: data.DataSet | data.Table | data.FileTable,
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
    novelty = _novelty(measure.kinds())
    return Evaluation(measure.result(own) | tempered | novelty, measure.tensors(own))


def scores_of(model: Trainable, known: data.Images | data.Points, *, samples: int = 5) -> dict[str, float]:
    """Returns the scores of a trained method on labelled images or points."""
    x, y = known.__getitems__(list(range(len(known))))
    own = float(model.likelihood.temperature)
    found: dict[str, float] = _Points(_Answers(model, samples, (own,)), data.Points(x, y)).result(own)["scores"]
    return found


@dataclass(frozen=True)
class _Answered:
    """Answers for some inputs by temperature, and how novel the inputs are, where the method can tell."""

    at: dict[float, Any]
    novelty: Novelty | None

    @classmethod
    def cat(cls, parts: "list[_Answered]") -> "_Answered":
        """Joins the answers for several lots of inputs."""
        at = {t: type(answer).cat([part.at[t] for part in parts]) for t, answer in parts[0].at.items()}
        known = [part.novelty for part in parts if part.novelty is not None]
        return cls(at, Novelty(*map(torch.cat, zip(*known, strict=True))) if known else None)

    def tensors(self, temperature: float) -> dict[str, Tensor]:
        """Returns what a run stores of them."""
        known = {} if self.novelty is None else {"p_value": self.novelty.p_value, "score": self.novelty.score}
        return _fields(self.at[temperature]) | known

    def doubts(self, temperature: float) -> dict[str, Tensor]:
        """Returns scores that grow with uncertainty."""
        answer: CategoricalPrediction = self.at[temperature]
        known = {} if self.novelty is None else {"novelty": self.novelty.score}
        return {"max_prob": 1 - answer.probs.amax(1), "total": answer.total, "epistemic": answer.epistemic} | known

    def most_novel(self) -> Tensor:
        """Returns the rows of the most novel inputs, the most novel first; none where novelty is not known."""
        return (
            torch.zeros(0).long()
            if self.novelty is None
            else self.novelty.score.argsort(descending=True, stable=True)[:SHOWN]
        )


def _novelty(kinds: dict[str, _Answered]) -> dict[str, Any]:
    """Returns the share of every kind of inputs that is called novel: of test inputs, that of false alarms."""
    p_values = {name: of.novelty.p_value for name, of in kinds.items() if of.novelty is not None}
    shares = {
        name: {f"{level}": round(float((p <= level).double().mean()), 5) for level in LEVELS}
        for name, p in p_values.items()
    }
    return {"novelty": shares} if shares else {}


def _observed(model: Any, x: Tensor) -> Novelty | None:
    """Returns how novel the inputs of a batch are, where the method can tell."""
    if getattr(model, "reference", None) is None:
        return None
    found = novelty_of(model, x)
    return Novelty(found.p_value.cpu(), found.score.clamp_max(MOST).cpu())


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
    def __call__(self, x: Tensor) -> _Answered:
        return _Answered.cat([self._batch(part.to(next(self.model.parameters()).device)) for part in x.split(BATCH)])

    def _batch(self, x: Tensor) -> _Answered:
        drawn = draws(self.model, x, samples=self.samples, batch_size=BATCH)
        at = {t: self.model.likelihood.summarise(drawn, t).to("cpu") for t in self.temperatures}
        return _Answered(at, _observed(self.model, x))


class _Points:
    """Answers for test points, and what is measured of them."""

    def __init__(self, answers: _Answers, test: data.Points) -> None:
        self.answered, self.test = answers(test.x), test

    def kinds(self) -> dict[str, _Answered]:
        """Returns the answers for every kind of inputs."""
        return {"test": self.answered}

    def result(self, temperature: float) -> dict[str, Any]:
        """Returns everything that is measured at a temperature."""
        answer, y = self.answered.at[temperature], self.test.y
        found = {"temperature": temperature, "outsiders": {}}
        if isinstance(answer, GaussianPrediction):
            scores = {"nll": float(-answer.log_prob(y).mean()), "rmse": metrics.rmse(answer.mean, y)}
            return found | {"scores": scores | {"coverage": metrics.coverage(*answer.interval(0.9), y)}}
        return found | {"scores": _scores(answer, y), "reliability": _reliability(answer, y)}

    def tensors(self, temperature: float) -> dict[str, Tensor]:
        """Returns the answers at a temperature."""
        known = "targets" if isinstance(self.answered.at[temperature], GaussianPrediction) else "labels"
        novel = {} if self.answered.novelty is None else {"novel/test/rows": self.answered.most_novel()}
        return {known: self.test.y, **self.answered.tensors(temperature), **novel}


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
        others = self._outsiders(shifted * 4, data_folder)
        worst = f"corrupted {SEVERITIES[-1]}"
        self.strange = {worst: _Answered.cat([of[-1] for of in self.corrupted.values()])}
        self.strange |= {name: self._answered(images) for name, images in others.items()}
        self.lots: dict[str, list[tuple[Images, Damage | None]]] = {"test": [(test, None)]}
        self.lots |= {worst: [(part, of[-1]) for of in damages.values()]}
        self.lots |= {name: [(images, None)] for name, images in others.items()}

    def _pixels(self, images: Images, rows: Tensor, damage: Damage | None) -> Tensor:
        """Returns consecutive images with values in [0, 1]."""
        x = images.rows(rows).images.float() / 255
        return damage(x, first=int(rows[0])) if damage else x

    def _answered(self, images: Images, *, damage: Damage | None = None, noise: Damage | None = None) -> _Answered:
        """Returns answers for images damaged as pixels in [0, 1] or noisy as what the network sees."""
        parts = []
        for rows in torch.arange(len(images.labels)).split(BATCH):
            x = (self._pixels(images, rows, damage) - self.mean) / self.std
            parts.append(self.answers(noise(x, first=int(rows[0])) if noise else x))
        return _Answered.cat(parts)

    def _outsiders(self, rows: int, folder: str | Path | None) -> dict[str, Images]:
        """Returns another kind of images, if there is one and it is on disk."""
        if (name := OUTSIDERS.get(self.whole.name)) is None:
            return {}
        try:
            test = data.load(name, folder).test
        except FileNotFoundError:
            return {}
        return {name: test.part(torch.arange(min(rows, len(test.labels))))}

    def kinds(self) -> dict[str, _Answered]:
        """Returns the answers for the test images, and for those that the method was not trained on."""
        return {"test": self.clean} | self.strange

    def result(self, temperature: float) -> dict[str, Any]:
        """Returns everything that is measured at a temperature."""
        clean, labels = self.clean.at[temperature], self.whole.test.labels
        doubts = self.clean.doubts(temperature)
        return {
            "temperature": temperature,
            **self._labelled(temperature),
            "reliability": _reliability(clean, labels),
            "gaussian": self._noisy([answered.at[temperature] for answered in self.gaussian], GAMMAS),
            "salt": self._noisy([answered.at[temperature] for answered in self.salt], SALTS),
            "outsiders": {
                name: {score: metrics.auroc(doubts[score], own) for score, own in of.doubts(temperature).items()}
                for name, of in self.strange.items()
            },
        }

    def _labelled(self, temperature: float) -> dict[str, Any]:
        """Returns the scores of test images, and of corrupted ones by kind and of all kinds."""
        clean = self.clean.at[temperature]
        corrupted = {kind: [answered.at[temperature] for answered in of] for kind, of in self.corrupted.items()}
        corrupted["all"] = [answer for of in corrupted.values() for answer in of]
        pooled = {kind: self._pooled(answers) for kind, answers in corrupted.items()}
        return {"scores": _scores(clean, self.whole.test.labels), "corrupted": pooled}

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
        """Returns the answers at a temperature, and the least and most certain images, and the most novel ones."""
        order = self.clean.at[temperature].total.argsort(descending=True)
        rows = torch.cat([order[:SHOWN], order[-SHOWN:]])
        images = self.whole.test.rows(rows).images.contiguous()
        drawn = self.answers.draw_logits((images.float() / 255 - self.mean) / self.std)
        probs = (drawn / temperature).softmax(2).movedim(0, 1).contiguous().cpu()  # (images, draws, classes)
        strange = self.strange.items()
        ood = {f"ood/{name}/{key}": values for name, of in strange for key, values in of.tensors(temperature).items()}
        shown = {"shown/rows": rows, "shown/images": images, "shown/draws": probs}
        labels = self.whole.test.labels.contiguous()
        return {"labels": labels, **self.clean.tensors(temperature), **ood, **shown, **self._novel()}

    def _novel(self) -> dict[str, Tensor]:
        """Returns the most novel images of every kind, and their numbers."""
        found: dict[str, Tensor] = {}
        for name, answered in self.kinds().items():
            if answered.novelty is None:
                continue
            rows, lots = answered.most_novel(), self.lots[name]
            length = len(lots[0][0].labels)
            images = [
                self._pixels(lots[r // length][0], torch.tensor([r % length]), lots[r // length][1])
                for r in rows.tolist()
            ]
            found |= {f"novel/{name}/rows": rows, f"novel/{name}/images": (255 * torch.cat(images)).round().byte()}
        return found


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
