"""What the benchmark prints and writes; its times are nobody's business here."""

import json
from dataclasses import replace
from pathlib import Path

import bench
import pytest
import torch
from rivals import RIVALS
from torch import nn

TINY = replace(bench.QUICK, nets=("lenet",), batch=4, inputs=3, few=2, known=100, seconds=0.0, turns=1)


def test_cells_are_measured_once_and_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ONE", (2, 2))
    path, told = tmp_path / "speed.json", list[str]()
    content = bench.bench(path, size=TINY, note=told.append)
    assert json.loads(path.read_text()) == content
    names = [f"lenet / {kind}" for kind in bench.MEASURES] + ["rivals"]
    assert list(content["cells"]) == names
    assert [line.split(":")[0] for line in told] == names
    assert all(cell["provenance"]["torch"] == torch.__version__ for cell in content["cells"].values())
    less = content | {"cells": {name: cell for name, cell in content["cells"].items() if name != "lenet / memory"}}
    path.write_text(json.dumps(less))
    again = bench.bench(path, size=TINY)["cells"]
    assert again["lenet / step"] == content["cells"]["lenet / step"]
    assert again["lenet / memory"]["ibnn"] == content["cells"]["lenet / memory"]["ibnn"]
    header, lenet = bench.rows(again)
    kinds = ["memory", "step", "components", "predict", "predict one", "novelty", "one pass", "one pass, novelty"]
    assert header == ["network", *kinds]
    assert [bench.BARS["lenet"][kind] for kind in kinds] == [1.10, 1.35, 1.03, 1.10, 1.10, 1.15, 1.10, 1.35]
    assert [bench.BARS["lstm"].get(kind) for kind in kinds] == [1.10, 1.30, 1.03, 1.10, None, 1.15, 1.10, 1.35]
    assert list(bench.BARS) == list(bench.NETS)
    only = bench.bench(size=TINY, only=["lenet / mem"])["cells"]
    assert only["lenet / memory"]["ibnn"] == again["lenet / memory"]["ibnn"]
    assert len(only) == 1
    with pytest.raises(ValueError, match="lenett"):
        bench.bench(size=TINY, only=["lenett"])
    assert lenet[0] == "lenet"
    assert all(float(value) > 0 for value in lenet[1:6])
    assert all(float(value) < 1e4 for value in lenet[6:])
    assert again["lenet / novelty"]["fit"] > 0
    methods = again["rivals"]["methods"]
    assert list(methods)[:2] == ["plain", "iBNN-2"]
    assert methods["deep ensemble of 4"]["parameters"] == 4
    assert methods["plain"] == {"parameters": 1.0, "step": 1.0, "draws": 4, "predict": 1.0}


def test_ratios_are_medians_of_turns() -> None:
    assert bench.ratio([1.0, 3.0, 8.0], [1.0, 2.0, 1.0]) == 1.5
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    times = bench.turns(calls, replace(TINY, turns=3))
    assert "".join(called) == "abc" + "abc" + "bca" + "cab"
    assert [len(values) for values in times.values()] == [3, 3, 3]


def test_rivals_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ONE", (2, 2))

    def absent(net: nn.Module, draws: int) -> None:
        raise ModuleNotFoundError("No module named 'absent'")

    monkeypatch.setattr(bench, "RIVALS", {"absent": absent})
    cell = bench.rivals(TINY)
    assert cell["methods"]["absent"] == {"missing": "No module named 'absent'"}
    assert bench.rival_rows(cell)[-1] == ["absent", "–", "–", "–", "not measured: No module named 'absent'"]


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_have_gradients_and_probabilities(name: str) -> None:
    net, x, y = bench._made("lenet", 3)
    try:
        rival = RIVALS[name](net, 4)
    except ImportError as error:
        pytest.skip(str(error))
    rival.loss(x, y).backward()
    assert all(parameter.grad is not None for parameter in rival.parameters)
    with torch.no_grad():
        probs = rival.predict(x)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    assert rival.draws == 4


def test_channels_last() -> None:
    found = bench.channels_last("lenet", TINY)
    assert set(found) == {"step", "plain_step", "predict"}
    assert min(found.values()) > 0
