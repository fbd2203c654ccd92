import json
import math
import random
import runpy
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
import pytest
from figures.grid import grid_of
from figures.panels import pooled
from figures.scores import _far
from figures.style import label_ends, styles
from PIL import Image
from reproduce import Experiment

METHODS = ("SGD", "MC-dropout", "BNN-VI", "ensemble", "SWAG", "iBNN-4", "iBNN-8", "iBNN-16")
KINDS = {"SGD": "sgd", "MC-dropout": "dropout", "BNN-VI": "vi", "ensemble": "ensemble", "SWAG": "swag"}
SIZES = {"1×": 1, "4×": 4, "16×": 16}


def experiment(figure: str, settings: tuple[str, ...] = ("",), methods: tuple[str, ...] = METHODS) -> Experiment:
    named = (
        tuple({"name": name} | ({"size": SIZES[name]} if name in SIZES else {}) for name in settings),
        tuple({"name": name, "method": KINDS.get(name, "ibnn")} for name in methods),
    )
    title = f"What a {figure} figure shows, in a line"
    return Experiment(figure, "cpu", title, "Section 4", figure=figure, settings=named[0], methods=named[1], seeds=3)


def scores(rng: random.Random, quality: float) -> dict[str, float]:
    error = 0.12 - 0.01 * quality + rng.gauss(0, 0.001)
    ece = max(0.004, 0.09 - 0.025 * quality + rng.gauss(0, 0.003))
    return {"error": error, "nll": 3 * error + 3 * ece, "ece": ece, "brier": error * 1.4, "aurc": error / 5}


def job(method: str, quality: float, rng: random.Random, size: float = 1.0, outsider: str = "mnist") -> dict[str, Any]:
    def measured(gap: float) -> dict[str, Any]:
        confidence = [(bin + 0.5 + rng.uniform(-0.2, 0.2)) / 15 for bin in range(3, 15)]
        accuracy = [min(1.0, c - gap * math.sin(math.pi * c) + rng.gauss(0, 0.012)) for c in confidence]
        count = [round(40 * math.exp(0.35 * i)) for i in range(12)]

        def noisy(top: float) -> list[dict[str, float]]:
            levels = [round(top * i / 5, 2) for i in range(6)]
            parts = [(0.25 + 0.9 * x / top, 0.0 if method == "SGD" else 0.3 * quality * x / top) for x in levels]
            return [
                {"level": x, "aleatoric": a, "epistemic": e, "total": a + e, "error": 0.1 + 0.7 * x / top}
                for x, (a, e) in zip(levels, parts, strict=True)
            ]

        score = {
            "max_prob": 0.8 + 0.03 * quality + rng.gauss(0, 0.01),
            "total": 0.84,
            "epistemic": 0.81 + 0.04 * quality,
        }
        return {
            "scores": scores(rng, quality + size / 8),
            "reliability": {"confidence": confidence, "accuracy": accuracy, "count": count},
            "corrupted": {"blur": scores(rng, quality - 3), "all": scores(rng, quality - 4)},
            "gaussian": noisy(1.0),
            "salt": noisy(0.5),
            "outsiders": {"corrupted 5": score | {"max_prob": 0.7}, outsider: score},
        }

    members = int(method.split("-")[1]) if method.startswith("iBNN") else 4 if method == "ensemble" else 1
    return measured(0.2 - 0.06 * quality) | {
        "key": method,
        "temperature": 1.0,
        "tempered": measured(0.01) | {"scores": scores(rng, quality + 1.5), "temperature": 2.0},
        "costs": {
            "train_seconds": 60 * members + rng.random(),
            "rows": 600_000 * members,
            "parameters": round(41_806 * size) + 414 * members,
            "latents": 414 * members,
            "forwards": 1 if method == "SGD" else 5 * members,
        },
        "job": {"method_options": {"components": members} if method.startswith("iBNN") else {}},
    }


def jobs(of: Experiment, sizes: tuple[float, ...] = (1, 1, 1, 1)) -> dict[str, Any]:
    rng, cells = random.Random(0), {}
    for cell in of.cells():
        method, place = cell.method["name"], of.settings.index(cell.setting)
        quality = 0.35 * [m["name"] for m in of.methods].index(method)
        cells[cell.name] = job(method, quality, rng, sizes[place])
    return cells


