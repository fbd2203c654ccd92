"""Puts the tables of results into README.md, experiments/README.md and pages of docs/: python experiments/tables.py

With --check it changes nothing and fails if a page is out of date.
"""

import importlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import figures
from reproduce import names, read, results
from table1 import text as table1

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import bench

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
PAGES = tuple(
    ROOT / page
    for page in (
        "README.md",
        "experiments/README.md",
        "experiments/notes/measured.md",
        *(f"docs/{name}.md" for name in ("results", "performance", "method", "novelty", "calibration")),
    )
)
SHORT = ("method", "error %", "NLL", "ECE", "NLL + T", "corrupted NLL + T", "rows ×", "forwards")


def blocks() -> dict[str, str]:
    """The text between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, by name."""
    found = {}
    for name in names():
        if cells := results(read(name), RESULTS).of(read(name)):
            found[name] = figures.markdown(figures.table(read(name), cells)).rstrip() + "\n"
    (sizes,) = json.loads((RESULTS / "table1.json").read_text())["cells"].values()
    found["table1"] = figures.markdown(table1(sizes["rows"])) + "\n"
    lenet, vgg, hundred = (setting["name"] for setting in read("benchmark").settings)
    found |= {"results": _benchmark(lenet), "readme": _benchmark(lenet, README)}
    found |= {"results-vgg": _benchmark(vgg), "results-cifar100": _benchmark(hundred)}
    if "vgg16-cifar10" in found:
        found["results-all"] = _benchmark(read("vgg16-cifar10").settings[0]["name"], name="vgg16-cifar10")
    if "posterior" in found:
        found["posterior"] = _posterior()
    chosen = json.loads((RESULTS / "choose.json").read_text())["cells"]
    found["choose"] = _choices(chosen)
    return found


README = ("SGD", "MC-dropout", "iBNN-8", "iBNN-8, one pass", "SGD, 4 networks", "SGD, 4 networks, paper's optimiser")
README += ("iBNN-8, 4 networks", "iBNN-8, 4 networks, one pass")


def _benchmark(setting: str, methods: tuple[str, ...] = (), name: str = "benchmark") -> str:
    """The short columns and some rows of an experiment's table of a network."""
    experiment = read(name)
    head, *rows = figures.table(experiment, results(experiment, RESULTS).of(experiment))
    rows = [row for row in rows if row[0] == setting and (not methods or row[1].split(" (")[0] in methods)]
    kept = [i for i, column in enumerate(head) if column in SHORT]
    return figures.markdown([[row[i] for i in kept] for row in (head, *rows)]).rstrip() + "\n"


def _posterior() -> str:
    """Free posteriors beside the default: mean ± standard error over seeds, and how far q has left the prior."""
    experiment, rows = read("posterior"), []
    for setting, method, cells in figures.grid_of(experiment, results(experiment, RESULTS).of(experiment)).groups():
        scores = [
            _with_error([unit * value for value in figures.numbers(cells, "tempered", *path)], digits)
            for path, unit, digits in (
                (("scores", "error"), 100.0, 2),
                (("scores", "nll"), 1.0, 3),
                (("corrupted", "all", "nll"), 1.0, 3),
            )
        ]
        spread, low, high = (
            figures.numbers(cells, "analysis", name) for name in ("spread_of_means", "low_std", "high_std")
        )
        q = [f"{_middle(spread):.2f}", f"{_middle(low):.2f}–{_middle(high):.2f}"] if spread else ["–", "–"]
        rows.append([setting, method, str(len(cells)), *scores, *q])
    head = ["network", "posterior", "seeds", "error %", "NLL + T", "corrupted NLL + T", "spread of μ", "σ / s"]
    return figures.markdown([head, *rows]).rstrip() + "\n"


def _middle(values: list[float]) -> float:
    return sum(values) / len(values)


def _with_error(values: list[float], digits: int) -> str:
    """Words a mean ± its standard error."""
    mean, sd = figures.spread(values)
    return f"{mean:.{digits}f} ± {sd / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def _choices(cells: dict[str, Any]) -> str:
    rows = [["setting", "held-out NLL", "error %"]]
    for name, cell in sorted(cells.items()):
        error = f"{100 * cell['valid_error']:.1f}" if "valid_error" in cell else "–"
        rows.append([name, f"{cell['valid_nll']:.3f}", error])
    return figures.markdown(rows).rstrip() + "\n"


