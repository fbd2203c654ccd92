"""The table of other libraries beside the benchmark's rows on the same LeNet; `tables.py` fills it in."""

import json
from collections.abc import Callable
from typing import Any

import figures
from common import RESULTS

SETTING = "LeNet, 5,000 Fashion-MNIST"
OURS = ("SGD", "iBNN-8", "MC-dropout", "BNN-VI", "Ensemble-4, equal cost", "Ensemble-4")
WHAT = {"Masksembles": "scale", "Packed-Ensembles": "α", "bayesian-torch": "KL ×"}
NAMES = {"SGD": "SGD, in the libraries' environment", "bayesian-torch": "bayesian-torch"}  # others: torch-uncertainty's
COLUMNS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "error %": lambda cell: 100 * cell["own"]["scores"]["error"],
    "NLL": lambda cell: cell["own"]["scores"]["nll"],
    "ECE": lambda cell: cell["own"]["scores"]["ece"],
    "NLL + T": lambda cell: cell["tempered"]["scores"]["nll"],
    "corrupted error %": lambda cell: 100 * cell["own"]["corrupted"]["error"],
    "corrupted NLL": lambda cell: cell["own"]["corrupted"]["nll"],
    "corrupted NLL + T": lambda cell: cell["tempered"]["corrupted"]["nll"],
    "AUROC to MNIST": lambda cell: cell["own"]["outsiders"]["mnist"]["max_prob"],
    "by epistemic": lambda cell: cell["own"]["outsiders"]["mnist"]["epistemic"] if cell["forwards"] > 1 else None,
    "training ×": lambda cell: cell.get("times"),
}


def libraries() -> str:
    """Scores of the libraries and of the benchmark's methods, mean ± sd over seeds."""
    stored = json.loads((RESULTS / "libraries.json").read_text())["cells"]
    plain = {name.rsplit(" ", 1)[1]: cell for name, cell in stored.items() if name.startswith("SGD ")}
    rows = _ours()
    for name, cell in stored.items():
        method, seed = name.split(" ")[0], name.rsplit(" ", 1)[1]
        first = plain[seed]["train seconds"]
        if "own" in cell:
            option = "" if cell["option"] is None else f", {WHAT[method]} {cell['option']:g}"
            label = NAMES.get(method, f"torch-uncertainty: {method}") + option
            rows.setdefault(label, []).append(cell | {"times": cell["train seconds"] / first})
        if "laplace-torch" in cell:
            of = cell["laplace-torch"] | {"parameters": cell["parameters"]}
            rows.setdefault("laplace-torch: last layer", []).append(of | {"times": 1 + of["fit seconds"] / first})
    table = [["method", *COLUMNS, "parameters", "forwards", "seeds"]]
    for label, cells in rows.items():
        values = [_mean([of(cell) for cell in cells], "%" in name) for name, of in COLUMNS.items()]
        table.append([label, *values, f"{cells[0]['parameters']:,}", str(cells[0]["forwards"]), str(len(cells))])
    return figures.markdown(table).rstrip() + "\n"


def _ours() -> dict[str, list[dict[str, Any]]]:
    """The benchmark's cells, in the form of those of libraries."""
    stored, found = json.loads((RESULTS / "benchmark-cpu.json").read_text())["cells"], dict[str, list[dict[str, Any]]]()
    for method in OURS:
        for seed in range(3):
            cell = stored[f"{SETTING} / {method} / seed {seed}"]
            parts = {"own": cell, "tempered": cell["tempered"]}
            own = {name: of | {"corrupted": of["corrupted"]["all"]} for name, of in parts.items()}
            costs = {key: cell["costs"][key] for key in ("parameters", "forwards")}
            found.setdefault(f"ibnn: {method}", []).append(own | costs)
    return found


def _mean(values: list[float | None], percent: bool) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean, digits = sum(known) / len(known), 2 if percent else 3
    sd = (sum((value - mean) ** 2 for value in known) / max(len(known) - 1, 1)) ** 0.5
    return f"{mean:.{digits}f}" + (f" ± {sd:.{digits}f}" if len(known) > 1 else "")
