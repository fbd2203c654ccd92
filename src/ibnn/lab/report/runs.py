"""RUNS: what a report reads from run folders. The files are not trusted: plain data only, checked before it is used."""

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.errors import DamagedError, complaint
from ibnn.lab.runs import ANSWERS, HISTORY, JOB, RESULT, RunFolder

PARTS = ("aleatoric", "between", "within")
_ROUNDING = 1e-5  # nats: what float32 leaves of a difference of equal entropies
_FILES = (JOB, RESULT, HISTORY)
_KINDS = {
    "name": str,
    "job": dict,
    "scores": dict,
    "costs": dict,
    "classes": list,
    "diagnosis": str,
    "provenance": dict,
}


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
        """What the draws disagree about, (N,); None where no draws ever do, as for a plain network."""
        if self.parts is None or self.parts[1:].max() < _ROUNDING:
            return None
        return self.parts[1:].sum(0)


@dataclass(frozen=True)
class Shown:
    """The examples to show, with what each draw says of them."""

    rows: Tensor  # of the test set (n,)
    draws: Tensor  # (n, J, C)
    images: Tensor | None  # uint8 (n, channels, H, W)


@dataclass(frozen=True)
class Run:
    """One run folder. Of a regression run `test` is None."""

    name: str
    recipe: str  # the text of job.toml
    job: Mapping[str, Any]
    scores: Mapping[str, float]
    costs: Mapping[str, float]
    classes: tuple[str, ...]
    diagnosis: str
    temperature: float | None
    provenance: Mapping[str, Any]
    history: Mapping[str, list[float]]
    labels: Tensor
    test: Answers | None
    ood: Mapping[str, Answers]
    shown: Shown | None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads and checks all folders; runs of one name get their folder's name, too."""
    if isinstance(folders, str | Path) or not folders:
        got = f"`{folders}`" if isinstance(folders, str | Path) else "none"
        raise ValueError(complaint("runs", "a list of one or more run folders", got, "Pass [Path('runs/mine')]."))
    for folder in map(Path, folders):
        if not folder.is_dir():
            got, remedy = f"no folder {folder}", "Pass folders that ibnn wrote."
            raise FileNotFoundError(complaint("runs", "run folders", got, remedy))
        _require(folder, _FILES)
    runs = [_read(Path(folder)) for folder in folders]
    for labels in ([Path(folder).name for folder in folders], [f"#{i}" for i in range(1, len(runs) + 1)]):
        often = Counter(run.name for run in runs)
        pairs = zip(runs, labels, strict=True)
        runs = [replace(run, name=f"{run.name} ({label})") if often[run.name] > 1 else run for run, label in pairs]
    return runs


def classifying(runs: Sequence[Run]) -> Iterator[tuple[int, Run, Answers]]:
    """The runs that classify, with their numbers and answers."""
    yield from ((number, run, run.test) for number, run in enumerate(runs) if run.test is not None)


def _require(folder: Path, names: Sequence[str]) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        got = f"{folder} without {' and '.join(missing)}"
        remedy = "Let the run finish or leave this folder out."
        raise FileNotFoundError(complaint("runs", f"folders with {', '.join((*_FILES, ANSWERS))}", got, remedy))


def _wrong(path: Path, expected: str, got: object) -> DamagedError:
    return DamagedError(complaint(str(path), expected, got, "Run it again or leave this folder out."))


def _read(folder: Path) -> Run:
    home = RunFolder(folder)
    result = _result(home)
    scores = _numbers(result["scores"])
    tensors: dict[str, Tensor] = {}
    if "rmse" not in scores or (folder / ANSWERS).is_file():
        _require(folder, [ANSWERS])
        tensors = home.tensors(ANSWERS)
    run = Run(
        name=result["name"].strip() or folder.name,
        recipe=home.text(JOB),
        job=home.job(),
        scores=scores,
        costs=_numbers(result["costs"]),
        classes=tuple(map(str, result["classes"])),
        diagnosis=result["diagnosis"].strip(),
        temperature=_numbers({"T": result.get("temperature")}).get("T"),
        provenance=result["provenance"],
        history=_history(home),
        labels=torch.zeros(0, dtype=torch.int64),
        test=None,
        ood={},
        shown=None,
    )
    return run if "rmse" in scores else _with_answers(run, tensors, folder / ANSWERS)


def _result(home: RunFolder) -> dict[str, Any]:
    result, path = dict(home.result), home.path / RESULT
    if missing := {"name", "scores"} - set(result):
        raise _wrong(path, "an object with name and scores", f"none of {' and '.join(sorted(missing))}")
    for key, kind in _KINDS.items():
        if not isinstance(result.setdefault(key, kind()), kind):
            raise _wrong(path, f"an object whose {key} is a {kind.__name__}", type(result[key]).__name__)
    return result


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {k: float(v) for k, v in numbers.items() if abs(v) < 1e300}  # nan is not, nor are giants


