import csv
import json
import pydoc
import random
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ibnn

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE, *sorted((ROOT / "experiments").rglob("*.md"))]
pytestmark = pytest.mark.usefixtures("no_accelerate_state")
pages = SimpleNamespace(**runpy.run_path(str(DOCS / "pages.py")))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def run(page: str) -> dict[str, Any]:
    """Runs a page in the current folder and returns the names it defines."""
    names, _ = pages.run(DOCS / page)
    return names


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -------------------------------------------------------------------------------------------------------------- README


def test_the_code_of_the_readme_runs() -> None:
    x, y = torch.randn(120, 4), torch.randint(3, (120,))
    names = {"ibnn": ibnn, "x": x, "net": torch.nn.Linear(4, 3)}
    names |= {"x_train": x, "y_train": y, "x_valid": x, "y_valid": y}
    code = "\n".join(code for code, _ in pages.blocks(ROOT / "README.md"))
    code = code.replace("(x_valid, y_valid))  # train", "(x_valid, y_valid), epochs=1, quiet=True)  # train")
    exec(code, names)
    assert names["p"].probs.shape == (120, 3)
    assert Path("model.onnx").exists()


# --------------------------------------------------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Sphinx make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith("#ibnn."):  # Sphinx makes the latter
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_is_reached_from_the_index_and_every_figure_is_shown() -> None:
    listed = re.findall(r"^([\w/-]+)$", read("docs/index.md"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(p.relative_to(DOCS).with_suffix("")) for p in SITE if p.stem != "index")
    text = "".join(page.read_text() for page in PAGES)
    assert [figure.name for figure in (DOCS / "figures").glob("*.png") if figure.name not in text] == []


def test_the_reference_names_what_there_is() -> None:
    """Sphinx says so too, but only of pages that have changed."""
    page = read("docs/api.md")
    names = re.findall(r"^.. auto(?:function|class|exception):: (\S+)$", page, flags=re.MULTILINE)
    for module, options in re.findall(r"^.. automodule:: (\S+)\n((?: +:.*\n)+)", page, flags=re.MULTILINE):
        members = re.search(r":members:(.*)", options)
        assert members
        names += [f"{module}.{name.strip()}" for name in members[1].split(",") if name.strip()] or [module]
    assert [name for name in names if pydoc.locate(name) is None] == []
    documented = {name.rpartition(".")[2] for name in names}
    assert set(ibnn.__all__) - documented - {"Latent", "Mixture", "Plan", "metrics"} == set()


# ----------------------------------------------------------------------------------------------------------- tutorials


@pytest.mark.slow
def test_the_tutorial_on_images_runs() -> None:
    names = run("tutorials/images.md")
    assert names["report"].after["nll"] < names["report"].before["nll"] - 0.1
    assert names["wrong"][names["answered"]].float().mean() < 0.7 * names["wrong"].float().mean()
    assert Path("tutorial-images.png").exists()


@pytest.mark.slow
def test_the_tutorial_on_tables_runs() -> None:
    names = run("tutorials/tables.md")
    assert names["wrong"][~names["leave"]].sum() < names["wrong"].sum()
    assert names["leave"].mean() < 0.3
    assert -names["scores"].mean() < 0.3  # chance: 0.69
    assert Path("tutorial-tables.png").exists()


def made_queries(intents: list[str], folder: Path) -> None:
    """Writes queries in the form of CLINC150, each with the words of its intent, and a small BERT that has these words.

    Queries out of scope have other words.
    """
    from transformers import BertConfig, BertModel, BertTokenizerFast

    chance = random.Random(0)

    def query(intent: str) -> list[str]:
        return [" ".join(chance.sample([f"word{n}" for n in range(20)], 3) + 2 * intent.split("_")), intent]

    parts = {
        name: [query(i) for i in intents for _ in range(n)] for name, n in (("train", 20), ("val", 8), ("test", 4))
    }
    parts["oos_test"] = [[" ".join(chance.sample([f"other{n}" for n in range(20)], 5)), "oos"] for _ in range(40)]
    words = {word for rows in parts.values() for text, _ in rows for word in text.split()}
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words | {"how", "much", "do", "i", "owe"})]
    (folder / "data_full.json").write_text(json.dumps(parts))
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder / "bert")


