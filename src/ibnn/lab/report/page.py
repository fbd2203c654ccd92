"""PAGE: the report's sections in the order a reader asks: how good, how honest, how it doubts, on what, from where."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from ibnn import metrics
from ibnn.lab.report import figures, scores
from ibnn.lab.report.examples import examples
from ibnn.lab.report.glossary import glossary
from ibnn.lab.report.markup import (
    cards,
    cell,
    facts,
    figure,
    interval_cell,
    nothing,
    paragraph,
    run_name,
    section,
    table,
    text,
    word,
)
from ibnn.lab.report.runs import PARTS, Run, classifying
from ibnn.lab.report.style import CSS
from ibnn.lab.runs import COSTS
from ibnn.metrics import Interval

OF_CLASSES = ("reliability", "ood", "risk", "split", "examples")  # what regression alone has nothing for


def page(runs: Sequence[Run], title: str) -> str:
    """The whole page as HTML."""
    rated = {
        number: scores.intervals(run.test, run.labels) for number, run in enumerate(runs) if run.test is not None
    }  # of runs that classify
    parts = {
        "summary": ("Summary", _summary(runs, rated)),
        "reliability": ("Reliability", _reliability(runs)),
        "ood": ("Out of distribution", _ood(runs)),
        "risk": ("Risk and coverage", _risk(runs)),
        "split": ("Where the doubt comes from", _split(runs)),
        "examples": ("Most and least certain", examples(runs)),
        "training": ("Training", _training(runs)),
        "doctor": ("Posterior doctor", _doctor(runs)),
        "provenance": ("Provenance", _provenance(runs)),
        "glossary": ("Glossary", glossary()),
    }
    if not rated:
        parts = {name: part for name, part in parts.items() if name not in OF_CLASSES}
    contents = "".join(f'<li><a href="#{name}">{text(heading)}</a></li>\n' for name, (heading, _) in parts.items())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f'<title>{text(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{CSS}\n</style>\n</head>\n<body>\n'
        '<a class="skip" href="#main">Skip to the report</a>\n<div class="layout">\n'
        f"<header>\n<h1>{text(title)}</h1>\n{_lead(runs, rated)}</header>\n"
        f'<nav aria-label="Contents">\n<ol>\n{contents}</ol>\n</nav>\n<main id="main" tabindex="-1">\n'
        + "".join(html for _, html in parts.values())
        + "</main>\n</div>\n</body>\n</html>\n"
    )


def _lead(runs: Sequence[Run], rated: Mapping[int, Mapping[str, Interval]]) -> str:
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    if not rated:
        return paragraph(f"{count} of regression.", "lead")
    number = min(rated, key=lambda n: rated[n]["nll"].value)
    value, low, high = rated[number]["nll"]
    if len(_groups(runs, rated)) > 1:
        return paragraph(f"{count} on {len(_groups(runs, rated))} sets of data, to be compared set by set.", "lead")
    only = "NLL" if len(rated) == 1 else "Lowest NLL"
    words = f"{count}. {only}: {runs[number].name}, {value:.3f} (95 % interval {low:.3f} to {high:.3f})."
    return paragraph(words + " New words are explained in the glossary.", "lead")


# -------------------------------------------------------------------------------------------------------------- summary


def _summary(runs: Sequence[Run], rated: Mapping[int, Mapping[str, Interval]]) -> str:
    explanation = "Lower error, NLL, ECE, Brier score and RMSE are better."
    explanation += " Below each value is its 95 % bootstrap interval over the test rows." if rated else ""
    parts = []
    if rated:
        parts.append(_ratings(runs, rated))
        parts.append(
            paragraph(
                "★ marks the lowest value among runs on the same data. Where intervals overlap, the order may be "
                "chance. Resampling adds noise to the ECE, so its interval leans upwards.",
                "note",
            )
        )
    if plain := [number for number in range(len(runs)) if number not in rated]:
        parts.append(_regressions(runs, plain))
    parts.append(_costs(runs))
    for number, found in rated.items():
        parts += [paragraph(f"Careful, {runs[number].name}: {w}.", "warn") for w in _warnings(runs[number], found)]
    return section("summary", "Summary", explanation, parts)


def _warnings(run: Run, found: Mapping[str, Interval]) -> list[str]:
    assert run.test is not None
    words = scores.contradictions(run, found)
    if lost := int((run.test.probs.gather(1, run.labels[:, None]) == 0).sum()):
        words.append(f"{lost} true classes have a stored probability of 0, which the NLL counts as the smallest number")
    return words


def _groups(runs: Sequence[Run], rated: Iterable[int]) -> list[list[int]]:
    """The runs that can be compared, having been asked the same: same data, same number of test rows."""
    groups: dict[object, list[int]] = {}
    for number in rated:
        groups.setdefault((str(runs[number].job.get("data")), len(runs[number].labels)), []).append(number)
    return list(groups.values())


def _ratings(runs: Sequence[Run], rated: Mapping[int, Mapping[str, Interval]]) -> str:
    winners = {
        (name, number)
        for name, (_, digits) in scores.METRICS.items()
        for group in _groups(runs, rated)
        for number in scores.best({n: rated[n][name].value for n in group}, digits)
    }
    rows = [
        (
            run_name(runs[number].name, number),
            [interval_cell(found[m], digits, best=(m, number) in winners) for m, (_, digits) in scores.METRICS.items()]
            + [cell(_short(len(runs[number].labels)))],
        )
        for number, found in rated.items()
    ]
    head = ["run", *(label for label, _ in scores.METRICS.values()), "test rows"]
    return table("scores-table", "Scores", head, rows)


def _regressions(runs: Sequence[Run], numbers: Sequence[int]) -> str:
    names = {"nll": "NLL", "rmse": "RMSE", "coverage": "coverage"}
    rows = [(run_name(runs[n].name, n), [cell(_short(runs[n].scores.get(name))) for name in names]) for n in numbers]
    return table("regression-table", "Scores of regression", ["run", *names.values()], rows)


def _costs(runs: Sequence[Run]) -> str:
    rows = [
        (
            run_name(run.name, number),
            [*(cell(_short(run.costs.get(key))) for key in COSTS), cell(_short(run.temperature))],
        )
        for number, run in enumerate(runs)
    ]
    return table("costs-table", "Costs", ["run", *COSTS.values(), "temperature"], rows)


def _short(value: float | None) -> str:
    """A number as short as it can be read; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------- honesty and usefulness


