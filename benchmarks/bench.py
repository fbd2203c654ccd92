"""Time and memory of an iBNN relative to its plain network; 1 is as fast and as light.

    python benchmarks/bench.py [--out FILE] [--only WORD] [--quick]    # or: make bench

What is compared takes turns in one process; a ratio is the median over the turns of the ratio of two times. With --out
it writes as it goes and continues where it was stopped. All of it takes half an hour on two cores, --only lenet two
minutes. It calls public functions only: PYTHONPATH=OTHER/src measures another checkout.
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from networks import BARS, CLASSES, NETS
from report import provenance, ratio, saved_bytes, write
from rivals import RIVALS, Rival, converted, plain
from torch import Tensor, nn

from ibnn import convert, cost, distil, fit_novelty

COMPONENTS = 8  # by default
ONE = (16, 5)  # components and draws per component for a single input, and against rivals
COLUMNS = ("memory", "step", "components", "predict", "predict one", "novelty", "one pass", "one pass, novelty")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    nets: tuple[str, ...] = tuple(NETS)
    rivals: str = "vgg16-small"  # network that rivals are compared on
    formats: tuple[str, ...] = ("vgg16-small", "lenet")  # networks that channels_last is tried on
    compiles: tuple[str, ...] = ("vgg16-small", "resnet-20", "lenet", "transformer-4")  # and torch.compile
    batch: int = 128  # rows of a training step
    inputs: int = 64  # rows of a prediction
    few: int = 8  # rows of the rivals' prediction
    known: int = 512  # rows that a reference is fitted on
    seconds: float = 8.0  # least time of a comparison, up to 50 turns
    turns: int = 5  # least number of turns


QUICK = Size(("lenet", "transformer-4"), "lenet", (), (), batch=16, inputs=24, few=4, known=100, seconds=0.1, turns=2)


def bench(
    path: Path | None = None,
    *,
    size: Size | None = None,
    only: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures the cells that a result file lacks, without a file all; returns its content, and notes every cell.

    Args:
        path: The result file.
        size: How much is measured.
        only: Measures those cells only whose names contain one of these words; default all.
        note: Is told of every cell.
    """
    size = size or Size()
    content: dict[str, Any] = {"about": "times and bytes of an iBNN to those of its plain network", "cells": {}}
    if path and path.exists():
        content = json.loads(path.read_text())
    content["recipe"] = {"batch": size.batch, "inputs": size.inputs, "components": COMPONENTS}
    cells = _cells(size)
    chosen = [name for name in cells if not only or any(word in name for word in only)]
    if not chosen:
        raise ValueError(f"No cell's name contains {' or '.join(only)}. Pass parts of: {'; '.join(cells)}.")
    for name in chosen:
        if name in content["cells"]:
            continue
        torch.manual_seed(0)
        machine = provenance() | {"capability": torch.backends.cpu.get_cpu_capability()}
        found = cells[name]() | {"load": round(os.getloadavg()[0], 2), "provenance": machine}
        content["cells"][name] = found
        if path:
            write(path, content)
        note(f"{name}: {json.dumps({key: found[key] for key in found if key not in ('load', 'provenance')})}")
    return content


def _cells(size: Size) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns what is measured, by name."""
    cells = {f"{net} / {kind}": partial(measure, net, size) for net in size.nets for kind, measure in MEASURES.items()}
    for net in size.formats:
        cells[f"{net} / channels last"] = partial(channels_last, net, size)
    for net in size.compiles:
        cells[f"{net} / compile"] = partial(compiled, net, size)
    return cells | {"rivals": partial(rivals, size)}


def rows(cells: dict[str, Any]) -> list[list[str]]:
    """Returns the ratios that have a limit as rows of text: a header, and a row per network."""
    found = [["network", *COLUMNS]]
    for net in NETS:
        parts = {kind: cells.get(f"{net} / {kind}", {}).get("ratio") for kind in MEASURES}
        parts["components"] = cells.get(f"{net} / step", {}).get("components")
        if any(parts.values()):
            found.append([net, *("–" if parts[kind] is None else f"{parts[kind]:.3f}" for kind in COLUMNS)])
    return found


def misses(cells: dict[str, Any]) -> list[str]:
    """Describes the ratios above their limits.

    >>> misses({"lenet / step": {"ratio": 1.4, "components": 1.0}})
    ['lenet, step 1.400 (1.35)']
    """
    (_, *kinds), *found = rows(cells)
    return [
        f"{net}, {kind} {value} ({BARS[net][kind]:.2f})"
        for net, *values in found
        for kind, value in zip(kinds, values, strict=True)
        if value != "–" and kind in BARS[net] and float(value) > BARS[net][kind]
    ]


def rival_rows(cell: dict[str, Any]) -> list[list[str]]:
    """Returns the rivals as rows of text, the header first."""
    found = [["method", "parameters", "step", "draws", "prediction"]]
    for name, row in cell["methods"].items():
        if "missing" in row:
            found.append([name, "–", "–", "–", f"not measured: {row['missing']}"])
        else:
            numbers = (f"{row['parameters']:.2f}", f"{row['step']:.2f}", str(row["draws"]), f"{row['predict']:.2f}")
            found.append([name, *numbers])
    return found


# ------------------------------------------------------------------------------------------------------- measuring


def turns(calls: Mapping[str, Callable[[], object]], size: Size) -> dict[str, list[float]]:
    """Returns the seconds of every call, turn by turn, after one to warm up; each turn begins with another call."""
    for call in calls.values():
        call()
    names, times = list(calls), {name: list[float]() for name in calls}
    began, turn = time.perf_counter(), 0
    while turn < size.turns or (turn < 50 and time.perf_counter() - began < size.seconds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
        turn += 1
    return times


def _against_plain(times: dict[str, list[float]], **more: float) -> dict[str, Any]:
    """Returns a cell of the times of "ibnn" and "plain"."""
    ms = {f"{name}_ms": round(1e3 * statistics.median(times[name]), 3) for name in ("ibnn", "plain")}
    return {"ratio": ratio(times["ibnn"], times["plain"]), **more, **ms, "turns": len(times["plain"])}


def _made(net: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a plain network and a batch for it."""
    make, shape = NETS[net]
    return make(), torch.randn(batch, *shape), torch.randint(CLASSES, (batch,))


