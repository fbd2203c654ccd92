"""One self-contained HTML page about one or more runs: no network, no scripts, the same bytes each time."""

import base64
import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.lab.display import BLUE, VERMILION, dots, house_style, new_figure, png, tables
from ibnn.lab.runs import ANSWERS, HISTORY, JOB, RESULT, RunFolder

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")  # HTML forbids them
_STYLE = {"font.size": 10, "axes.grid": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.6, "legend.fontsize": 9}


def write_report(runs: Sequence[Path], out: Path, *, title: str = "Calibration report") -> None:
    """Reads folders of finished runs and writes the page; if anything is wrong with a folder, writes nothing.

    >>> write_report([], Path("report.html"))
    Traceback (most recent call last):
    ValueError: Expected `runs` to be a list of one or more run folders, but got []. Pass [Path('runs/mine')].
    """
    if isinstance(runs, str | Path) or not runs:
        raise ValueError(complaint("runs", "a list of one or more run folders", runs, "Pass [Path('runs/mine')]."))
    if Path(out).is_dir():
        raise IsADirectoryError(complaint("out", "a file's name", f"the folder {out}", "Pass report.html in it."))
    homes = [RunFolder(Path(folder)) for folder in runs]
    for home in homes:
        home.require([JOB, RESULT, HISTORY, ANSWERS])
    with house_style(_STYLE):
        sections = [_section(home) for home in homes]
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=PackageLoader("ibnn.lab"), **options).get_template("report.html.j2")
    page = _CONTROL.sub("", template.render(title=title, runs=sections))
    write_atomically(Path(out), page.encode("utf-8", "replace"))


def _section(home: RunFolder) -> dict[str, Any]:
    result, answers = home.result, home.answers()
    facts = {"seed": result["job"].get("seed", 0)} | result["provenance"]
    lines = [f"{k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in facts.items()]
    return {
        "name": result["name"],
        "tables": tables(result),
        "figures": [*_reliability(result), *_training(home.text(HISTORY))],
        "examples": list(_examples(answers, result["classes"])),
        "diagnosis": result["diagnosis"].strip(),
        "provenance": "\n".join([*lines, "", home.text(JOB)]),
    }


def _source(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _reliability(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Draws accuracy over confidence; dots have areas that grow with the rows of their bin."""
    if "reliability" not in result:
        return []
    figure = new_figure(4.6, 4)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="black", lw=0.8, ls=":")
    readings = {"as it is": (result, BLUE)}
    if "tempered" in result:
        readings["+ temperature scaling"] = (result["tempered"], VERMILION)
    for name, (reading, colour) in readings.items():
        columns = [reading["reliability"][column] for column in ("confidence", "accuracy", "count")]
        share = 260 / sum(columns[2])
        points = [(confidence, accuracy, 6 + share * n) for confidence, accuracy, n in zip(*columns, strict=True)]
        dots(axes, points, lw=1.2, color=colour, label=name)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.04))
    axes.legend(loc="upper left")
    return [("Reliability: below the diagonal, the network is more confident than right", _source(png(figure)))]


def _training(history: str) -> list[tuple[str, str]]:
    """Draws the NLL of training and held-out rows, and the noise where it was steered."""
    rows = list(csv.DictReader(history.splitlines()))
    known = [name for name in ("nll", "valid_nll", "prior_std") if any(row.get(name) for row in rows)]
    if not known:
        return []
    figure = new_figure(4.6, 4)
    panels = figure.subplots(1 + ("prior_std" in known), squeeze=False, sharex=True)[:, 0]
    time = "epoch" if "epoch" in rows[0] else "step"
    for name, colour in zip(known, (BLUE, VERMILION, BLUE), strict=False):
        axes = panels[-1 if name == "prior_std" else 0]
        points = [(float(row[time]), float(row[name])) for row in rows if row.get(name)]
        axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.legend(loc="upper right")
    panels[-1].set_xlabel(time)
    return [("Training: where the held-out NLL rises, the network overfits", _source(png(figure)))]


def _examples(answers: dict[str, Tensor], classes: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the least and the most certain test images with what was answered."""
    from matplotlib.image import imsave

    found = []
    for row, image in zip(answers.get("shown/rows", ()), answers.get("shown/images", ()), strict=True):
        file, pixels = io.BytesIO(), image[:3].movedim(0, -1) if len(image) >= 3 else image[0]
        about: Any = {"Software": None}
        imsave(file, pixels.numpy(), format="png", cmap="gray_r", metadata=about)
        probability, guess = answers["probs"][row].max(0)
        words = f"{classes[int(guess)]} {float(probability):.0%}, true {classes[int(answers['labels'][row])]}"
        found.append((f"row {int(row)}: {words}", _source(file.getvalue())))
    return found
