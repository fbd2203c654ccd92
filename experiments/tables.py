"""Puts the tables of results into README.md, experiments/README.md and pages of docs/ and experiments/notes/.

findings.py fills in the rest of notes/findings.md. Usage: python tables.py

With --check it changes nothing and fails if a page is out of date.
"""

import json
import sys
from pathlib import Path
from typing import Any

import figures
from libraries_table import libraries
from reproduce import names, read, results
from table1 import text as table1

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import bench

ROOT = Path(__file__).parent.parent
RESULTS, NOTES = ROOT / "experiments" / "results", ROOT / "experiments" / "notes"
PAGES = tuple(
    ROOT / page
    for page in (
        "README.md",
        "experiments/README.md",
        *(f"docs/{name}.md" for name in ("results", "performance", "novelty", "sets")),
        *(f"experiments/notes/{name}.md" for name in ("novelty", "pruning")),
    )
)
SHORT = (
    "setting",
    "method",
    "error %",
    "NLL",
    "ECE",
    "own T",
    "NLL + T",
    "corrupted ECE",
    "corrupted ECE + T",
    "rows ×",
    "forwards",
)
DROPOUT = (
    *("setting", "method", "error %", "NLL", "ECE", "NLL + T"),
    *("corrupted error %", "corrupted NLL", "corrupted ECE"),
)


README = ("method", "error %", "NLL", "ECE", "NLL + T", "ECE + T", "rows ×", "forwards")


def blocks() -> dict[str, str]:
    """The text between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, by name."""
    found = {}
    for name in names():
        if cells := results(read(name), RESULTS).of(read(name)):
            found[name] = figures.markdown(figures.table(read(name), cells)).rstrip() + "\n"
    (sizes,) = json.loads((RESULTS / "table1.json").read_text())["cells"].values()
    found["table1"] = figures.markdown(table1(sizes["rows"])) + "\n"
    found["results"] = _benchmark(SHORT)
    found["readme"] = _benchmark(README, methods=("SGD", "SWAG", "Ensemble-4 (", "MC", "iBNN-8"), name="converged")
    chosen = json.loads((RESULTS / "choose.json").read_text())["cells"]
    found["choose"] = _choices(chosen)
    return found


def _benchmark(
    columns: tuple[str, ...], settings: str = "", methods: tuple[str, ...] = (), name: str = "benchmark"
) -> str:
    """Some columns and rows of an experiment's table."""
    experiment = read(name)
    head, *rows = figures.table(experiment, results(experiment, RESULTS).of(experiment))
    rows = [row for row in rows if row[0].startswith(settings) and (not methods or row[1].startswith(methods))]
    kept = [i for i, column in enumerate(head) if column in columns]
    return figures.markdown([[row[i] for i in kept] for row in (head, *rows)]).rstrip() + "\n"


def _choices(cells: dict[str, Any]) -> str:
    rows = [["setting", "held-out NLL", "error %"]]
    for name, cell in sorted(cells.items()):
        error = f"{100 * cell['valid_error']:.1f}" if "valid_error" in cell else "–"
        rows.append([name, f"{cell['valid_nll']:.3f}", error])
    return figures.markdown(rows).rstrip() + "\n"


def _noises() -> str:
    """NLLs of few draws to that of many, and gaps of probability and epistemic part, by kind of noise and network."""
    cells = json.loads((RESULTS / "noise.json").read_text())["cells"]
    names = [name for name, value in next(iter(cells.values())).items() if isinstance(value, dict) and "nll" in value]
    rows = [["noise", *cells]]
    for name in names:
        found = [cell.get(name) for cell in cells.values()]
        rows.append([name, *("–" if cell is None else _noise_cell(cell) for cell in found)])
    return figures.markdown(rows).rstrip() + "\n"


def _noise_cell(cell: dict[str, Any]) -> str:
    return "{:.4f} ± {:.4f}, {probability:.3f}, {epistemic:.4f}".format(*cell["nll"], **cell)


def performance() -> dict[str, str]:
    """The blocks of docs/performance.md."""
    speed, older = (json.loads((RESULTS / f"{name}.json").read_text())["cells"] for name in ("speed", "speed-avx2"))
    draws = json.loads((RESULTS / "draws.json").read_text())["cells"]
    found = {
        "limits": bench.limits(),
        "bars": bench.rows(speed),
        "avx2": bench.rows(older),
        "draws": _settled(draws),
        "without": _without_draws(draws),
    }
    if "rivals" in speed:
        found["rivals"] = bench.rival_rows(speed["rivals"])
    tried = [net for net in bench.NETS if {f"{net} / channels last", f"{net} / compile"} & speed.keys()]
    forms = [[net, *_form(speed, net)] for net in tried]
    if forms:
        found["formats"] = [["network", *FORMS], *forms]
    above = "; ".join(bench.misses(speed)) or "nothing"
    return {name: figures.markdown(rows).rstrip() + "\n" for name, rows in found.items()} | {
        "misses": f"Above its bar (in brackets): {above}.\n"
    }


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
    """Means over the seeds' held-out images, and the test images seed by seed."""
    rows = [["images", "tolerance", "draws", "NLL", "equal labels %"]]
    held_out = [cell for name, cell in cells.items() if name.startswith("held out")]
    for tolerance in (key for key, value in held_out[0].items() if isinstance(value, dict) and "draws" in value):
        means = [sum(cell[tolerance][key] for cell in held_out) / len(held_out) for key in SETTLED]
        rows.append([f"held out, mean of {len(held_out)} seeds", tolerance, *_settled_cells(means)])
    for name, cell in sorted(cells.items()):
        if name.startswith("test"):
            ((tolerance, found),) = ((key, v) for key, v in cell.items() if isinstance(v, dict) and "draws" in v)
            rows.append([name.replace(" / ", ", "), tolerance, *_settled_cells([found[key] for key in SETTLED])])
    return rows