@pytest.mark.slow
def test_the_tutorial_on_text_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up queries and a small BERT in place of CLINC150 and MiniLM, which the tests do not have."""
    pytest.importorskip("transformers")
    page = read("docs/tutorials/text.md")
    made_queries(
        sorted(set(re.findall(r"[a-z_]+", page.partition("intents = (")[2].partition(").split()")[0]))), tmp_path
    )
    monkeypatch.setenv("CLINC150", str(tmp_path / "data_full.json"))
    monkeypatch.setenv("MINILM", str(tmp_path / "bert"))
    names = run("tutorials/text.md")
    p, q = names["p"], names["q"]
    assert p.probs.shape == (len(names["test"]), 15)
    torch.testing.assert_close(p.aleatoric + p.epistemic, p.total)
    assert ibnn.metrics.auroc(-p.p_value, -q.p_value) > 0.8


@pytest.mark.slow
def test_the_tutorial_on_regression_runs() -> None:
    names = run("tutorials/regression.md")
    coverage = names["coverage"]
    assert 0.8 < coverage["where there were points"] < 0.99
    assert coverage["beyond"] < 0.6  # as the page warns
    assert Path("tutorial-regression.png").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of torch's exporter
def test_the_tutorial_on_deploying_runs() -> None:
    names = run("tutorials/deploying.md")
    assert names["written"].difference < 1e-5
    assert names["reply"].status_code == 200
    assert names["answer"]["abstain"]
    assert names["answer"]["total"] == pytest.approx(float(names["total"][0]), abs=1e-4)  # of the exported file
    assert names["refused"].status_code == 422
    assert names["health"]["shift"]["seen"] == 1
    assert 100 < names["monitor"].alarm <= 160
    elsewhere = next(code for code, _ in pages.blocks(DOCS / "tutorials/deploying.md") if "import onnxruntime" in code)
    blocked = "import sys\nsys.modules['ibnn'] = sys.modules['torch'] = None\n"
    done = subprocess.run([sys.executable, "-c", blocked + elsewhere], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"an empty image: label {names['answer']['label']}")


# --------------------------------------------------------------------------------------------------------------- pages


def test_the_calibration_page_runs() -> None:
    report = run("calibration.md")["report"]
    assert report.after["nll"] < report.before["nll"] - 0.1
    assert (report.scale, "without noise" in str(report)) == (0, True)  # as the page says


@pytest.mark.slow
def test_the_training_page_runs() -> None:
    names = run("training.md")
    looks = names["history"].looks
    assert looks[-1]["prior_std"] > looks[0]["prior_std"]  # nothing to learn: all confidence is overconfidence


RUN_AS_THEY_ARE = ("index", "converting", "sets", "scaling", "expert")


@pytest.mark.parametrize("page", [f"{name}.md" for name in RUN_AS_THEY_ARE])
def test_the_page_runs(page: str) -> None:
    names = run(page)
    if page == "converting.md":
        assert torch.equal(names["net"][0].weight, names["model"].net[0].weight)


def test_the_page_on_sequences_and_transformers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    names, printed = pages.run(DOCS / "transformers.md")
    assert names["answers"].probs.shape == (8, 4)
    assert list(names["asked"].latents) == ["words", "rnn", "head"]
    assert sum(names["ports"].values()) == names["model"].latents["rnn"].nodes
    lora, bert = names["lora"], names["bert"]
    assert all(latent.mean.grad is not None for latent in (*bert.latents.values(), *lora.latents.values()))
    assert "looks rows up" in printed[0]


@pytest.mark.slow
def test_the_page_on_deploying_runs() -> None:
    names = run("deploying.md")
    assert names["written"].difference < 1e-5
    assert 300 < names["monitor"].alarm < 330
    assert torch.equal(names["again"].eval()(torch.ones(5, 4)), names["models"]["clinic-a"].eval()(torch.ones(5, 4)))


@pytest.mark.slow
def test_the_methods_on_the_page_on_choosing_run() -> None:
    scores = run("choosing.md")["scores"]
    assert len(scores) == 12
    assert all(score["nll"] < 0.6 for name, score in scores.items() if name != "BNN-VI")  # chance: 0.69


@pytest.mark.slow
def test_the_page_on_the_command_line_runs() -> None:
    assert run("command-line.md")["result"]["costs"]["forwards"] == 5


@pytest.mark.slow
def test_the_tabular_page_runs() -> None:
    names = run("tabular.md")
    assert names["error"] <= 0.02
    assert names["leave"].mean() < 0.5
    assert 0.7 < names["coverage"] <= 1


@pytest.mark.slow
def test_the_commands_of_the_tabular_page_run() -> None:
    """On a table as the page describes it; `serve` is tested elsewhere."""
    from typer.testing import CliRunner

    from ibnn.app.cli.app import app

    page = read("docs/tabular.md").partition("## At the command line")[2]
    generator = np.random.default_rng(0)
    rows = [(area, int(area // 30), age) for area, age in generator.uniform((40, 0), (200, 90), size=(200, 2))]
    prices = [3 * area - age + generator.normal(scale=20) for area, _, age in rows]
    lines = [f"{area},{rooms},{age},{price}" for (area, rooms, age), price in zip(rows, prices, strict=True)]
    Path("houses.csv").write_text("\n".join(["area,rooms,age,price", *lines]) + "\n")
    Path("new.csv").write_text("age,area,rooms\n10,100,3\n")
    (job,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    Path("houses.toml").write_text(job.replace("epochs = 100", "epochs = 8"))  # for time
    Path("mynets.py").write_text(code)
    commands = [
        line for lines in re.findall(r"```\n(ibnn .*?)```", page, flags=re.DOTALL) for line in lines.splitlines()
    ]
    assert [line.split()[1] for line in commands] == [
        *("train", "evaluate", "predict", "report", "export", "serve"),
        *("plan", "train", "predict"),
    ]
    stderr = {}
    for line in commands:
        if not line.startswith("ibnn serve"):
            done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
            assert done.exit_code == 0, done.output
            stderr[line.partition("#")[0].strip()] = done.stderr
    expected = "'price' is a number; 120 rows to train on, 40 held out, 40 to test."
    assert f"houses.csv: {expected}" in stderr["ibnn train houses.toml"]
    assert 10 < json.loads(Path("runs/houses/result.json").read_text())["scores"]["rmse"] < 160  # in units of the price
    (answer,) = csv.DictReader(Path("prices.csv").read_text().splitlines())
    assert float(answer["low"]) < float(answer["mean"]) < float(answer["high"])
    assert Path("houses.html").exists()
    assert Path("houses.onnx").exists()
    sys.modules.pop("mynets")
