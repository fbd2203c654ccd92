"""Time and memory of this checkout relative to another one, in turns: python benchmarks/against.py OTHER [--only WORD]

Two processes of one thread, one for each checkout, take turns with the same call on the same network and batch. A ratio
above 1 means that this checkout is slower, or keeps more bytes for the backward pass. It is the median over the turns
of the ratio of two times. The machine must have nothing else to do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KINDS = ("memory", "step", "predict", "predict one")
ROWS = {"step": 128, "predict": 64, "predict one": 1}
DRAWS = {"predict": (4, 5), "predict one": (16, 5)}  # components and draws of each


def call_of(net: str, kind: str) -> Callable[[], object]:
    """Returns what is timed: a training step, or a prediction."""
    import torch
    from networks import CLASSES, NETS
    from rivals import converted

    import ibnn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape = NETS[net]
    plain, x = make(), torch.randn(ROWS["step"], *shape)
    if kind in DRAWS:
        components, samples = DRAWS[kind]
        model = ibnn.convert(plain.eval(), components=components, seed=0)
        model.set_posterior(std=0.1)
        return partial(model.predict, x[: ROWS[kind]], samples=samples, progress=False)
    rival, y = converted(ibnn.convert(plain.train(), components=8, seed=0)), torch.randint(CLASSES, (len(x),))
    optimiser = torch.optim.SGD(rival.parameters, lr=0.0)

    def step() -> None:
        optimiser.zero_grad()
        rival.loss(x, y).backward()
        optimiser.step()

    return partial(_kept, lambda: rival.loss(x, y), rival.parameters) if kind == "memory" else step


def _kept(loss: Callable[[], Any], known: list[Any]) -> int:
    from report import saved_bytes

    with saved_bytes(known) as saved:
        loss()
    return int(saved.bytes)


def serve() -> None:
    """Answers requests, one a line: a cell to prepare, or "go" for one turn of it."""
    call: Callable[[], object] = lambda: None  # noqa: E731
    for line in sys.stdin:
        request = line.strip()
        if request != "go":
            call = call_of(*json.loads(request))
            answer: object = call()  # to warm up
        else:
            began = time.perf_counter()
            made = call()
            answer = made if isinstance(made, int) else time.perf_counter() - began
        print(json.dumps(answer if isinstance(answer, int | float) else 0), flush=True)


class Worker:
    """A process that imports ibnn from one checkout."""

    def __init__(self, checkout: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, request: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def compare(other: Path, only: list[str], seconds: float) -> dict[str, dict[str, float]]:
    """Returns the ratio of every cell, printing each as it comes."""
    from networks import NETS

    here, there, found = Worker(HERE.parent), Worker(other), {}
    for net in NETS:
        for kind in KINDS:
            name = f"{net} / {kind}"
            if only and not any(word in name for word in only):
                continue
            for worker in (here, there):
                worker.ask(json.dumps([net, kind]))
            pairs: list[tuple[float, float]] = []
            began = time.perf_counter()
            while not pairs or (kind != "memory" and (len(pairs) < 5 or time.perf_counter() - began < seconds)):
                order = (here, there) if len(pairs) % 2 else (there, here)
                times = {worker: worker.ask("go") for worker in order}
                pairs.append((times[here], times[there]))
            ratios = [a / b for a, b in pairs]
            best = min(a for a, _ in pairs) / min(b for _, b in pairs)
            found[name] = {"ratio": round(statistics.median(ratios), 3), "best": round(best, 3), "turns": len(pairs)}
            print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="another checkout of this repository")
    parser.add_argument("--only", action="append", default=[], help="a part of cells' names; may be repeated")
    parser.add_argument("--seconds", type=float, default=10.0, help="least time of a cell")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    if given.other is None or not (given.other / "src" / "ibnn").is_dir():
        parser.error("name a checkout: a folder with src/ibnn, such as one made by `git worktree add`")
    found = compare(given.other, given.only, given.seconds)
    if given.out:
        from report import provenance, write

        asked = ["git", "-C", str(given.other), "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        about = "this checkout's time or bytes, relative to another's, in turns"
        write(given.out, {"about": about, "other": commit, "cells": found, "provenance": provenance()})


if __name__ == "__main__":
    main()
