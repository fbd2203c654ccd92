"""Draws the README's figure, docs/figures/readme.png, from experiments/results/benchmark-cpu.json.

    python docs/readme_figure.py

VGG-16 at a quarter of its width on 10,000 CIFAR-10 images. Left: accuracy by confidence, seed 0.
Right: expected calibration error on clean and on corrupted test images, mean over the seeds.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
CELLS = json.loads((DOCS.parent / "experiments" / "results" / "benchmark-cpu.json").read_text())["cells"]
SETTING = "VGG-16/4, 10,000 CIFAR-10"
METHODS = {  # label: (method, with a temperature)
    "plain": ("SGD", False),
    "plain + temperature": ("SGD", True),
    "ensemble, equal cost": ("Ensemble-4, equal cost", False),
    "MC-dropout": ("MC-dropout", False),
    "iBNN": ("iBNN-8", False),
}
COLOURS = ("#777777", "#E69F00", "#CC79A7", "#009E73", "#0072B2")  # Okabe and Ito's
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "legend.frameon": False,
}


def results(label: str) -> list[dict[str, Any]]:
    """Returns what was measured for a method, a dict for each seed."""
    method, tempered = METHODS[label]
    cells = [cell for name, cell in sorted(CELLS.items()) if name.startswith(f"{SETTING} / {method} / ")]
    return [cell["tempered"] for cell in cells] if tempered else cells


def main() -> None:
    """Draws and writes the figure."""
    with plt.style.context(["default", STYLE]):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.65), width_ratios=(1, 1.35), layout="constrained")
        left.plot([0, 1], [0, 1], color="#CCCCCC", lw=1)
        for label, colour in (("plain", COLOURS[0]), ("iBNN", COLOURS[-1])):
            curve = results(label)[0]["reliability"]
            left.plot(curve["confidence"], curve["accuracy"], "o-", ms=3.5, color=colour, label=label)
        left.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
        left.set_title("How often confident answers are right")
        left.legend(loc="upper left")
        for row, (label, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
            clean = mean(cell["scores"]["ece"] for cell in results(label))
            corrupted = mean(cell["corrupted"]["all"]["ece"] for cell in results(label))
            right.plot([clean, corrupted], [row, row], color=colour, lw=1)
            right.plot(clean, row, "o", ms=6, color=colour)
            right.plot(corrupted, row, "s", ms=6, color=colour, mfc="white")
        for label, marker, face in (("clean", "o", "#444444"), ("corrupted", "s", "white")):
            right.plot([], [], marker, color="#444444", mfc=face, label=label)
        right.set_yticks(range(len(METHODS)), list(METHODS))
        right.invert_yaxis()
        right.set(xlabel="expected calibration error", xlim=(0, None))
        right.set_title("Calibration error, clean and corrupted images")
        right.grid(axis="x")
        right.legend(loc="lower right")
        figure.savefig(DOCS / "figures" / "readme.png", dpi=120)


if __name__ == "__main__":
    main()
