"""The words, colours and tables that the command line, the report and figures share; opens matplotlib when drawing."""

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

SCORES = {"error": "error %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "aurc": "AURC", "rmse": "RMSE"}
SCORES |= {"coverage": "in 90 % interval"}
UNCERTAINTIES = {"max_prob": "largest probability", "total": "total entropy"}
UNCERTAINTIES |= {"epistemic": "epistemic part", "novelty": "novelty"}
COSTS = {"train_seconds": "seconds of training", "rows": "rows trained on"}
COSTS |= {"steering_rows": "held-out forward passes for steering", "parameters": "parameters"}
COSTS |= {"latents": "of them latents", "stored": "numbers stored", "forwards": "forward passes per prediction"}
SIZES = {"weights": "weights", "products": "multiply–adds", "nodes": "nodes"}

DPI = 120  # dots in each inch of a figure
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for the colour-blind
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = COLOURS
OTHER = "#BBBBBB"  # whatever has no colour of its own
_SHARED = {
    "text.parse_math": False,  # names are not formulas
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def tables(result: dict[str, Any]) -> list[list[list[str]]]:
    """Returns scores, what was pruned, outsiders, novelty and costs of a run as rows of text, headers first."""
    names = {name: words for name, words in SCORES.items() if name in result["scores"]}
    readings = {"": result}
    if "tempered" in result:
        readings[f", + temperature scaling (T = {result['tempered']['temperature']:.3g})"] = result["tempered"]
    scores = {f"test{how}": reading["scores"] for how, reading in readings.items()}
    scores |= {f"corrupted{how}": r["corrupted"]["all"] for how, r in readings.items() if "corrupted" in r}
    scores |= {"test, one pass": result["one_pass"]["scores"]} if "one_pass" in result else {}
    rows = [[f"{100 * of[n]:.2f}" if n == "error" else f"{of[n]:.4f}" for n in names] for of in scores.values()]
    found = [[[result.get("name", ""), *names.values()], *([n, *row] for n, row in zip(scores, rows, strict=True))]]
    if "pruned" in result:
        sizes = result["pruned"]["sizes"]
        found.append([["pruned", "before", "after"], *([w, *(f"{s[n]:,}" for s in sizes)] for n, w in SIZES.items())])
        for name, scale in {"error": 100, "nll": 1, "rmse": 1}.items():
            if values := [f"{scale * of[name]:.4g}" for of in result["pruned"]["held_out"] if name in of]:
                found[-1].append([f"held-out {SCORES[name]}", *values])
    if outsiders := {f"{name}{how}": by for how, r in readings.items() for name, by in r["outsiders"].items()}:
        known = [name for name in UNCERTAINTIES if any(name in by for by in outsiders.values())]
        rows = [[name, *(f"{by[n]:.4f}" if n in by else "–" for n in known)] for name, by in outsiders.items()]
        found.append([["AUROC of outsiders by", *(UNCERTAINTIES[name] for name in known)], *rows])
    if shares := result.get("novelty"):
        rows = [[name, *(f"{100 * share:.1f} %" for share in by.values())] for name, by in shares.items()]
        found.append([["called novel at", *(f"p ≤ {level}" for level in shares["test"])], *rows])
    if "costs" in result:
        costs = {words: f"{result['costs'][name]:,}" for name, words in COSTS.items() if name in result["costs"]}
        found.append([list(costs), list(costs.values())])
    return found


def house_style(own: dict[str, Any]) -> AbstractContextManager[None]:
    """Replaces the user's matplotlib settings by those of all figures and these while something is drawn."""
    import matplotlib.style

    return matplotlib.style.context(["default", _SHARED, own])


def new_figure(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Any, dpi: int = DPI) -> bytes:
    """Returns the figure's PNG, the same bytes each time."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def dots(axes: Any, points: Sequence[tuple[float, float, float]], *, lw: float, **style: Any) -> None:
    """Draws a line through dots of given areas (x, y, area)."""
    x, y, areas = ([point[i] for point in points] for i in range(3))
    axes.plot(x, y, color=style["color"], lw=lw)
    axes.scatter(x, y, s=areas, alpha=0.85, **style)
