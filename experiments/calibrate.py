"""`ibnn.calibrate` on trained networks against the plain network and temperature scaling.

    IBNN_DATA=FOLDER python experiments/calibrate.py [--nets lenet4 resnet20] [--seeds 0 1 2]
    IBNN_DATA=FOLDER python experiments/calibrate.py --dev  # scored on training images in neither split, not kept
    python experiments/calibrate.py --figures               # draws docs/figures/calibrate-*.png, fills in the docs

2,000 held-out labels choose; everything else is scored once, on the test set (of CIFAR-10, except for seed 0, on its
first 3,000 images). Out-of-distribution images: 1,000 of each kind; corrupted images: 500 of each kind and severity.
"""

import argparse
import json
import time
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from common import FIGURES, NORM, NOTES, Data, Results, data_folder, images, parts, scores
from figures import markdown as markdown_table
from tables import fill_in
from torch import Tensor
from trained import NETS, data, trained

import ibnn
from ibnn import metrics
from ibnn.baselines import Plain, scale_temperature
from ibnn.data import corrupt, load_idx

COMPONENTS, FEW, CORRUPTED, KINDS, SEVERITIES = 4, 1_000, 500, ("blur", "contrast", "noise"), (3, 4, 5)
METHODS = ("plain", "temperature scaling", "calibrate, no temperature", "calibrate")
COLOURS = dict(zip(METHODS, ("#999999", "#E69F00", "#56B4E9", "#0072B2"), strict=True))


