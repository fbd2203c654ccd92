"""Measures a trained method, whichever it is, on test data.

Images are measured on the test set, on corrupted and ever noisier versions of its first images, and on images of
another kind; points on the test points alone. Each is measured at the method's own temperature and at the one that
minimises the held-out NLL (temperature scaling), from the same draws. A method that can tell novel inputs is also
measured by its p-values of novelty.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn import data, metrics
from ibnn.baselines.plain import find_temperature
from ibnn.novelty import Novelty, measure
from ibnn.novelty.measure import annotated
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, check_fallback, draws
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


class Evaluation(NamedTuple):
    """What was measured."""

    result: dict[str, Any]  # scores, curves and the like, as plain data
    answers: dict[str, Tensor]  # tensors behind them, for a report


def evaluate(
    model: Trainable,
    whole: data.DataSet | data.Table | data.FileTable,
    valid: data.Images | data.Points | None,
    *,
    samples: int = 5,
    fallback: float | None = None,
    shifted: int = SHIFTED,
    data_folder: str | Path | None = None,
) -> Evaluation:
    """Measures a trained method on the test images or points of a set.

    Args:
        model: The method.
        whole: Data set whose test split informed no choice.
        valid: Held-out images or points, for temperature scaling; None leaves it out.
        samples: Draws per component.
        fallback: p-value of novelty below which answers are mixed with the base rates, as in `predict`.
        shifted: How many of the test images are corrupted.
        data_folder: Where the images of another kind are; default as `ibnn.data.load`.
    """
    own = float(model.likelihood.temperature)
    scaled = own if valid is None else find_temperature(model, valid, samples=samples)
    if fallback is not None:
        check_fallback(fallback, getattr(model, "reference", None))
    method = _Method(model, samples, (own, scaled), fallback)
    if isinstance(whole, data.DataSet):
        measured: _Points = _Images(method, whole, shifted, data_folder)
    else:
        measured = _Points(method.answers(whole.test.x.split(BATCH)), whole.test.y)
    result = measured.result(own)
    if valid is not None:
        result["tempered"] = measured.result(scaled)
    if measured.test.novelty is not None:  # the share of each kind that is called novel; of the test, of false alarms
        result["novelty"] = {
            name: {f"{level}": round(float((kind.novelty.p_value <= level).double().mean()), 5) for level in LEVELS}
            for name, kind in measured.kinds.items()
            if kind.novelty is not None
        }
    return Evaluation(result, measured.tensors(own))


def scores_of(model: Trainable, known: data.Images | data.Points, *, samples: int = 5) -> dict[str, float]:
    """Returns the scores of a trained method on labelled images or points."""
    x, y = known.__getitems__(list(range(len(known))))
    own = float(model.likelihood.temperature)
    return _scores(_Method(model, samples, (own,)).answers(x.split(BATCH)).at[own], y)


def _scores(answer: Any, y: Tensor) -> dict[str, float]:
    if not isinstance(answer, GaussianPrediction):
        return metrics.scores(answer.probs, answer.log_probs, y)
    scores = {"nll": float(-answer.log_prob(y).mean()), "rmse": metrics.rmse(answer.mean, y)}
    return scores | {"coverage": metrics.coverage(*answer.interval(0.9), y)}


class _Answers(NamedTuple):
    """Answers for some inputs by temperature, and how novel the inputs are, where the method can tell."""

    at: dict[float, Any]
    novelty: Novelty | None

    @classmethod
    def cat(cls, parts: "list[_Answers]") -> "_Answers":
        at = {t: type(answer).cat([part.at[t] for part in parts]) for t, answer in parts[0].at.items()}
        known = [part.novelty for part in parts if part.novelty is not None]
        return cls(at, Novelty(*map(torch.cat, zip(*known, strict=True))) if known else None)

    def tensors(self, temperature: float) -> dict[str, Tensor]:
        """Returns what a run stores of them."""
        answer = self.at[temperature]
        first = "mean" if isinstance(answer, GaussianPrediction) else "probs"
        named = {name: getattr(answer, name) for name in (first, "aleatoric", "between", "within")}
        found = {name: part.contiguous() for name, part in named.items() if part is not None}  # one pass has no parts
        return found | ({"p_value": self.novelty.p_value, "score": self.novelty.score} if self.novelty else {})

    def doubts(self, temperature: float) -> dict[str, Tensor]:
        """Returns scores that grow with uncertainty."""
        answer: CategoricalPrediction = self.at[temperature]
        known = {} if self.novelty is None else {"novelty": self.novelty.score}
        return {"max_prob": 1 - answer.probs.amax(1), "total": answer.total, "epistemic": answer.epistemic} | known


class _Method(NamedTuple):
    """A method that answers batches of inputs at several temperatures; the draws are made once."""

    model: Trainable
    samples: int
    temperatures: tuple[float, ...]
    fallback: float | None = None

    @torch.no_grad()
    def answers(self, batches: Iterable[Tensor]) -> _Answers:
        device = next(self.model.parameters()).device
        return _Answers.cat([self._batch(x.to(device)) for x in batches])

    def _batch(self, x: Tensor) -> _Answers:
        drawn, novelty = draws(self.model, x, samples=self.samples, batch_size=BATCH), None
        answers = {t: self.model.likelihood.summarise(drawn, t) for t in self.temperatures}
        if getattr(self.model, "reference", None) is not None:
            found = measure(self.model, x)
            answers = {t: annotated(self.model, answer, found, self.fallback) for t, answer in answers.items()}
            novelty = Novelty(found.p_value.cpu(), found.score.clamp_max(MOST).cpu())
        return _Answers({t: answer.to("cpu") for t, answer in answers.items()}, novelty)


class _Points:
    """Answers for test inputs, and what is measured of them."""

    def __init__(self, test: _Answers, y: Tensor) -> None:
        self.test, self.y = test, y
        self.kinds = {"test": test}  # answers by kind of inputs

    def result(self, temperature: float) -> dict[str, Any]:
        """Returns everything that is measured at a temperature."""
        answer = self.test.at[temperature]
        found = {"temperature": temperature, "scores": _scores(answer, self.y), "outsiders": {}}
        if isinstance(answer, CategoricalPrediction):
            curve = metrics.reliability_curve(answer.probs, self.y)
            columns = {name: getattr(curve, name)[curve.count > 0] for name in ("confidence", "accuracy", "count")}
            found["reliability"] = {n: [round(float(v), 5) for v in values] for n, values in columns.items()}
        return found

    def tensors(self, temperature: float) -> dict[str, Tensor]:
        """Returns the answers at a temperature, and the rows of the most novel inputs of every kind."""
        targets = "targets" if isinstance(self.test.at[temperature], GaussianPrediction) else "labels"
        novel = {
            f"novel/{name}/rows": kind.novelty.score.argsort(descending=True, stable=True)[:SHOWN]
            for name, kind in self.kinds.items()
            if kind.novelty is not None
        }
        return {targets: self.y.contiguous(), **self.test.tensors(temperature), **novel}


class _Images(_Points):
    """Adds answers for damaged images and for images of another kind."""

    def __init__(self, method: _Method, whole: data.DataSet, shifted: int, folder: str | Path | None) -> None:
        self.method, self.whole = method, whole
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (whole.mean, whole.std))
        super().__init__(self._answers(whole.test), whole.test.labels)
        self.part = part = whole.test.part(torch.arange(min(shifted, len(whole.test.labels))))
        damages = {kind: [partial(data.corrupt, kind=kind, severity=s) for s in SEVERITIES] for kind in data.KINDS}
        self.corrupted = {kind: [self._answers(part, damage=d) for d in of] for kind, of in damages.items()}
        self.gaussian = [self._answers(part, noise=partial(data.gaussian_mix, gamma=gamma)) for gamma in GAMMAS]
        self.salt = [self._answers(part, damage=partial(data.salt_and_pepper, p=p)) for p in SALTS]
        worst = f"corrupted {SEVERITIES[-1]}"
        self.kinds[worst] = _Answers.cat([of[-1] for of in self.corrupted.values()])
        self.lots: dict[str, list[tuple[Images, Damage | None]]] = {"test": [(whole.test, None)]}  # behind the kinds
        self.lots[worst] = [(part, of[-1]) for of in damages.values()]
        name = OUTSIDERS.get(whole.name)
        if name and any(row.found for row in data.status(folder) if row.name == name):
            other = data.load(name, folder).test
            other = other.part(torch.arange(min(4 * shifted, len(other.labels))))
            self.kinds[name], self.lots[name] = self._answers(other), [(other, None)]

    def _answers(self, images: Images, *, damage: Damage | None = None, noise: Damage | None = None) -> _Answers:
        """Returns answers for images damaged as pixels in [0, 1] or noisy as what the network sees."""

        def batches() -> Iterator[Tensor]:
            for rows in torch.arange(len(images.labels)).split(BATCH):
                x = (_pixels(images, rows, damage) - self.mean) / self.std
                yield noise(x, first=int(rows[0])) if noise else x

        return self.method.answers(batches())

    def result(self, temperature: float) -> dict[str, Any]:
        corrupted = {kind: [answers.at[temperature] for answers in of] for kind, of in self.corrupted.items()}
        corrupted["all"] = [answer for of in corrupted.values() for answer in of]
        inside, labels = self.test.doubts(temperature), self.part.labels
        return super().result(temperature) | {
            "corrupted": {
                kind: _scores(CategoricalPrediction.cat(of), labels.repeat(len(of))) for kind, of in corrupted.items()
            },
            "gaussian": self._curve(self.gaussian, GAMMAS, temperature),
            "salt": self._curve(self.salt, SALTS, temperature),
            "outsiders": {
                name: {score: metrics.auroc(inside[score], own) for score, own in kind.doubts(temperature).items()}
                for name, kind in self.kinds.items()
                if name != "test"
            },
        }

    def _curve(self, noisy: list[_Answers], levels: Iterable[float], temperature: float) -> list[dict[str, float]]:
        """Returns how the entropies and the error grow with the noise."""
        return [
            {"level": level}
            | {name: round(float(getattr(a, name).mean()), 5) for name in ("total", "aleatoric", "epistemic")}
            | {"error": metrics.error(a.probs, self.part.labels)}
            for level, a in zip(levels, (answers.at[temperature] for answers in noisy), strict=True)
        ]

    def tensors(self, temperature: float) -> dict[str, Tensor]:
        """Returns the answers at a temperature, and the least certain, most certain and most novel images."""
        found = super().tensors(temperature)
        for name, kind in self.kinds.items():
            if name != "test":
                found |= {f"ood/{name}/{key}": values for key, values in kind.tensors(temperature).items()}
            if kind.novelty is not None:
                found[f"novel/{name}/images"] = self._shown(name, found[f"novel/{name}/rows"])
        order = self.test.at[temperature].total.argsort(descending=True)
        rows = torch.cat([order[:SHOWN], order[-SHOWN:]])
        images = self.whole.test.rows(rows).images.contiguous()
        model, x = self.method.model, (images.float() / 255 - self.mean) / self.std
        with torch.no_grad():
            logits = model.draw_logits(x.to(next(model.parameters()).device), self.method.samples, 0)
        probs = (logits / temperature).softmax(2).movedim(0, 1).contiguous().cpu()  # (images, draws, classes)
        return found | {"shown/rows": rows, "shown/images": images, "shown/draws": probs}

    def _shown(self, name: str, rows: Tensor) -> Tensor:
        """Returns rows of a kind of images as bytes; the rows of its lots follow one another."""
        length, pixels = len(self.lots[name][0][0].labels), []
        for row in rows.tolist():
            images, damage = self.lots[name][row // length]
            pixels.append(_pixels(images, torch.tensor([row % length]), damage))
        return (255 * torch.cat(pixels)).round().byte()


def _pixels(images: Images, rows: Tensor, damage: Damage | None) -> Tensor:
    """Returns consecutive images, damaged, with values in [0, 1]."""
    x = images.rows(rows).images.float() / 255
    return damage(x, first=int(rows[0])) if damage else x
