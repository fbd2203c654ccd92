"""One self-contained HTML page about one or more runs: no network, no scripts, reproducible to the byte."""

from collections.abc import Sequence
from pathlib import Path

from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.lab.pages import environment, style
from ibnn.lab.report import sections
from ibnn.lab.report.runs import Classifier, read_runs

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path, *, title: str = "Calibration report") -> None:
    """Reads run folders and writes the page; if anything is wrong with a folder, writes nothing.

    Args:
        runs: Folders of finished runs.
        out: The page's file; missing folders are created.
        title: The page's heading.

    >>> write_report([], Path("report.html"))
    Traceback (most recent call last):
    ValueError: Expected `runs` to be a list of one or more run folders, but got none. Pass [Path('runs/mine')].
    """
    if Path(out).is_dir():
        raise IsADirectoryError(complaint("out", "a file's name", f"the folder {out}", "Pass report.html in it."))
    found = read_runs(runs)
    classifiers = [run for run in found if isinstance(run, Classifier)]
    template = environment(__name__).get_template("page.html.j2")
    page = template.render(
        title=title,
        style=style(__name__, "report.css"),
        runs=found,
        classifiers=classifiers,
        regressions=[run for run in found if not isinstance(run, Classifier)],
        rated=[(run, sections.intervals(run.test, run.labels)) for run in classifiers],
        sections=sections,
    )
    write_atomically(Path(out), page.encode("utf-8", "replace"))
