"""Draws the README's figure, docs/figures/readme.png, from experiments/results/benchmark-cpu.json.

    python docs/readme_figure.py

VGG-16 at a quarter of its width on 10,000 CIFAR-10 images. Left: accuracy by confidence, seed 0.
Right: expected calibration error on clean and on corrupted test images, mean over the seeds.
"""

import json
from pathlib import Path
from statistics import mean

from ibnn.lab.figures import look

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
COLOURS = (look.GREY, look.ORANGE, look.PURPLE, look.GREEN, look.BLUE)


def results(label: str) -> list[dict]:
    """Returns what was measured for a method, a dict for each seed."""
    method, tempered = METHODS[label]
    cells = [cell for name, cell in sorted(CELLS.items()) if name.startswith(f"{SETTING} / {method} / ")]
    return [cell["tempered"] for cell in cells] if tempered else cells


def main() -> None:
    """Draws and writes the figure."""
    with look.house_look():
        figure = look.canvas(2.4)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
        left.plot([0, 1], [0, 1], color="#CCCCCC", lw=1)
        for label, colour in (("plain", look.GREY), ("iBNN", look.BLUE)):
            curve = results(label)[0]["reliability"]
            left.plot(curve["confidence"], curve["accuracy"], "o-", ms=3.5, color=colour, label=label)
        left.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
        left.set_title("How often confident answers are right")
        left.legend(loc="upper left")
        for row, (label, colour) in enumerate(zip(reversed(METHODS), reversed(COLOURS), strict=True)):
            clean = mean(cell["scores"]["ece"] for cell in results(label))
            corrupted = mean(cell["corrupted"]["all"]["ece"] for cell in results(label))
            right.plot([clean, corrupted], [row, row], color=colour, lw=1)
            right.plot(clean, row, "o", ms=6, color=colour)
            right.plot(corrupted, row, "s", ms=6, color=colour, mfc="white")
        right.set_yticks(range(len(METHODS)), list(reversed(METHODS)))
        right.set(xlabel="expected calibration error", xlim=(0, None))
        right.set_title("Calibration error, clean and corrupted images")
        right.grid(axis="x")
        marks = [
            look.mark("clean", marker="o", color="#444444"),
            look.mark("corrupted", marker="s", color="#444444", mfc="white"),
        ]
        right.legend(handles=marks, loc="lower right")
        (DOCS / "figures" / "readme.png").write_bytes(look.png(figure))


if __name__ == "__main__":
    main()
