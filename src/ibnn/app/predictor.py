"""Answers for pixels or points by a finished run, and abstains above a threshold of uncertainty."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ibnn.app.inputs import BATCH, Form, Note, Reader, image_reader, read_points
from ibnn.data import Images, Points, Standardisation
from ibnn.data.images import shorter_side
from ibnn.data.sets import KNOWN, PHOTOGRAPHS
from ibnn.errors import DamagedError, complaint
from ibnn.files import sealed
from ibnn.lab import jobs, parts
from ibnn.lab.runs import HELD_OUT, RunFolder
from ibnn.monitoring.abstention import CONFIDENCE, Threshold, default_level, threshold
from ibnn.novelty import Reference
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, check_fallback, check_level, predict

MOST = 2000  # validation images that decide where to abstain


class HeldOut(NamedTuple):
    """Answers for labelled inputs that were not trained on, (N,) each."""

    total: Tensor  # entropy, or the variance of a predicted number
    epistemic: Tensor  # the part of it that comes from disagreement among the draws
    wrong: Tensor  # whether the label was wrong; False for numbers
    p_value: Tensor  # p-values of novelty; 1 where the model cannot tell
    source: str  # describes the inputs
    stored: bool = False  # whether the run stored them, with the job's number of draws and seed 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The answers by name."""
        return {name: getattr(self, name) for name in ("total", "epistemic", "wrong", "p_value")}