def evaluation(name: str, seed: int, *, dev: bool) -> tuple[Data, dict[str, Data], dict[str, Tensor]]:
    """Images to score: clean, corrupted, and out of distribution."""
    source, count = NETS[name][1:3]
    clean = data(name, seed).test
    if source == "cifar-10" and seed:  # for time
        clean = Data(clean.x[:3_000], clean.y[:3_000])
    if dev:
        _, clean = parts(images(source, train=True), [count + 2_000, 3_000], seed)
    mean, std = NORM[source]
    pixels, labels = (clean.x[:CORRUPTED] * std + mean).clamp(0, 1), clean.y[:CORRUPTED]
    corrupted = {
        f"{kind} {severity}": Data((corrupt(pixels, kind, severity) - mean) / std, labels)
        for kind in KINDS
        for severity in SEVERITIES
    }
    if source == "fashion-mnist":
        outside = {"MNIST": images("mnist", train=dev).x[:FEW]}
    else:
        gray = load_idx(data_folder() / "fashion-mnist", train=dev)[0][:FEW].float().view(-1, 1, 28, 28) / 255
        colour = F.pad(gray, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
        noise = torch.rand(FEW, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        outside = {"Fashion-MNIST": (colour - mean) / std, "noise": (noise - mean) / std}
    return clean, corrupted, outside


def answer(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Log-probabilities and uncertainties of images."""
    p = model.predict(_fast(x))
    found = {"log_probs": p.log_probs, "max-probability": -p.log_probs.amax(1), "entropy": p.total}
    return found | ({"epistemic": p.epistemic} if model.random else {})


def _fast(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def method_scores(model: Any, clean: Data, corrupted: dict[str, Data], outside: dict[str, Tensor]) -> dict[str, Any]:
    """Everything about a method."""
    seen = answer(model, clean.x)
    found: dict[str, Any] = scores(seen["log_probs"], clean.y)
    found["corrupted nll"] = {k: metrics.nll(answer(model, d.x)["log_probs"], d.y) for k, d in corrupted.items()}
    found["auroc"] = {}
    for name, x in outside.items():
        unseen = answer(model, x)
        found["auroc"][name] = {k: metrics.auroc(seen[k], unseen[k]) for k in seen if k != "log_probs"}
    return found


def report_of(report: ibnn.Calibration) -> dict[str, Any]:
    """A calibration as JSON."""
    names = ("scale", "temperature", "std", "reason", "rows", "cross_nll", "before", "temperature_scaling", "after")
    return {"curve": [list(point) for point in report.curve]} | {name: getattr(report, name) for name in names}


def cell(name: str, seed: int, *, dev: bool = False) -> dict[str, Any]:
    """All methods on one network."""
    net, facts = trained(name, seed)
    valid = data(name, seed).valid
    valid = Data(_fast(valid.x), valid.y)
    models: dict[str, Any] = {METHODS[0]: Plain(net), METHODS[1]: Plain(net)}
    temperature = scale_temperature(models[METHODS[1]], valid)
    reports = {}
    for method, tempered in ((METHODS[2], False), (METHODS[3], True)):
        if not tempered and (dev or name == "resnet20"):  # for time
            continue
        began = time.monotonic()
        models[method] = ibnn.convert(net, components=COMPONENTS, seed=seed)
        reports[method] = ibnn.calibrate(models[method], valid, temperature=tempered, seed=seed)
        seconds = time.monotonic() - began
        print(name, seed, method, reports[method], sep="\n", flush=True)
    sets = evaluation(name, seed, dev=dev)
    return {
        "net": name,
        "seed": seed,
        **facts,
        "temperature": temperature,
        "seconds of calibrate": round(seconds, 1),
        "methods": {  # without a temperature: clean images alone
            method: method_scores(model, *(sets if method != METHODS[2] else (sets[0], {}, {})))
            for method, model in models.items()
        },
        "reports": {method: report_of(report) for method, report in reports.items()},
    }


# -------------------------------------------------------------------------------------------------------------- showing


def table(cells: list[dict[str, Any]]) -> str:
    """Means over the seeds of one network, in Markdown."""
    outside = list(cells[0]["methods"]["plain"]["auroc"])
    rows = [["", "error %", "NLL", "ECE", *(f"NLL {kind}" for kind in KINDS), *(f"AUROC {name}" for name in outside)]]
    for method in cells[0]["methods"]:
        scored = [cell["methods"][method] for cell in cells]
        values = [
            f"{100 * mean(s['error'] for s in scored):.2f}",
            *(f"{mean(s[k] for s in scored):.4f}" for k in ("nll", "ece")),
        ]
        for kind in KINDS:
            found = [s["corrupted nll"][f"{kind} {v}"] for s in scored for v in SEVERITIES if s["corrupted nll"]]
            values.append(f"{mean(found):.3f}" if found else "")
        for name in outside:
            kinds = scored[0]["auroc"].get(name, {})
            values.append(" / ".join(f"{mean(s['auroc'][name][k] for s in scored):.3f}" for k in kinds))
        rows.append([method, *values])
    return markdown_table(rows)


def by_net(cells: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Cells of each network."""
    return {name: found for name in NETS if (found := [c for c in cells.values() if c["net"] == name])}


def markdown(nets: dict[str, list[dict[str, Any]]]) -> str:
    """What notes/calibrate.md shows of the results."""
    parts = ["## Measured", ""]
    for name, cells in nets.items():
        source, count, epochs = NETS[name][1:4]
        seeds = ", ".join(str(c["seed"]) for c in cells)
        error = f"{100 * mean(c['training error'] for c in cells):.2f} %"
        parts += [
            f"**{name}**, {epochs} epochs on {count:,} images of {source} (training error {error}), seeds {seeds}:",
            "",
            table(cells),
            "",
        ]
    parts += [
        f"Means over the seeds; {COMPONENTS} components, {COMPONENTS * 5} draws. NLL of corrupted images: mean over",
        "severities 3, 4 and 5 of CIFAR-10-C's scales. AUROC of images from elsewhere against test images, by",
        "max-probability / entropy / (with noise) epistemic uncertainty. Scores: the test set; the rule was settled",
        "on training images in neither split. From `experiments/results/calibrate.json`, made by",
        "`experiments/calibrate.py`.",
        "",
        "![curve](figures/calibrate-curve.png)",
        "![NLL under corruption](figures/calibrate-corrupted.png)",
    ]
    return "\n".join(parts)


def draw_figures(nets: dict[str, list[dict[str, Any]]]) -> None:
    """The curve of seed 0, and NLL under corruption, of each network."""
    from matplotlib.figure import Figure

    for name in ("curve", "corrupted"):
        figure = Figure(figsize=(5.2 * len(nets), 3.8), layout="constrained")
        for axes, (net, cells) in zip(figure.subplots(1, len(nets), squeeze=False)[0], nets.items(), strict=True):
            (draw_curve if name == "curve" else draw_corrupted)(axes, cells)
            axes.set_title(f"{net}, {len(cells)} seed{'s' * (len(cells) > 1)}" if name == "corrupted" else net)
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(FIGURES / f"calibrate-{name}.png", dpi=130)


def draw_curve(axes: Any, cells: list[dict[str, Any]]) -> None:
    """Held-out NLL over the scale."""
    report = cells[0]["reports"]["calibrate"]
    scales, plain, _, tempered = zip(*report["curve"], strict=True)
    axes.plot(scales, plain, "o-", color=COLOURS["calibrate, no temperature"], ms=4, label="temperature 1")
    axes.plot(scales, tempered, "o-", color=COLOURS["calibrate"], ms=4, label="best temperature of each scale")
    line = report["temperature_scaling"]["nll"]
    axes.axhline(line, color=COLOURS["temperature scaling"], ls="--", lw=1, label="temperature scaling")
    chosen = dict(zip(scales, tempered, strict=True)).get(report["scale"], report["after"]["nll"])
    axes.plot([report["scale"]], [chosen], "*", color="#D55E00", ms=14, label="chosen")
    axes.set(
        xlabel="scale of the latents' noise", ylabel="held-out NLL (nats)", ylim=(0.93 * min(tempered), 1.5 * line)
    )


def draw_corrupted(axes: Any, cells: list[dict[str, Any]]) -> None:
    """Bars: NLL by corruption and severity."""
    names = [f"{kind} {severity}" for kind in KINDS for severity in SEVERITIES]
    methods = (METHODS[0], METHODS[1], METHODS[3])
    for number, method in enumerate(methods):
        heights = [mean(c["methods"][method]["corrupted nll"][n] for c in cells) for n in names]
        places = [i + 0.27 * (number - 1) for i in range(len(names))]
        axes.bar(places, heights, width=0.25, color=COLOURS[method], label=method)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set(ylabel="NLL (nats)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dev", action="store_true")
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    results = Results(
        "calibrate", "ibnn.calibrate on trained networks, 2,000 held-out labels; python experiments/calibrate.py"
    )
    for name in [] if options.figures else options.nets:
        for seed in options.seeds:
            if options.dev:
                print(json.dumps(cell(name, seed, dev=True)["methods"], indent=1), flush=True)
            else:
                results.run(f"{name} {seed}", lambda: cell(name, seed))  # noqa: B023
    for name, cells in ({} if options.dev else by_net(results.cells)).items():
        print(f"\n{name}, mean of {len(cells)} seeds\n\n{table(cells)}")
    if options.figures:
        draw_figures(by_net(results.cells))
        fill_in({NOTES / "calibrate.md": {"calibrate": markdown(by_net(results.cells)) + "\n"}})
