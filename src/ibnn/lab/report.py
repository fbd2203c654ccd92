"""One self-contained HTML page about one or more runs: no network, no scripts, reproducible to the byte."""

import base64
import csv
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.lab.display import (
    COLOURS,
    COSTS,
    SCORES,
    UNCERTAINTIES,
    draw_examples,
    histogram,
    house_style,
    new_figure,
    png,
)
from ibnn.lab.evaluation import LEVELS
from ibnn.lab.pages import environment, style
from ibnn.lab.runs import ANSWERS, HISTORY, JOB, RESULT, RunFolder
from ibnn.metrics import Interval

__all__ = ["write_report"]

PARTS = ("aleatoric", "between", "within")
DIGITS = {"error": 1, "nll": 3, "ece": 3, "brier": 3}  # that are printed
_ROUNDING = 1e-5  # nats: what float32 leaves of a difference of equal entropies
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)))  # say the same as colours do
_STYLE = {"font.size": 10, "axes.grid": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.6, "legend.fontsize": 9}


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run; `number` counts the runs of a report."""

    number: int
    name: str
    job_text: str  # job.toml
    result: dict[str, Any]  # result.json
    history: Mapping[str, list[float]]  # columns of history.csv, nan for empty cells
    answers: Mapping[str, Tensor]

    @property
    def colour(self) -> str:
        """The run's colour in all figures and tables."""
        return COLOURS[self.number % len(COLOURS)]

    @property
    def sets(self) -> dict[str, str]:
        """The sets of inputs that were answered, with the prefixes of their tensors."""
        others = sorted({key[4:].rpartition("/")[0] for key in self.answers if key.startswith("ood/")})
        return {"test set": ""} | {name: f"ood/{name}/" for name in others}

    def parts(self, prefix: str = "") -> Tensor:
        """Returns the aleatoric, between and within part of the entropies of a set, (3, N)."""
        return torch.stack([self.answers[prefix + part].double() for part in PARTS]).clamp_min(0)

    def uncertainties(self, prefix: str = "") -> dict[str, Any]:
        """Returns scores (N,) of a set that grow with uncertainty; None where the method has no such score."""
        parts, novelty = self.parts(prefix), self.answers.get(f"{prefix}score")
        epistemic = None if parts[1:].max() < _ROUNDING else parts[1:].sum(0)  # None if draws never disagree
        confidence = self.answers[f"{prefix}probs"].amax(1).double()
        scores = (1 - confidence, parts.sum(0), epistemic, None if novelty is None else novelty.double())
        return dict(zip(UNCERTAINTIES, scores, strict=True))


Table = tuple[str, Sequence[str], Sequence[tuple[Run, Sequence[str]]]]  # caption, head, rows that begin with a run


@dataclass(frozen=True)
class Section:
    """The content of a section, whose heading and first words are in the template."""

    name: str
    tables: list[Table] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def draw(self, canvas: Any, alt: str, caption: str, note: str = "", *, wide: bool = False) -> None:
        """Adds a picture as a data URI, with its caption."""
        src = f"data:image/png;base64,{base64.b64encode(png(canvas)).decode()}"
        width, height = (round(96 * side) for side in canvas.get_size_inches())
        about = {"alt": alt, "caption": caption, "note": note, "wide": wide}
        self.figures.append({"src": src, "width": width, "height": height} | about)


