"""REPORTED RUNS: what a report reads from run folders. The files are not trusted: plain data, checked before use."""

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.errors import complaint
from ibnn.lab.display import COLOURS
from ibnn.lab.runs import ANSWERS, HISTORY, JOB, RESULT, RunFolder

PARTS = ("aleatoric", "between", "within")
_Expect = Callable[[bool, str, object], None]  # raises unless true: expected, got
_ROUNDING = 1e-5  # nats: what float32 leaves of a difference of equal entropies
_KINDS = {"name": str, "diagnosis": str, "classes": list}
_KINDS |= dict.fromkeys(("job", "scores", "costs", "provenance"), dict)


@dataclass(frozen=True)
class Answers:
    """Probabilities for one set of inputs and, if the method has draws, the entropies behind them."""

    probs: Tensor  # (N, C)
    parts: Tensor | None  # (3, N): aleatoric, between, within

    @property
    def total(self) -> Tensor:
        """Entropy of the answers in nats, (N,)."""
        return torch.special.entr(self.probs.double()).sum(1) if self.parts is None else self.parts.sum(0)

    @property
    def epistemic(self) -> Tensor | None:
        """Disagreement of the draws in nats, (N,); None if they never disagree, as those of a plain network."""
        if self.parts is None or self.parts[1:].max() < _ROUNDING:
            return None
        return self.parts[1:].sum(0)


@dataclass(frozen=True)
class Shown:
    """Examples to show and the probabilities of each draw, from the most to the least certain example."""

    rows: Tensor  # of the test set (n,)
    draws: Tensor  # (n, J, C)
    images: Tensor | None  # uint8 (n, channels, H, W)


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
    job: Mapping[str, Any]
    scores: Mapping[str, float]
    costs: Mapping[str, float]
    diagnosis: str
    temperature: float | None
    provenance: Mapping[str, Any]
    history: Mapping[str, list[float]]
    novel: Mapping[str, Novel] = field(default_factory=dict)  # by set; empty if the method cannot tell

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
        home.require([JOB, RESULT, HISTORY])
    runs = [_read(home, number) for number, home in enumerate(homes)]
    for labels in ([home.path.name for home in homes], [f"#{i}" for i in range(1, len(runs) + 1)]):
        count = Counter(run.name for run in runs)
        pairs = zip(runs, labels, strict=True)
        runs = [replace(run, name=f"{run.name} ({label})") if count[run.name] > 1 else run for run, label in pairs]
    return runs


def _read(home: RunFolder, number: int) -> Run:
    result = _result(home)
    scores = _numbers(result["scores"])
    shared: dict[str, Any] = {
        "number": number,
        "name": result["name"].strip() or home.path.name,
        "job_text": home.text(JOB),
        "job": home.job(),
        "scores": scores,
        "costs": _numbers(result["costs"]),
        "diagnosis": result["diagnosis"].strip(),
        "temperature": _numbers({"T": result.get("temperature")}).get("T"),
        "provenance": result["provenance"],
        "history": _history(home),
    }
    if "rmse" in scores:
        novel = _novel(home.tensors(ANSWERS), _expecting(home)) if home.has(ANSWERS) else {}
        return Run(**shared, novel=novel)
    return Classifier(**shared, **_answered(home, tuple(map(str, result["classes"]))))


def _result(home: RunFolder) -> dict[str, Any]:
    result = dict(home.result)
    if missing := {"name", "scores"} - set(result):
        raise home.damaged(RESULT, "an object with name and scores", f"none of {' and '.join(sorted(missing))}")
    for key, kind in _KINDS.items():
        if not isinstance(result.setdefault(key, kind()), kind):
            raise home.damaged(RESULT, f"an object whose {key} is a {kind.__name__}", type(result[key]).__name__)
    return result


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the entries that are finite numbers."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {k: float(v) for k, v in numbers.items() if abs(v) < 1e300}  # false for nan and for giant integers


def _history(home: RunFolder) -> dict[str, list[float]]:
    """Returns the columns of the CSV, with nan for empty cells."""
    lines = home.text(HISTORY).splitlines()
    try:
        rows = list(csv.DictReader(lines))
        columns = [column for column in (rows[0] if rows else ()) if column]
        return {column: [float(row[column] or "nan") for row in rows] for column in columns}
    except (csv.Error, ValueError) as error:
        raise home.damaged(HISTORY, "CSV with numbers in all columns", error) from None