def _step_of(rival: Rival, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Returns a call of forward, backward and a step of SGD with rate 0, which leaves the network as it is."""
    optimiser = torch.optim.SGD(rival.parameters, lr=0.0)

    def call() -> None:
        optimiser.zero_grad()
        rival.loss(x, y).backward()
        optimiser.step()

    return call


def memory(name: str, size: Size) -> dict[str, Any]:
    """Compares the bytes that a training step keeps for backward, weights aside; and what `ibnn.cost` plans."""
    net, x, y = _made(name, size.batch)
    model = convert(net.train(), components=COMPONENTS, seed=0)
    kept = {}
    for key, module, loss in (("ibnn", model, converted(model).loss), ("plain", net, plain(net).loss)):
        with saved_bytes([*module.parameters(), *module.buffers()]) as saved:
            loss(x, y)
        kept[key] = saved.bytes
    planned = cost(net, x, components=COMPONENTS).step_bytes / kept["ibnn"]
    return {"ratio": round(kept["ibnn"] / kept["plain"], 4), "planned": round(planned, 4), **kept}


def training(name: str, size: Size) -> dict[str, Any]:
    """Compares the seconds of a training step on the same rows; and those of 32 components to those of one."""
    net, x, y = _made(name, size.batch)
    calls = {"plain": _step_of(plain(net.train()), x, y)}
    for key, components in (("ibnn", COMPONENTS), ("1", 1), ("32", 32)):
        calls[key] = _step_of(converted(convert(net, components=components, seed=0)), x, y)
    times = turns(calls, size)
    return _against_plain(times, components=ratio(times["32"], times["1"]))


def prediction(name: str, size: Size) -> dict[str, Any]:
    """Compares the seconds of 20 draws (4 components) for a batch to 20 forward passes of the plain network."""
    net, x, _ = _made(name, size.inputs)
    model = convert(net.eval(), components=4, seed=0)
    many = plain(net, 20).predict
    with torch.no_grad():
        return _against_plain(turns({"plain": partial(many, x), "ibnn": partial(model.predict, x)}, size))


def prediction_of_one(name: str, size: Size) -> dict[str, Any]:
    """Compares the seconds of 80 draws for one input to one forward pass of the plain network on 80 rows."""
    net, x, _ = _made(name, ONE[0] * ONE[1])
    model = convert(net.eval(), components=ONE[0], seed=0)
    with torch.no_grad():
        calls = {"plain": partial(net, x), "ibnn": partial(model.predict, x[:1], samples=ONE[1])}
        return _against_plain(turns(calls, size))


def novelty(name: str, size: Size) -> dict[str, Any]:
    """Counts the plain forward passes that novelty adds to a prediction, and those that fitting it takes per input."""
    net, x, _ = _made(name, size.known)
    model, few = convert(net.eval(), components=1, seed=0), x[: size.inputs]
    parts = partial(_in_parts, net, x)
    with torch.no_grad():
        few_turns = replace(size, seconds=0.0, turns=min(2, size.turns))
        fits = turns({"fit": partial(fit_novelty, model, x, batch_size=32), "plain": parts}, few_turns)
        calls: dict[str, Callable[[], object]] = {"plain": partial(net, few)}
        for key, asked in (("with", True), ("without", False)):
            calls[key] = partial(model.predict, few, samples=1, novelty=asked)
        times = turns(calls, size)
    added = [more - less for more, less in zip(times["with"], times["without"], strict=True)]
    return _against_plain({"ibnn": added, "plain": times["plain"]}, fit=ratio(fits["fit"], fits["plain"]))


def one_pass(name: str, size: Size, *, novel: bool = False) -> dict[str, Any]:
    """Compares the seconds of a distilled model's prediction, with or without novelty, to a plain forward pass."""
    net, x, _ = _made(name, size.known)
    few = x[: size.inputs]
    fast = distil(convert(net.eval(), components=2, seed=0), x, samples=1, epochs=1, copies=0, progress=False)
    if novel:
        fit_novelty(fast, x, batch_size=32)
    with torch.no_grad():
        calls = {"plain": partial(net, few), "ibnn": partial(fast.predict, few, novelty=novel)}
        return _against_plain(turns(calls, size))


def _in_parts(net: nn.Module, x: Tensor) -> None:
    for part in x.split(32):
        net(part)


MEASURES: dict[str, Callable[[str, Size], dict[str, Any]]] = {
    "memory": memory,
    "step": training,
    "predict": prediction,
    "predict one": prediction_of_one,
    "novelty": novelty,
    "one pass": one_pass,
    "one pass, novelty": partial(one_pass, novel=True),
}


def channels_last(name: str, size: Size) -> dict[str, Any]:
    """Compares the seconds of a step and of a prediction with channels last to those with channels first."""
    net, x, y = _made(name, size.batch)
    calls: dict[str, Callable[[], object]] = {}
    predicts: dict[str, Callable[[], object]] = {}
    for form in (torch.contiguous_format, torch.channels_last):
        twin = copy.deepcopy(net).train().to(memory_format=form)  # type: ignore[call-overload]
        model, images = convert(twin, components=COMPONENTS, seed=0), x.contiguous(memory_format=form)
        key = "last" if form is torch.channels_last else "first"
        calls[f"plain {key}"] = _step_of(plain(twin), images, y)
        calls[f"ibnn {key}"] = _step_of(converted(model), images, y)
        predicts[key] = partial(model.predict, images[: size.inputs], samples=1)
    times, answers = turns(calls, size), turns(predicts, size)
    steps = {who: ratio(times[f"{who} last"], times[f"{who} first"]) for who in ("plain", "ibnn")}
    return {"step": steps["ibnn"], "plain_step": steps["plain"], "predict": ratio(answers["last"], answers["first"])}


def compiled(name: str, size: Size) -> dict[str, Any]:
    """Compares the seconds of a compiled training step, the loss of Algorithm 1 in one graph, to those of an eager one.

    `plain` is the same ratio of the plain network.
    """
    net, x, y = _made(name, size.batch)
    kinds = {"ibnn": converted(convert(net.train(), components=COMPONENTS, seed=0)), "plain": plain(net)}
    calls, began = {kind: _step_of(rival, x, y) for kind, rival in kinds.items()}, time.perf_counter()
    for kind, rival in kinds.items():
        calls[f"{kind} compiled"] = _step_of(rival._replace(loss=torch.compile(rival.loss, fullgraph=True)), x, y)
        calls[f"{kind} compiled"]()
    first, times = time.perf_counter() - began, turns(calls, size)
    found = {kind: ratio(times[f"{kind} compiled"], times[kind]) for kind in kinds}
    return {"step": found["ibnn"], "plain": found["plain"], "compile_seconds": round(first, 1)}


def rivals(size: Size) -> dict[str, Any]:
    """Compares parameters, and seconds of a step and of a prediction of 80 draws, to the plain network's."""
    size = replace(size, batch=size.batch // 2, seconds=0.0, turns=min(3, size.turns))
    net, x, y = _made(size.rivals, size.batch)
    net.train()
    draws = ONE[0] * ONE[1]
    model = convert(net, components=ONE[0], seed=0)
    made = {"plain": plain(net, draws), f"iBNN-{ONE[0]}": converted(model, draws)}
    missing = {}
    for name, make in RIVALS.items():
        try:
            made[name] = make(net, draws)
        except ImportError as error:
            missing[name] = {"missing": str(error)}
    few, reference = x[: size.few], sum(p.numel() for p in net.parameters())
    times = turns({name: _step_of(rival, x, y) for name, rival in made.items()}, size)
    with torch.no_grad():
        answers = turns({name: partial(m.predict, few) for name, m in made.items()}, size)
    methods = {
        name: {
            "parameters": round(sum(p.numel() for p in rival.parameters) / reference, 4),
            "step": ratio(times[name], times["plain"]),
            "draws": rival.draws,
            "predict": ratio(answers[name], answers["plain"]),
        }
        for name, rival in made.items()
    }
    return {"net": size.rivals, "batch": size.batch, "inputs": size.few, "methods": methods | missing}


def main() -> None:
    """Reads the command line; prints the ratios and the cells above their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file; adds the cells that it lacks")
    parser.add_argument("--only", action="append", help="a part of cells' names (lenet, lenet / step); may be repeated")
    parser.add_argument("--quick", action="store_true", help="small networks and batches: half a minute")
    given = parser.parse_args()
    cells = bench(given.out, size=QUICK if given.quick else None, only=given.only or (), note=print)["cells"]
    print("\niBNN to plain network: bytes kept for backward, seconds of the rest")
    _print(rows(cells))
    for line in () if given.quick else misses(cells):  # the limits are for the full benchmark
        print(f"above its limit: {line}")
    if "rivals" in cells:
        print(f"\n{cells['rivals']['net']}: methods to the plain network")
        _print(rival_rows(cells["rivals"]))


def _print(table: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
