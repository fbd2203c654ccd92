"""Compares the numbers in the pages with the result files that they come from: `python docs/check_numbers.py`.

`make docs` runs it. Every function below is one comparison; it returns what is wrong, in words, or nothing.
"""

import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
EXPERIMENTS, RESULTS = ROOT / "experiments", ROOT / "experiments" / "results"


def read(name: str) -> str:
    """Returns a page, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    """Returns the content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(page: str, name: str) -> list[str]:
    """Returns the rows between the page's markers of that name, without the head."""
    return page.partition(f"<!-- {name}:begin -->\n")[2].partition(f"<!-- {name}:end -->")[0].splitlines()[2:]


def missing(name: str, *quotes: str) -> Iterator[str]:
    """Yields quotes that a page does not contain, whatever its line breaks."""
    page = " ".join(read(name).split())
    yield from (f"{name} does not say: {quote}" for quote in quotes if " ".join(quote.split()) not in page)


def tables() -> Iterator[str]:
    """The tables of results that `experiments/tables.py` fills in."""
    filled = importlib.import_module("tables")
    if filled.main(check=True) != 0:
        yield "tables are out of date: run python experiments/tables.py"
    homes = {
        "readme": "README.md",
        "results": "docs/results.md",
        "results-vgg": "docs/results.md",
        "results-cifar100": "docs/results.md",
        "results-all": "docs/results.md",
        "posterior": "docs/method.md",
    }
    for name in filled.blocks():
        yield from missing(homes.get(name, "experiments/README.md"), f"<!-- {name}:begin -->")
    for name in filled.performance():
        yield from missing("docs/performance.md", f"<!-- {name}:begin -->")


def recipes() -> Iterator[str]:
    """Committed results come from the recipes as they are: others cannot be reproduced."""
    reproduce = importlib.import_module("reproduce")
    for path in sorted(RESULTS.glob("*-cpu.json")):
        experiment = reproduce.read(path.stem.removesuffix("-cpu"))
        found = reproduce.results(experiment, path.parent)
        known = set(found.of(experiment))
        yield from (f"{path.name}: {name} is no cell of the recipe" for name in found.cells if name not in known)


def tutorials() -> Iterator[str]:
    """What tutorials show is what their code printed; `python docs/pages.py` writes both."""
    shown = runpy.run_path(str(DOCS / "pages.py"))["shown"]
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        outputs = shown(page)
        if outputs != result("tutorials")[page.stem]["shown"] or not all(output.strip() for output in outputs):
            yield f"docs/tutorials/{page.name} shows other outputs than its result file"


def scaling() -> Iterator[str]:
    """Speed of workers, and the plan of a large model."""
    found, overhead, large = result("scaling"), result("fit-overhead"), result("large")
    sizes = {row["net"]: 2 * 16 * row["nodes"] for row in result("table1")["cells"]["table1"]["rows"]}
    quotes = (f"has {sizes['VGG16-small']:,} latent", f"has {sizes['WideResNet-28x10']:,}, 0.8 %")
    yield from missing("docs/scaling.md", *quotes)
    page = "experiments/notes/scaling.md"
    yield from missing(
        page,
        f"1 worker {found['steps_per_second']['1 worker']} steps/s",
        f"{found['steps_per_second']['2 workers']} steps/s",
        f"a speed-up of {found['speedup']} (efficiency {found['efficiency']})",
        f"a step takes {overhead['ratio']} times",
        f"{large['large']['cost']['latents']:,} latent parameters",
    )
    for name, parts in large["large_gigabytes_by_arithmetic"].items():
        yield from missing(page, f"| {name} | {' | '.join(map(str, parts.values()))} |")
    for name, way in large["small"]["ways"].items():
        seconds = large["scaled_step_seconds_of_one_thread_here"][name]
        row = f"| {way['trained_parameters']:,} | {way['over_plain']} | {way['kept_megabytes']} | {seconds} |"
        yield from missing(page, row)


def transformers() -> Iterator[str]:
    """Time and memory of sequence models."""
    ratios = result("sequence-speed")["ratios"]
    for kind, batches in {"LSTM": (32, 128), "GRU": (32, 128), "Transformer": (16, 64)}.items():
        steps = [f"{ratios[f'{kind}, batch {batch}']['step']:.2f}" for batch in batches]
        memory = f"{ratios[f'{kind}, batch {batches[1]}']['memory']:.2f}"
        yield from missing("docs/transformers.md", f"| {' | '.join([*steps, memory])} |")