def regression() -> tuple[Experiment, dict[str, Any]]:
    of = experiment("regression", tuple(f"{n} layers" for n in range(1, 6)), ("BNN-VI", "iBNN"))
    rng, cells = random.Random(0), {}
    x = [i / 10 for i in range(-60, 61)]
    for cell in of.cells():
        layers, vi = int(cell.setting["name"][0]), cell.method["name"] == "BNN-VI"
        fit = 1 - 0.2 * layers if vi else 0.95
        train_x = [rng.uniform(-4, 4) for _ in range(30)]
        analysis = {
            "x": x,
            "mean": [fit * (v**3 if abs(v) < 4 else math.copysign(64 + 30 * (abs(v) - 4), v)) for v in x],
            "aleatoric_std": [3 + 30 * (1 - fit)] * len(x),
            "epistemic_std": [2 + (0 if vi else 1) * 12 * max(0, abs(v) - 3) for v in x],
            "train_x": train_x,
            "train_y": [v**3 + rng.gauss(0, 3) for v in train_x],
        }
        scores = {"nll": 2.6 + layers * vi / 3 + rng.gauss(0, 0.05), "rmse": 4 + layers * vi, "coverage": 0.9}
        job = {"net_options": {"layers": layers}}
        cells[cell.name] = {"analysis": analysis, "scores": scores, "job": job}
    return of, cells


def plane() -> tuple[Experiment, dict[str, Any]]:
    of = experiment("pca", methods=("iBNN-8",))
    line = [i / 7 * 3 for i in range(-7, 8)]
    height = [[0.1 + 0.08 * x * x + 0.03 * (y - 0.5) ** 2 + 0.01 * x * y for x in line] for y in line]
    analysis = {
        "plane_x": line,
        "plane_y": line,
        "train_loss": height,
        "test_error": [[0.1 + v / 5 for v in row] for row in height],
        "components": [[2.2 * math.cos(k), 1.7 * math.sin(1.3 * k)] for k in range(8)],
        "centre": [0.0, 0.0],
        "explained": [0.31, 0.22],
    }
    return of, {cell.name: {"scores": scores(random.Random(1), 1), "analysis": analysis} for cell in of.cells()}


def certainty() -> tuple[Experiment, dict[str, Any]]:
    of = experiment("softmax", methods=("iBNN-8",))
    classes = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
    rng = random.Random(0)

    def entry(label: int, sharp: float) -> dict[str, Any]:
        draws = []
        for _ in range(40):
            weights = [math.exp(rng.gauss(0, 0.7) + sharp * (c == label) + 2 * (c in (0, 6))) for c in range(10)]
            draws.append([w / sum(weights) for w in weights])
        best = max(range(10), key=lambda c: sum(draw[c] for draw in draws))
        image = [[[(9 * i + 5 * j * (label + 1)) % 256 for i in range(28)] for j in range(28)]]
        return {"image": image, "label": classes[label], "predicted": classes[best], "draws": draws}

    least, most = [entry(c, 1.5) for c in range(8)], [entry(c, 9.0) for c in (1, 8, 9, 5, 7, 1, 8, 9)]
    analysis = {"classes": classes, "least": least, "most": most}
    return of, {cell.name: {"scores": scores(rng, 1), "analysis": analysis} for cell in of.cells()}


def grid(figure: str) -> tuple[Experiment, dict[str, Any]]:
    """An experiment with all of its cells."""
    made = {"regression": regression, "pca": plane, "softmax": certainty}
    if figure in made:
        return made[figure]()
    two = ("LeNet / Fashion-MNIST", "VGG-16 / CIFAR-10")
    of = {
        "components": experiment(figure, two, ("SGD", *(f"iBNN-{k}" for k in (4, 8, 16, 24, 32)))),
        "calibration": experiment(figure, two, ("SGD", "MC-dropout", "BNN-VI", "iBNN-8", "iBNN-16")),
        "ood": experiment(figure, methods=("SGD", "MC-dropout", "BNN-VI", "ensemble", "iBNN-8")),
        "size": experiment(figure, ("1×", "4×", "16×"), ("SGD", "BNN-VI", "iBNN-8")),
        "pretrained": experiment(figure, two[:1], ("SGD", "SWAG", "iBNN-16")),
    }.get(figure, experiment(figure, two))
    return of, jobs(of, (1, 4, 16) if figure == "size" else (1, 1))


FIGURES = ("benchmark", "pretrained", "components", "calibration", "ood", "size", "regression", "pca", "softmax")
SEVERAL = ("benchmark", "regression")  # a file for each of their two settings or methods


