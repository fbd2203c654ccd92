"""How few draws suffice? Answers that stop when settled, against 5 draws per component.

    IBNN_DATA=FOLDER IBNN_RUNS=runs python experiments/draws.py

The benchmark's LeNet on 5,000 Fashion-MNIST images, from its run folders (`make reproduce NAME=benchmark` trains them).
Tolerances are compared on the 1,000 held-out images; the default one is then measured once on the test images. Writes
results/draws.json.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import Data, Results, data_folder
from reproduce import read

import ibnn
from ibnn import metrics
from ibnn.data import Images
from ibnn.lab.jobs import read_run
from ibnn.lab.parts import make_data
from ibnn.prediction.predict import TOLERANCE

SETTING, METHOD, SEEDS = "LeNet × 2, 5,000 Fashion-MNIST", "iBNN-8", (0, 1, 2, 3)
TOLERANCES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
SAMPLES = 5


@cache
def trained(seed: int) -> tuple[ibnn.IBNN, Data, Data]:
    """A network of the benchmark, its held-out images and the test images."""
    (cell,) = (c for c in read("benchmark").cells() if c.name == f"{SETTING} / {METHOD} / seed {seed}")
    splits = make_data(cell.job, data_folder())
    model = read_run(Path(os.environ.get("IBNN_RUNS", "runs")) / cell.job.key).model
    assert isinstance(model, ibnn.IBNN)
    assert splits.valid is not None
    test = Images(splits.whole.test, mean=splits.whole.mean, std=splits.whole.std)
    return model, *(Data(*part.__getitems__(torch.arange(len(part)))) for part in (splits.valid, test))


def settled(model: ibnn.IBNN, data: Data, tolerances: tuple[float, ...]) -> dict[str, Any]:
    """Draws, NLL and labels to those of 5 draws per component, by tolerance."""
    whole = model.predict(data.x, samples=SAMPLES)
    answers = {str(tolerance): model.predict(data.x, samples=SAMPLES, tolerance=tolerance) for tolerance in tolerances}
    if len(tolerances) > 1:
        answers |= {f"samples={number}": model.predict(data.x, samples=number) for number in (1, 2)}
    found: dict[str, Any] = {}
    for name, p in answers.items():
        used = int(name[-1]) if p.draws is None else p.draws.double().mean().item() / model.components
        found[name] = {
            "draws": round(used / SAMPLES, 4),
            "nll": round(metrics.nll(p.log_probs, data.y) / metrics.nll(whole.log_probs, data.y), 4),
            "equal_labels": round((p.labels == whole.labels).double().mean().item(), 4),
        }
    return found


def main() -> None:
    """Writes the results."""
    results = Results("draws", "answers from fewer draws, to those of 5 per component: draws, NLL and equal labels")
    for seed in SEEDS:
        model, valid, _ = trained(seed)
        results.run(f"held out / seed {seed}", lambda model=model, valid=valid: settled(model, valid, TOLERANCES))
    for seed in SEEDS:
        model, _, test = trained(seed)
        results.run(f"test / seed {seed}", lambda model=model, test=test: settled(model, test, (TOLERANCE,)))


if __name__ == "__main__":
    main()