def performance() -> dict[str, str]:
    """The blocks of docs/performance.md."""
    speed, draws = (json.loads((RESULTS / f"{name}.json").read_text())["cells"] for name in ("speed", "draws"))
    found = {
        "bars": _with_aims(speed),
        "draws": _settled(draws),
    }
    if "rivals" in speed:
        found["rivals"] = bench.rival_rows(speed["rivals"])
    tried = [net for net in bench.NETS if {f"{net} / channels last", f"{net} / compile"} & speed.keys()]
    forms = [[net, *_form(speed, net)] for net in tried]
    if forms:
        found["formats"] = [["network", *FORMS], *forms]
    return {name: figures.markdown(rows).rstrip() + "\n" for name, rows in found.items()}


def _with_aims(speed: dict[str, Any]) -> list[list[str]]:
    """Every ratio with the aim in brackets, in bold where it misses it; without columns that were not measured."""
    head, *rows = bench.rows(speed)
    kept = [i for i in range(1, len(head)) if any(row[i] != "–" for row in rows)]

    def cell(net: str, kind: str, value: str) -> str:
        aim = bench.BARS[net].get(kind)
        if value == "–" or aim is None:
            return value
        return f"**{value}** ({aim:.2f})" if float(value) > aim else f"{value} ({aim:.2f})"

    return [["network", *(head[i] for i in kept)], *([r[0], *(cell(r[0], head[i], r[i]) for i in kept)] for r in rows)]


FORMS = (
    "channels_last: plain step", "channels_last: our step", "channels_last: our prediction",
    "compile: plain step", "compile: our step", "seconds to compile",
)  # fmt: skip


def _form(cells: dict[str, Any], net: str) -> list[str]:
    last, fast = cells.get(f"{net} / channels last", {}), cells.get(f"{net} / compile", {})
    values = [last.get(key) for key in ("plain_step", "step", "predict")]
    values += [fast.get(key) for key in ("plain", "step", "compile_seconds")]
    return ["–" if value is None else f"{value:.2f}" for value in values]


def _settled(cells: dict[str, Any]) -> list[list[str]]:
    """Means over the seeds' held-out images."""
    rows = [["tolerance, or samples", "share of 40 draws", "NLL relative to 40 draws", "same label %"]]
    held_out = [cell for name, cell in cells.items() if name.startswith("held out")]
    for tolerance in ("0.02", "0.05", "0.1", "samples=1", "samples=2"):
        means = [sum(cell[tolerance][key] for cell in held_out) / len(held_out) for key in SETTLED]
        rows.append([tolerance, *_settled_cells(means)])
    return rows


SETTLED = ("draws", "nll", "equal_labels")


def _settled_cells(values: list[float]) -> list[str]:
    draws, nll, labels = values
    return [f"{draws:.3f}", f"{nll:.4f}", f"{100 * labels:.2f}"]


SCORES = {  # columns of the table of scores, and what they are in the result file
    "entropy + T": "entropy",
    "energy": "energy",
    "last layer": "last layer, Mahalanobis",
    "10 neighbours": "last layer, 10 neighbours",
    "MC-dropout": "MC-dropout, epistemic",
    "ensemble": "ensemble of 4, epistemic",
    "**novelty**, SGD": "novelty",
    "**novelty**, iBNN": "iBNN, novelty",
}


def novelty() -> dict[str, str]:
    """The blocks of docs/novelty.md."""
    every = json.loads((RESULTS / "novelty.json").read_text())["cells"]
    cells = over_seeds({name: cell for name, cell in every.items() if "auroc" in cell})
    pairs = [
        (cell, pair, kind, found["auroc"][pair])
        for cell, found in cells.items()
        for pair, kind in found["kinds"].items()
    ]
    found = {"coverage": _coverage({name: cell for name, cell in every.items() if "coverage" in cell})}
    made = {f"novelty-{name}": figures.markdown(rows).rstrip() + "\n" for name, rows in found.items()}
    return made | {"readme-novelty": figures.markdown(_means(pairs)).rstrip() + "\n"}


def over_seeds(cells: dict[str, Any]) -> dict[str, Any]:
    """Means of the cells of one name over their seeds, by name and number of seeds."""
    named: dict[str, list[Any]] = {}
    for name, cell in cells.items():
        named.setdefault(name.rsplit(" ", 1)[0], []).append(cell)
    return {f"{name}, {len(many)} seed{'s' * (len(many) > 1)}": _mean(many) for name, many in named.items()}


def _mean(many: list[Any]) -> Any:
    """The mean of numbers, or of those at the same places of dicts; of other things the first."""
    if isinstance(many[0], dict):
        return {key: _mean([one[key] for one in many]) for key in many[0] if all(key in one for one in many)}
    return sum(many) / len(many) if isinstance(many[0], float) else many[0]