def _reliability(runs: Sequence[Run]) -> str:
    shown = []
    for number, run, test in classifying(runs):
        curve = metrics.reliability_curve(test.probs, run.labels)
        sure = 100 * float(test.probs.max(1).values.double().mean())
        right = 100 - 100 * metrics.error(test.probs, run.labels)
        lean = f"{'over' if sure > right else 'under'}confident by {abs(sure - right):.1f} points"
        ece = metrics.ece(test.probs, run.labels)
        note = f"Mean confidence {sure:.1f} %, accuracy {right:.1f} %: {lean}."
        alt = f"Reliability diagram of {run.name}: ECE {ece:.3f} over {len(run.labels)} rows. {note}"
        shown.append(figure(figures.reliability(curve, number), alt, run.name, note))
    explanation = (
        "Dots on the diagonal: of the answers given with some confidence, as many are right. Below it the network is "
        "more confident than right; grey bars are the gap, thin lines 95 % intervals. The lower panel counts the rows "
        "of each bin (log scale)."
    )
    return section(
        "reliability", "Reliability", explanation, [cards(shown) if shown else nothing("class probabilities")]
    )


def _ood(runs: Sequence[Run]) -> str:
    shown, rows = [], []
    for number, run, test in classifying(runs):
        sets = {"test set": test} | {name: answers for name, answers in run.ood.items() if name != "test set"}
        found = {name: scores.detections(test, answers) for name, answers in run.ood.items()}
        for name, detected in found.items():
            cells = [
                cell(_digits(d.auroc) if d else "–") + cell(_digits(d.fpr95) if d else "–") for d in detected.values()
            ]
            rows.append((run_name(run.name, number), [word(name), *cells]))
        for doubt, label in (("total entropy", "total"), ("epistemic part", "epistemic")):
            values = {name: v for name, a in sets.items() if (v := scores.doubts(a)[doubt]) is not None}
            if "test set" not in values:
                continue
            areas = [f"{name}: AUROC {d.auroc:.3f}" for name, all in found.items() if (d := all[doubt]) is not None]
            note = "; ".join(areas) or f"Mean {float(values['test set'].mean()):.3f} nats."
            alt = f"Histogram of the {label} uncertainty of {run.name}. {note}"
            shown.append(figure(figures.histograms(values, f"{label} uncertainty"), alt, f"{run.name}: {label}", note))
    explanation = (
        "How the doubt is spread over test rows (filled) and over inputs of kinds never seen in training (lines). The "
        "further apart, the better the model can say that it does not know."
    )
    head = [
        "run",
        "set",
        *(f"{word} {score}" for score in ("max-prob", "total", "epistemic") for word in ("AUROC", "FPR95")),
    ]
    parts = [table("ood-table", "Telling sets apart by three scores of doubt", head, rows)] if rows else []
    parts += [] if rows else [nothing("answers for inputs out of distribution")]
    return section("ood", "Out of distribution", explanation, [*parts, *([cards(shown)] if shown else [])])


def _digits(value: float) -> str:
    return f"{value:.3f}"


