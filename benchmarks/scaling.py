"""One against two workers on the same global batches: steps per second and their ratio.

    python benchmarks/scaling.py [--json FILE]

Each worker has one thread, so that two workers have twice the cores of one. Runs alternate; medians are reported.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

STEPS, BATCH, REPEATS = 80, 128, 3


def worker(out: Path) -> None:
    """Times the middle of a run, from inside a worker."""
    import torch

    import ibnn
    from ibnn.nets import LeNet

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH * 10, 1, 28, 28), torch.randint(10, (BATCH * 10,))
    model = ibnn.convert(LeNet(width=2), components=8, seed=0)
    times: list[float] = []
    watch = [lambda row, model: times.append(time.perf_counter())]
    ibnn.fit(model, (x, y), steps=STEPS, batch_size=BATCH, quiet=True, callbacks=watch)
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps((STEPS - 20) / (times[-1] - times[1])))  # epochs of 10 steps; the first two warm up


def measure(workers: int) -> float:
    """Steps per second with so many workers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rate.json"
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--master-port=29533"]
        command = [sys.executable, *(launch if workers > 1 else []), __file__, "--worker", str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        return float(json.loads(out.read_text()))


def main() -> None:
    """Measures and prints."""
    parser = report.parser(__doc__)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    pairs = [(measure(1), measure(2)) for _ in range(REPEATS)]
    one, two = (statistics.median(column) for column in zip(*pairs, strict=True))
    speedup = statistics.median(b / a for a, b in pairs)
    result = {
        "steps_per_second": {"1 worker": round(one, 2), "2 workers": round(two, 2)},
        "speedup": round(speedup, 3),
        "efficiency": round(speedup / 2, 3),
        "recipe": {"net": "LeNet width 2", "components": 8, "batch_size": BATCH, "steps": STEPS, "repeats": REPEATS},
    }
    report.tell(result, options.json)


if __name__ == "__main__":
    main()