SETTLED = ("draws", "nll", "equal_labels")


def _settled_cells(values: list[float]) -> list[str]:
    draws, nll, labels = values
    return [f"{draws:.3f}", f"{nll:.4f}", f"{100 * labels:.2f}"]


def _without_draws(cells: dict[str, Any]) -> list[list[str]]:
    forwards = {"moments": "2K", "moments, channels whole": "2K", "samples=2": "2K"}
    found = [cell for name, cell in sorted(cells.items()) if name.startswith("without draws")]
    rows = [["answer", "plain forwards", *(f"NLL, seed {seed}" for seed in range(len(found)))]]
    for name in (key for key, value in found[0].items() if isinstance(value, float) and key != "seconds"):
        rows.append([name, forwards.get(name, "K"), *(f"{cell[name]:.3f}" for cell in found)])
    return rows


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
    choice = json.loads((RESULTS / "novelty-choice.json").read_text())["cells"]
    pairs = [
        (cell, pair, kind, found["auroc"][pair])
        for cell, found in cells.items()
        for pair, kind in found["kinds"].items()
    ]
    found = {"pairs": _scores(pairs, SCORES), "choice": _candidates(choice), "growth": _growth(choice["rows"]["rows"])}
    found["coverage"] = _coverage({name: cell for name, cell in every.items() if "coverage" in cell})
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


def _scores(pairs: list[Any], columns: dict[str, str]) -> list[list[str]]:
    """AUROC of every near and far pair, and the means over each kind, corruptions too."""
    rows, every = [["data", "against", "kind", *columns]], dict[str, list[list[float | None]]]()
    for cell, pair, kind, auroc in pairs:
        values = [auroc.get(score) for score in columns.values()]
        every.setdefault(kind, []).append(values)
        if kind != "corrupted":
            rows.append([cell, pair, kind, *map(_three, values)])
    for kind, many in every.items():
        complete = [row for row in many if None not in row]
        if not complete:
            continue
        means = [sum(column) / len(column) for column in zip(*complete, strict=True)]
        rows.append([f"mean of {len(complete)}", "", kind, *map(_three, means)])
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


def guarantees() -> dict[str, str]:
    """The blocks of docs/sets.md, and novelty's false alarms."""
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


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _candidates(cells: dict[str, Any]) -> list[list[str]]:
    """Means over the pairs of each data set, the best first."""
    head = ["score", "MNIST: classes", "corrupted", "CIFAR-10: classes", "corrupted ", "mean"]
    named = {data: [c["auroc"] for name, c in cells.items() if name.startswith(data)] for data in ("mnist", "cifar")}
    rows: list[tuple[float, str, list[float]]] = []
    for score in named["mnist"][0]:
        values = []
        for many in named.values():
            values.append(sum(auroc[score]["classes"] for auroc in many) / len(many))
            changed = [v for auroc in many for key, v in auroc[score].items() if key != "classes"]
            values.append(sum(changed) / len(changed))
        rows.append((sum(values) / len(values), score, values))
    return [head, *([score, *map(_three, values), _three(mean)] for mean, score, values in sorted(rows, reverse=True))]


def _growth(rows: dict[str, Any]) -> list[list[str]]:
    head = ["inputs", "classes", "corrupted", "false alarms at 0.05"]
    made = []
    for name, found in rows.items():
        changed = [v for key, v in found.items() if key not in ("classes", head[-1])]
        made.append([name, _three(found["classes"]), _three(sum(changed) / len(changed)), _three(found[head[-1]])])
    return [head, *made]


DIVERSITY = {"labels differ %": "disagreement", "between %": "between", "spread of μ": "spread"}