def write_report(runs: Sequence[Path], out: Path, *, title: str = "Calibration report") -> None:
    """Reads run folders and writes the page; if anything is wrong with a folder, writes nothing.

    Args:
        runs: Folders of finished runs.
        out: The page's file; missing folders are created.
        title: The page's heading.

    >>> write_report([], Path("report.html"))
    Traceback (most recent call last):
    ValueError: Expected `runs` to be a list of one or more run folders, but got []. Pass [Path('runs/mine')].
    """
    if Path(out).is_dir():
        raise IsADirectoryError(complaint("out", "a file's name", f"the folder {out}", "Pass report.html in it."))
    found = read_runs(runs)
    rated = [(run, intervals(run)) for run in found if run.result["classes"]]
    classifiers = [run for run, _ in rated]
    with house_style(_STYLE):
        sections = [_summary(found, rated)]
        if classifiers:
            sections += [_reliability(classifiers), _detection(classifiers)]
        if any("p_value" in run.answers for run in found):
            sections.append(_novelty(found))
        if classifiers:
            sections += [_risk(classifiers), _split(classifiers), _examples(classifiers)]
        sections += [_training(found), _diagnosis(found), _provenance(found)]
    values = {"title": title, "style": style("ibnn.lab", "report.css"), "lead": _lead(found, rated)}
    page = environment("ibnn.lab").get_template("report.html.j2").render(sections=sections, **values)
    write_atomically(Path(out), page.encode("utf-8", "replace"))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads and checks all folders; runs that share a name get their folder's name as well."""
    if isinstance(folders, str | Path) or not folders:
        raise ValueError(complaint("runs", "a list of one or more run folders", folders, "Pass [Path('runs/mine')]."))
    homes = [RunFolder(Path(folder)) for folder in folders]
    for home in homes:
        home.require([JOB, RESULT, HISTORY, ANSWERS])
    runs = []
    for number, home in enumerate(homes):
        rows = list(csv.DictReader(home.text(HISTORY).splitlines()))
        history = {column: [float(row[column] or "nan") for row in rows] for column in (rows[0] if rows else ())}
        runs.append(Run(number, home.result["name"], home.text(JOB), home.result, history, home.answers()))
    for labels in ([home.path.name for home in homes], [f"#{i}" for i in range(1, len(runs) + 1)]):
        count = Counter(run.name for run in runs)
        pairs = zip(runs, labels, strict=True)
        runs = [replace(run, name=f"{run.name} ({label})") if count[run.name] > 1 else run for run, label in pairs]
    return runs


def intervals(run: Run) -> dict[str, Interval]:
    """Returns error in %, NLL, ECE and Brier score of a classifier with 95 % bootstrap intervals."""
    probs = run.answers["probs"]
    tiny = torch.finfo(probs.dtype).tiny  # a probability that was rounded to 0 would make the mean infinite
    found = metrics.score_intervals(probs, probs.clamp_min(tiny).double().log(), run.answers["labels"])
    return found | {"error": Interval(*(100 * value for value in found["error"]))}


Rated = Sequence[tuple[Run, Mapping[str, Interval]]]


def _data(run: Run) -> tuple[str, int]:
    """Returns data and number of test rows: runs that share them can be compared."""
    return str(run.result["job"].get("data")), len(run.answers["labels"])


def _lead(runs: Sequence[Run], rated: Rated) -> str:
    """Returns the first sentence of the page."""
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    if not rated:
        return f"{count} of regression."
    if (sets := len({_data(run) for run, _ in rated})) > 1:
        return f"{count} on {sets} data sets; compare runs on the same data only."
    run, found = min(rated, key=lambda each: each[1]["nll"].value)
    value, low, high = found["nll"]
    which = "NLL" if len(rated) == 1 else "Lowest NLL"
    return f"{count}. {which}: {run.name}, {value:.3f} (95 % interval {low:.3f} to {high:.3f})."


def _summary(runs: Sequence[Run], rated: Rated) -> Section:
    section, rows = Section("summary"), []
    for run, found in rated:
        alike = [each for other, each in rated if _data(other) == _data(run)]
        cells = []
        for name, digits in DIGITS.items():
            value, low, high = (f"{number:.{digits}f}" for number in found[name])
            best = len(alike) > 1 and float(value) == min(round(each[name].value, digits) for each in alike)
            cells.append(f"{'★ ' if best else ''}{value} ({low}–{high})")
        rows.append((run, [*cells, _short(len(run.answers["labels"]))]))
        if zero := int((run.answers["probs"].gather(1, run.answers["labels"][:, None]) == 0).sum()):
            words = f"{zero} true classes have a stored probability of 0; the NLL uses the smallest positive number."
            section.notes.append(f"Careful, {run.name}: {words}")
    numbers = {"nll": "NLL", "rmse": "RMSE", "coverage": "coverage"}
    others = [run for run in runs if not run.result["classes"]]
    regressions = [(run, [_short(run.result["scores"].get(name)) for name in numbers]) for run in others]
    costs = [
        (run, [*(_short(run.result["costs"].get(key)) for key in COSTS), _short(run.result["temperature"])])
        for run in runs
    ]
    section.tables.append(("Scores", ["run", *(SCORES[name] for name in DIGITS), "test rows"], rows))
    section.tables.append(("Scores of regression", ["run", *numbers.values()], regressions))
    section.tables.append(("Costs", ["run", *COSTS.values(), "temperature"], costs))
    return section


