"""What a report reads from run folders, whose files are verified by their checksums."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn.errors import complaint
from ibnn.lab.display import COLOURS
from ibnn.lab.runs import ANSWERS, HISTORY, JOB, RESULT, RunFolder

PARTS = ("aleatoric", "between", "within")
_ROUNDING = 1e-5  # nats: what float32 leaves of a difference of equal entropies


@dataclass(frozen=True)
class Answers:
    """Probabilities for one set of inputs, and the entropies behind them."""

    probs: Tensor  # (N, C)
    parts: Tensor  # (3, N): aleatoric, between, within

    @property
    def total(self) -> Tensor:
        """Entropy of the answers in nats, (N,)."""
        return self.parts.sum(0)

    @property
    def epistemic(self) -> Tensor | None:
        """Disagreement of the draws in nats, (N,); None if they never disagree, as those of a plain network."""
        return None if self.parts[1:].max() < _ROUNDING else self.parts[1:].sum(0)


@dataclass(frozen=True)
class Shown:
    """Examples to show and the probabilities of each draw, from the most to the least certain example."""

    rows: Tensor  # of the test set (n,)
    draws: Tensor  # (n, J, C)
    images: Tensor  # uint8 (n, channels, H, W)


@dataclass(frozen=True)
class Novel:
    """How novel the inputs of one set are, and the most novel of them, the first the most."""

    p_values: Tensor  # (N,)
    score: Tensor  # the scores behind them, which go on rising where no p-value can be lower, (N,)
    rows: Tensor  # of the set (n,)
    images: Tensor | None  # uint8 (n, channels, H, W)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run; `number` counts the runs of a report."""

    number: int
    name: str
    job_text: str  # job.toml
    result: dict[str, Any]  # result.json
    history: Mapping[str, list[float]]
    novel: Mapping[str, Novel]  # by set; empty if the method cannot tell

    @property
    def colour(self) -> str:
        """The run's colour in all figures and tables."""
        return COLOURS[self.number % len(COLOURS)]


@dataclass(frozen=True, kw_only=True)
class Classifier(Run):
    """A run that predicts classes, with its answers on the test set and on further sets."""

    classes: tuple[str, ...]
    labels: Tensor  # (N,)
    test: Answers
    ood: Mapping[str, Answers]
    shown: Shown | None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads and checks all folders; runs that share a name get their folder's name as well."""
    if isinstance(folders, str | Path) or not folders:
        got = f"`{folders}`" if isinstance(folders, str | Path) else "none"
        raise ValueError(complaint("runs", "a list of one or more run folders", got, "Pass [Path('runs/mine')]."))
    homes = [RunFolder(Path(folder)) for folder in folders]
    for home in homes:
        home.require([JOB, RESULT, HISTORY, ANSWERS])
    runs = [_read(home, number) for number, home in enumerate(homes)]
    for labels in ([home.path.name for home in homes], [f"#{i}" for i in range(1, len(runs) + 1)]):
        count = Counter(run.name for run in runs)
        pairs = zip(runs, labels, strict=True)
        runs = [replace(run, name=f"{run.name} ({label})") if count[run.name] > 1 else run for run, label in pairs]
    return runs


def _read(home: RunFolder, number: int) -> Run:
    result, answers = home.result, home.answers()
    others = sorted({key[4:].rpartition("/")[0] for key in answers if key.startswith("ood/")})
    shared: dict[str, Any] = {
        "number": number,
        "name": result["name"],
        "job_text": home.text(JOB),
        "result": result,
        "history": _history(home),
        "novel": _novel(answers, others),
    }
    if not result["classes"]:
        return Run(**shared)
    return Classifier(
        **shared,
        classes=tuple(map(str, result["classes"])),
        labels=answers["labels"],
        test=_answers(answers, ""),
        ood={name: _answers(answers, f"ood/{name}/") for name in others},
        shown=_shown(answers),
    )


def _history(home: RunFolder) -> dict[str, list[float]]:
    """Returns the columns of the CSV, with nan for empty cells."""
    rows = list(csv.DictReader(home.text(HISTORY).splitlines()))
    return {column: [float(row[column] or "nan") for row in rows] for column in (rows[0] if rows else ())}


def _answers(tensors: Mapping[str, Tensor], prefix: str) -> Answers:
    parts = torch.stack([tensors[prefix + part].double() for part in PARTS])
    return Answers(tensors[f"{prefix}probs"], parts.clamp_min(0))


def _novel(tensors: Mapping[str, Tensor], others: Sequence[str]) -> dict[str, Novel]:
    """Returns how novel the inputs of every set are; nothing if the method cannot tell."""
    if "p_value" not in tensors:
        return {}
    sets = {"test set": ("", "novel/test/")} | {name: (f"ood/{name}/", f"novel/{name}/") for name in others}
    return {
        name: Novel(
            tensors[f"{prefix}p_value"].float(),  # as they are compared with a level
            tensors[f"{prefix}score"].double(),
            tensors[f"{novel}rows"],
            tensors.get(f"{novel}images"),
        )
        for name, (prefix, novel) in sets.items()
    }


def _shown(tensors: Mapping[str, Tensor]) -> Shown | None:
    """Returns the stored examples, from the most to the least certain; those of points were not stored."""
    if "shown/rows" not in tensors:
        return None
    rows, draws, images = (tensors[f"shown/{name}"] for name in ("rows", "draws", "images"))
    order = sum(tensors[part][rows].double() for part in PARTS).argsort(stable=True)  # type: ignore[union-attr]
    return Shown(rows[order], draws[order].double(), images[order])
