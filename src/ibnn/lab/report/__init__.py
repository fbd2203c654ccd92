"""REPORT: one HTML page about one or several runs, whole in itself: no network, no scripts, always the same bytes."""

from collections.abc import Sequence
from pathlib import Path

from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.lab.report.page import page
from ibnn.lab.report.runs import read_runs

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path, *, title: str = "Calibration report") -> None:
    """Reads run folders and writes the page; if anything is wrong with a folder, nothing is written.

    Args:
        runs: Folders with job.toml, result.json, history.csv and answers.safetensors (regression does without it).
        out: The page's file. Its folder is made if need be.
        title: The page's heading.

    >>> write_report([Path("nowhere")], Path("report.html"))
    Traceback (most recent call last):
    FileNotFoundError: Expected `runs` to be run folders, but got no folder nowhere. Pass folders that ibnn wrote.
    """
    if Path(out).is_dir():
        raise IsADirectoryError(complaint("out", "a file's name", f"the folder {out}", "Pass report.html in it."))
    write_atomically(Path(out), page(read_runs(runs), title).encode("utf-8", "replace"))
