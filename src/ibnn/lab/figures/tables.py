"""TABLES: the cells as rows of text, mean ± standard deviation over seeds."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ibnn.lab.figures.grid import Cells, Grid, at, grid_of, numbers, outsider, spread
from ibnn.lab.figures.look import family

if TYPE_CHECKING:
    from ibnn.lab.reproduce import Experiment

NOTHING = "–"
Text = Callable[[Cells], str]


def table(experiment: "Experiment", cells: dict[str, Any]) -> list[list[str]]:
    """The result of an experiment, so far.

    Args:
        experiment: The grid.
        cells: What its cells gave, by name; any may be missing.

    Returns:
        Rows of text, the header first. A method of which seeds are missing says so.
    """
    grid = grid_of(experiment, cells)
    if experiment.figure == "table1":
        return _sizes(grid)
    if experiment.figure == "regression":
        return _regression(grid)
    columns = _columns(grid)
    wanted = WANTED.get(experiment.figure, list(columns))
    kept = {header: text for header, text in columns.items() if any(header.startswith(w) for w in wanted)}
    rows = [
        [s, _named(m, group, grid.seeds[s, m]), *(text(group) for text in kept.values())]
        for s, m, group in grid.groups()
    ]
    rows = [["setting", "method", *kept], *rows]
    return rows if any(setting["name"] for setting in experiment.settings) else [row[1:] for row in rows]


def markdown(rows: list[list[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    if not rows:
        return ""
    head, *body = [[text.replace("|", "\\|") for text in row] for row in rows]
    right = [bool(body) and all(row[i][:1].isdigit() or row[i][:1] in "–-−" for row in body) for i in range(len(head))]
    lines = [head, ["---:" if side else "---" for side in right], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _named(method: str, cells: Cells, seeds: int) -> str:
    return method if len(cells) == seeds else f"{method} ({len(cells)} of {seeds} seeds)"


def _said(values: list[float], digits: int = 3) -> str:
    """Mean ± standard deviation; of one value itself."""
    if not values:
        return NOTHING
    mean, sd = spread(values)
    return f"{mean:,.{digits}f} ± {sd:,.{digits}f}" if len(values) > 1 else f"{mean:,.{digits}f}"


def _mean(*path: str, digits: int = 3, unit: float = 1.0) -> Text:
    return lambda cells: _said([unit * value for value in numbers(cells, *path)], digits)


def _count(*path: str) -> Text:
    """Of what no seed changes."""
    return lambda cells: f"{values[0]:,.0f}" if (values := numbers(cells, *path)) else NOTHING


_SCORES = ["error %", "NLL", "ECE", "own T"]
WANTED = {  # beginnings of headers; a figure that is not here has all
    "components": [*_SCORES, "training seconds", "parameters", "forwards"],
    "size": [*_SCORES, "training seconds", "parameters"],
    "calibration": [*_SCORES],
    "ood": ["error %", "NLL", "corrupted", "OOD"],
    "pca": [*_SCORES],
    "softmax": [*_SCORES],
}


def _columns(grid: Grid) -> dict[str, Text]:
    """Header → what a group of cells has there."""
    strange = list(dict.fromkeys(name for *_, cells in grid.groups() if (name := outsider(cells))))
    outside = f"OOD AUROC ({', '.join(strange)})" if strange else "OOD AUROC"
    return {
        "error %": _mean("scores", "error", digits=2, unit=100),
        "NLL": _mean("scores", "nll"),
        "ECE": _mean("scores", "ece"),
        "own T": _mean("temperature", digits=2),
        "NLL + T": _mean("tempered", "scores", "nll"),
        "ECE + T": _mean("tempered", "scores", "ece"),
        "corrupted error %": _mean("corrupted", "all", "error", digits=2, unit=100),
        "corrupted NLL": _mean("corrupted", "all", "nll"),
        "corrupted ECE": _mean("corrupted", "all", "ece"),
        "corrupted NLL + T": _mean("tempered", "corrupted", "all", "nll"),
        "corrupted ECE + T": _mean("tempered", "corrupted", "all", "ece"),
        outside: lambda cells: _auroc(cells, "max_prob"),
        f"{outside} by epistemic": lambda cells: NOTHING if _alone(cells) else _auroc(cells, "epistemic"),
        "training seconds": _mean("costs", "train_seconds", digits=0),
        "rows ×": _times(grid),
        "parameters": _count("costs", "parameters"),
        "forwards": _count("costs", "forwards"),
    }


def _auroc(cells: Cells, score: str) -> str:
    strange = outsider(cells)
    return _said(numbers(cells, "outsiders", strange, score)) if strange else NOTHING


def _alone(cells: Cells) -> bool:
    """One network alone has no epistemic part."""
    return all(at(cell, "costs", "forwards") == 1 for cell in cells)


def _times(grid: Grid) -> Text:
    """Rows through a network in training, as a multiple of plain training's in the same setting, else of the fewest."""
    bases: dict[int, float] = {}
    for methods in grid.having("costs", "rows").settings.values():
        rows = {method: cells[0]["costs"]["rows"] for method, cells in methods.items()}
        plain = [count for method, count in rows.items() if family(method) in ("sgd", "plain")]
        bases |= {id(c): (plain or [min(rows.values())])[0] for cells in methods.values() for c in cells}

    def text(cells: Cells) -> str:
        ratios = [cell["costs"]["rows"] / bases[id(cell)] for cell in cells if id(cell) in bases]
        return f"{ratios[0]:.3g}×" if ratios else NOTHING

    return text


def _regression(grid: Grid) -> list[list[str]]:
    """By method, then by hidden layers."""
    groups: dict[tuple[str, int], Cells] = {}
    seeds = dict[str, int]()
    for setting, method, cells in grid.having("layers").groups():
        seeds[method] = grid.seeds[setting, method]
        for cell in cells:
            groups.setdefault((method, cell["layers"]), []).append(cell)
    rows = [
        [
            _named(method, cells, seeds[method]),
            f"{layers}",
            *(_mean("scores", name)(cells) for name in ("nll", "rmse", "coverage")),
        ]
        for (method, layers), cells in sorted(
            groups.items(), key=lambda group: (grid.methods.index(group[0][0]), group[0][1])
        )
    ]
    return [["method", "L", "NLL", "RMSE", "coverage"], *rows]


def _sizes(grid: Grid) -> list[list[str]]:
    """The paper's Table 1."""
    found: Cells = next((cells[0]["rows"] for *_, cells in grid.having("rows").groups()), [])
    names = ("weights", "nodes", "ratio", "printed")
    rows = [[row["net"], *(f"{row[n]:,.0f}" if row.get(n) is not None else NOTHING for n in names)] for row in found]
    return [["net", "weights", "nodes", "ratio", "nodes in the paper"], *rows]
