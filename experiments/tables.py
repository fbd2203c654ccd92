"""Puts the tables of results into README.md and experiments/README.md, from the result files: python tables.py

With --check it changes nothing and fails if a page is out of date.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ibnn import figures
from ibnn.reproduce import names, read, results

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
PAGES = (ROOT / "README.md", ROOT / "experiments" / "README.md")
SHORT = (
    "setting",
    "method",
    "error %",
    "NLL",
    "ECE",
    "NLL + T",
    "corrupted ECE",
    "corrupted ECE + T",
    "rows ×",
    "forwards",
)


def blocks() -> dict[str, str]:
    """The text between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, by name."""
    found = {}
    for name in names():
        experiment, cells = read(name, "cpu"), results(name, "cpu", RESULTS).cells
        if cells:
            found[name] = figures.markdown(figures.table(experiment, cells)).rstrip() + "\n"
    if "benchmark" in found:
        rows = figures.table(read("benchmark", "cpu"), results("benchmark", "cpu", RESULTS).cells)
        kept = [i for i, column in enumerate(rows[0]) if column in SHORT]
        found["results"] = figures.markdown([[row[i] for i in kept] for row in rows]).rstrip() + "\n"
    chosen = json.loads((RESULTS / "choose.json").read_text())["cells"]
    found["choose"] = _choices(chosen)
    return found


def _choices(cells: dict[str, Any]) -> str:
    rows = [["setting", "held-out NLL", "error %"]]
    for name, cell in sorted(cells.items()):
        error = f"{100 * cell['valid_error']:.1f}" if "valid_error" in cell else "–"
        rows.append([name, f"{cell['valid_nll']:.3f}", error])
    return figures.markdown(rows).rstrip() + "\n"


def filled(text: str, found: dict[str, str]) -> str:
    """A page with every block that there is a table for."""
    for name, table in found.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin in text:
            before, rest = text.split(begin)
            text = before + begin + table + end + rest.split(end, 1)[1]
    return text


def main(check: bool) -> int:
    """Fills the pages in, or says which are out of date."""
    found, stale = blocks(), []
    for page in PAGES:
        old = page.read_text()
        new = filled(old, found)
        if new != old:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    if check and stale:
        print(f"Out of date: {', '.join(stale)}. Run: python experiments/tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
