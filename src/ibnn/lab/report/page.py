"""REPORT PAGE: the runs' scores and the template that arranges the sections."""

from collections.abc import Sequence

from ibnn.lab.pages import environment, style
from ibnn.lab.report import sections
from ibnn.lab.report.runs import Classifier, Run

_PACKAGE = "ibnn.lab.report"


def page(runs: Sequence[Run], title: str) -> str:
    """Returns the whole page as HTML."""
    classifiers = [run for run in runs if isinstance(run, Classifier)]
    template = environment(_PACKAGE).get_template("page.html.j2")
    return template.render(
        title=title,
        style=style(_PACKAGE, "report.css"),
        runs=runs,
        classifiers=classifiers,
        regressions=[run for run in runs if not isinstance(run, Classifier)],
        rated=[(run, sections.intervals(run.test, run.labels)) for run in classifiers],
        sections=sections,
    )
