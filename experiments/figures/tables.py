"""Tables of results: cells as rows of text, mean ± standard deviation over seeds."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from figures.grid import Cells, Grid, auroc, grid_of, numbers, outsider, spread

if TYPE_CHECKING:
    from reproduce import Experiment

NOTHING = "–"
Text = Callable[[Cells], str]


def table(experiment: "Experiment", cells: dict[str, Any]) -> list[list[str]]:
    """Returns results, by name of the cell, as rows of text, the header first; a method with missing seeds says so."""
    grid = grid_of(experiment, cells)
    if experiment.figure == "regression":
        return _regression(grid)
    wanted = WANTED.get(experiment.figure)
    columns = [(header, text) for kind, header, text in _columns(grid) if wanted is None or kind in wanted]
    rows = [["setting", "method", *(header for header, _ in columns)]]
    for setting, method, group in grid.groups():
        rows.append(
            [setting, _named(method, group, grid.seeds[setting, method]), *(text(group) for _, text in columns)]
        )
    return rows if any(setting["name"] for setting in experiment.settings) else [row[1:] for row in rows]


def markdown(rows: list[list[str]]) -> str:
    """Returns a table in Markdown, numbers aligned right."""
    if not rows:
        return ""
    head, *body = [[text.replace("|", "\\|") for text in row] for row in rows]
    right = [bool(body) and all(row[i][:1].isdigit() or row[i][:1] in "–-−" for row in body) for i in range(len(head))]
    lines = [head, ["---:" if side else "---" for side in right], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _named(method: str, cells: Cells, seeds: int) -> str:
    return method if len(cells) == seeds else f"{method} ({len(cells)} of {seeds} seeds)"


def _worded(values: list[float], digits: int = 3) -> str:
    """Words mean ± standard deviation, or a single value."""
    if not values:
        return NOTHING
    mean, sd = spread(values)
    return f"{mean:,.{digits}f} ± {sd:,.{digits}f}" if len(values) > 1 else f"{mean:,.{digits}f}"


def _mean(*path: str, digits: int = 3, unit: float = 1.0) -> Text:
    return lambda cells: _worded([unit * value for value in numbers(cells, *path)], digits)


def _count(*path: str) -> Text:
    """Shows a number that is the same for all seeds."""
    return lambda cells: f"{values[0]:,.0f}" if (values := numbers(cells, *path)) else NOTHING


WANTED = {  # kinds of columns; a figure that is not here has all
    "components": ("error", "nll", "ece", "temperature", "parameters", "forwards"),
    "size": ("error", "nll", "ece", "temperature", "parameters"),
    **dict.fromkeys(("calibration", "pca", "softmax"), ("error", "nll", "ece", "temperature")),
    "ood": ("error", "nll", "corrupted", "ood"),
}


def _columns(grid: Grid) -> list[tuple[str, str, Text]]:
    """Returns the kind that figures choose by, the header, and the text for a group of cells, of every column."""
    strange = list(dict.fromkeys(name for *_, cells in grid.groups() if (name := outsider(cells))))
    outside = f"OOD AUROC ({', '.join(strange)})" if strange else "OOD AUROC"
    return [
        ("error", "error %", _mean("scores", "error", digits=2, unit=100)),
        ("nll", "NLL", _mean("scores", "nll")),
        ("ece", "ECE", _mean("scores", "ece")),
        ("temperature", "own T", _mean("temperature", digits=2)),
        ("nll", "NLL + T", _mean("tempered", "scores", "nll")),
        ("ece", "ECE + T", _mean("tempered", "scores", "ece")),
        ("corrupted", "corrupted error %", _mean("corrupted", "all", "error", digits=2, unit=100)),
        ("corrupted", "corrupted NLL", _mean("corrupted", "all", "nll")),
        ("corrupted", "corrupted ECE", _mean("corrupted", "all", "ece")),
        ("corrupted", "corrupted NLL + T", _mean("tempered", "corrupted", "all", "nll")),
        ("corrupted", "corrupted ECE + T", _mean("tempered", "corrupted", "all", "ece")),
        ("ood", outside, lambda cells: _worded(auroc(cells, "max_prob"))),
        ("ood", f"{outside} by epistemic", lambda cells: _worded(auroc(cells, "epistemic"))),
        ("rows", "rows ×", _times(grid)),
        ("parameters", "parameters", _count("costs", "parameters")),
        ("forwards", "forwards", _count("costs", "forwards")),
    ]


def _times(grid: Grid) -> Text:
    """Shows training rows as a multiple of plain training's in the same setting, else of the smallest number."""
    bases: dict[int, float] = {}
    for methods in grid.having("costs", "rows").settings.values():
        rows = {method: cells[0]["costs"]["rows"] for method, cells in methods.items()}
        plain = [count for method, count in rows.items() if grid.methods[method] == "sgd"]
        bases |= {id(c): (plain or [min(rows.values())])[0] for cells in methods.values() for c in cells}

    def text(cells: Cells) -> str:
        ratios = [cell["costs"]["rows"] / bases[id(cell)] for cell in cells if id(cell) in bases]
        return f"{ratios[0]:.3g}×" if ratios else NOTHING

    return text


def _regression(grid: Grid) -> list[list[str]]:
    """Returns rows by method, then by number of hidden layers."""
    rows = [["method", "L", "NLL", "RMSE", "coverage"]]
    for name in grid.methods:
        for setting, method, cells in grid.having("scores").groups():
            if method == name:
                scores = (_mean("scores", score)(cells) for score in ("nll", "rmse", "coverage"))
                layers = cells[0]["job"]["net_options"]["layers"]
                rows.append([_named(name, cells, grid.seeds[setting, name]), f"{layers}", *scores])
    return rows
