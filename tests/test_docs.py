import csv
import json
import pydoc
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def run_page(name: str) -> dict[str, Any]:
    """What is there after the page's code has run."""
    page = (ROOT / "docs" / name).read_text()
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)), names)
    return names


def test_scaling_page_quotes_its_result_files() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    scaling = json.loads((ROOT / "experiments" / "results" / "scaling.json").read_text())
    overhead = json.loads((ROOT / "experiments" / "results" / "fit-overhead.json").read_text())
    for words in (
        f"1 worker {scaling['steps_per_second']['1 worker']} steps/s",
        f"{scaling['steps_per_second']['2 workers']} steps/s",
        f"a speed-up of {scaling['speedup']} (efficiency {scaling['efficiency']})",
        f"a step takes {overhead['ratio']} times",
    ):
        assert words in page


def test_the_reference_names_what_there_is() -> None:
    """Sphinx says so too, but only of pages that have changed."""
    page = (ROOT / "docs" / "api.md").read_text()
    names = re.findall(r"^.. auto(?:function|class):: (\S+)$", page, flags=re.MULTILINE)
    for module, options in re.findall(r"^.. automodule:: (\S+)\n((?: +:.*\n)+)", page, flags=re.MULTILINE):
        members = re.search(r":members:(.*)", options)
        assert members
        names += [f"{module}.{name.strip()}" for name in members[1].split(",") if name.strip()] or [module]
    assert len(names) > 40
    missing = [name for name in names if pydoc.locate(name) is None]
    assert missing == []


def test_no_cell_of_the_robustness_sweep_diverged() -> None:
    """docs/training.md says so."""
    cells = json.loads((ROOT / "experiments" / "results" / "robustness.json").read_text())["cells"]
    assert f"none of its {len(cells)} cells diverged" in (ROOT / "docs" / "training.md").read_text()
    assert {cell["task"] for cell in cells} >= {"lenet", "mlp-regression", "transformer", "vgg16-eighth", "wrn-10-1"}
    assert not any(cell["diverged"] for cell in cells)


def test_the_calibration_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = run_page("calibration.md")["report"]
    assert report.after["nll"] < report.before["nll"] - 0.1
    assert report.scale > 0
    assert (tmp_path / "curve.png").exists()


@pytest.mark.slow
def test_the_comparing_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "comparing.md").read_text()
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)), names)
    scores = names["scores"]
    assert len(scores) == 12
    assert all(score["nll"] < 0.6 for name, score in scores.items() if name != "BNN-VI")  # chance: 0.69
    assert names["result"]["costs"]["forwards"] == 5


def test_tables_of_results_are_those_of_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import tables

    assert tables.main(check=True) == 0
    blocks = tables.blocks()
    page = (ROOT / "experiments" / "README.md").read_text()
    assert all(f"<!-- {name}:begin -->" in page for name in blocks if name != "results")
    page = (ROOT / "docs" / "performance.md").read_text()
    assert all(f"<!-- {name}:begin -->" in page for name in tables.performance())


def test_the_performance_page_quotes_its_result_files() -> None:
    from ibnn import prediction

    results = ROOT / "experiments" / "results"
    page = (ROOT / "docs" / "performance.md").read_text()
    cells = json.loads((results / "draws.json").read_text())["cells"]
    test = [cell[str(prediction.TOLERANCE)] for name, cell in cells.items() if name.startswith("test")]  # the default
    for key, words in (
        ("draws", "{:.3f} of the draws"),
        ("nll", "an NLL {:.4f} times"),
        ("equal_labels", "{:.4f} of the labels"),
    ):
        assert words.format(sum(cell[key] for cell in test) / len(test)) in page
    overhead = json.loads((results / "fit-overhead.json").read_text())["ratio"]
    assert f"{1 / overhead:.1%} of its time".replace("%", " %") in page


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments" / "results").glob("*-cpu.json")), ids=lambda path: path.stem
)
def test_committed_results_are_those_of_the_recipes(path: Path) -> None:
    """A cell of a recipe that has changed since would be a number nobody can reproduce."""
    from ibnn.lab.reproduce import read, results

    experiment = read(path.stem.removesuffix("-cpu"))
    found = results(experiment, path.parent)
    assert [name for name in found.cells if name not in found.of(experiment)] == []


@pytest.mark.slow
def test_the_tabular_page_runs() -> None:
    names = run_page("tabular.md")
    assert names["error"] <= 0.02
    assert names["leave"].mean() < 0.5
    assert 0.7 < names["coverage"] <= 1


