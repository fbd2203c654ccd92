"""Runs the tutorials, fills in what their code prints, and redraws their figures.

    python docs/pages.py                # every page of docs/tutorials
    python docs/pages.py images text    # some of them

The Python blocks of a page run one after another in an empty folder. A `text` block below one shows what it printed;
the PNG files that the code writes go to docs/figures. The output is also kept, with versions and commit, in
experiments/results/tutorials.json: the numbers in the tutorials are checked against that file.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULT = DOCS.parent / "experiments" / "results" / "tutorials.json"
_BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", flags=re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Returns the page's Python blocks, each with the output shown below it (None if none is shown)."""
    return [(match[1], match[2]) for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def run(page: Path) -> tuple[dict[str, Any], list[str]]:
    """Runs the page's Python blocks in the current folder.

    Returns:
        The names that the code defined, and what each block printed.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    printed = []
    for code, _ in blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, str(page), "exec"), names)
        printed.append(output.getvalue())
    return names, printed


def shown(page: Path) -> list[str]:
    """Returns the outputs that the page shows."""
    return [output for _, output in blocks(page) if output is not None]


def fill(page: Path, printed: list[str]) -> None:
    """Replaces the outputs that the page shows by what its blocks printed."""
    outputs = iter(printed)

    def filled(match: re.Match[str]) -> str:
        output = next(outputs)
        return match[0] if match[2] is None else f"```python\n{match[1]}```\n\n```text\n{output}```"

    page.write_text(_BLOCK.sub(filled, page.read_text(encoding="utf-8")), encoding="utf-8")


def main(wanted: list[str]) -> None:
    """Runs the tutorials that are named, or all."""
    sys.path.append(str(DOCS.parent / "experiments"))
    from provenance import provenance

    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        if wanted and page.stem not in wanted:
            continue
        begun, home = time.perf_counter(), Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                _, printed = run(page)
                for figure in Path(folder).glob("*.png"):
                    (DOCS / "figures" / figure.name).write_bytes(figure.read_bytes())
            finally:
                os.chdir(home)
        fill(page, printed)
        seconds = round(time.perf_counter() - begun, 1)
        results[page.stem] = {"shown": shown(page), "seconds": seconds, "versions": provenance("scikit-learn")}
        print(f"{page.stem}: {seconds} s", file=sys.stderr)
    RESULT.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