@dataclass(frozen=True)
class Predictor:
    """A finished run, and the draws to predict by."""

    folder: Path  # the run folder
    run: jobs.Run  # its content
    samples: int  # draws per component
    seed: int = 0  # of the draws
    fallback: float | None = None  # p-value below which answers are mixed with the base rates

    @classmethod
    def read(
        cls,
        folder: Path,
        samples: int | None = None,
        seed: int = 0,
        *,
        fallback: float | None = None,
        trust_code: bool = False,
    ) -> Self:
        """Reads a folder that `ibnn train` has finished; `samples` defaults to the job's."""
        run = jobs.read_run(folder, trust_code=trust_code)
        if fallback is not None:
            check_fallback(fallback, getattr(run.model, "reference", None))
        return cls(folder, run, samples or run.job.samples, seed, fallback)

    @property
    def classes(self) -> list[str]:
        """Names of the classes; empty where a number is predicted."""
        return [str(name) for name in self.run.result["classes"]]

    @property
    def units(self) -> Standardisation | None:
        """Standardisation of the points that the run was trained on; None for images."""
        return self.run.units

    @cached_property
    def form(self) -> Form:
        """Shape of the images that the run was trained on."""
        return Form(*self.test_answers["shown/images"].shape[1:])

    @property
    def resize(self) -> int | None:
        """What the shorter side of an image is resized to before its centre is cropped; None for sets without that."""
        return None if self.run.job.data in KNOWN else shorter_side(self.form.height)

    @cached_property
    def test_answers(self) -> dict[str, Tensor]:
        """The run's answers on its test set."""
        return RunFolder(self.folder).answers()

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel that images are normalised by."""
        data = self.run.job.data
        return (KNOWN[data].mean, KNOWN[data].std) if data in KNOWN else PHOTOGRAPHS

    def reader(self, scale: float | None, note: Note) -> Reader:
        """Returns a function that reads files of the run's kind of inputs; `scale` is the value of white in images."""
        if self.units is None:
            return image_reader(self.form, note, scale, self.resize)
        if scale is not None:
            remedy = "Leave it out: points are taken as they are."
            raise ValueError(complaint("--scale", "absent for a run on points", scale, remedy))
        return partial(read_points, units=self.units, note=note)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Returns what the network takes, from images in [0, 1]."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in self.normalisation)
        return (pixels - mean) / std

    def answer(self, inputs: Tensor) -> CategoricalPrediction | GaussianPrediction:
        """Predicts for images (N, C, H, W) in [0, 1], or points (N, D)."""
        return self._answer(self.normalised(inputs) if self.units is None else inputs)

    def _answer(self, x: Tensor) -> CategoricalPrediction | GaussianPrediction:
        found = predict(
            self.run.model, x, samples=self.samples, seed=self.seed, batch_size=BATCH, fallback=self.fallback
        )
        assert isinstance(found, CategoricalPrediction | GaussianPrediction), "as for all runs"
        return found

    @torch.no_grad()
    def draws(self, inputs: Tensor) -> Tensor:
        """Returns the answer of every draw: probabilities (N, K·S, classes) or, for numbers, means (N, K·S)."""
        model, x = self.run.model, self.normalised(inputs) if self.units is None else inputs
        outputs = model.draw_logits(x, self.samples, self.seed, batch_size=BATCH).movedim(0, 1)
        return (outputs / model.likelihood.temperature).softmax(2) if self.classes else outputs[..., 0]

    def described(self, found: CategoricalPrediction | GaussianPrediction, rule: Threshold) -> list[dict[str, Any]]:
        """Returns a class, its probability and entropies; or a number, its std, 90 % interval and variances.

        They are followed by the p-value of novelty, if the run can tell it, and by whether and why to abstain.
        """
        rows: list[dict[str, Any]] = [{} for _ in range(len(found))]
        if isinstance(found, GaussianPrediction):
            low, high = found.interval(0.9)
            numbers = {"mean": found.mean, "std": found.std, "low": low, "high": high}
            numbers |= {"aleatoric": found.aleatoric, "epistemic": found.epistemic}
        else:
            rows = [{"label": self.classes[number]} for number in found.labels.tolist()]
            numbers = {"probability": found.probs.amax(1)}
            numbers |= {name: getattr(found, name) for name in ("total", "aleatoric", "epistemic")}
        numbers |= {} if found.p_value is None else {"p_value": found.p_value}
        rows = [row | {name: float(values[i]) for name, values in numbers.items()} for i, row in enumerate(rows)]
        if not self.classes and found.p_value is None:  # nothing is ever withheld
            return rows
        why = rule.reasons(found)
        return [row | {"abstain": w is not None, "withheld": w} for row, w in zip(rows, why, strict=True)]

    @property
    def reference(self) -> Reference | None:
        """What novel inputs are recognised by; None for runs with too few data."""
        return getattr(self.run.model, "reference", None)

    def novelty_level(self, given: float | None) -> float:
        """Returns the p-value up to which inputs are withheld as novel; 0 if the run cannot tell.

        By default 0.01, or the smallest p-value that the run can give if that is larger.
        """
        if self.reference is None:
            if given:
                remedy = "Leave it out, or train again with at least 50 validation examples."
                raise ValueError(complaint("novelty", "0 for a run that knows no reference data", given, remedy))
            return 0.0
        if given:
            check_level("novelty", given, self.reference.ranked)
        return default_level(self.reference.ranked) if given is None else given

    def rule(
        self, risk: float, novelty: float, held_out: Callable[[], HeldOut]
    ) -> tuple[Threshold, dict[str, Any] | None]:
        """Returns the rule that keeps the share of wrong answers at or below a risk, and the evidence.

        Answers for inputs with p-values up to `novelty` are withheld, too.
        """
        if risk == 1 or not self.classes:  # every answer is certain enough
            return Threshold(math.inf, 1.0, 0, 1.0, novelty), None
        held = held_out()
        found = threshold(held.total, held.wrong, risk, novel=held.p_value <= novelty)._replace(novelty=novelty)
        facts = {"risk": risk, "confidence": CONFIDENCE, "by": held.source, "examples": len(held.total)}
        return found, facts | found._asdict()

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
            p_value = stored.get("p_value", torch.ones_like(total))
            return HeldOut(total, epistemic, wrong, p_value, "test answers of the run folder", stored=True)
        index = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))[:MOST]
        x, y = valid.__getitems__(index.sort().values.tolist())
        answer = self._answer(x)
        total, epistemic = answer.total.flatten(), answer.epistemic.flatten()
        wrong = answer.labels != y if isinstance(answer, CategoricalPrediction) else epistemic < 0
        p_value = torch.ones_like(total) if answer.p_value is None else answer.p_value
        source = "validation images" if self.units is None else "validation points"
        found = HeldOut(total, epistemic, wrong, p_value, source)
        with suppress(OSError):  # a read-only folder
            sealed.write_tensors(self.folder / HELD_OUT, found.tensors, {"key": self._key, "source": source})
        return found

    def _validation(self, data: Path | None) -> Images | Points | None:
        """Returns the validation split, or None if the run had none, or if its data are missing or have changed."""
        try:
            return parts.make_data(self.run.job, data, self.units).valid if self.run.job.valid else None
        except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
            if isinstance(error, ValueError) and not self.run.job.has_file:
                raise
            return None

    @cached_property
    def _key(self) -> str:
        """Names all that the cached answers depend on."""
        draws = [self.samples, self.seed, self.fallback]
        return json.dumps([RunFolder(self.folder).checksum(), self.run.job.key, *draws, MOST])

    def _cached(self) -> HeldOut | None:
        tensors: Any
        try:
            tensors, facts = sealed.read_tensors(self.folder / HELD_OUT)
        except (OSError, DamagedError):
            return None
        return HeldOut(**tensors, source=facts["source"]) if facts["key"] == self._key else None