def _means(pairs: list[Any]) -> list[list[str]]:
    """Mean AUROC of each score over near and over far pairs, of those that all were measured on."""
    shown = {label: score for label, score in SCORES.items() if score not in ("novelty", "MC-dropout, epistemic")}
    rows = [["score", "forward passes", "near", "far"]]
    complete = [(kind, auroc) for _, _, kind, auroc in pairs if all(score in auroc for score in shown.values())]
    for label, score in shown.items():
        values = [[auroc[score] for kind, auroc in complete if kind == wanted] for wanted in ("near", "far")]
        passes = "4, trained four times" if label == "ensemble" else "1"
        rows.append([label, passes, *(_three(sum(v) / len(v)) for v in values)])
    return rows


def _coverage(cells: dict[str, Any]) -> list[list[str]]:
    """Coverage and width of 90 % intervals."""
    rows = [["data", "covered %", "conformal: covered %", "width", "conformal: width"]]
    for name, cell in cells.items():
        found = cell["coverage"]
        covered = [f"{100 * found[kind]:.1f}" for kind in ("mixture", "conformal")]
        rows.append(
            [name.rsplit(" ", 1)[0], *covered, *(f"{found[f'{k} width']:.2f}" for k in ("mixture", "conformal"))]
        )
    return rows


DETECTORS = {  # rows of the table of queries out of scope: a method, and scores of it
    "plain": ("entropy + T", "energy", "last layer, Mahalanobis", "novelty"),
    "calibrate": ("entropy", "novelty"),
    "MC-dropout": ("entropy", "epistemic"),
    "iBNN-8": ("entropy", "epistemic", "energy", "last layer, Mahalanobis", "novelty"),
    "iBNN-8, one pass": ("entropy", "novelty"),
    "3 plain networks": ("entropy", "epistemic"),
}


def clinc() -> dict[str, str]:
    """The tables of CLINC150, in scope and out of scope: means ± standard deviations over seeds."""
    named = _clinc()
    inside = [["method", "seeds", "error %", "NLL", "ECE", "NLL + T", "ECE + T", "passes"]]
    outside = [["method", "score", "AUROC", "FPR95 %", "recall % at 5 %", "false alarms %"]]
    for method, scores in DETECTORS.items():
        cells = list(named.get(method, {}).values())
        if not cells:
            continue
        own, tempered = ([cell[kind] for cell in cells] for kind in ("test", "tempered"))
        values = [_spread([found["error"] for found in own], 100, 2)]
        values += [_spread([found[key] for found in kind]) for kind in (own, tempered) for key in ("nll", "ece")]
        inside.append([method, str(len(cells)), *values, str(cells[0]["forwards"])])
        for score in scores:
            found = [cell["out of scope"][score] for cell in cells]
            shares = [_spread([one[key] for one in found], 100, 1) for key in ("fpr95", "recall", "false alarms")]
            outside.append([method, score, _spread([one["auroc"] for one in found]), *shares])
    found = {"clinc": inside, "clinc-outside": outside}
    return {name: figures.markdown(rows).rstrip() + "\n" for name, rows in found.items()}


def _clinc() -> dict[str, dict[str, Any]]:
    """The cells of each method, by seed."""
    named: dict[str, dict[str, Any]] = {}
    for name, cell in json.loads((RESULTS / "clinc.json").read_text())["cells"].items():
        method, seed = name.rsplit(" / ", 1)
        named.setdefault(method, {})[seed] = cell
    return named


def _spread(values: list[float], factor: float = 1, digits: int = 3) -> str:
    """Returns mean ± standard deviation; the value alone if there is one."""
    mean = f"{factor * statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {factor * statistics.stdev(values):.{digits}f}"


def guarantees() -> dict[str, str]:
    """The tables of sets and intervals, and novelty's false alarms."""
    cells = json.loads((RESULTS / "guarantees.json").read_text())["cells"]
    sizes = [["classes", "error %", "kind", "90 %: covered %", "size", "empty %", "95 %: covered %", "size"]]
    for classes in (10, 100):
        cell = cells[f"sizes {classes}"]
        for kind, levels in cell["sets"].items():
            low, high = levels["0.9"], levels["0.95"]
            covered = [f"{100 * found['coverage']:.1f}" for found in (low, high)]
            numbers = [covered[0], f"{low['size']:.2f}", f"{100 * low['empty']:.1f}", covered[1], f"{high['size']:.2f}"]
            sizes.append([str(classes), f"{100 * cell['error']:.1f}", kind, *numbers])
    rows = (60, 200, 1000)
    kinds = [name.removesuffix(", n = 60") for name in cells if name.endswith(", n = 60") and "coverage" in cells[name]]
    covered_rows = [["held out", *map(str, rows)]]
    covered_rows += [[k, *(f"{100 * cells[f'{k}, n = {n}']['coverage']:.1f}" for n in rows)] for k in kinds]
    breaks = [["held out", "level", "before", "next 100", "last 500", "all"]]
    for n in rows:
        for level in ("fixed", "adaptive"):
            breaks.append([str(n), level, *(f"{100 * v:.1f}" for v in cells[f"break, n = {n}"][level].values())])
    alarms = [["held out", "groups", "α = 0.01", "0.02", "0.05", "0.1"]]
    for name, cell in cells.items():
        if name.startswith("novelty"):
            n, groups = name.split("n = ")[1].removesuffix(" groups").split(", ")
            shares = [cell["levels"].get(level) for level in ("0.01", "0.02", "0.05", "0.1")]
            alarms.append([n, groups, *map(_three, shares)])
    found = {"set-sizes": sizes, "guarantees": covered_rows, "break": breaks, "false-alarms": alarms}
    return {name: figures.markdown(table).rstrip() + "\n" for name, table in found.items()}


