"""Draws the figures of notes/findings.md and fills in its tables from the result files."""

import json
from typing import Any

from common import FIGURES, NOTES, RESULTS
from tables import fill_in

BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"


def cells(name: str) -> dict[str, dict[str, Any]]:
    """Results by cell and method: means over the seeds of every number of "test" (or "dev") and "tempered"."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for key, value in json.loads((RESULTS / f"{name}.json").read_text())["cells"].items():
        *cell, method, _ = ["", *key.split(" / ")] if key.count(" / ") == 1 else key.split(" / ")
        found.setdefault(cell[-1], {}).setdefault(method, []).append(value)
    return {c: {m: _mean(values) for m, values in methods.items()} for c, methods in found.items()}


def _mean(values: list[dict[str, Any]]) -> dict[str, Any]:
    mean: dict[str, Any] = {"seeds": len(values), "seconds": sum(v["seconds"] for v in values) / len(values)}
    for part in ("test", "dev", "tempered"):
        for metric in values[0].get(part, {}):
            mean[f"{part} {metric}"] = sum(v[part][metric] for v in values) / len(values)
    mean["s"] = sum(v.get("final prior_std", 0.0) for v in values) / len(values)
    return mean


def strength_table(found: dict[str, dict[str, Any]]) -> str:
    """Classification cells: NLL and error."""
    lines = [
        "| cell | SGD | SGD + T | best fixed s | best fixed s + T | **auto** | auto's s | error %: SGD / auto |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell, methods in found.items():
        if "auto" not in methods or "test error" not in methods["auto"] or "plain" not in methods:
            continue
        fixed = {m: v for m, v in methods.items() if m.startswith("fixed")}
        raw = min(fixed.items(), key=lambda item: item[1]["test nll"], default=None)
        tempered = min(fixed.items(), key=lambda item: item[1]["tempered nll"], default=None)
        plain, auto = methods["plain"], methods["auto"]
        best = ["", ""]
        if raw and tempered:
            best = [f"{raw[1]['test nll']:.3f} ({raw[0].split()[1]})", f"{tempered[1]['tempered nll']:.3f}"]
        seeds = f" ({auto['seeds']} seeds)" if auto["seeds"] > 1 else ""
        lines.append(
            f"| {cell}{seeds} | {plain['test nll']:.3f} | {plain['tempered nll']:.3f} | {best[0]} | {best[1]} | "
            f"**{auto['test nll']:.3f}** | {auto['s']:.2f} | "
            f"{100 * plain['test error']:.2f} / {100 * auto['test error']:.2f} |"
        )
    return "\n".join(lines)


def regression_table(found: dict[str, dict[str, Any]]) -> str:
    """Regression cells: NLL of standardised targets and coverage."""
    lines = [
        "| cell | plain | plain + T | best fixed s | **auto** | coverage of 90 % intervals: plain / plain + T / auto |",
        "|---|---|---|---|---|---|",
    ]
    for cell, methods in found.items():
        if "auto" not in methods or "test rmse" not in methods["auto"]:
            continue
        fixed = [(v["test nll"], m.split()[1]) for m, v in methods.items() if m.startswith("fixed")]
        plain, auto, key = methods["plain"], methods["auto"], "coverage of 90 %"
        lines.append(
            f"| {cell} ({auto['seeds']} seeds) | {plain['test nll']:.3f} | {plain['tempered nll']:.3f} | "
            f"{min(fixed)[0]:.3f} ({min(fixed)[1]}) | **{auto['test nll']:.3f}** | "
            f"{plain[f'test {key}']:.2f} / {plain[f'tempered {key}']:.2f} / {auto[f'test {key}']:.2f} |"
        )
    return "\n".join(lines)


def components_table(found: dict[str, Any]) -> str:
    """Variants on development images."""
    lines = ["| | error % | NLL | NLL + T | ECE + T | seeds |", "|---|---|---|---|---|---|"]
    for name, v in found.items():
        lines.append(
            f"| {name} | {100 * v['dev error']:.2f} | {v['dev nll']:.3f} | {v['tempered nll']:.3f} | "
            f"{v['tempered ece']:.3f} | {v['seeds']} |"
        )
    return "\n".join(lines)


def pretrained_table() -> str:
    """Trained networks: plain, temperature scaling, calibrate, a few epochs."""
    lines = ["| | error % | NLL | ECE |", "|---|---|---|---|"]
    for key, cell in json.loads((RESULTS / "pretrained.json").read_text())["cells"].items():
        for method, v in cell["methods"].items():
            cost = f" ({cell['epochs']:g} epochs)" if method == "pretrained" else ""
            lines.append(f"| {key}, {method}{cost} | {100 * v['error']:.2f} | {v['nll']:.4f} | {v['ece']:.4f} |")
    return "\n".join(lines)


def draw_strength(found: dict[str, dict[str, Any]]) -> None:
    """Test NLL against fixed s, and where the steering ended."""
    from matplotlib.figure import Figure

    shown = {c: m for c, m in found.items() if "auto" in m and sum(k.startswith("fixed") for k in m) > 1}
    rows = -(-len(shown) // 4)
    figure = Figure(figsize=(13, 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, 4, squeeze=False).flatten()
    for axes, (cell, methods) in zip(grid, shown.items(), strict=False):
        fixed = sorted((float(m.split()[1]), v) for m, v in methods.items() if m.startswith("fixed"))
        axes.plot([s for s, _ in fixed], [v["test nll"] for _, v in fixed], "o-", color=BLUE, label="fixed s")
        if "tempered nll" in fixed[0][1]:
            values = [v["tempered nll"] for _, v in fixed]
            axes.plot([s for s, _ in fixed], values, "o:", color=BLUE, alpha=0.5, label="fixed s + T")
        plain, auto = methods["plain"], methods["auto"]
        axes.axhline(plain["tempered nll"], color=ORANGE, ls="--", lw=1.2, label="SGD + T")
        axes.plot([auto["s"]], [auto["test nll"]], "*", color=RED, ms=13, label="auto")
        axes.set(title=cell, xlabel="s", ylabel="test NLL")
    for axes in grid[len(shown) :]:
        axes.axis("off")
    grid[0].legend(frameon=False, fontsize=8)
    figure.savefig(FIGURES / "strength.png", dpi=110)


def draw_components(found: dict[str, Any]) -> None:
    """NLL with a temperature, a bar a variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    names = list(found)[::-1]
    colours = [BLUE if name.startswith("K") else GREY for name in names]
    axes.barh(names, [found[n]["tempered nll"] for n in names], color=colours)
    axes.scatter([found[n]["dev nll"] for n in names], names, color=RED, s=18, zorder=3, label="without T")
    low = min(v["tempered nll"] for v in found.values())
    axes.set(xlabel="NLL with a temperature (development images)", xlim=(0.9 * low, 1.35 * low))
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(FIGURES / "components.png", dpi=110)


if __name__ == "__main__":
    strength, components = cells("strength"), cells("components")[""]
    tables = {"strength": strength_table(strength), "regression": regression_table(strength)}
    tables |= {"components": components_table(components), "pretrained": pretrained_table()}
    fill_in({NOTES / "findings.md": {name: f"{table}\n" for name, table in tables.items()}})
    draw_strength(strength)
    draw_components(components)
