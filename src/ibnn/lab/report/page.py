"""REPORT PAGE: a report's sections in the order a reader asks: how good, how calibrated, how uncertain, from where."""

from collections.abc import Sequence

from ibnn.lab.pages import environment, style
from ibnn.lab.report import scores, sections
from ibnn.lab.report.runs import Classifier, Run, classifiers

_PACKAGE = "ibnn.lab.report"
_HEADINGS = {  # and whether a section is of classifiers alone
    "summary": ("Summary", False),
    "reliability": ("Reliability", True),
    "ood": ("Out of distribution", True),
    "risk": ("Risk and coverage", True),
    "split": ("Sources of uncertainty", True),
    "examples": ("Most and least certain", True),
    "training": ("Training", False),
    "doctor": ("Posterior diagnosis", False),
    "provenance": ("Provenance", False),
    "glossary": ("Glossary", False),
}


def page(runs: Sequence[Run], title: str) -> str:
    """Returns the whole page as HTML."""
    classified = classifiers(runs)
    rated = [(run, scores.intervals(run.test, run.labels)) for run in classified]
    plain = [run for run in runs if not isinstance(run, Classifier)]
    detection, histograms = sections.detection(classified)
    curves, risk = sections.risk(classified)
    bars, split = sections.split(classified)
    return (
        environment(_PACKAGE)
        .get_template("page.html.j2")
        .render(
            title=title,
            style=style(_PACKAGE, "report.css"),
            headings={name: words for name, (words, only) in _HEADINGS.items() if classified or not only},
            lead=sections.lead(runs, rated),
            runs=runs,
            classified=classified,
            ratings=sections.ratings(rated) if rated else None,
            regressions=sections.regressions(plain) if plain else None,
            costs=sections.costs(runs),
            warnings=[(run.name, words) for run, found in rated for words in sections.warnings(run, found)],
            reliability=[sections.reliability(run) for run in classified],
            detection=detection,
            histograms=histograms,
            curves=curves,
            risk=risk,
            bars=bars,
            split=split,
            examples=sections.examples,
            training=[(run.name, sections.training(run)) for run in runs],
            facts=sections.facts,
        )
    )
