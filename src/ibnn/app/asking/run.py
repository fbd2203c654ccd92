"""ASKED RUN: a finished run that answers for pixels or points, and abstains above a threshold of uncertainty."""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ibnn.app.asking.inputs import BATCH, Form
from ibnn.data import Images, Points, Units
from ibnn.data.sets import KNOWN, PHOTOGRAPHS
from ibnn.errors import complaint
from ibnn.lab import jobs
from ibnn.lab.runs import RunFolder
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, predict

LEVELS = 20  # sets of the most certain answers that are tried as where to abstain: 5 %, 10 %, … 100 %
MOST = 2000  # validation images that decide where to abstain
CONFIDENCE = 0.95


class HeldOut(NamedTuple):
    """Answers for labelled inputs that were not trained on, (N,) each."""

    total: Tensor  # entropy, or the variance of a predicted number
    epistemic: Tensor  # the part of it that comes from disagreement among the draws
    wrong: Tensor  # whether the label was wrong; False for numbers
    source: str  # describes the inputs
    stored: bool = False  # whether the run stored them, with the job's number of draws and seed 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The answers by name."""
        return {"total": self.total, "epistemic": self.epistemic, "wrong": self.wrong}

    @property
    def checksum(self) -> str:
        """SHA-256 of the numbers."""
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in self.tensors.values())).hexdigest()


@dataclass(frozen=True)
class Asked:
    """A finished run, and the draws to predict by."""

    folder: Path  # the run folder
    run: jobs.Run  # its content
    samples: int  # draws per component
    seed: int = 0  # of the draws

    @classmethod
    def read(cls, folder: Path, samples: int | None = None, seed: int = 0, *, trust_code: bool = False) -> Self:
        """Reads a folder that `ibnn train` has finished; `samples` defaults to the job's."""
        run = jobs.read_run(folder, trust_code=trust_code)
        return cls(folder, run, samples or run.job.samples, seed)

    @property
    def classes(self) -> list[str]:
        """Names of the classes; empty where a number is predicted."""
        return [str(name) for name in self.run.result["classes"]]

    @property
    def units(self) -> Units | None:
        """Units of the points that the run was trained on; None for images."""
        return self.run.units

    @cached_property
    def form(self) -> Form:
        """Shape of the images that the run was trained on."""
        return Form(*self.test_answers["shown/images"].shape[1:])

    @cached_property
    def test_answers(self) -> dict[str, Tensor]:
        """The run's answers on its test set."""
        return RunFolder(self.folder).answers()

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel that images are normalised by."""
        data = self.run.job.data
        return (KNOWN[data].mean, KNOWN[data].std) if data in KNOWN else PHOTOGRAPHS

    def normalised(self, pixels: Tensor) -> Tensor:
        """Returns what the network takes, from images in [0, 1]."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in self.normalisation)
        return (pixels - mean) / std

    def answer(self, inputs: Tensor) -> CategoricalPrediction | GaussianPrediction:
        """Predicts for images (N, C, H, W) in [0, 1], or points (N, D)."""
        return self._answer(self.normalised(inputs) if self.units is None else inputs)

    def _answer(self, x: Tensor) -> CategoricalPrediction | GaussianPrediction:
        found = predict(self.run.model, x, samples=self.samples, seed=self.seed, batch_size=BATCH)
        assert isinstance(found, CategoricalPrediction | GaussianPrediction), "as for all runs"
        return found

    @torch.no_grad()
    def draws(self, inputs: Tensor) -> Tensor:
        """Returns the answer of every draw: probabilities (N, K·S, classes) or, for numbers, means (N, K·S)."""
        model, x = self.run.model, self.normalised(inputs) if self.units is None else inputs
        outputs = model.draw_logits(x, self.samples, self.seed, batch_size=BATCH).movedim(0, 1)
        return (outputs / model.likelihood.temperature).softmax(2) if self.classes else outputs[..., 0]

    def described(self, found: CategoricalPrediction | GaussianPrediction) -> list[dict[str, Any]]:
        """Returns a class, its probability and entropies; or a number, its std, 90 % interval and variances."""
        names: list[dict[str, Any]] = [{} for _ in range(len(found))]
        if isinstance(found, GaussianPrediction):
            low, high = found.interval(0.9)
            numbers = {"mean": found.mean, "std": found.std, "low": low, "high": high}
            numbers |= {"aleatoric": found.aleatoric, "epistemic": found.epistemic}
        else:
            names = [{"label": self.classes[number]} for number in found.labels.tolist()]
            numbers = {"probability": found.probs.amax(1)}
            numbers |= {name: getattr(found, name) for name in ("total", "aleatoric", "epistemic")}
        return [name | {n: float(v[i]) for n, v in numbers.items()} for i, name in enumerate(names)]

    def limit(self, risk: float, held_out: Callable[[], HeldOut]) -> tuple[float, dict[str, Any] | None]:
        """Returns the entropy above which to abstain for at most this share of wrong answers, and the evidence."""
        if risk == 1 or not self.classes:  # never abstains
            return math.inf, None
        total, _, wrong, source, _ = held_out()
        found = threshold(total, wrong, risk, confidence=CONFIDENCE)
        facts = {"risk": risk, "confidence": CONFIDENCE, "by": source, "examples": len(total)}
        return found.limit, facts | found._asdict()

    def held_out(self, data: Path | None = None) -> HeldOut:
        """Returns answers for the run's validation inputs, cached in its folder; without these, for its test inputs."""
        if (cached := self._cached()) is not None:
            return cached
        valid = self._validation(data)
        if valid is None:
            stored = self.test_answers
            epistemic = (stored["between"] + stored["within"]).flatten()
            total = stored["aleatoric"].flatten() + epistemic
            wrong = stored["probs"].argmax(1) != stored["labels"] if self.classes else epistemic < 0
            return HeldOut(total, epistemic, wrong, "test answers of the run folder", stored=True)
        index = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))[:MOST]
        x, y = valid.__getitems__(index.sort().values.tolist())
        answer = self._answer(x)
        total, epistemic = answer.total.flatten(), answer.epistemic.flatten()
        wrong = answer.labels != y if isinstance(answer, CategoricalPrediction) else epistemic < 0
        found = HeldOut(total, epistemic, wrong, "validation images" if self.units is None else "validation points")
        with suppress(OSError):  # a read-only folder
            facts = {"key": self._key, "source": found.source, "sha256": found.checksum}
            RunFolder(self.folder).write_held_out(found.tensors, facts)
        return found

    def _validation(self, data: Path | None) -> Images | Points | None:
        """Returns the validation split, or None if the run had none, or if its data are missing or have changed."""
        try:
            return jobs.make_data(self.run.job, data, self.units).valid if self.run.job.valid else None
        except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
            if isinstance(error, ValueError) and not self.run.job.has_file:
                raise
            return None

    @cached_property
    def _key(self) -> str:
        """Names all that the cached answers depend on."""
        return json.dumps([RunFolder(self.folder).checksum(), self.run.job.key, self.samples, self.seed, MOST])

    def _cached(self) -> HeldOut | None:
        tensors, facts = RunFolder(self.folder).held_out()
        if facts.get("key") != self._key:
            return None
        found = HeldOut(tensors["total"], tensors["epistemic"], tensors["wrong"], facts["source"])
        return found if facts.get("sha256") == found.checksum else None


