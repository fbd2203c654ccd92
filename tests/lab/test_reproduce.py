"""Experiments: grids of valid jobs, a runner that skips, shares and survives, smoke runs of everything."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ibnn.convert import revert
from ibnn.lab import analysis, reproduce
from ibnn.lab.jobs import Job, read_run, run
from ibnn.lab.parts import made_data
from ibnn.lab.reproduce import Results, names, read, results
from ibnn.network import IBNN
from ibnn.prediction import GaussianPrediction

BOTH = [(name, preset) for name in names() for preset in ("cpu", "paper")]


@pytest.mark.parametrize(("name", "preset"), BOTH)
def test_every_recipe_describes_valid_jobs(name: str, preset: str) -> None:
    experiment = read(name, preset)
    cells = list(experiment.cells())
    assert cells
    assert len({cell.name for cell in cells}) == len(cells)
    if experiment.kind == "jobs":
        jobs = [Job(**cell.fields) for cell in cells]
        assert len({job.key for job in jobs}) == len(cells)
        assert all(job.seed == cell.seed for job, cell in zip(jobs, cells, strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all experiments look for runs: what several have in common is trained once."""
    return tmp_path_factory.mktemp("runs")


LONG = [
    (name, "paper") for name in ("regression", "size", "benchmark", "pretrained", "calibration", "ood", "converged")
]
LONG += [
    (name, "cpu") for name in ("benchmark", "size", "ood", "regression", "calibration", "converged")
]  # others run the same code
# as their smaller presets; the last two are the benchmark's runs


@pytest.mark.usefixtures("short_profile")
@pytest.mark.parametrize(
    ("name", "preset"), [pytest.param(*both, marks=pytest.mark.slow if tuple(both) in LONG else ()) for both in BOTH]
)
def test_every_recipe_runs(name: str, preset: str, runs: Path, tmp_path: Path) -> None:
    options = {"preset": preset, "seeds": 1, "runs": runs, "out": tmp_path, "quiet": True}
    written, table = reproduce.reproduce(name, smoke=True, **options)  # type: ignore[arg-type]
    source = "benchmark" if name in ("calibration", "ood") else name
    assert written[0] == tmp_path / f"{source}-{preset}-smoke.json"
    assert all(path.stat().st_size > 100 for path in written)
    assert len(written) == (1 if name == "table1" else 2)
    cells = json.loads(written[0].read_text())["cells"]
    assert len(cells) == sum(cell.seed == 0 for cell in read(name, preset).cells())
    assert all("commit" in cell["provenance"] for cell in cells.values())
    assert len(table) > 1
    assert not [path for folder in (tmp_path, runs) for path in folder.rglob("*") if "lock" in path.name]


def test_cells_that_are_there_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted() -> list[Any]:
        calls.append("table1")
        return []

    monkeypatch.setattr(reproduce.sizes, "table1", counted)
    for _ in range(2):
        reproduce.reproduce("table1", runs=tmp_path, out=tmp_path, quiet=True)
    assert len(calls) == 1
    path = tmp_path / "table1-cpu.json"
    content = json.loads(path.read_text())
    content["cells"]["iBNN / seed 0"]["key"] = "of another recipe"
    path.write_text(json.dumps(content))
    experiment = read("table1")
    assert results(experiment, tmp_path).of(experiment) == {}  # no table shows it
    reproduce.reproduce("table1", runs=tmp_path, out=tmp_path, quiet=True)
    assert len(calls) == 2
    assert set(results(experiment, tmp_path).of(experiment)) == {"iBNN / seed 0"}


def test_smoke_runs_keep_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(job: Job, *_: Any, **__: Any) -> dict[str, Any]:
        asked.append(job.train["steps"])
        return {"scores": {"nll": 1.0}, "costs": {}, "job": job.model_dump(exclude_unset=True), "provenance": {}}

    monkeypatch.setattr(reproduce, "run", counted)
    monkeypatch.setitem(analysis.ANALYSES, "curve", lambda *_: {})
    monkeypatch.setattr("ibnn.lab.figures.draw", lambda *_: [])
    for smoke in (True, False, True, False):
        reproduce.reproduce("regression", smoke=smoke, seeds=1, runs=tmp_path, out=tmp_path, quiet=True)
    assert asked == [2] * 15 + [2000] * 15
    assert {path.name for path in tmp_path.glob("*.json")} == {"regression-cpu.json", "regression-cpu-smoke.json"}
    assert read("size").only(None, 1) != read("size", smoke=True).only(None, 1)


def test_seeds_are_as_many_as_asked_for() -> None:
    experiment = read("benchmark")
    for seeds in (1, 5):
        counts = Counter(cell.name.rpartition(" / ")[0] for cell in experiment.only(None, seeds).cells())
        assert set(counts.values()) == {seeds}
    one = [cell.name for cell in experiment.only(["BNN-VI, β = 1"], None).cells()]
    settings = [s["name"] for s in experiment.settings if "BNN-VI, β = 1" not in s.get("skip", ())]
    assert one == [f"{name} / BNN-VI, β = 1 / seed 0" for name in settings]


def test_experiments_share_runs(tmp_path: Path) -> None:
    options = {"seeds": 1, "runs": tmp_path / "runs", "out": tmp_path, "smoke": True, "quiet": True}
    reproduce.reproduce("lenet-softmax", **options)  # type: ignore[arg-type]
    folders = {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()}
    reproduce.reproduce("components", methods=["iBNN-8"], **options)  # type: ignore[arg-type]
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
        ({"name": "benchmrk"}, "Did you mean 'benchmark'"),
        ({"name": "size", "preset": "gpu"}, "one of cpu, paper"),
        ({"name": "size", "methods": ["SGDD"]}, "SGDD"),
    ],
)
def test_wrong_names_are_named(options: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        reproduce.reproduce(**options, out=tmp_path, runs=tmp_path, quiet=True)  # type: ignore[arg-type]
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
    found = analysis.pca(tmp_path, None, splits, points=3, rows=4)
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
    found = analysis.curve(tmp_path, None, None)
    answer = read_run(tmp_path).model.predict(torch.tensor([found["x"]]).T, samples=2)
    assert isinstance(answer, GaussianPrediction)
    total = [a**2 + e**2 for a, e in zip(found["aleatoric_std"], found["epistemic_std"], strict=True)]
    assert found["mean"] == pytest.approx(answer.mean.flatten().tolist(), abs=1e-4)
    assert total == pytest.approx(answer.variance.flatten().tolist(), rel=1e-3)
    assert (found["x"][0], found["x"][-1], len(found["train_x"])) == (-6, 6, 30)
