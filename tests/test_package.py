import subprocess
import sys
import types

import pytest

import ibnn


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_import_is_quick() -> None:
    # CPU time as a share of torch's own, best of three: a bound on what is imported, not on this machine's speed
    code = "from time import process_time as t; a = t(); import torch; b = t(); import ibnn; print((t() - b) / (b - a))"
    assert min(float(run(code)) for _ in range(3)) < 0.2


def test_dir_shows_the_public_names_and_nothing_imported_for_own_use() -> None:
    shown = run("import ibnn; print(*dir(ibnn))").split()
    assert set(ibnn.__all__) <= set(shown)
    assert not {"Any", "TYPE_CHECKING", "importlib", "typing"} & set(shown)
    assert len(shown) == len(set(shown))
    others = {name for name in set(shown) - set(ibnn.__all__) if not name.startswith("_")}
    assert all(isinstance(getattr(ibnn, name), types.ModuleType) for name in others), others


@pytest.mark.parametrize("name", ibnn.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(ibnn, name).__doc__