def _history(home: RunFolder) -> dict[str, list[float]]:
    """Columns of the CSV; nan where a row has no entry."""
    try:
        rows = list(csv.DictReader(home.text(HISTORY).splitlines()))
        columns = [column for column in (rows[0] if rows else ()) if column]
        return {column: [float(row[column] or "nan") for row in rows] for column in columns}
    except DamagedError:
        raise
    except (csv.Error, ValueError) as why:
        raise _wrong(home.path / HISTORY, "CSV with numbers in all columns", why) from None


def _with_answers(run: Run, tensors: Mapping[str, Tensor], path: Path) -> Run:
    if missing := [name for name in ("labels", "probs") if name not in tensors]:
        raise _wrong(path, "tensors with labels and probs", f"no {' and no '.join(missing)}")
    test = _answers(tensors, "", tensors["labels"], path)
    wide = test.probs.shape[1]
    if run.classes and len(run.classes) != wide:
        raise _wrong(path, f"probs for the {len(run.classes)} classes of result.json", f"{wide} columns")
    ood: dict[str, Answers] = {}
    for name in sorted({key[4:].rpartition("/")[0] for key in tensors if key.startswith("ood/")} - {""}):
        if f"ood/{name}/probs" not in tensors:
            raise _wrong(path, f"tensors with ood/{name}/probs", "the set's other tensors only")
        ood[name] = _answers(tensors, f"ood/{name}/", None, path)
        if ood[name].probs.shape[1] != wide:
            raise _wrong(path, f"ood/{name}/probs with {wide} columns", f"{ood[name].probs.shape[1]}")
    classes = run.classes or tuple(f"class {c}" for c in range(wide))
    shown = _shown(tensors, test, path)
    return replace(run, classes=classes, labels=tensors["labels"].long(), test=test, ood=ood, shown=shown)


def _answers(tensors: Mapping[str, Tensor], prefix: str, labels: Tensor | None, path: Path) -> Answers:
    probs = tensors[f"{prefix}probs"]
    probs = probs if probs.dtype in (torch.float32, torch.float64) else probs.float()
    if probs.ndim != 2:
        raise _wrong(path, f"{prefix}probs of shape (N, C)", f"{tuple(probs.shape)}")
    try:
        metrics.error(probs, torch.zeros(len(probs), dtype=torch.int64) if labels is None else labels)
    except ValueError as why:
        raise _wrong(path, f"{prefix}probs and labels to measure", f"this: {why}") from None
    there = [part for part in PARTS if f"{prefix}{part}" in tensors]
    if not there:
        return Answers(probs, None)
    if len(there) < 3:
        raise _wrong(path, f"all or none of {', '.join(prefix + part for part in PARTS)}", f"only {', '.join(there)}")
    for part in PARTS:
        values = tensors[prefix + part]
        if values.shape != probs[:, 0].shape or not values.double().isfinite().all():
            raise _wrong(path, f"{prefix}{part} with {len(probs)} finite numbers", f"shape {tuple(values.shape)}")
    return Answers(probs, torch.stack([tensors[prefix + part].double() for part in PARTS]).clamp_min(0))


def _shown(tensors: Mapping[str, Tensor], test: Answers, path: Path) -> Shown | None:
    """The examples, from the most to the least certain."""
    if "shown/rows" not in tensors or "shown/draws" not in tensors:
        return None
    rows, draws, images = tensors["shown/rows"], tensors["shown/draws"].double(), tensors.get("shown/images")
    size, (count, wide) = rows.shape[0] if rows.ndim == 1 else -1, test.probs.shape
    if size < 0 or rows.is_floating_point() or bool(((rows < 0) | (rows >= count)).any()):
        raise _wrong(path, f"shown/rows of whole numbers from 0 to {count - 1}", f"{rows.dtype} {tuple(rows.shape)}")
    if draws.ndim != 3 or draws.shape[::2] != (size, wide) or not draws.shape[1] or not bool((draws >= 0).all()):
        raise _wrong(path, f"shown/draws of probabilities ({size}, J, {wide})", f"{tuple(draws.shape)}")
    if images is not None and (
        images.ndim != 4 or len(images) != size or images.dtype != torch.uint8 or not math.prod(images.shape[1:])
    ):
        raise _wrong(path, f"shown/images uint8 ({size}, channels, H, W)", f"{images.dtype} {tuple(images.shape)}")
    order = test.total[rows.long()].argsort(stable=True)
    return Shown(rows.long()[order], draws[order], None if images is None else images[order]) if size else None
