"""Measures a trained method, whichever it is, on test data.

Images are measured on the test set, on corrupted versions of its first images, and on images of another kind; points on
the test points alone. Each is measured at the method's own temperature and at the one that minimises the held-out NLL
(temperature scaling), from the same draws; where the method can tell novel inputs, also by its p-values.
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

# Images of another kind, of the same shape.
OUTSIDERS = {"fashion-mnist": "mnist", "mnist": "fashion-mnist", "cifar-10": "cifar-100", "cifar-100": "cifar-10"}
SEVERITIES = (1, 3, 5)
SHIFTED = 300  # test images that are corrupted
SHOWN = 8  # of the least certain test images, and of the most certain ones
MOST = 1e9  # what is stored of a score of novelty that is higher still
LEVELS = (0.01, 0.05)  # p-values from which down inputs are called novel
DECIDING = 2000  # validation inputs that decide where to abstain
BATCH = 250

Damage = Callable[..., Tensor]  # of images, and by keyword the place of the first
Images = data.Split | data.Folder


class Evaluation(NamedTuple):
    """What was measured."""

    result: dict[str, Any]  # scores, curves and the like, as plain data
    answers: dict[str, Tensor]  # tensors behind them, for a report


class Answers(NamedTuple):
    """Answers for some inputs by temperature, and how novel the inputs are, where the method can tell."""

    at: dict[float, Any]
    novelty: Novelty | None

    @classmethod
    def cat(cls, parts: "list[Answers]") -> "Answers":
        """Returns the answers for all parts."""
        at = {t: type(answer).cat([part.at[t] for part in parts]) for t, answer in parts[0].at.items()}
        known = [part.novelty for part in parts if part.novelty is not None]
        return cls(at, Novelty(*map(torch.cat, zip(*known, strict=True))) if known else None)

    def doubts(self, temperature: float) -> dict[str, Tensor]:
        """Returns scores that grow with uncertainty."""
        answer: CategoricalPrediction = self.at[temperature]
        known = {} if self.novelty is None else {"novelty": self.novelty.score}
        return {"max_prob": 1 - answer.probs.amax(1), "total": answer.total, "epistemic": answer.epistemic} | known


class Method(NamedTuple):
    """A method that answers batches of inputs at several temperatures; the draws are made once."""

    model: Trainable
    samples: int
    temperatures: tuple[float, ...]
    fallback: float | None = None

    @torch.no_grad()
    def answers(self, batches: Iterable[Tensor]) -> Answers:
        """Returns the answers for all batches."""
        device = next(self.model.parameters()).device
        return Answers.cat([self._batch(x.to(device)) for x in batches])

    def _batch(self, x: Tensor) -> Answers:
        drawn, novelty = draws(self.model, x, samples=self.samples, batch_size=BATCH), None
        answers = {t: self.model.likelihood.summarise(drawn, t) for t in self.temperatures}
        if getattr(self.model, "reference", None) is not None:
            found = measure(self.model, x)
            answers = {t: annotated(self.model, answer, found, self.fallback) for t, answer in answers.items()}
            novelty = Novelty(found.p_value.cpu(), found.score.clamp_max(MOST).cpu())
        return Answers({t: answer.to("cpu") for t, answer in answers.items()}, novelty)

    def images(
        self, whole: data.DataSet, images: Images, damage: Damage | None = None, noise: Damage | None = None
    ) -> Answers:
        """Returns answers for images, damaged as pixels in [0, 1] or noisy as what the network takes."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (whole.mean, whole.std))

        def batches() -> Iterator[Tensor]:
            for rows in torch.arange(len(images.labels)).split(BATCH):
                x = images.rows(rows).images.float() / 255
                x = ((damage(x, first=int(rows[0])) if damage else x) - mean) / std
                yield noise(x, first=int(rows[0])) if noise else x

        return self.answers(batches())


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
    """Measures a trained method on the test images or points of a set, which informed no choice.

    `valid` are held-out images or points for temperature scaling; None leaves it out. `shifted` of the test images are
    corrupted, and those of another kind are in the data folder, if anywhere. `fallback` is as in `predict`.
    """
    own = float(model.likelihood.temperature)
    scaled = own if valid is None else find_temperature(model, valid, samples=samples)
    if fallback is not None:
        check_fallback(fallback, getattr(model, "reference", None))
    method = Method(model, samples, (own, scaled), fallback)
    kinds, corrupted, part = dict[str, Answers](), dict[str, list[Answers]](), None
    if isinstance(whole, data.DataSet):
        y, test = whole.test.labels, method.images(whole, whole.test)
        part = whole.test.part(torch.arange(min(shifted, len(y))))
        for kind in data.KINDS:
            damages = [partial(data.corrupt, kind=kind, severity=severity) for severity in SEVERITIES]
            corrupted[kind] = [method.images(whole, part, damage) for damage in damages]
        kinds[f"corrupted {SEVERITIES[-1]}"] = Answers.cat([of[-1] for of in corrupted.values()])
        corrupted["all"] = [answers for of in corrupted.values() for answers in of]
        name = OUTSIDERS.get(whole.name, "")
        if any(row.found for row in data.status(data_folder) if row.name == name):
            other = data.load(name, data_folder).test
            kinds[name] = method.images(whole, other.part(torch.arange(min(4 * shifted, len(other.labels)))))
    else:
        y, test = whole.test.y, method.answers(whole.test.x.split(BATCH))

    def reading(temperature: float) -> dict[str, Any]:
        """Returns everything that is measured at a temperature."""
        answer = test.at[temperature]
        found = {"temperature": temperature, "scores": _scores(answer, y), "outsiders": {}}
        if isinstance(answer, CategoricalPrediction):
            curve = metrics.reliability_curve(answer.probs, y)
            columns = {name: getattr(curve, name)[curve.count > 0] for name in ("confidence", "accuracy", "count")}
            found["reliability"] = {n: [round(float(v), 5) for v in values] for n, values in columns.items()}
        if part is not None:
            found["corrupted"] = {
                kind: _scores(Answers.cat(of).at[temperature], part.labels.repeat(len(of)))
                for kind, of in corrupted.items()
            }
            inside = test.doubts(temperature)
            found["outsiders"] = {
                name: {score: metrics.auroc(inside[score], own) for score, own in kind.doubts(temperature).items()}
                for name, kind in kinds.items()
            }
        return found

    result = reading(own)
    if valid is not None:
        result["tempered"] = reading(scaled)
    if test.novelty is not None:  # the share of each kind that is called novel; of the test, of false alarms
        result["novelty"] = {
            name: {f"{level}": round(float((kind.novelty.p_value <= level).double().mean()), 5) for level in LEVELS}
            for name, kind in {"test": test, **kinds}.items()
            if kind.novelty is not None
        }
    stored = _stored(whole, test, y, own)
    if valid is not None and isinstance(test.at[own], CategoricalPrediction):  # decide where to abstain
        x, labels = valid.__getitems__(held_out_rows(len(valid)))
        held = method.answers(x.split(BATCH))
        answer, p_value = held.at[own], torch.ones(len(x)) if held.novelty is None else held.novelty.p_value
        stored |= {"valid/total": answer.total, "valid/wrong": answer.labels != labels, "valid/p_value": p_value}
    return Evaluation(result, stored)


