"""Experiments: grids of valid jobs, a runner that skips, shares and survives, smoke runs of everything."""

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import analysis
import pytest
import reproduce
import torch
from reproduce import Folders, Results, content, names, read, results
from smoke import made_data
from torch import nn

from ibnn.convert import revert
from ibnn.lab.job import Job
from ibnn.lab.jobs import read_run, run
from ibnn.lab.parts import make_data
from ibnn.network import IBNN
from ibnn.prediction import GaussianPrediction

BOTH = [(name, preset) for name in names() for preset in content(name)["presets"]]


@pytest.mark.parametrize(("name", "preset"), BOTH)
def test_every_recipe_describes_valid_jobs(name: str, preset: str) -> None:
    experiment = read(name, preset)
    cells = list(experiment.cells())
    assert cells
    assert len({cell.name for cell in cells}) == len(cells)
    assert len({cell.key for cell in cells}) == len(cells)
    assert all(cell.job.seed == cell.seed for cell in cells if not cell.members())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all experiments look for runs: what several have in common is trained once."""
    return tmp_path_factory.mktemp("runs")


LONG = [(name, "paper") for name in ("regression", "size", "benchmark", "pretrained", "calibration", "ood")]
# others run the same code as their smaller presets
LONG += [(name, "cpu") for name in ("benchmark", "size", "ood", "regression", "calibration")]
LONG += [("vgg16-cifar10", "cpu"), ("vgg16-cifar100", "cpu"), ("posterior", "cpu"), ("components", "paper")]
LONG += [("lenet-pca", "paper"), ("lenet-softmax", "paper")]


@pytest.mark.parametrize(
    ("name", "preset"), [pytest.param(*both, marks=pytest.mark.slow if tuple(both) in LONG else ()) for both in BOTH]
)
def test_every_recipe_runs(name: str, preset: str, runs: Path, tmp_path: Path) -> None:
    options = {"preset": preset, "seeds": 1, "folders": Folders(runs, tmp_path), "quiet": True}
    written, table = reproduce.reproduce(name, smoke=True, **options)  # type: ignore[arg-type]
    source = "benchmark" if name in ("calibration", "ood") else name
    assert written[0] == tmp_path / f"{source}-{preset}-smoke.json"
    assert all(path.stat().st_size > 100 for path in written)
    assert len(written) == 2
    cells = json.loads(written[0].read_text())["cells"]
    first = [cell for cell in read(name, preset).cells() if cell.seed == 0]
    assert len(cells) == sum(find_spec(cell.method.get("needs", "json")) is not None for cell in first)
    assert all("commit" in cell["provenance"] for cell in cells.values())
    assert len(table) > 1
    assert not [path for folder in (tmp_path, runs) for path in folder.rglob("*") if "lock" in path.name]


RECIPE = """
title = "A small grid"
paper = "none"
figure = "benchmark"
[presets.cpu]
seeds = 2
job = { net = "mlp", net_options = { hidden = 8 }, data = "two-moons", valid = 50, samples = 2, train = { steps = 3 } }
[[presets.cpu.methods]]
name = "SGD"
method = "sgd"
[[presets.cpu.methods]]
name = "iBNN"
method = "ibnn"
method_options = { components = 2 }
seeds = 1
[[presets.cpu.methods]]
name = "two SGD"
of = "SGD"
members = 2
seeds = 1
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """The recipe "small", and the folders of its runs and results."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "small.toml").write_text(RECIPE)
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    return Folders(tmp_path / "runs", tmp_path / "out")


def test_every_cell_has_a_row_and_is_run_once(small: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, figure), table = reproduce.reproduce("small", folders=small, quiet=True)
    cells = json.loads(path.read_text())["cells"]
    assert set(cells) == {"SGD / seed 0", "SGD / seed 1", "iBNN / seed 0", "two SGD / seed 0"}
    assert all({"scores", "costs", "job", "provenance"} <= set(cell) for cell in cells.values())
    assert [row[0] for row in table[1:]] == ["SGD", "iBNN", "two SGD"]
    assert figure.is_file()
    monkeypatch.setattr(reproduce, "run", None)  # nothing is trained from here on
    before = path.read_bytes()
    reproduce.reproduce("small", folders=small, quiet=True)
    assert path.read_bytes() == before
    path.unlink()
    reproduce.reproduce("small", folders=small, quiet=True)  # from the kept runs
    assert json.loads(path.read_text())["cells"]["iBNN / seed 0"] == cells["iBNN / seed 0"]


def test_kept_runs_answer_again_without_training(small: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, _), _ = reproduce.reproduce("small", folders=small, quiet=True)
    cells = json.loads(path.read_text())["cells"]
    monkeypatch.setattr(reproduce, "run", None)
    reproduce.reproduce("small", folders=small, quiet=True, again=True)
    again = json.loads(path.read_text())["cells"]
    for name, cell in cells.items():
        assert again[name]["scores"] == pytest.approx(cell["scores"], abs=1e-6)
        assert again[name]["provenance"] == cell["provenance"]
        assert "evaluated" in again[name]


def test_an_ensemble_of_kept_runs_averages_their_probabilities(small: Folders) -> None:
    (path, _), _ = reproduce.reproduce("small", folders=small, quiet=True)
    cell = json.loads(path.read_text())["cells"]["two SGD / seed 0"]
    members = [cell for cell in read("small").cells() if cell.method["name"] == "SGD"]
    test = make_data(members[0].job).whole.test
    probs = torch.stack(
        [read_run(small.runs / cell.job.key).model.predict(test.x, novelty=False).probs for cell in members]
    ).mean(0)
    nll = -probs[torch.arange(len(test.y)), test.y].log().mean()
    assert cell["scores"]["nll"] == pytest.approx(nll.item(), rel=1e-4)
    assert cell["costs"]["forwards"] == 2
    assert cell["job"]["seeds"] == [0, 1]


def test_cells_of_another_recipe_are_stale(small: Folders, tmp_path: Path) -> None:
    reproduce.reproduce("small", methods=["SGD"], folders=small, quiet=True)
    (tmp_path / "recipes" / "small.toml").write_text(RECIPE.replace("steps = 3", "steps = 4"))
    experiment = read("small")
    assert results(experiment, small.out).of(experiment) == {}  # no table shows them
    reproduce.reproduce("small", methods=["SGD"], folders=small, quiet=True)
    assert set(results(experiment, small.out).of(experiment)) == {"SGD / seed 0", "SGD / seed 1"}


def test_cells_that_another_process_has_are_left_to_it(small: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = next(iter(read("small").cells()))
    waited = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        lock.__exit__(None, None, None)  # the other process ends

    monkeypatch.setattr("time.sleep", wait)
    lock = reproduce.RunFolder(small.runs / taken.job.key).lock()
    lock.__enter__()
    reproduce.reproduce("small", methods=["SGD"], folders=small, quiet=True)
    assert len(waited) == 1
    assert taken.name in results(read("small"), small.out).cells


def test_seeds_are_as_many_as_asked_for() -> None:
    experiment = read("benchmark")
    for seeds in (1, 5):
        counts = Counter(cell.name.rpartition(" / ")[0] for cell in experiment.only(None, seeds).cells())
        assert set(counts.values()) == {seeds}
    one = [cell.name for cell in experiment.only(["BNN-VI"], None).cells()]
    settings = [s["name"] for s in experiment.settings if "BNN-VI" not in s.get("skip", ())]
    assert one == [f"{name} / BNN-VI / seed 0" for name in settings]


def test_experiments_share_runs(tmp_path: Path) -> None:
    options = {"seeds": 1, "folders": Folders(tmp_path / "runs", tmp_path), "smoke": True, "quiet": True}
    reproduce.reproduce("lenet-softmax", **options)  # type: ignore[arg-type]
    folders = {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()}
    reproduce.reproduce("lenet-pca", **options)  # type: ignore[arg-type]
    assert {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()} == folders


def test_processes_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    mine, other = Results(path, {"about": 1}), Results(path, {"about": 1})
    mine.add("b", {"value": 1})
    other.add("a", {"value": 2})
    assert set(json.loads(path.read_text())["cells"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "benchmrk"}, "`name`"),
        ({"name": "size", "preset": "gpu"}, "`preset`"),
        ({"name": "size", "methods": ["SGDD"]}, "`methods`"),
    ],
)
def test_wrong_names_are_named(options: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        reproduce.reproduce(**options, folders=Folders(tmp_path, tmp_path), quiet=True)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_plane_holds_the_components(tmp_path: Path) -> None:
    """Weights put back at a component's place in a plane of two components are that component."""
    job = Job(
        net="lenet", data="mnist", method_options={"components": 2}, samples=1, train={"steps": 2, "batch_size": 8}
    )
    splits = made_data(job)
    assert splits is not None
    run(job, tmp_path, splits=splits, quiet=True)
    model = read_run(tmp_path).model
    found = analysis.pca(tmp_path, splits, points=3, rows=4)
    assert isinstance(model, IBNN)

    def weights(net: nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    members = torch.stack([weights(model.component(k)) for k in range(2)])
    plain = revert(model)
    away = members - weights(plain)
    lengths = torch.tensor(found["components"]).norm(dim=1)
    torch.testing.assert_close(lengths, away.norm(dim=1), atol=1e-3, rtol=1e-3)
    assert sum(found["explained"]) == pytest.approx(1.0, abs=1e-3)
    x, y = splits.train.__getitems__(list(range(4)))
    expected = nn.functional.cross_entropy(plain(x), y)
    assert found["train_loss"][1][1] == pytest.approx(expected.item(), abs=1e-3)  # the centre is U


def test_the_curve_is_what_the_run_predicts(tmp_path: Path) -> None:
    options = {"hidden": 8, "layers": 1}
    job = Job(net="mlp", net_options=options, data="toy-regression", samples=2, train={"steps": 5})
    run(job, tmp_path, quiet=True)
    found = analysis.curve(tmp_path, make_data(job))
    answer = read_run(tmp_path).model.predict(torch.tensor([found["x"]]).T, samples=2)
    assert isinstance(answer, GaussianPrediction)
    total = [a**2 + e**2 for a, e in zip(found["aleatoric_std"], found["epistemic_std"], strict=True)]
    assert found["mean"] == pytest.approx(answer.mean.flatten().tolist(), abs=1e-4)
    assert total == pytest.approx(answer.variance.flatten().tolist(), rel=1e-3)
    assert (found["x"][0], found["x"][-1], len(found["train_x"])) == (-6, 6, 30)