def _rules(cells: dict[str, Any]) -> str:
    """Rules of steering: change of the NLL against the present rule, in %, means over the seeds of both."""
    nets = list(dict.fromkeys(name.split()[0] for name in cells))
    own, usual = "both, K = 8, ", "both, K = 8, as it is"
    found = list(dict.fromkeys(name.split(" ", 1)[1].rsplit(" ", 1)[0] for name in cells))
    rows = [["rule", *(f"{net}: {score}" for net in nets for score in ("NLL", "corrupted NLL", "seeds"))]]
    for rule in (rule for rule in found if rule != usual):
        row = [rule.removeprefix(own).removesuffix(", as it is")]
        for net in nets:
            pairs = [(cells.get(f"{net} {rule} {seed}"), cells.get(f"{net} {usual} {seed}")) for seed in range(10)]
            both = [(new, old) for new, old in pairs if new and old]
            for kind in ("+ T", "corrupted + T"):
                changes = [100 * (new[kind]["nll"] / old[kind]["nll"] - 1) for new, old in both]
                row.append(f"{sum(changes) / len(changes):+.1f}" if changes else "–")
            row.append(str(len(both)) if both else "–")
        rows.append(row)
    return figures.markdown(rows).rstrip() + "\n"


def _noise(cells: dict[str, Any]) -> str:
    """Forms of the noise beside SGD and dropout, scored on training images that nothing has seen."""
    more = DIVERSITY if any("diversity" in found for found in cells.values()) else {}
    head = ["cell, method, seed", "error %", "NLL", "ECE", "NLL + T", "T", "corrupted error %", "corrupted NLL + T"]
    rows = [[*head, "last s", *more]]
    for name, found in cells.items():
        own, hard = found["scores"], found["corrupted + T"]
        values = [
            f"{100 * own['error']:.2f}",
            *(f"{own[key]:.3f}" for key in ("nll", "ece")),
            f"{found['+ T']['nll']:.3f}",
        ]
        values += [f"{found['T']:.2f}", f"{100 * hard['error']:.2f}", f"{hard['nll']:.3f}"]
        apart = found.get("diversity", {})
        values += [f"{found['prior_std'][-1]:.2f}" if "prior_std" in found else "–"]
        for label, key in more.items():
            shown = "" if key not in apart else f"{100 * apart[key]:.1f}" if "%" in label else f"{apart[key]:.2f}"
            values.append(shown or "–")
        rows.append([name, *values])
    return figures.markdown(rows).rstrip() + "\n"


def _pruned() -> str:
    """Thinner networks by ranking: held-out error before, test scores after training on, and speed."""
    head = ["multiply–adds", "weights", "cut: error %", "error %", "NLL", "ECE", "faster"]
    rows = [["network, ranking, kept, seed", *head]]
    cells = json.loads((RESULTS / "prune.json").read_text())["cells"]
    faster = {cell: ratio for of in cells.values() for cell, ratio in of.get("faster", {}).items()}
    for name, found in sorted(((name, of) for name, of in cells.items() if "cut" in of), key=_network_first):
        values = [*(f"{found[key]:,}" for key in ("products", "weights")), f"{100 * found['cut']['error']:.2f}"]
        if (test := found.get("test")) is not None:
            values += [f"{100 * test['error']:.2f}", f"{test['nll']:.3f}", f"{test['ece']:.3f}"]
        else:
            values += ["–"] * 3
        rows.append([name, *values, f"{faster[name]:.2f} ×" if name in faster else "–"])
    return figures.markdown(rows).rstrip() + "\n"


def _network_first(cell: tuple[str, Any]) -> tuple[str, int, float]:
    """Sorts cells by network, seed and share, the whole network first."""
    name, *_, keep, seed = cell[0].split()
    return name, int(seed), -float(keep)


def _laplace() -> str:
    """Laplace's approximation on nodes and on the last layer, beside temperature scaling and calibrate."""
    rows = [["network, seed, method", "error %", "NLL", "ECE", "AUROC", "AUROC, noise", "fit, s", "matrix, MB"]]
    for name, found in json.loads((RESULTS / "laplace.json").read_text())["cells"].items():
        for method, of in found["methods"].items():
            values = [f"{of[key]:.3f}" if key in of else "–" for key in ("nll", "ece", "auroc", "auroc noise")]
            values += [f"{of['fit seconds']:.0f}" if "fit seconds" in of else "–"]
            values += [f"{of['bytes'] / 1e6:.1f}" if "bytes" in of else "–"]
            rows.append([f"{name}, {method}", f"{100 * of['error']:.2f}", *values])
    return figures.markdown(rows).rstrip() + "\n"


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
    found = blocks() | performance() | novelty() | guarantees() | {"libraries": libraries(), "prune": _pruned()}
    files = ("form", "where", "apart")
    noise = {name: _noise(json.loads((RESULTS / f"{name}.json").read_text())["cells"]) for name in files}
    noise["rules"] = _rules(json.loads((RESULTS / "rules.json").read_text())["cells"])
    findings = {"dropout": _benchmark(DROPOUT, "VGG", ("SGD", "MC", "iBNN")), **noise, "noise": _noises()}
    findings["laplace"] = _laplace()
    return fill_in(dict.fromkeys(PAGES, found) | {NOTES / "findings.md": findings}, check)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