def colours(path: Path) -> int:
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width == 840
        assert 150 < image.height < 1200
        return len(image.convert("RGB").getcolors(1 << 24) or [])


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_drawn(figure: str, tmp_path: Path) -> None:
    of, cells = grid(figure)
    paths = figures.draw(of, cells, tmp_path)
    names = [f"{figure}-cpu-{i}.png" for i in (1, 2)] if figure in SEVERAL else [f"{figure}-cpu.png"]
    assert [path.name for path in paths] == sorted(p.name for p in tmp_path.iterdir()) == names
    for path in paths:
        assert colours(path) > 100
        assert not any(word in path.read_bytes() for word in (b"tEXt", b"iTXt", b"tIME"))  # no versions, no dates
    if figure in ("pretrained", "calibration"):  # the same cells give the same bytes
        (again,) = figures.draw(of, dict(reversed(cells.items())), tmp_path / "again")
        assert again.read_bytes() == paths[0].read_bytes()


@pytest.mark.parametrize(
    "figure",
    [pytest.param(f, marks=pytest.mark.slow) if f == "pretrained" else f for f in FIGURES],  # drawn as the benchmark
)
def test_a_half_finished_grid_is_drawn(figure: str, tmp_path: Path) -> None:
    of, cells = grid(figure)
    figures.table(of, {name: {"key": "0"} for name in cells})
    assert figures.draw(of, {}, tmp_path) == []
    assert figures.draw(of, {name: {"key": "0"} for name in cells}, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    some = {name: cell for i, (name, cell) in enumerate(cells.items()) if i % 3 == 2}
    for cell in list(some.values())[::2]:
        for part in ("tempered", "costs", "outsiders", "salt"):
            cell.pop(part, None)
    for path in figures.draw(of, some, tmp_path):
        assert colours(path) > 50
    rows = figures.table(of, some)
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows) > 1


@pytest.mark.parametrize(("figure", "drawn"), [("calibration", 1), ("size", 1), ("pca", 1), ("components", 0)])
def test_one_cell_is_drawn_if_it_has_a_place(figure: str, drawn: int, tmp_path: Path) -> None:
    of, cells = grid(figure)
    name = next(iter(cells))  # plain training, which has no components
    assert len(figures.draw(of, {name: cells[name]}, tmp_path)) == drawn


def said(values: list[float], digits: int) -> str:
    mean, sd = statistics.mean(values), statistics.stdev(values)
    return f"{mean:,.{digits}f} ± {sd:,.{digits}f}"


def test_benchmark_table() -> None:
    of, cells = grid("benchmark")
    head, *rows = figures.table(of, cells)
    assert head[:4] == ["setting", "method", "error %", "NLL"]
    assert len(rows) == 16
    by_name = {(row[0], row[1]): dict(zip(head, row, strict=True)) for row in rows}
    setting = "VGG-16 / CIFAR-10"
    for method in METHODS:
        found = [cells[f"{setting} / {method} / seed {seed}"] for seed in range(3)]
        row = by_name[setting, method]
        assert row["error %"] == said([100 * c["scores"]["error"] for c in found], 2)
        assert row["NLL"] == said([c["scores"]["nll"] for c in found], 3)
        assert row["ECE"] == said([c["scores"]["ece"] for c in found], 3)
        assert row["NLL + T"] == said([c["tempered"]["scores"]["nll"] for c in found], 3)
        assert row["corrupted error %"] == said([100 * c["corrupted"]["all"]["error"] for c in found], 2)
        assert row["corrupted NLL"] == said([c["corrupted"]["all"]["nll"] for c in found], 3)
        assert row["corrupted ECE"] == said([c["corrupted"]["all"]["ece"] for c in found], 3)
        assert row["OOD AUROC (mnist)"] == said([c["outsiders"]["mnist"]["max_prob"] for c in found], 3)
    row = by_name[setting, "iBNN-8"]
    assert (row["rows ×"], row["parameters"], row["forwards"]) == ("8×", "45,118", "40")
    assert row["OOD AUROC (mnist) by epistemic"] == f"{0.81 + 0.04 * 0.35 * 6:.3f} ± 0.000"
    assert by_name[setting, "SGD"]["OOD AUROC (mnist) by epistemic"] == "–"  # one network alone


