"""Draws docs/figures/readme.png, what a prediction says about a few inputs, and NLL against its price: frontier.png.

`python docs/readme_figure.py` trains on scikit-learn's digits, writes experiments/results/readme.json and draws it;
with `--draw` it only draws. The other figure is drawn from experiments/results/benchmark-cpu.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

DOCS = Path(__file__).parent
RESULT = DOCS.parent / "experiments" / "results" / "readme.json"
STYLE = {"font.size": 10, "figure.titlesize": 10, "figure.dpi": 150}


def measure() -> dict[str, Any]:
    """Answers of an iBNN trained on 200 digits for four test digits, an inverted one and noise."""
    sys.path.append(str(DOCS.parent / "experiments"))
    from provenance import provenance

    import ibnn

    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = ibnn.convert(net, seed=0)
    ibnn.fit(model, (x[:200], y[:200]), (x[200:700], y[200:700]), seed=0, quiet=True)
    p: Any = model.predict(x[700:])
    sure, unsure = p.total.argsort()[:300:150], p.total.argsort(descending=True)[20:80:40]
    shown = torch.cat([x[700:][torch.cat([sure, unsure])], 1 - x[700:701], torch.rand(1, 64)])
    labels = [*y[700:][torch.cat([sure, unsure])].tolist(), int(y[700]), None]
    q: Any = model.predict(shown)
    answers = [
        {
            "pixels": [round(v, 3) for v in shown[i].tolist()],
            "truth": labels[i],
            "label": int(q.labels[i]),
            "probability": round(float(q.probs[i].max()), 4),
            "set": q.set(0.9)[i].nonzero().flatten().tolist(),
            "total": round(float(q.total[i]), 4),
            "epistemic": round(float(q.epistemic[i]), 4),
            "p_value": round(float(q.p_value[i]), 4),
            "novel": bool(q.novel(0.01)[i]),
        }
        for i in range(len(shown))
    ]
    scores = model.likelihood.score(p, y[700:])
    return {"answers": answers, "scores": scores, "provenance": provenance()}


def caption(answer: dict[str, Any]) -> str:
    """What is written below an input."""
    held = ", ".join(map(str, answer["set"]))
    lines = [f"{answer['label']} at {100 * answer['probability']:.0f} %", f"90 % set: {{{held}}}"]
    return "\n".join([*lines, f"p-value {answer['p_value']:.3f}", "novel input" if answer["novel"] else ""])


def draw(content: dict[str, Any]) -> None:
    """Draws the inputs in a row, with their answers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(content["answers"]), figsize=(7, 2.0))
        for place, answer in zip(axes, content["answers"], strict=True):
            place.imshow(torch.tensor(answer["pixels"]).view(8, 8), cmap="gray_r", vmin=0, vmax=1)
            colour = "#D55E00" if answer["novel"] else "#0072B2" if len(answer["set"]) == 1 else "#777777"
            place.set_xlabel(caption(answer), fontsize=7.5, color=colour)
            place.set(xticks=[], yticks=[])
        figure.suptitle("Answers come with a set that holds the truth nine times in ten, and a warning")
        figure.subplots_adjust(left=0.01, right=0.99, bottom=0.34, top=0.88, wspace=0.12)
        figure.savefig(DOCS / "figures" / "readme.png")


LINES = {"SGD": "#777777", "MC-dropout": "#009E73", "iBNN-8": "#0072B2"}
PAPER = ", paper's optimiser"  # a second line of plain networks, where the first is trained by Adam
FRONTIERS = {  # by network: name of the figure, beginning of its rows, title
    "frontier": ("LeNet", "One noisy network is near four plain ones, and one pass keeps nearly all of it"),
    "frontier-deeper": ("VGG-16/4, 10,000 CIFAR-10 ", "In a deeper network two noisy ones equal four plain ones"),
}
MADE_OF = ("", ", 4 networks")  # what one-pass networks learnt from
Points = dict[str, list[tuple[float, float]]]


def frontier(cells: dict[str, Any], network: str) -> dict[str, Points]:
    """Returns NLL + T against the number of networks and against passes, means over seeds, by method."""
    found: dict[str, Points] = {}
    for method in (*LINES, f"SGD{PAPER}"):
        first, paper = method.removesuffix(PAPER), PAPER * method.endswith(PAPER)
        named = {1: method} | {count: f"{first}, {count} networks{paper}" for count in (2, 4)}
        rows = {count: row for count, name in named.items() if (row := _rows(cells, network, name))}
        few, single = _rows(cells, network, f"{method}, 8 passes"), (f"{method}{which}, one pass" for which in MADE_OF)
        found[method] = {
            "networks": [(count, _nll(row)) for count, row in rows.items()],
            "passes": [(row[0]["costs"]["forwards"], _nll(row)) for row in (few, *rows.values()) if row],
            "one pass": [(1, _nll(row)) for name in single if (row := _rows(cells, network, name))],
        }
    return {method: points for method, points in found.items() if points["networks"]}


def _rows(cells: dict[str, Any], network: str, method: str) -> list[Any]:
    return [cell for name, cell in cells.items() if name.startswith(network) and name.split(" / ")[1] == method]


def _nll(rows: list[Any]) -> float:
    return float(sum(row["tempered"]["scores"]["nll"] for row in rows) / len(rows))


def draw_frontier(found: dict[str, Points], title: str, name: str) -> None:
    """Draws NLL against trainings and against passes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.1), sharey=True, layout="constrained")
        for method, points in found.items():
            look: dict[str, Any] = {"color": LINES[method.removesuffix(PAPER)]}
            look |= {"ls": "--" if method.endswith(PAPER) else "-", "marker": "o"}
            look |= {"ms": 9 if method == "MC-dropout" else 6}  # to be seen below iBNN's
            left.plot(*zip(*points["networks"], strict=True), label=method, **look)
            right.plot(*zip(*points["passes"], strict=True), **look)
            if points["one pass"]:
                right.plot(*zip(*points["one pass"], strict=True), "D", color=look["color"], mfc="white")
        left.set(xscale="log", xticks=[1, 2, 4], xticklabels=["1", "2", "4"], xlabel="networks trained")
        left.set_ylabel("NLL, with temperature (nats)")
        right.set(xscale="log", xticks=(ticks := [1, 2, 4, 8, 24, 64]), xticklabels=map(str, ticks))
        right.set_xlabel("passes for an answer (diamonds: distilled)")
        for axes in (left, right):
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#E8E8E8")
        figure.legend(loc="outside lower center", ncols=len(found), frameon=False)
        figure.suptitle(title)
        figure.savefig(DOCS / "figures" / f"{name}.png")


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(RESULT.read_text(encoding="utf-8")))
    rows = json.loads((RESULT.parent / "benchmark-cpu.json").read_text(encoding="utf-8"))["cells"]
    for name, (network, title) in FRONTIERS.items():
        draw_frontier(frontier(rows, network), title, name)
