import functools
import importlib
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import ibnn


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """What a new Python has loaded beside torch and the standard library after one import more, and `dir(ibnn)`."""
    code = """if True:
        import json, sys, torch
        before, loaded = set(sys.modules), {}

        def note(name):
            new = {module.split(".")[0] for module in set(sys.modules) - before}
            loaded[name] = sorted(new - set(sys.stdlib_module_names))

        import ibnn
        note("ibnn")
        loaded["dir"] = dir(ibnn)
        import ibnn.data
        note("data")
        from ibnn.app.cli.app import app
        app(["--help"], standalone_mode=False)
        note("help")
        import ibnn.lab.demo
        note("demo")
        print(json.dumps(loaded))
    """
    found: dict[str, list[str]] = json.loads(run(code).splitlines()[-1])
    return found


def test_imports_need_only_torch_and_wait_for_what_is_heavy(imported: dict[str, list[str]]) -> None:
    assert imported["ibnn"] == imported["data"] == ["ibnn"]
    assert not {"accelerate", "matplotlib", "sklearn", "pydantic", "PIL"} & set(imported["help"])
    assert "matplotlib" not in imported["demo"]


@pytest.mark.slow
def test_import_is_quick() -> None:
    # CPU time as a share of torch's own, best of three: a bound on what is imported, not on this machine's speed
    code = "from time import process_time as t; a = t(); import torch; b = t(); import ibnn; print((t() - b) / (b - a))"
    assert min(float(run(code)) for _ in range(3)) < 0.2


def test_dir_shows_the_public_names_and_nothing_imported_for_own_use(imported: dict[str, list[str]]) -> None:
    shown = imported["dir"]
    assert set(ibnn.__all__) <= set(shown)
    assert not {"Any", "TYPE_CHECKING", "importlib", "typing"} & set(shown)
    assert len(shown) == len(set(shown))
    others = {name for name in set(shown) - set(ibnn.__all__) if not name.startswith("_")}
    assert all(isinstance(getattr(ibnn, name), types.ModuleType) for name in others), others


@pytest.mark.parametrize("name", ibnn.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(ibnn, name).__doc__


def test_modules_do_not_hide_public_functions_of_the_same_name() -> None:
    """`ibnn.convert` and `ibnn.draws` are modules, too; importing them later must not replace the functions."""
    for path in sorted(Path(ibnn.__path__[0]).glob("*.py")):
        if not path.stem.startswith("__"):
            importlib.import_module(f"ibnn.{path.stem}")
    assert [name for name in ibnn.__all__ if isinstance(getattr(ibnn, name), types.ModuleType)] == ["metrics"]


def test_caches_have_a_bound() -> None:
    model = ibnn.convert(torch.nn.Linear(4, 3), components=2, seed=0)
    for rows in range(1, 80):
        model.predict(torch.zeros(rows, 4), samples=1 + rows % 40, seed=rows)
        model.elbo(torch.zeros(rows, 4), torch.zeros(rows).long(), n_data=1000 + rows)
    kind = type(functools.lru_cache(print))
    loaded = [module for name, module in sys.modules.items() if name.startswith("ibnn.")]
    caches = [value for module in loaded for value in vars(module).values() if isinstance(value, kind)]
    assert len(caches) > 2
    assert all(cache.cache_info().currsize <= 64 for cache in caches)
    without = [c for c in caches if c.cache_info().maxsize is None]
    assert not [c for c in without if any(p.default is p.empty for p in inspect.signature(c).parameters.values())]