class Threshold(NamedTuple):
    """Where to abstain, and the evidence."""

    limit: float  # answers above this uncertainty are withheld; −inf withholds all
    coverage: float  # share of the labelled answers that are given
    errors: int  # wrong answers among those given
    bound: float  # upper confidence bound on the share of wrong answers among those given


def threshold(uncertainty: Tensor, wrong: Tensor, risk: float, *, confidence: float = 0.95) -> Threshold:
    """Returns the largest set of the most certain answers whose error rate is, with confidence, at most `risk`.

    A set's bound is that of Clopper and Pearson at 1 − (1 − confidence) / 20, because the same labels choose one of 20
    sets (Bonferroni). The guarantee holds for inputs like the labelled ones.
    """
    if not 0 < risk < 1:
        raise ValueError(complaint("risk", "between 0 and 1", risk, "Pass 0.05."))
    uncertainty, miss = uncertainty.double(), (1 - confidence) / LEVELS
    ordered = uncertainty.sort().values
    for level in range(LEVELS, 0, -1):
        limit = ordered[math.ceil(len(uncertainty) * level / LEVELS) - 1].item()
        given = uncertainty <= limit  # ties included
        count, errors = int(given.sum()), int(wrong[given].sum())
        if at_most(errors, count, risk) <= miss:  # then the bound is at most the risk
            return Threshold(limit, count / len(uncertainty), errors, upper_bound(errors, count, miss))
    return Threshold(-math.inf, 0.0, 0, 1.0)


def at_most(errors: int, count: int, rate: float) -> float:
    """Returns the probability of at most this many errors: the binomial CDF."""
    ways = (math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(errors + 1))
    logs = (way + k * math.log(rate) + (count - k) * math.log1p(-rate) for k, way in enumerate(ways))
    return min(1.0, math.fsum(map(math.exp, logs)))


def upper_bound(errors: int, count: int, miss: float) -> float:
    """Returns the Clopper–Pearson bound: the rate at which at most this many errors have probability `miss`."""
    if errors >= count:
        return 1.0
    low, high = errors / count, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (rate, high) if at_most(errors, count, rate) > miss else (low, rate)
    return high
