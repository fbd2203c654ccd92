"""Do sets, intervals, p-values and levels that adapt keep what they promise? Coverage and false alarms over splits.

    python experiments/guarantees.py            made data, 1,000 splits: experiments/results/guarantees.json
    python experiments/guarantees.py --sizes    set sizes of two small networks on CIFAR-10 and CIFAR-100

`--sizes` needs both data sets in the folder IBNN_DATA. The cases are those of tests/test_conformal.py.
"""

import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Data, Results, data_folder, images, parts, train_plain
from torch import Tensor, nn

import ibnn

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from coverage_cases import EVERY, KINDS, covered

SPLITS = int(os.environ.get("IBNN_SPLITS", "1000"))
ROWS = (60, 200, 1000)
ABOUT = "Coverage of 90 % sets and intervals, false alarms of novelty, adaptive levels after a break, sizes of sets."


def coverage(kind: str, n: int) -> dict[str, Any]:
    """Mean coverage over splits, its standard error, and the share covered in nine splits of ten."""
    found = torch.stack([covered(kind, n, seed).double().mean(0).mean() for seed in range(SPLITS)])
    return {"coverage": float(found.mean()), "error": float(found.std()) / math.sqrt(SPLITS), "splits": SPLITS}


def false_alarms(n: int, groups: int) -> dict[str, Any]:
    """Share of new inputs with a p-value at or below some levels, where nothing is novel."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    model, levels = ibnn.baselines.Plain(net), (0.01, 0.02, 0.05, 0.1)
    shares = []
    for seed in range(SPLITS):
        x = torch.randn(200 + n + 100, 5, generator=torch.Generator().manual_seed(seed))
        known, held, new = x.split([200, n, 100])
        ibnn.fit_novelty(model, held) if groups == 4 else ibnn.fit_novelty(model, known, held)
        p_value = model.predict(new).p_value
        assert p_value is not None
        shares.append([float((p_value <= level).double().mean()) for level in levels])
    means = np.mean(shares, 0)
    reachable = {str(level): float(m) for level, m in zip(levels, means, strict=True) if level * (n + 1) >= 1}
    return {"levels": reachable, "splits": SPLITS}


def after_a_break(n: int, rate: float, steps: int = 3000, streams: int = 20) -> dict[str, Any]:
    """Coverage of a fixed and an adaptive level on a stream whose noise is three times as large from the middle on."""
    found: dict[str, list[list[float]]] = {"fixed": [], "adaptive": []}
    for seed in range(streams):
        generator = torch.Generator().manual_seed(seed)
        distances = torch.randn(n, 1, 1, generator=generator).abs()
        held = ibnn.prediction.Conformal(distances[..., None], torch.zeros(n, 1, 1, dtype=torch.int64))
        stream = torch.randn(steps, generator=generator).abs() * torch.where(torch.arange(steps) < steps // 2, 1, 3)
        adaptive = ibnn.AdaptiveLevel(0.9, rate=rate)
        hits = torch.zeros(2, steps, dtype=torch.bool)
        fixed = held.limits(distances, 0.9).item()
        for step, distance in enumerate(stream.tolist()):
            hits[:, step] = torch.tensor([distance <= fixed, distance <= held.limits(distances, adaptive.level).item()])
            adaptive.update(hits[1, step : step + 1])
        for name, covered_ in zip(found, hits.double(), strict=True):
            middle = steps // 2
            spans = covered_[:middle], covered_[middle : middle + 100], covered_[-500:], covered_
            found[name].append([float(span.mean()) for span in spans])
    spans = "before", "next 100", "last 500", "all"
    means = {name: dict(zip(spans, np.mean(rows, 0).tolist(), strict=True)) for name, rows in found.items()}
    worst = max(abs(row[-1] - 0.9) for row in found["adaptive"])
    bound = (1 + 2 * rate) / (rate * steps)
    return means | {"worst": worst, "bound": bound, "rate": rate, "steps": steps, "streams": streams}


def cifar100() -> tuple[Data, Data]:
    """CIFAR-100, normalised."""
    found = []
    for split in ("train", "test"):
        path = data_folder() / "cifar-100-binary" / f"{split}.bin"
        record = torch.from_numpy(np.fromfile(path, dtype=np.uint8).reshape(-1, 3074))
        found.append(Data((record[:, 2:].view(-1, 3, 32, 32).float() / 255 - 0.48) / 0.26, record[:, 1].long()))
    return found[0], found[1]


def small_net(classes: int) -> nn.Module:
    """Three convolutions and a linear layer."""
    widths = 3, 16, 32, 64
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, classes))


def sizes(classes: int, epochs: int = 8, rows: int = 10000) -> dict[str, Any]:
    """Coverage, mean size and share of empty sets of each kind, on test images, of a calibrated small network."""
    whole, test = (images("cifar-10", train=True), images("cifar-10", train=False)) if classes == 10 else cifar100()
    train, valid, held = parts(whole, [rows, 500, 1000], seed=0)
    test = Data(test.x[:2000], test.y[:2000])
    torch.manual_seed(0)
    model = ibnn.convert(train_plain(small_net(classes), train, epochs=epochs, seed=0).net, components=2, seed=0)
    ibnn.calibrate(model, valid, progress=False)
    ibnn.conformalize(model, held)
    p = model.predict(test.x)
    error = float((p.labels != test.y).double().mean())
    return {"error": error, "train": rows, "epochs": epochs, "sets": {k: _sizes(p, test.y, k) for k in KINDS}}


def _sizes(p: Any, y: Tensor, kind: str) -> dict[str, dict[str, float]]:
    found = {}
    for level in (0.9, 0.95):
        inside = p.set(level, **KINDS[kind])
        shares = inside[torch.arange(len(y)), y], inside.sum(1), ~inside.any(1)
        found[str(level)] = dict(
            zip(("coverage", "size", "empty"), (float(s.double().mean()) for s in shares), strict=True)
        )
    return found


def main() -> None:
    """Runs what is not stored yet."""
    results = Results("guarantees", ABOUT)
    if "--sizes" in sys.argv[1:]:
        for classes in (10, 100):
            results.run(f"sizes {classes}", lambda classes=classes: sizes(classes))
        return
    for n in ROWS:
        for kind in EVERY:
            results.run(f"{kind}, n = {n}", lambda kind=kind, n=n: coverage(kind, n))
        for groups in (2, 4):
            if n >= 100 or groups == 2:
                name = f"novelty, n = {n}, {groups} groups"
                results.run(name, lambda n=n, groups=groups: false_alarms(n, groups))
        results.run(f"break, n = {n}", lambda n=n: after_a_break(n, rate=0.02))


if __name__ == "__main__":
    main()