def _answered(home: RunFolder, classes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of a classifier that its stored answers give."""
    tensors, expect = home.tensors(ANSWERS), _expecting(home)
    missing = [name for name in ("labels", "probs") if name not in tensors]
    expect(not missing, "tensors with labels and probs", f"no {' and no '.join(missing)}")
    test = _answers(tensors, "", tensors["labels"], expect)
    width = test.probs.shape[1]
    expect(len(classes) in (0, width), f"probs for the {len(classes)} classes of result.json", f"{width} columns")
    ood: dict[str, Answers] = {}
    for name in _others(tensors):
        expect(f"ood/{name}/probs" in tensors, f"tensors with ood/{name}/probs", "the set's other tensors only")
        ood[name] = _answers(tensors, f"ood/{name}/", None, expect)
        columns = ood[name].probs.shape[1]
        expect(columns == width, f"ood/{name}/probs with {width} columns", columns)
    return {
        "classes": classes or tuple(f"class {c}" for c in range(width)),
        "labels": tensors["labels"].long(),
        "test": test,
        "ood": ood,
        "shown": _shown(tensors, test, expect),
        "novel": _novel(tensors, expect),
    }


def _expecting(home: RunFolder) -> _Expect:
    def expect(true: bool, expected: str, got: object) -> None:
        if not true:
            raise home.damaged(ANSWERS, expected, got)

    return expect


def _others(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the sets beside the test set."""
    return sorted({key[4:].rpartition("/")[0] for key in tensors if key.startswith("ood/")} - {""})


def _novel(tensors: Mapping[str, Tensor], expect: _Expect) -> dict[str, Novel]:
    """Returns how novel the inputs of every set are, as far as that was stored."""
    found = {}
    sets = {"test set": ("", "novel/test/")} | {name: (f"ood/{name}/", f"novel/{name}/") for name in _others(tensors)}
    for name, (prefix, novel) in sets.items():
        if f"{prefix}p_value" not in tensors:
            continue
        p = tensors[f"{prefix}p_value"].float()  # as they are compared with a level
        score = tensors.get(f"{prefix}score", -p.log()).double()
        count = len(tensors[f"{prefix}probs"] if f"{prefix}probs" in tensors else tensors.get(f"{prefix}mean", p))
        good = p.shape == (count,) and bool(((p > 0) & (p <= 1)).all())
        expect(good, f"{prefix}p_value of {count} p-values in (0, 1]", f"shape {tuple(p.shape)} or values beyond")
        good = score.shape == p.shape and bool(score.isfinite().all())
        expect(good, f"{prefix}score with {count} finite numbers", f"shape {tuple(score.shape)} or other values")
        rows, images = tensors.get(f"{novel}rows", torch.zeros(0).long()), tensors.get(f"{novel}images")
        good = rows.ndim == 1 and not rows.is_floating_point() and bool(((rows >= 0) & (rows < count)).all())
        expect(good, f"{novel}rows of whole numbers from 0 to {count - 1}", f"{rows.dtype} {tuple(rows.shape)}")
        if images is not None:
            _check_images(f"{novel}images", images, len(rows), expect)
        found[name] = Novel(p, score, rows.long(), images)
    return found


def _check_images(name: str, images: Tensor, size: int, expect: _Expect) -> None:
    good = images.ndim == 4 and len(images) == size and images.dtype == torch.uint8 and images[:1].numel() > 0
    expect(good, f"{name} uint8 ({size}, channels, H, W)", f"{images.dtype} {tuple(images.shape)}")


def _answers(tensors: Mapping[str, Tensor], prefix: str, labels: Tensor | None, expect: _Expect) -> Answers:
    probs = tensors[f"{prefix}probs"]
    probs = probs if probs.dtype in (torch.float32, torch.float64) else probs.float()
    expect(probs.ndim == 2, f"{prefix}probs of shape (N, C)", f"shape {tuple(probs.shape)}")
    try:
        metrics.error(probs, torch.zeros(len(probs), dtype=torch.int64) if labels is None else labels)
    except ValueError as error:
        expect(False, f"{prefix}probs and labels to measure", f"this: {error}")
    found = [part for part in PARTS if f"{prefix}{part}" in tensors]
    if not found:
        return Answers(probs, None)
    expect(len(found) == 3, f"all or none of {', '.join(prefix + part for part in PARTS)}", f"only {', '.join(found)}")
    for part in PARTS:
        values = tensors[prefix + part]
        good = values.shape == probs[:, 0].shape and bool(values.double().isfinite().all())
        expect(good, f"{prefix}{part} with {len(probs)} finite numbers", f"shape {tuple(values.shape)}")
    return Answers(probs, torch.stack([tensors[prefix + part].double() for part in PARTS]).clamp_min(0))


def _shown(tensors: Mapping[str, Tensor], test: Answers, expect: _Expect) -> Shown | None:
    if "shown/rows" not in tensors or "shown/draws" not in tensors:
        return None
    rows, draws, images = tensors["shown/rows"], tensors["shown/draws"].double(), tensors.get("shown/images")
    count, width = test.probs.shape
    good = rows.ndim == 1 and not rows.is_floating_point() and bool(((rows >= 0) & (rows < count)).all())
    expect(good, f"shown/rows of whole numbers from 0 to {count - 1}", f"{rows.dtype} {tuple(rows.shape)}")
    size = len(rows)
    good = draws.ndim == 3 and draws.shape[::2] == (size, width) and draws.shape[1] > 0 and bool((draws >= 0).all())
    expect(good, f"shown/draws of probabilities ({size}, J, {width})", f"shape {tuple(draws.shape)}")
    if images is not None and size:
        _check_images("shown/images", images, size, expect)
    order = test.total[rows.long()].argsort(stable=True)
    return Shown(rows.long()[order], draws[order], None if images is None else images[order]) if size else None
