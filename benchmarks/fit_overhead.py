"""What does `ibnn.fit` add to forward, backward and step? Prints (and with --json writes) the share.

    python benchmarks/fit_overhead.py [--json FILE]

The same LeNet steps are timed inside `fit` and in a bare loop of forward, backward and optimiser steps on batches made
beforehand; the two alternate in one process, and the medians are compared.
"""

import time

import report
import torch

import ibnn
from ibnn.nets import LeNet

STEPS, BATCH, REPEATS = 60, 128, 7


def make() -> ibnn.IBNN:
    torch.manual_seed(0)
    return ibnn.convert(LeNet(), components=8, seed=0)


def in_fit(x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds a step in the middle of a run: a long run less a short one takes start and end out."""
    seconds = []
    for steps in (10, STEPS + 10):
        model, start = make(), time.perf_counter()
        ibnn.fit(model, (x, y), steps=steps, batch_size=BATCH, quiet=True)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / STEPS


def bare(x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds a step of forward, backward, clipping and both optimisers, and nothing else."""
    model = make().train()
    groups = model.parameter_groups(1e-3, 1e-2)
    optimisers = [torch.optim.AdamW([group]) for group in groups]
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    for number, (a, b) in enumerate([*batches[:10], *batches]):
        if number == 10:  # as in_fit: the first ten do not count
            start = time.perf_counter()
        model.elbo(a, b, n_data=len(x)).loss.backward()
        for optimiser, group in zip(optimisers, groups, strict=True):
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            optimiser.step()
            optimiser.zero_grad()
    return (time.perf_counter() - start) / len(batches)


def main() -> None:
    """Measures and prints."""
    options = report.parser(__doc__).parse_args()
    x, y = torch.randn(STEPS * BATCH, 1, 28, 28), torch.randint(10, (STEPS * BATCH,))
    pairs = [(in_fit(x, y), bare(x, y)) for _ in range(REPEATS)]
    recipe = {"net": "LeNet", "components": 8, "batch_size": BATCH, "steps": STEPS, "repeats": REPEATS}
    report.tell(report.compared(pairs, "fit_ms", "bare_ms") | {"recipe": recipe}, options.json)


if __name__ == "__main__":
    main()