def test_table_says_what_is_missing() -> None:
    of, cells = grid("benchmark")
    setting = "LeNet / Fashion-MNIST"
    names = [f"{setting} / iBNN-8 / seed {seed}" for seed in (0, 2)]
    some = {name: cells[name] for name in names} | {f"{setting} / SGD / seed 1": cells[f"{setting} / SGD / seed 1"]}
    for name in names:
        del some[name]["tempered"], some[name]["outsiders"]
    head, sgd, ours = figures.table(of, some)
    assert (sgd[1], ours[1]) == ("SGD (1 of 3 seeds)", "iBNN-8 (2 of 3 seeds)")
    row = dict(zip(head, ours, strict=True))
    assert row["NLL"] == said([some[name]["scores"]["nll"] for name in names], 3)
    assert (row["NLL + T"], row["OOD AUROC (mnist)"], row["rows ×"]) == ("–", "–", "8×")
    assert dict(zip(head, sgd, strict=True))["NLL"] == f"{cells[f'{setting} / SGD / seed 1']['scores']['nll']:.3f}"
    assert len(figures.table(of, {})) == 1


def test_a_diverged_run_is_not_hidden(tmp_path: Path) -> None:
    of, cells = grid("benchmark")
    cells["VGG-16 / CIFAR-10 / SGD / seed 0"]["scores"]["nll"] = math.nan
    rows = figures.table(of, cells)
    assert [row[3] for row in rows if row[:2] == ["VGG-16 / CIFAR-10", "SGD"]] == ["nan ± nan"]
    assert len(figures.draw(of, cells, tmp_path)) == 2


def test_a_setting_keeps_the_number_of_its_figure(tmp_path: Path) -> None:
    of, cells = grid("benchmark")
    second = {name: cell for name, cell in cells.items() if name.startswith("VGG")}
    (path,) = figures.draw(of, second, tmp_path)
    assert path.name == "benchmark-cpu-2.png"
    whole, parts = grid_of(of, cells), grid_of(of, cells).split("setting")
    assert list(parts) == list(whole.settings)
    assert [dict(part.settings) for part in parts.values()] == [{s: m} for s, m in whole.settings.items()]


def test_one_setting_without_a_name_has_no_column() -> None:
    of, cells = grid("ood")
    head, *rows = figures.table(of, cells)
    assert head[:2] == ["method", "error %"]
    assert [row[0] for row in rows] == ["SGD", "MC-dropout", "BNN-VI", "ensemble", "iBNN-8"]


def test_regression_table() -> None:
    of, cells = regression()
    head, *rows = figures.table(of, cells)
    assert head == ["method", "L", "NLL", "RMSE", "coverage"]
    assert [row[:2] for row in rows] == [[m, f"{n}"] for m in ("BNN-VI", "iBNN") for n in range(1, 6)]
    found = [cells[f"3 layers / BNN-VI / seed {seed}"]["scores"] for seed in range(3)]
    assert rows[2][2:] == [said([s[name] for s in found], 3) for name in ("nll", "rmse", "coverage")]


def test_markdown() -> None:
    text = figures.markdown([["method", "NLL", "T"], ["a|b", "0.1 ± 0.2", "–"], ["SGD", "0.3", "1.5"]])
    assert text == "| method | NLL | T |\n| --- | ---: | ---: |\n| a\\|b | 0.1 ± 0.2 | – |\n| SGD | 0.3 | 1.5 |"
    assert figures.markdown([]) == ""


def test_pooled_bins_are_those_of_all_rows_together() -> None:
    rng, rows, cells = random.Random(0), [], []
    for _ in range(3):
        mine = [(c := rng.uniform(0.1, 1), rng.random() < c) for _ in range(500)]
        bins = {b: [row for row in mine if b < row[0] * 15 <= b + 1] for b in range(15)}
        bins = {b: inside for b, inside in bins.items() if inside}
        columns = [
            [statistics.mean(c for c, _ in inside) for inside in bins.values()],
            [statistics.mean(hit for _, hit in inside) for inside in bins.values()],
            [len(inside) for inside in bins.values()],
        ]
        cells.append({"reliability": dict(zip(("confidence", "accuracy", "count"), columns, strict=True))})
        rows += mine
    found = pooled(cells)
    expected = [[row for row in rows if b < row[0] * 15 <= b + 1] for b in range(15)]
    expected = [inside for inside in expected if inside]
    assert [n for *_, n in found] == [len(inside) for inside in expected]
    assert [c for c, *_ in found] == pytest.approx([statistics.mean(c for c, _ in inside) for inside in expected])
    assert [a for _, a, _ in found] == pytest.approx([statistics.mean(h for _, h in inside) for inside in expected])