def performance() -> Iterator[str]:
    """What drawing until answers settle saves, and what `fit` adds to a step."""
    prediction = importlib.import_module("ibnn.prediction.predict")
    cells = [cell[str(prediction.TOLERANCE)] for name, cell in result("draws")["cells"].items() if name[:4] == "test"]
    draws, nll, labels = (sum(cell[key] for cell in cells) / len(cells) for key in ("draws", "nll", "equal_labels"))
    words = f"takes {100 * draws:.0f} % of the draws", f"NLL rises by {100 * (nll - 1):.1f} %"
    yield from missing("docs/performance.md", *words, f"{100 * labels:.1f} % of the labels stay the same")
    bars = table(read("docs/performance.md"), "bars")
    missed, aims = ("".join(bars).count(mark) for mark in ("** (", " ("))
    yield from missing("docs/performance.md", f"miss the aim: {missed} of {aims}")
    share = f"{1 / result('fit-overhead')['ratio']:.1%} of its time".replace("%", " %")
    yield from missing("docs/performance.md", share)


def steering() -> Iterator[str]:
    """The cost of choosing the noise."""
    lenet, vgg = ([100 * share for share in of.values()] for of in result("steering")["share"].values())
    one = f"one run ({min(lenet + vgg):.0f}–{max(lenet + vgg):.0f} % of it to steer)"
    yield from missing("docs/results.md", one)


def shift() -> Iterator[str]:
    """False alarms and delays."""
    found = result("shift")
    alarms = found["false_alarms"]
    soon = {name: found["inverted"][name]["median"] for name in ("novelty", "total", "epistemic")}
    words = "half of the alarms came within {novelty} images by novelty, {total} by the total, and {epistemic} by the"
    raised = f"raised an alarm in {100 * alarms['found']:g} % of {alarms['streams']} streams"
    yield from missing("docs/deploying.md", raised, words.format(**soon))
    cells = {s: [d[n][name] for n in ("0", "1000") for name in ("median", "most")] for s, d in found["delays"].items()}
    rows = [f"| {s} | {' | '.join('–' if c is None else str(c) for c in row)} |" for s, row in cells.items()]
    if table(read("docs/deploying.md"), "shift") != rows:
        yield "docs/deploying.md: its table is not that of shift.json"


def deploying() -> Iterator[str]:
    """Sizes and times of exported files."""
    facts = ("recipe", "versions")
    rows = [
        f"| {name} | {row['plain_bytes']:,} | {row['draw_bytes']:,} | {row['bytes']:,} | "
        f"{row['batch 1']['plain_ms']} | {row['batch 1']['ms']} | {row['batch 1']['ratio']} | "
        f"{row['batch 64']['plain_ms']} | {row['batch 64']['ms']} | {row['batch 64']['ratio']} |"
        for name, row in result("export").items()
        if name not in facts
    ]
    if table(read("docs/performance.md"), "export") != rows:
        yield "docs/performance.md: its table is not that of export.json"
    for name, row in result("int8").items():
        if name not in facts:
            line = f"| {name} | {row['nll']} | {row['ece']} | {row['error']} | {row['bytes']:,} |"
            yield from missing("docs/performance.md", line)


OURS = {"uci": "/ibnn/"}  # files where only the rows with this in their name are trained by our code
NO_TRAINING = (  # times, sizes, coverages: no training is judged
    *(
        "demo",
        "demo-seeds",
        "export",
        "fit-overhead",
        "guarantees",
        "int8",
        "kills",
        "large",
        "loading",
        "memory_growth",
        "readme",
    ),
    *("scaling", "sequence-speed", "serve", "shift", "speed", "steering", "table1", "tutorials", "draws"),
)


def code() -> Iterator[str]:
    """Published results are of the present training code."""
    present = importlib.import_module("provenance").training_code()
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.stem in OURS:
            content = [cell for name, cell in content["cells"].items() if OURS[path.stem] in name]
        stamps = set(_stamps(content))
        if path.stem in NO_TRAINING:
            continue
        if stamps != {present}:
            yield f"{path.name} is of other training code ({stamps}) than the present ({present}): run it again"


def _stamps(content: Any) -> Iterator[Any]:
    """Yields the training code of every provenance in a result file."""
    if isinstance(content, dict):
        if "commit" in content and "torch" in content:
            yield content.get("training_code")
        for part in content.values():
            yield from _stamps(part)
    elif isinstance(content, list):
        for part in content:
            yield from _stamps(part)


def five_minutes() -> Iterator[str]:
    """The report that the README shows."""
    yield from missing("README.md", *result("five-minutes")["printed"])


COMPARISONS = (
    tables,
    recipes,
    code,
    five_minutes,
    tutorials,
    scaling,
    transformers,
    performance,
    steering,
    shift,
    deploying,
)


def main() -> int:
    """Runs all comparisons, prints what is wrong, and returns the number of mistakes, at most 1."""
    sys.path.insert(0, str(EXPERIMENTS))
    wrong = [f"{compare.__name__}: {words}" for compare in COMPARISONS for words in compare()]
    print("\n".join(wrong) or f"{len(COMPARISONS)} comparisons of pages with result files: all equal")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
