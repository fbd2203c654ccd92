"""Networks that are imported from the current folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ibnn.lab.imported_net import make_net

CODE = """
from torch import nn
from {name}_parts import LAYER

def make_net(outputs, inputs=4, *, hidden=8):
    return nn.Sequential(LAYER(inputs, hidden), nn.ReLU(), LAYER(hidden, outputs))

class Net(nn.Sequential):
    def __init__(self, outputs):
        super().__init__(nn.Linear(3, outputs))

def late(outputs):
    import {name}_late  # while it is called, the folder can still be imported from
    return {name}_late.nn.Linear(2, outputs)

def number(outputs):
    return outputs

def broken(outputs):
    raise KeyError("oops")

WIDTH = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current folder, which no other test has."""
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(CODE.format(name=name))
    (tmp_path / f"{name}_parts.py").write_text("from torch.nn import Linear as LAYER")
    (tmp_path / f"{name}_late.py").write_text("from torch import nn")
    (tmp_path / f"{name}_package").mkdir()
    (tmp_path / f"{name}_package" / "inner.py").write_text(f"from {name} import make_net")
    (tmp_path / f"{name}_syntax.py").write_text("def f(:")
    (tmp_path / f"{name}_talks.py").write_text(
        f"print('imported')\n\ndef make(outputs):\n    print('called')\n    return __import__('{name}').Net(outputs)"
    )
    (tmp_path / f"{name}_exits.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    yield name
    for each in [each for each in sys.modules if each.startswith(name)]:
        del sys.modules[each]


def test_a_network_of_your_own_is_imported_from_the_current_folder(module: str) -> None:
    before = list(sys.path)
    net = make_net(f"{module}:make_net", 3, {"hidden": 5})
    assert [tuple(p.shape) for p in net.parameters()] == [(5, 4), (5,), (3, 5), (3,)]
    assert make_net(f"{module}_package.inner:make_net", 2, {})[2].out_features == 2  # type: ignore[index]
    assert make_net(f"{module}:Net", 7, {})[0].out_features == 7  # type: ignore[index]
    assert make_net(f"{module}:late", 6, {}).out_features == 6
    assert sys.path == before


def test_what_your_own_code_prints_is_no_result(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_net(f"{module}_talks:make", 3, {})
    assert capsys.readouterr() == ("", "imported\ncalled\n")


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("{}:make_nett", {}, ValueError, "'make_nett', which it does not have. Did you mean 'make_net'"),
        ("{}:WIDTH", {}, ValueError, "'WIDTH', which it does not have"),
        ("{}:number", {}, TypeError, "a torch.nn.Module, but got .*:number, which returned int"),
        ("{}:broken", {}, ValueError, "which stops: KeyError: 'oops'"),
        ("{}:make_net", {"hiden": 3}, ValueError, "`net` .*unexpected keyword argument 'hiden'"),
        ("{}:make_net", {"outputs": 3}, ValueError, "`net` .*multiple values"),
        ("{}:make_net", {"name": 3}, ValueError, "`net` .*unexpected keyword argument 'name'"),
        ("{}_syntax:f", {}, ValueError, "can be imported.* SyntaxError"),
        ("{}_exits:f", {}, ValueError, "can be imported.* SystemExit"),
        ("{}_package.none:f", {}, ValueError, "can be imported.* No module named '.*none'"),
        ("{}_other:f", {}, FileNotFoundError, "has no module '.*_other'"),
        ("os:system", {}, FileNotFoundError, "has no module 'os'"),
        ("torch.nn:Linear", {}, FileNotFoundError, "has no module 'torch'"),
    ],
)
def test_code_that_makes_no_network_is_refused(
    name: str, options: dict[str, int], error: type[Exception], words: str, module: str
) -> None:
    before = list(sys.path)
    with pytest.raises(error, match=words) as caught:
        make_net(name.format(module), 3, options)
    assert str(caught.value).startswith("Expected `net")
    assert sys.path == before


def test_a_module_whose_name_is_taken_is_not_confused_with_it(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("def make(outputs): return None")
    with pytest.raises(ValueError, match=r"'json' is already .*Rename your module"):
        make_net("json:make", 3, {})
    make_net(f"{module}:make_net", 3, {})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{module}.py").write_text("def make_net(outputs): return None")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is already"):
        make_net(f"{module}:make_net", 3, {})
