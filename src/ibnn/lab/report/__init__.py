"""One self-contained HTML page about one or more runs: no network, no scripts, reproducible to the byte."""

from ibnn.lab.report.page import write_report

__all__ = ["write_report"]