def held_out_rows(rows: int) -> list[int]:
    """Returns the validation inputs that decide where to abstain: all, or this many random ones."""
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:DECIDING]
    return chosen.sort().values.tolist()


def _stored(whole: Any, test: Answers, y: Tensor, temperature: float) -> dict[str, Tensor]:
    """Returns the answers for the test inputs, and the least and the most certain images."""
    answer: Any = test.at[temperature]
    first, target = ("mean", "targets") if isinstance(answer, GaussianPrediction) else ("probs", "labels")
    named = {name: getattr(answer, name) for name in (first, "aleatoric", "between", "within")}
    found = {name: part.contiguous() for name, part in named.items() if part is not None}  # one pass has no parts
    found |= {target: y.contiguous()} | ({"p_value": test.novelty.p_value} if test.novelty else {})
    if not isinstance(whole, data.DataSet):
        return found
    order = answer.total.argsort(descending=True)
    rows = torch.cat([order[:SHOWN], order[-SHOWN:]])
    return found | {"shown/rows": rows, "shown/images": whole.test.rows(rows).images.contiguous()}


def scores_of(model: Trainable, known: data.Images | data.Points, *, samples: int = 5) -> dict[str, float]:
    """Returns the scores of a trained method on labelled images or points."""
    x, y = known.__getitems__(list(range(len(known))))
    own = float(model.likelihood.temperature)
    return _scores(Method(model, samples, (own,)).answers(x.split(BATCH)).at[own], y)


def _scores(answer: Any, y: Tensor) -> dict[str, float]:
    if not isinstance(answer, GaussianPrediction):
        return metrics.scores(answer.probs, answer.log_probs, y)
    scores = {"nll": float(-answer.log_prob(y).mean()), "rmse": metrics.rmse(answer.mean, y)}
    return scores | {"coverage": metrics.coverage(*answer.interval(0.9), y)}