def _short(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _reliability(runs: Sequence[Run]) -> Section:
    section = Section("reliability")
    for run in runs:
        probs, labels = run.answers["probs"], run.answers["labels"]
        confidence, accuracy = 100 * float(probs.amax(1).double().mean()), 100 - 100 * metrics.error(probs, labels)
        lean = f"{'over' if confidence > accuracy else 'under'}confident by {abs(confidence - accuracy):.1f} points"
        note = f"Mean confidence {confidence:.1f} %, accuracy {accuracy:.1f} %: {lean}."
        curve = metrics.reliability_curve(probs, labels)
        x, p, n = (column[curve.count > 0].double() for column in (curve.confidence, curve.accuracy, curve.count))
        spread = 1.96**2 / n  # Wilson's interval
        middle = (p + spread / 2) / (1 + spread)
        half = (1.96 / (1 + spread)) * (p * (1 - p) / n + spread / n / 4).sqrt()
        reach = torch.stack([p - middle + half, middle + half - p]).clamp_min(0)
        canvas, (top, bottom) = _panels(4, 4.2, 2, 1, sharex=True, height_ratios=(3, 1))
        top.plot([0, 1], [0, 1], color="#555555", lw=1, ls=":")
        top.errorbar(x.tolist(), p.tolist(), reach.tolist(), color=run.colour, marker="o", ms=4, lw=1.4)
        top.set(ylabel="accuracy", xlim=(0, 1), ylim=(-0.02, 1.04))
        edges = curve.edges.tolist()
        bottom.bar(edges[:-1], curve.count.tolist(), width=edges[1], align="edge", color=run.colour, alpha=0.7)
        bottom.set(xlabel="confidence", ylabel="rows", yscale="log", ylim=(0.7, 2 * float(curve.count.max())))
        bottom.yaxis.set_major_formatter("{x:g}")  # the usual one is a formula
        alt = f"Reliability diagram of {run.name}: ECE {metrics.ece(probs, labels):.3f} over {len(labels)} rows. {note}"
        section.draw(canvas, alt, run.name, note)
    return section


def _detection(runs: Sequence[Run]) -> Section:
    section, rows = Section("ood"), []
    for run in runs:
        scores = {name: run.uncertainties(prefix) for name, prefix in run.sets.items()}
        inside = scores["test set"]
        for name, outside in list(scores.items())[1:]:
            cells = [name]
            for kind, test in inside.items():
                other = outside[kind]
                known = test is not None and other is not None
                cells += [f"{m(test, other):.3f}" if known else "–" for m in (metrics.auroc, metrics.fpr_at_95_tpr)]
            rows.append((run, cells))
        for kind in [kind for kind in ("total", "epistemic") if inside[kind] is not None]:
            values = {name: found for name, each in scores.items() if (found := each[kind]) is not None}
            high = max(float(v.max()) for v in values.values()) or 1.0
            edges = torch.linspace(0, high * (1 + 1e-9), 25, dtype=torch.float64).tolist()
            note = "Mean: " + "; ".join(f"{name} {float(v.mean()):.3f} nats" for name, v in values.items()) + "."
            canvas = _histograms(values, f"{kind} uncertainty (nats)", edges)
            section.draw(
                canvas, f"Histogram of the {kind} uncertainty of {run.name}. {note}", f"{run.name}: {kind}", note
            )
    head = [f"{score} {by}" for by in ("max-prob", "total", "epistemic", "novelty") for score in ("AUROC", "FPR95")]
    section.tables.append(("Detection of each set by four scores", ["run", "set", *head], rows))
    if not rows:
        section.notes.append("No run stored answers for inputs out of distribution.")
    return section


def _novelty(runs: Sequence[Run]) -> Section:
    section, shares, most = Section("novelty"), [], []
    for run in runs:
        if "p_value" not in run.answers:
            section.notes.append(f"{run.name} stored no p-values of novelty.")
            continue
        p_values = {name: run.answers[f"{prefix}p_value"].float() for name, prefix in run.sets.items()}
        for name, p in p_values.items():
            novel = [f"{100 * float((p <= level).double().mean()):.1f}" for level in LEVELS]
            shares.append((run, [name, *novel, f"{float(p.median()):.3f}", _short(len(p))]))
        canvas = _histograms(p_values, "p-value of novelty", [n / 20 for n in range(21)], expected=True)
        said = "; ".join(f"{cells[0]} {cells[1]} %" for each, cells in shares if each is run)
        note = f"Called novel at p ≤ {LEVELS[0]}: {said}."
        section.draw(canvas, f"Histogram of the p-values of novelty of {run.name}. {note}", run.name, note)
        for name, p in p_values.items():
            prefix = f"novel/{'test' if name == 'test set' else name}/"
            rows, images = run.answers[f"{prefix}rows"], run.answers.get(f"{prefix}images")
            words = [f"row {row}: p = {float(p[row]):.2g}" for row in rows.tolist()]
            most.append((run, [name, "; ".join(words)]))
            if images is not None and len(rows):
                canvas = new_figure(9.6, 1.9)
                draw_examples(canvas, images, [word.replace(": ", "\n") for word in words])
                alt = f"The most novel inputs of {name}, {run.name}: {'; '.join(words)}."
                section.draw(canvas, alt, f"{run.name}: most novel of {name}", wide=True)
    head = ["run", "set", *(f"% with p ≤ {level}" for level in LEVELS), "median p", "rows"]
    section.tables.append(("Inputs that are called novel", head, shares))
    section.tables.append(("The most novel inputs", ["run", "set", "inputs"], most))
    return section


def _risk(runs: Sequence[Run]) -> Section:
    section, (canvas, axes) = Section("risk"), _panels(4.8, 3.4 + 0.2 * len(runs))
    shares, rows = (50, 80, 95, 100), []
    for run in runs:
        confidence, guess = run.answers["probs"].max(1)
        curve = metrics.risk_coverage(1 - confidence, guess == run.answers["labels"])
        axes.plot(curve.coverage.tolist(), (100 * curve.risk).tolist(), label=_plain(run.name), **_line(run.number))
        answered = [max(1, math.ceil(share / 100 * len(curve.risk))) for share in shares]
        errors = [f"{100 * float(curve.risk[count - 1]):.1f}" for count in answered]
        rows.append((run, [f"{curve.area:.4f}", *errors]))
    axes.set(xlabel="coverage: share of rows answered", ylabel="error % among them", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=1)
    areas = "; ".join(f"{run.name}: AURC {cells[0]}" for run, cells in rows)
    alt = f"Error rate among the most certain rows over coverage. {areas}."
    section.draw(canvas, alt, "Risk over coverage", "Rows of high confidence are answered first.")
    head = ["run", "AURC", *(f"error % at {share} % coverage" for share in shares)]
    section.tables.append(("Error rate if the most uncertain rows are declined", head, rows))
    return section


def _split(runs: Sequence[Run]) -> Section:
    rows = []
    for run in runs:
        wrong = run.answers["probs"].argmax(1) != run.answers["labels"]
        sets = {"right answers": run.parts()[:, ~wrong], "wrong answers": run.parts()[:, wrong]}
        sets |= {name: run.parts(prefix) for name, prefix in run.sets.items() if prefix}
        for name, parts in sets.items():
            if parts.shape[1]:
                means = parts.mean(1)  # (3,)
                total, epistemic = float(means.sum()), float(means[1:].sum())
                numbers = [f"{value:.3f}" for value in (*means.tolist(), epistemic, total)]
                rows.append((run, [name, *numbers, f"{100 * epistemic / max(total, 1e-12):.0f}"]))
    head = ["run", "rows", *PARTS, "epistemic", "total", "epistemic %"]
    return Section("split", [("Mean uncertainty in nats", head, rows)])


def _examples(runs: Sequence[Run]) -> Section:
    section = Section("examples")
    for run in runs:
        if "shown/rows" not in run.answers:
            section.notes.append(f"{run.name} stored no examples.")
            continue
        rows, images, draws = (run.answers[f"shown/{name}"] for name in ("rows", "images", "draws"))
        order = run.parts().sum(0)[rows].argsort(stable=True)
        classes, said = run.result["classes"], []
        for row in rows[order].tolist():
            probs, true = run.answers["probs"][row], int(run.answers["labels"][row])
            said.append(f"row {row}: {classes[int(probs.argmax())]} {float(probs.max()):.0%}, true {classes[true]}")
        canvas = new_figure(9.6, 4.4)
        titles = [_plain(words.replace(": ", "\n", 1).replace(", true", "\ntrue"), 48) for words in said]
        draw_examples(canvas, images[order], titles, draws[order])
        alt = f"Most to least certain test images of {run.name}. {'; '.join(said)}."
        section.draw(canvas, alt, run.name, "Most certain at the left, least certain at the right.", wide=True)
    return section


def _training(runs: Sequence[Run]) -> Section:
    section = Section("training")
    columns = {"train NLL": "nll", "validation NLL": "valid_nll", "prior std": "prior_std"}
    for run in runs:
        axis = "epoch" if "epoch" in run.history else "step"
        pairs = {n: zip(run.history.get(axis, ()), run.history.get(c, ()), strict=False) for n, c in columns.items()}
        finite = {name: [pair for pair in points if all(map(math.isfinite, pair))] for name, points in pairs.items()}
        curves = {name: points for name, points in finite.items() if points}
        if not curves:
            section.notes.append(f"{run.name} has no history of training.")
            continue
        panels = 1 + ("prior std" in curves)
        canvas, grid = _panels(4, 1.9 + panels, panels, sharex=True, squeeze=False, height_ratios=(3, 1)[:panels])
        for number, (name, points) in enumerate(curves.items()):
            axes = grid[-1 if name == "prior std" else 0, 0]
            axes.plot(*zip(*points, strict=True), label=name, **_line(number))
            axes.set_ylabel("prior std" if name == "prior std" else "NLL")
        grid[0, 0].legend(loc="upper right")
        grid[-1, 0].set_xlabel(axis)
        ends = {name: [y for _, y in points] for name, points in curves.items()}
        note = "; ".join(f"{name}: last {y[-1]:.3f}, lowest {min(y):.3f}" for name, y in ends.items()) + "."
        section.draw(canvas, f"Training curves of {run.name} over {axis}s. {note}", run.name, note)
    return section


def _diagnosis(runs: Sequence[Run]) -> Section:
    found = {run.name: run.result["diagnosis"].strip() for run in runs}
    notes = [f"{name} has no diagnosis." for name, text in found.items() if not text]
    return Section("diagnosis", notes=notes, texts=[(name, text) for name, text in found.items() if text])


def _provenance(runs: Sequence[Run]) -> Section:
    texts = []
    for run in runs:
        facts: dict[str, Any] = {"seed": run.result["job"].get("seed", 0)} | run.result["provenance"]
        lines = [f"{k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in facts.items()]
        texts.append((run.name, "\n".join([*lines, "", run.job_text])))
    return Section("provenance", texts=texts)


def _panels(width: float, height: float, *shape: int, **options: Any) -> tuple[Any, Any]:
    """Returns a matplotlib figure of a size in inches, and its axes."""
    canvas = new_figure(width, height)
    return canvas, canvas.subplots(*shape, **options)


def _histograms(sets: Mapping[str, Tensor], label: str, edges: list[float], *, expected: bool = False) -> Any:
    """Draws the share of rows in each bin; the first set is filled. `expected` adds a line of equal shares."""
    canvas, axes = _panels(4, 2.8 + 0.2 * (len(sets) + expected))
    for i, (name, values) in enumerate(sets.items()):
        form = {"histtype": "stepfilled", "alpha": 0.45, "lw": None} if i == 0 else {"histtype": "step", "lw": 1.8}
        histogram(axes, values, edges, label=_plain(name), **(_line(i) | form))
    axes.set(xlabel=label, ylabel="share of rows", xlim=(0, edges[-1]))
    if expected:
        words = "expected of inputs like the held-out ones"
        axes.axhline(1 / (len(edges) - 1), color="#555555", lw=1, ls=":", label=words)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return canvas


def _line(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % 6], "ls": _DASHES[number % 6], "lw": 1.6}


def _plain(name: str, length: int = 44) -> str:
    """Returns a name in letters that the font has, cut to a length."""
    letters = "".join(c if (c.isprintable() and ord(c) < 0x250) or c == "\n" else "?" for c in name)
    letters = letters if len(letters) <= length else letters[: length - 1] + "…"
    return f" {letters}" if letters.startswith("_") else letters  # matplotlib hides what begins with _
