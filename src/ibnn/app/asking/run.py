"""A RUN that is asked: pixels or points in, answers out, and the doubt of held-out ones that they are measured by."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ibnn.app.asking.abstain import threshold
from ibnn.app.asking.inputs import Form
from ibnn.data import Units
from ibnn.data.sets import KNOWN, PHOTOGRAPHS
from ibnn.lab import jobs
from ibnn.lab.runs import RunFolder
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, predict

BATCH = 250
MOST = 2000  # validation images that decide where to abstain
CONFIDENCE = 0.95


class HeldOut(NamedTuple):
    """Answers for images or points whose labels are known and that were not trained on, (N,) each.

    Attributes:
        total: Entropy; variance of a number.
        epistemic: The part of it that the draws disagree about.
        wrong: Whether the label was; a number is never.
        source: Of what they are.
        stored: Whether the run stored them, with the draws of its job and not those that were asked for.
    """

    total: Tensor
    epistemic: Tensor
    wrong: Tensor
    source: str
    stored: bool = False

    @property
    def checksum(self) -> str:
        """SHA-256 of the numbers."""
        parts = (self.total, self.epistemic, self.wrong)
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


@dataclass(frozen=True)
class Asked:
    """A finished run and how it is asked.

    Attributes:
        folder: The run folder.
        run: What is in it.
        samples: Draws per component.
        seed: Decides the draws.
    """

    folder: Path
    run: jobs.Run
    samples: int
    seed: int = 0

    @classmethod
    def read(cls, folder: Path, samples: int | None = None, seed: int = 0, *, trust_code: bool = False) -> Self:
        """Of a folder that `ibnn train` has finished; the draws are as many as its job says unless given.

        `trust_code` as in `jobs.read_run`.
        """
        run = jobs.read_run(folder, trust_code=trust_code)
        return cls(folder, run, samples or run.job.samples, seed)

    @property
    def classes(self) -> list[str]:
        """Their names; none where a number is predicted."""
        return [str(name) for name in self.run.result["classes"]]

    @property
    def units(self) -> Units | None:
        """Of the points that the run was trained on, unless it was images."""
        return self.run.units

    @cached_property
    def form(self) -> Form:
        """Of the images that the run was trained on."""
        return Form(*stored_in(self.folder)["shown/images"].shape[1:])

    def normalised(self, pixels: Tensor) -> Tensor:
        """What the network takes, of images in [0, 1]."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in scale(self.run.job.data))
        return (pixels - mean) / std

    def answer(self, inputs: Tensor) -> CategoricalPrediction | GaussianPrediction:
        """For images (N, C, H, W) in [0, 1], or points (N, D)."""
        return self._answer(self.normalised(inputs) if self.units is None else inputs)

    def _answer(self, x: Tensor) -> CategoricalPrediction | GaussianPrediction:
        found = predict(self.run.model, x, samples=self.samples, seed=self.seed, batch_size=BATCH)
        assert isinstance(found, CategoricalPrediction | GaussianPrediction), "as all runs"
        return found

    @torch.no_grad()
    def draws(self, inputs: Tensor) -> Tensor:
        """What every draw says, (N, K·S, classes); their mean is the answer's probabilities. Of a number (N, K·S)."""
        model, x = self.run.model, self.normalised(inputs) if self.units is None else inputs
        outputs = model.draw_logits(x, self.samples, self.seed, batch_size=BATCH).movedim(0, 1)
        return (outputs / model.likelihood.temperature).softmax(2) if self.classes else outputs[..., 0]

    def described(self, found: CategoricalPrediction | GaussianPrediction) -> list[dict[str, Any]]:
        """What is told of every answer.

        Of classes the label, its probability, and the entropies in nats; of a number its mean, deviation, 90 % interval
        and variances.
        """
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

    def limit(self, risk: float, held_out: HeldOut) -> tuple[float, dict[str, Any]]:
        """The entropy above which nothing is answered, so that at most so many answers are wrong; and the evidence."""
        found = threshold(held_out.total, held_out.wrong, risk, confidence=CONFIDENCE)
        facts = {"risk": risk, "confidence": CONFIDENCE, "by": held_out.source, "examples": len(held_out.total)}
        return found.limit, facts | found._asdict()

    def held_out(self, data: Path | None = None) -> HeldOut:
        """Answers for the run's validation images, or those stored for its test images where the others are not there.

        Those for validation images are kept in the run folder, and hold as long as the model, the samples and the seed
        are the same.

        Args:
            data: Where data sets are.
        """
        kept = self._kept()
        if kept is not None:
            return kept
        try:
            valid = jobs.make_data(self.run.job, data, self.units).valid if self.run.job.valid else None
        except (FileNotFoundError, ModuleNotFoundError):  # the data are not here
            valid = None
        except ValueError:  # the table has changed
            if not self.run.job.has_file:
                raise
            valid = None
        if valid is None:
            stored = stored_in(self.folder)
            epistemic = (stored["between"] + stored["within"]).flatten()
            wrong = stored["probs"].argmax(1) != stored["labels"] if self.classes else epistemic < 0
            total = stored["aleatoric"].flatten() + epistemic
            return HeldOut(total, epistemic, wrong, "test answers of the run folder", stored=True)
        index = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))[:MOST]
        parts = [valid.__getitems__(part) for part in index.sort().values.split(BATCH)]
        answers = [self._answer(x) for x, _ in parts]
        total, epistemic = (torch.cat([getattr(a, name).flatten() for a in answers]) for name in HeldOut._fields[:2])
        told = zip(answers, parts, strict=True)
        misses = [a.labels != y for a, (_, y) in told if isinstance(a, CategoricalPrediction)]
        source = "validation images" if self.units is None else "validation points"
        answered = HeldOut(total, epistemic, torch.cat(misses) if misses else epistemic < 0, source)
        self._keep(answered)
        return answered

    @cached_property
    def _key(self) -> str:
        """Of all that the kept answers depend on."""
        model = RunFolder(self.folder).checksum()
        return json.dumps([model, self.run.job.key, self.samples, self.seed, MOST])

    def _kept(self) -> HeldOut | None:
        tensors, facts = RunFolder(self.folder).held_out()
        if facts.get("key") != self._key:
            return None
        found = HeldOut(tensors["total"], tensors["epistemic"], tensors["wrong"], facts["source"])
        return found if facts.get("sha256") == found.checksum else None

    def _keep(self, found: HeldOut) -> None:
        tensors = {name: value for name, value in found._asdict().items() if isinstance(value, Tensor)}
        try:
            facts = {"key": self._key, "source": found.source, "sha256": found.checksum}
            RunFolder(self.folder).write_held_out(tensors, facts)
        except OSError:  # a folder that may only be read
            return


def stored_in(folder: Path) -> dict[str, Tensor]:
    """What a run answered on its test set."""
    return RunFolder(folder).answers()


def scale(data: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation that a set is normalised by, whether it is here or not."""
    return (KNOWN[data].mean, KNOWN[data].std) if data in KNOWN else PHOTOGRAPHS
