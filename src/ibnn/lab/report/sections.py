"""The tables, figures and sentences of a report's sections as plain data; the template arranges them."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.lab.display import COLOURS, COSTS, OTHER, SCORES, UNCERTAINTIES
from ibnn.lab.evaluation import LEVELS
from ibnn.lab.report import figures
from ibnn.lab.report.runs import PARTS, Answers, Classifier, Novel, Run, Shown
from ibnn.metrics import Interval

Rated = Sequence[tuple[Classifier, Mapping[str, Interval]]]
DIGITS = {"error": 1, "nll": 3, "ece": 3, "brier": 3}  # that are printed
_SHOWN = 6  # examples of each kind


class Score(NamedTuple):
    """A cell with a value and its interval."""

    value: str
    low: str
    high: str
    best: bool


class Table(NamedTuple):
    """A table whose rows begin with a run; the first `words` cells of a row are words, the others numbers."""

    name: str
    caption: str
    head: Sequence[str]
    rows: Sequence[tuple[Run, Sequence[str | Score]]]
    words: int = 0


class Card(NamedTuple):
    """A figure with its caption."""

    picture: figures.Picture
    alt: str
    caption: str
    note: str


class Example(NamedTuple):
    """One row of the test set and what the draws say of it; `shares` are classes with colour and probabilities."""

    pictures: Sequence[tuple[str, figures.Picture, str]]  # class in the page, picture, alternative text
    right: bool
    predicted: str
    true: str
    shares: Sequence[tuple[str, str, str, str]]
    note: str


def intervals(answers: Answers, labels: Tensor) -> dict[str, Interval]:
    """Returns error in %, NLL, ECE and Brier score with 95 % bootstrap intervals."""
    probs = answers.probs
    tiny = torch.finfo(probs.dtype).tiny  # a probability that was rounded to 0 would make the mean infinite
    found = metrics.score_intervals(probs, probs.clamp_min(tiny).double().log(), labels)
    return found | {"error": Interval(*(100 * value for value in found["error"]))}


def _uncertainties(answers: Answers, novel: Novel | None) -> dict[str, Tensor | None]:
    """Returns scores (N,) that grow with uncertainty; None where the method has no such score."""
    novelty = None if novel is None else novel.score
    scores = (1 - answers.probs.max(1).values.double(), answers.total, answers.epistemic, novelty)
    return dict(zip(UNCERTAINTIES, scores, strict=True))


def lead(runs: Sequence[Run], rated: Rated) -> str:
    """Returns the first sentence of the page."""
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    if not rated:
        return f"{count} of regression."
    if (sets := len(_groups(rated))) > 1:
        return f"{count} on {sets} data sets; compare runs on the same data only."
    run, found = min(rated, key=lambda each: each[1]["nll"].value)
    value, low, high = found["nll"]
    which = "NLL" if len(rated) == 1 else "Lowest NLL"
    interval = f"{value:.3f} (95 % interval {low:.3f} to {high:.3f})"
    return f"{count}. {which}: {run.name}, {interval}. The glossary explains the terms."


def _groups(rated: Rated) -> list[Rated]:
    """Groups the runs that can be compared: same data, same number of test rows."""
    groups: dict[object, list[tuple[Classifier, Mapping[str, Interval]]]] = {}
    for run, found in rated:
        groups.setdefault((str(run.result["job"].get("data")), len(run.labels)), []).append((run, found))
    return list(groups.values())


def best(scores: Mapping[int, float], digits: int) -> set[int]:
    """Returns the runs with the lowest printed score, ties included; none if there is nothing to compare.

    >>> sorted(best({0: 0.1001, 1: 0.1002, 2: 0.2}, 3))
    [0, 1]
    """
    printed = {number: round(value, digits) for number, value in scores.items()}
    return {number for number, value in printed.items() if len(printed) > 1 and value == min(printed.values())}


def ratings(rated: Rated) -> Table:
    """Returns the scores of classifiers; the best of each group is marked."""
    winners = {
        (name, number)
        for name, digits in DIGITS.items()
        for group in _groups(rated)
        for number in best({run.number: found[name].value for run, found in group}, digits)
    }
    rows = []
    for run, found in rated:
        scores: list[str | Score] = []
        for name, digits in DIGITS.items():
            value, low, high = (f"{number:.{digits}f}" for number in found[name])
            scores.append(Score(value, low, high, (name, run.number) in winners))
        rows.append((run, [*scores, _short(len(run.labels))]))
    return Table("scores-table", "Scores", ["run", *(SCORES[name] for name in DIGITS), "test rows"], rows)


def regressions(runs: Sequence[Run]) -> Table:
    """Returns the scores of runs that predict a number."""
    names = {"nll": "NLL", "rmse": "RMSE", "coverage": "coverage"}
    rows = [(run, [_short(run.result["scores"].get(name)) for name in names]) for run in runs]
    return Table("regression-table", "Scores of regression", ["run", *names.values()], rows)


def costs(runs: Sequence[Run]) -> Table:
    """Returns what each run took."""
    rows = [
        (run, [*(_short(run.result["costs"].get(key)) for key in COSTS), _short(run.result["temperature"])])
        for run in runs
    ]
    return Table("costs-table", "Costs", ["run", *COSTS.values(), "temperature"], rows)


def _short(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def impossible(run: Classifier) -> int:
    """Counts the true classes that have a stored probability of 0."""
    return int((run.test.probs.gather(1, run.labels[:, None]) == 0).sum())


def reliability(runs: Sequence[Classifier]) -> list[Card]:
    """Returns a reliability diagram of each run."""
    cards = []
    for run in runs:
        curve = metrics.reliability_curve(run.test.probs, run.labels)
        confidence = 100 * float(run.test.probs.max(1).values.double().mean())
        accuracy = 100 - 100 * metrics.error(run.test.probs, run.labels)
        lean = f"{'over' if confidence > accuracy else 'under'}confident by {abs(confidence - accuracy):.1f} points"
        note = f"Mean confidence {confidence:.1f} %, accuracy {accuracy:.1f} %: {lean}."
        ece = metrics.ece(run.test.probs, run.labels)
        alt = f"Reliability diagram of {run.name}: ECE {ece:.3f} over {len(run.labels)} rows. {note}"
        cards.append(Card(figures.reliability(curve, run.colour), alt, run.name, note))
    return cards


def detection(runs: Sequence[Classifier]) -> tuple[Table, list[Card]]:
    """Returns how well uncertainty separates further sets from the test set, and its histograms."""
    cards, rows = [], []
    for run in runs:
        inside = _uncertainties(run.test, run.novel.get("test set"))
        areas: dict[str, list[str]] = {name: [] for name in inside}
        for name, answers in run.ood.items():
            cells = [name]
            for kind, outside in _uncertainties(answers, run.novel.get(name)).items():
                if (test := inside[kind]) is None or outside is None:
                    cells += ["–", "–"]
                    continue
                cells += [f"{metrics.auroc(test, outside):.3f}", f"{metrics.fpr_at_95_tpr(test, outside):.3f}"]
                areas[kind].append(f"{name}: AUROC {cells[-2]}")
            rows.append((run, cells))
        for kind in ("total", "epistemic"):
            if (test := inside[kind]) is None:
                continue
            others = {name: _uncertainties(a, None)[kind] for name, a in run.ood.items() if name != "test set"}
            values = {"test set": test} | {name: v for name, v in others.items() if v is not None}
            high = max(float(v.max()) for v in values.values()) or 1.0
            edges = torch.linspace(0, high * (1 + 1e-9), 25, dtype=torch.float64).tolist()
            note = "; ".join(areas[kind]) or f"Mean {float(test.mean()):.3f} nats."
            alt = f"Histogram of the {kind} uncertainty of {run.name}. {note}"
            picture = figures.histograms(values, f"{kind} uncertainty (nats)", edges)
            cards.append(Card(picture, alt, f"{run.name}: {kind}", note))
    head = [f"{score} {by}" for by in ("max-prob", "total", "epistemic", "novelty") for score in ("AUROC", "FPR95")]
    caption = "Detection of each set by four scores"
    return Table("ood-table", caption, ["run", "set", *head], rows, words=1), cards


def novelty(runs: Sequence[Run]) -> tuple[Table, list[Card]]:
    """Returns the shares of every set that are called novel, and histograms of the p-values."""
    cards, rows = [], []
    for run in (run for run in runs if run.novel):
        for name, novel in run.novel.items():
            shares = [f"{100 * float((novel.p_values <= level).double().mean()):.1f}" for level in LEVELS]
            rows.append((run, [name, *shares, f"{float(novel.p_values.median()):.3f}", _short(len(novel.p_values))]))
        words = [f"{name}: {share} %" for each, (name, share, *_) in rows if each is run]
        note = f"Called novel at p ≤ {LEVELS[0]}: {'; '.join(words)}."
        p_values, edges = {name: novel.p_values for name, novel in run.novel.items()}, [n / 20 for n in range(21)]
        expected = "expected of inputs like the held-out ones"
        picture = figures.histograms(p_values, "p-value of novelty", edges, expected=expected)
        cards.append(Card(picture, f"Histogram of the p-values of novelty of {run.name}. {note}", run.name, note))
    head = ["run", "set", *(f"% with p ≤ {level}" for level in LEVELS), "median p", "rows"]
    return Table("novelty-table", "Inputs that are called novel", head, rows, words=1), cards


def most_novel(run: Run) -> dict[str, list[tuple[figures.Picture | None, str]]]:
    """Returns the most novel inputs of every set, as pictures where they are images, and what is said of each."""
    found = {}
    for name, novel in run.novel.items():
        pictures = [None] * len(novel.rows) if novel.images is None else map(figures.photo, novel.images)
        said = [
            f"row\N{NO-BREAK SPACE}{row}, p\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{float(novel.p_values[row]):.2g}"
            for row in novel.rows.tolist()
        ]
        found[name] = list(zip(pictures, said, strict=True))
    return {name: shown for name, shown in found.items() if shown}


def risk(runs: Sequence[Classifier]) -> tuple[list[Card], Table]:
    """Returns risk over coverage, as curves of up to six runs and as a table."""
    cards, rows, curves = [], [], []
    for run in runs:
        confidence, guess = run.test.probs.max(1)
        curves.append((run, metrics.risk_coverage(1 - confidence, guess == run.labels)))
    for some in (curves[first : first + 6] for first in range(0, len(curves), 6)):
        areas = "; ".join(f"{run.name}: AURC {curve.area:.4f}" for run, curve in some)
        alt = f"Error rate among the most certain rows over coverage. {areas}."
        picture = figures.risk_coverage([(run.name, run.number, curve) for run, curve in some])
        cards.append(Card(picture, alt, "Risk over coverage", "Rows of high confidence are answered first."))
    shares = (50, 80, 95, 100)
    for run, curve in curves:
        answered = [max(1, math.ceil(share / 100 * len(curve.risk))) for share in shares]
        errors = [f"{100 * float(curve.risk[count - 1]):.1f}" for count in answered]
        rows.append((run, [f"{curve.area:.4f}", *errors]))
    head = ["run", "AURC", *(f"error % at {share} % coverage" for share in shares)]
    return cards, Table("risk-table", "Error rate if the most uncertain rows are declined", head, rows)


def split(runs: Sequence[Classifier]) -> Table:
    """Returns the mean aleatoric and epistemic uncertainty of right and wrong answers and of further sets."""
    rows = []
    for run in runs:
        wrong = run.test.probs.argmax(1) != run.labels
        sets = {"right answers": run.test.parts[:, ~wrong], "wrong answers": run.test.parts[:, wrong]}
        sets |= {name: answers.parts for name, answers in run.ood.items()}
        for name, parts in sets.items():
            if parts.shape[1]:
                means = parts.mean(1)  # (3,)
                total, epistemic = float(means.sum()), float(means[1:].sum())
                numbers = [f"{value:.3f}" for value in (*means.tolist(), epistemic, total)]
                rows.append((run, [name, *numbers, f"{100 * epistemic / max(total, 1e-12):.0f}"]))
    head = ["run", "rows", *PARTS, "epistemic", "total", "epistemic %"]
    return Table("split-table", "Mean uncertainty in nats", head, rows, words=1)


def examples(run: Classifier) -> dict[str, list[Example]]:
    """Returns the least and the most certain examples of a run."""
    if run.shown is None:
        return {}
    half, count = len(run.shown.rows) // 2, len(run.shown.rows)
    kinds = {"Least certain": range(half, count)[-_SHOWN:][::-1], "Most certain": range(half)[:_SHOWN]}
    return {kind: [_example(run, run.shown, i) for i in rows] for kind, rows in kinds.items() if rows}


def _example(run: Classifier, shown: Shown, i: int) -> Example:
    row, draws = int(shown.rows[i]), shown.draws[i]
    true, guess = int(run.labels[row]), int(run.test.probs[row].argmax())
    mean, tally = draws.mean(0), _tally(draws, run.classes)
    order = [c for c in mean.argsort(descending=True, stable=True).tolist() if mean[c] >= 0.01][:4] or [guess]
    alt = f"{tally}; the predicted class has {100 * float(mean[guess]):.0f} %."
    said = f"Test row {row}: true {run.classes[true]}, predicted {run.classes[guess]}."
    pictures = [("photo", figures.photo(shown.images[i]), said), ("strips", figures.strips(draws, order), alt)]
    shares = [(COLOURS[rank], run.classes[c], *_range(draws[:, c])) for rank, c in enumerate(order)]
    if 1 - float(mean[order].sum()) >= 0.005:
        shares.append((OTHER, "all others", *_range(draws.sum(1) - draws[:, order].sum(1))))
    total, epistemic = (float(part[row]) for part in (run.test.total, run.test.parts[1:].sum(0)))
    note = f"Test row {row}; total {total:.3f} nats, epistemic {epistemic:.3f}. {tally}."
    return Example(pictures, true == guess, run.classes[guess], run.classes[true], shares, note)


def _tally(draws: Tensor, classes: Sequence[str]) -> str:
    votes = draws.argmax(1).bincount(minlength=draws.shape[1])
    named = [c for c in votes.argsort(descending=True, stable=True).tolist() if votes[c]][:3]
    if len(draws) == 1:
        return f"The only draw says {classes[named[0]]}"
    return f"Of {len(draws)} draws " + ", ".join(f"{int(votes[c])} say {classes[c]}" for c in named)


def _range(probs: Tensor) -> tuple[str, str]:
    """Returns a mean probability and, if there are several draws, the range of their probabilities."""
    low, mean, high = (f"{100 * float(p):.0f}" for p in (probs.min(), probs.mean(), probs.max()))
    return f"{mean} %", f"(draws: {low}–{high} %)" if len(probs) > 1 else ""


def losses(run: Run) -> dict[str, list[float]]:
    """Returns the curves of a run's training by name."""
    columns = {"train NLL": "nll", "validation NLL": "valid_nll", "loss": "loss"}
    found = {name: run.history[column] for name, column in columns.items() if _finite(run.history.get(column, []))}
    return {name: values for name, values in found.items() if name != "loss"} or found


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def training(runs: Sequence[Run]) -> list[Card]:
    """Returns the training curves of the runs that have any."""
    cards = []
    for run in (run for run in runs if losses(run)):
        axis = next((name for name in ("epoch", "step") if _finite(run.history.get(name, []))), "row")
        x = run.history.get(axis) or list(range(len(next(iter(losses(run).values())))))
        finite = {name: _finite(values) for name, values in losses(run).items()}
        note = "; ".join(f"{name}: last {v[-1]:.3f}, lowest {min(v):.3f}" for name, v in finite.items()) + "."
        steered = _finite(run.history.get("prior_std", []))
        note += f" Prior std ends at {steered[-1]:.3f}." if steered else ""
        picture = figures.training(axis, x, losses(run), run.history["prior_std"] if steered else ())
        cards.append(Card(picture, f"Training curves of {run.name} over {axis}s. {note}", run.name, note))
    return cards


def facts(run: Run) -> dict[str, str]:
    """Returns the provenance of a run, as text."""
    known: dict[str, Any] = {"seed": run.result["job"].get("seed", 0)} | run.result["provenance"]
    return {k: v if isinstance(v, str) else json.dumps(v, default=str, ensure_ascii=False) for k, v in known.items()}