def test_colours_stay_when_cells_are_missing() -> None:
    of, cells = grid("benchmark")
    whole = styles(grid_of(of, cells).methods)
    assert styles(grid_of(of, dict([next(iter(cells.items()))])).methods) == whole
    assert len({style["color"] for style in whole.values()}) == len(METHODS)
    assert whole["iBNN-16"]["color"].lower() == "#0072b2"


def test_places_in_a_figure_do_not_depend_on_names(tmp_path: Path) -> None:
    """Components, sizes and methods are fields: other names give the same lines in the same colours."""
    of, cells = grid("size")
    found = grid_of(of, cells)
    assert (found.sizes, found.methods) == (SIZES, {"SGD": "sgd", "BNN-VI": "vi", "iBNN-8": "ibnn"})
    renamed = replace(of, methods=tuple(method | {"name": "abc"[i]} for i, method in enumerate(of.methods)))
    assert list(styles(grid_of(renamed, {}).methods).values()) == list(styles(found.methods).values())
    of, cells = grid("components")
    del cells["LeNet / Fashion-MNIST / iBNN-8 / seed 0"]["job"]  # nothing but its name says 8
    assert len(figures.draw(of, cells, tmp_path)) == 1


def test_what_is_too_far_off_is_four_times_the_median() -> None:
    assert _far([[0.3], [0.4, 0.6], [9.0]]) == 2.0
    assert _far([[0.3], [9.0]]) == math.inf


def test_labels_beside_lines_do_not_overlap() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set_ylim(0, 10)
    label_ends(axes, [(9.9, "a", "red"), (9.8, "b", "red"), (9.7, "c", "red"), (1.0, "d", "red")], gap=0.1)
    assert {text.get_text(): round(text.xy[1], 9) for text in axes.texts} == {"a": 1.0, "b": 0.9, "c": 0.8, "d": 0.1}


def test_unknown_figure_is_named(tmp_path: Path) -> None:
    of, cells = grid("benchmark")
    with pytest.raises(ValueError, match="`figure`"):
        figures.draw(replace(of, figure="pie"), cells, tmp_path)


def test_matplotlib_is_left_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    (path,) = figures.draw(*plane(), tmp_path / "one")
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "lines.linewidth": 9}):
        (again,) = figures.draw(*plane(), tmp_path / "two")
    assert path.read_bytes() == again.read_bytes()


if __name__ == "__main__":  # to look at them: python tests/experiments/test_figures.py folder
    for name in FIGURES:
        print(*figures.draw(*grid(name), Path(sys.argv[1])))


def test_the_readme_figures_show_what_the_files_hold() -> None:
    root = Path(__file__).parents[2]
    drawn = runpy.run_path(str(root / "docs" / "readme_figure.py"))
    cells = json.loads((root / "experiments" / "results" / "benchmark-cpu.json").read_text())["cells"]
    setting = "LeNet × 2, 5,000 Fashion-MNIST"
    found = drawn["frontier"](cells, "LeNet")
    seeds = [cells[f"{setting} / iBNN-8 / seed {seed}"]["tempered"]["scores"]["nll"] for seed in range(4)]
    assert found["iBNN-8"]["networks"][0] == (1, pytest.approx(statistics.mean(seeds)))
    four = cells[f"{setting} / SGD, 4 networks / seed 0"]
    assert found["SGD"]["passes"][-1] == (4, pytest.approx(four["tempered"]["scores"]["nll"]))
    assert found["SGD"]["one pass"] == []
    deeper = "VGG-16/4, 10,000 CIFAR-10 "
    few = [cells[f"{deeper}/ iBNN-8, 8 passes / seed {seed}"]["tempered"]["scores"]["nll"] for seed in range(3)]
    assert drawn["frontier"](cells, deeper)["iBNN-8"]["passes"][0] == (8, pytest.approx(statistics.mean(few)))
    answers = json.loads((root / "experiments" / "results" / "readme.json").read_text())["answers"]
    assert [answer["novel"] for answer in answers] == [False] * 4 + [True] * 2
    assert all(("novel input" in drawn["caption"](answer)) == answer["novel"] for answer in answers)