@pytest.mark.slow
def test_the_commands_of_the_tabular_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a table as the page describes it; `serve` is tested elsewhere."""
    from test_cli import call

    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "tabular.md").read_text().partition("## At the command line")[2]
    generator = np.random.default_rng(0)
    rows = [(area, int(area // 30), age) for area, age in generator.uniform((40, 0), (200, 90), size=(200, 2))]
    prices = [3 * area - age + generator.normal(scale=20) for area, _, age in rows]
    table = [f"{area},{rooms},{age},{price}" for (area, rooms, age), price in zip(rows, prices, strict=True)]
    Path("houses.csv").write_text("\n".join(["area,rooms,age,price", *table]) + "\n")
    Path("new.csv").write_text("age,area,rooms\n10,100,3\n")
    (job,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    Path("houses.toml").write_text(job.replace("epochs = 100", "epochs = 8"))  # for time
    Path("mynets.py").write_text(code)
    commands = [
        line for block in re.findall(r"```\n(ibnn .*?)```", page, flags=re.DOTALL) for line in block.splitlines()
    ]
    assert [line.split()[1] for line in commands] == [
        *("train", "evaluate", "predict", "report", "export", "serve"),
        *("plan", "train", "predict"),
    ]
    told = {}
    for line in commands:
        if not line.startswith("ibnn serve"):
            told[line.partition("#")[0].strip()] = call(*shlex.split(line, comments=True)[1:])
    expected = "'price' is a number, predicted from 3 columns; 120 rows to train on, 40 held out, 40 to test."
    assert f"houses.csv: {expected}" in told["ibnn train houses.toml"].stderr
    result = json.loads(Path("runs/houses/result.json").read_text())
    assert 10 < result["scores"]["rmse"] < 160  # in units of the price
    (answer,) = csv.DictReader(Path("prices.csv").read_text().splitlines())
    assert float(answer["low"]) < float(answer["mean"]) < float(answer["high"])
    assert Path("houses.html").exists()
    assert Path("houses.onnx").exists()
    sys.modules.pop("mynets")


def test_the_tabular_page_quotes_its_result_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import tabular

    assert tabular.page(check=True) == 0


def test_the_page_on_sequences_and_transformers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    names = run_page("transformers.md")
    assert names["answers"].probs.shape == (8, 4)
    assert list(names["asked"].latents) == ["words", "rnn", "head"]
    assert sum(names["ports"].values()) == names["model"].latents["rnn"].nodes
    lora, bert = names["lora"], names["bert"]
    assert all(latent.mean.grad is not None for latent in (*bert.latents.values(), *lora.latents.values()))
    assert "looks rows up" in capsys.readouterr().out


def test_the_table_of_sequences_is_that_of_its_result_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import sequences

    assert sequences.page(check=True) == 0
    assert (ROOT / "docs" / "figures" / "sequences.png").exists()


@pytest.mark.slow
def test_the_deploying_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "deploying.md").read_text()
    exporting, elsewhere, other, serving, watching = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(exporting, names)
    assert names["written"].difference < 1e-5
    blocked = "import sys\nsys.modules['ibnn'] = sys.modules['torch'] = None\n"
    done = subprocess.run([sys.executable, "-c", blocked + elsewhere], capture_output=True, text=True, check=True)
    zeros = names["model"].predict(names["torch"].zeros(1, 1, 8, 8))
    label, *numbers = done.stdout.split()
    assert int(label) == int(zeros.labels)
    expected = [float(value) for value in (zeros.probs.amax(), zeros.total, zeros.epistemic)]
    assert list(map(float, numbers)) == pytest.approx(expected, abs=1e-5)
    exec(other, names)
    exec(watching, names)
    assert 300 < names["monitor"].alarm < 330
    exec(serving, names)
    assert names["reply"].status_code == 200
    assert set(names["answer"]) >= {"label", "probability", "total", "aleatoric", "epistemic", "abstain"}
    assert "in [0, 1], but got values from 2 to 2" in names["refused"].json()["detail"]
    assert names["health"]["shift"]["seen"] == 1


def test_the_deploying_page_quotes_its_result_files() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()

    def lines(name: str) -> list[str]:
        return page.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0].splitlines()[3:]

    shift = json.loads((ROOT / "experiments" / "results" / "shift.json").read_text())
    assert f"rang in {100 * shift['false_alarms']['found']:g} % of {shift['false_alarms']['streams']} streams" in page
    cells = {
        s: [d[calm][name] for calm in ("0", "1000") for name in ("median", "most")] for s, d in shift["delays"].items()
    }
    assert lines("shift") == [
        f"| {s} | {' | '.join('–' if c is None else str(c) for c in row)} |" for s, row in cells.items()
    ]
    told = json.loads((ROOT / "experiments" / "results" / "export.json").read_text())
    assert lines("export") == [
        f"| {name} | {row['plain_bytes']:,} | {row['draw_bytes']:,} | {row['bytes']:,} | "
        f"{row['batch 1']['plain_ms']} | {row['batch 1']['ms']} | {row['batch 1']['ratio']} | "
        f"{row['batch 64']['plain_ms']} | {row['batch 64']['ms']} | {row['batch 64']['ratio']} |"
        for name, row in told.items()
        if name not in ("recipe", "versions")
    ]
    found = json.loads((ROOT / "experiments" / "results" / "int8.json").read_text())
    for name in ("float32", "dynamic", "static"):
        row = found[name]
        assert f"| {name} | {row['nll']} | {row['ece']} | {row['error']} | {row['bytes']:,} |" in page