def one_pass() -> str:
    """Each model's draws beside one pass of its student, means over seeds; for numbers, RMSE in place of the error."""
    columns = {
        "error % or RMSE": "error",
        "NLL": "nll",
        "corrupted NLL": "corrupted nll",
        "misclassification AUROC": "misclassification AUROC",
        "OOD AUROC": "OOD AUROC",
    }
    rows = [["network", "model", "seeds", *columns, "rank correlation of epistemic"]]
    path = RESULTS / "one_pass.json"
    every = json.loads(path.read_text())["cells"] if path.exists() else {}
    for name, cell in over_seeds({name: cell for name, cell in every.items() if not name.startswith("choice")}).items():
        task, kind, seeds = name.removesuffix("s").removesuffix(" seed").replace(" / seed, ", " / ").split(" / ")
        draws = cell.get("40 draws") or cell["ensemble"]
        student = cell["one pass"] if "one pass" in cell else cell["one pass, whole"]
        values = []
        for key in columns.values():
            pair = [_percent(found) if key == "error" else _three(found.get(key)) for found in (draws, student)]
            values.append("–" if "–" in pair else " → ".join(pair))
        rows.append([task, kind, seeds, *values, _three(student.get("rank"))])
    draws, students = (_clinc().get(name, {}) for name in ("iBNN-8", "iBNN-8, one pass"))
    if students:
        pairs = [_queries_of([cells[seed] for seed in students]) for cells in (draws, students)]
        error, nll, outside = (" → ".join(pair) for pair in zip(*pairs, strict=True))
        rows.append(["MiniLM, CLINC150", "iBNN", str(len(students)), error, nll, "–", "–", outside, "–"])
    return figures.markdown(rows).rstrip() + "\n"


def _queries_of(cells: list[Any]) -> list[str]:
    """Mean error, NLL, and AUROC of the epistemic part for queries out of scope."""
    error, nll = (statistics.mean(cell["test"][key] for cell in cells) for key in ("error", "nll"))
    outside = statistics.mean(cell["out of scope"]["epistemic"]["auroc"] for cell in cells)
    return [f"{100 * error:.2f}", _three(nll), _three(outside)]


def _percent(found: dict[str, float]) -> str:
    return f"{found['rmse']:.3f}" if "rmse" in found else f"{100 * found['error']:.2f}"


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def few_labels() -> dict[str, str]:
    """The table of few held-out labels."""
    experiment = importlib.import_module("few_labels")
    rows = experiment.table(experiment.Results("few_labels", ""))
    return {"few-labels": figures.markdown(rows).rstrip() + "\n"}


def filled(text: str, found: dict[str, str]) -> str:
    """A page with every block that there is a table for."""
    for name, table in found.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin in text:
            before, rest = text.split(begin)
            text = before + begin + table + end + rest.split(end, 1)[1]
    return text


def fill_in(pages: dict[Path, dict[str, str]], check: bool = False) -> int:
    """Fills blocks into pages; with `check` changes nothing, and returns 1 if a page is out of date."""
    new = {page: filled(page.read_text(), blocks) for page, blocks in pages.items()}
    stale = {page: text for page, text in new.items() if text != page.read_text()}
    if check and stale:
        names = ", ".join(page.name for page in stale)
        print(f"Out of date: {names}. Run the same script of experiments/ without --check.", file=sys.stderr)
        return 1
    for page, text in stale.items():
        page.write_text(text)
    return 0


def main(check: bool) -> int:
    """Fills the pages in, or says which are out of date."""
    found = blocks() | performance() | novelty() | guarantees() | clinc() | few_labels() | {"one-pass": one_pass()}
    return fill_in(dict.fromkeys(PAGES, found), check)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
