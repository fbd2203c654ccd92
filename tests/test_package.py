import subprocess
import sys

import pytest

import ibnn


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_needs_only_torch() -> None:
    heavy = run(
        "import torch, sys; before = set(sys.modules); import ibnn;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    assert heavy == "['ibnn']"


def test_import_is_quick() -> None:
    # CPU time over torch's own, best of three: a bound on what is imported, not on this machine's mood
    code = "import torch, time; t = time.process_time(); import ibnn; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize("name", ibnn.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(ibnn, name).__doc__