def _risk(runs: Sequence[Run]) -> str:
    curves = {number: scores.selective(test, run.labels) for number, run, test in classifying(runs)}
    parts = []
    for first in range(0, len(curves), 6):
        some = list(curves)[first : first + 6]
        areas = "; ".join(f"{runs[n].name}: AURC {curves[n].area:.4f}" for n in some)
        picture = figures.risk_coverage({runs[n].name: curves[n] for n in some}, some[0])
        alt = f"Error rate among the most certain rows over coverage. {areas}."
        parts.append(figure(picture, alt, "Risk over coverage", "Rows of high confidence are answered first.", "wide"))
    if curves:
        rows = []
        for n, curve in curves.items():
            at = [
                100 * float(curve.risk[max(0, math.ceil(share * len(curve.risk)) - 1)]) for share in (0.5, 0.8, 0.95, 1)
            ]
            rows.append((run_name(runs[n].name, n), [cell(f"{curve.area:.4f}"), *(cell(f"{risk:.1f}") for risk in at)]))
        head = ["run", "AURC", *(f"error % at {share} % coverage" for share in (50, 80, 95, 100))]
        parts.append(table("risk-table", "What handing over the doubtful rows would bring", head, rows))
    explanation = (
        "If the model may hand over its most doubtful rows, how often are its remaining answers wrong? A useful "
        "uncertainty makes the line fall towards the left."
    )
    return section("risk", "Risk and coverage", explanation, parts or [nothing("class probabilities")])


def _split(runs: Sequence[Run]) -> str:
    shown, rows, without = [], [], []
    for number, run, _ in classifying(runs):
        parts = scores.mean_parts(run)
        if not parts:
            without.append(run.name)
            continue
        shares = {name: float(values[1:].sum() / values.sum().clamp_min(1e-12)) for name, values in parts.items()}
        note = "Epistemic share of " + ", ".join(f"{name}: {100 * share:.0f} %" for name, share in shares.items()) + "."
        alt = f"Mean aleatoric, between and within uncertainty of {run.name}. {note}"
        shown.append(figure(figures.split(parts), alt, run.name, note))
        for name, values in parts.items():
            numbers = [*values.tolist(), float(values[1:].sum()), float(values.sum())]
            rows.append((run_name(run.name, number), [word(name), *(cell(_digits(v)) for v in numbers)]))
    explanation = (
        "Aleatoric doubt is in the input, and every draw has it; epistemic doubt (between + within) is disagreement of "
        "the draws. Wrong answers and unseen kinds should have more of the latter."
    )
    head = ["run", "rows", *PARTS, "epistemic", "total"]
    html = [cards(shown), table("split-table", "Mean uncertainty in nats", head, rows)] if rows else []
    html += [paragraph(f"{name} has stored no split of its uncertainty.", "note") for name in without]
    return section("split", "Where the doubt comes from", explanation, html or [nothing("a split of the uncertainty")])


# ------------------------------------------------------------------------------------------------ training, provenance


def _training(runs: Sequence[Run]) -> str:
    shown, without = [], []
    for run in runs:
        columns = {name: run.history[name] for name in run.history if any(map(math.isfinite, run.history[name]))}
        curves = {
            label: columns[name]
            for name, label in (("nll", "train NLL"), ("valid_nll", "validation NLL"))
            if name in columns
        }
        curves = curves or {name: columns[name] for name in ("loss",) if name in columns}
        if not curves:
            without.append(run.name)
            continue
        axis = next((name for name in ("epoch", "step") if name in columns), "row")
        x = columns.get(axis) or list(range(len(next(iter(curves.values())))))
        last = {name: [v for v in values if math.isfinite(v)] for name, values in curves.items()}
        note = "; ".join(f"{name}: last {v[-1]:.3f}, lowest {min(v):.3f}" for name, v in last.items()) + "."
        below = {"prior std": columns["prior_std"]} if "prior_std" in columns else {}
        note += f" Prior std ends at {[v for v in below['prior std'] if math.isfinite(v)][-1]:.3f}." if below else ""
        alt = f"Training curves of {run.name} over {axis}s. {note}"
        shown.append(figure(figures.training((axis, x), curves, below), alt, run.name, note))
    html = [cards(shown)] if shown else []
    html += [paragraph(f"{name} has no history of training.", "note") for name in without]
    explanation = (
        "The training NLL is what the optimiser sees; where the validation NLL turns up, the network overfits."
    )
    return section("training", "Training", explanation, html)


def _doctor(runs: Sequence[Run]) -> str:
    html = [
        f"<h3>{run_name(run.name, number)}</h3>\n<pre>{text(run.diagnosis)}</pre>\n"
        if run.diagnosis
        else paragraph(f"{run.name}: the doctor was not asked, or has nothing to say.", "note")
        for number, run in enumerate(runs)
    ]
    return section("doctor", "Posterior doctor", "What ibnn.diagnose says of each trained network.", html)


def _provenance(runs: Sequence[Run]) -> str:
    html = []
    for number, run in enumerate(runs):
        known = {"seed": run.job.get("seed", 0)} | dict(run.provenance)
        plain = {
            k: v if isinstance(v, str) else json.dumps(v, default=str, ensure_ascii=False) for k, v in known.items()
        }
        html.append(
            f"<details><summary>{run_name(run.name, number)}</summary>\n{facts(plain)}"
            f"<h3>Recipe (job.toml)</h3>\n<pre>{text(run.recipe)}</pre>\n</details>\n"
        )
    return section("provenance", "Provenance", "What each result was made from: recipe, seed, versions, commit.", html)
