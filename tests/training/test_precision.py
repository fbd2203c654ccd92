import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import conftest
import pytest
import torch
from torch import nn

import ibnn
from ibnn.training import precision

# What a probe does on a CPU that announces AMX and has none, and on one where nothing helps.
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_WITH_AMX = f"import os\nif os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX512_CORE_FP16':\n    {DIES}"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPUs in question the tests themselves run with the variable."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    remembered = precision.bf16_settings
    remembered.cache_clear()
    yield
    remembered.cache_clear()


@pytest.mark.parametrize(
    ("probe", "settings"),
    [
        ("pass", {}),
        (DIES_WITH_AMX, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}),
        (DIES, None),
        ("raise RuntimeError", None),
    ],
    ids=["works", "dies with AMX", "dies", "fails"],
)
def test_a_crash_is_found_out_in_another_process(probe: str, settings: dict[str, str] | None) -> None:
    assert precision.bf16_settings(probe) == settings
    assert precision.bf16_settings(probe) == settings
    assert precision.bf16_settings.cache_info().misses == 1  # tried once


def test_a_probe_that_hangs_is_ended() -> None:
    assert precision.bf16_settings("import time; time.sleep(600)", seconds=0.5) is None


@pytest.mark.bf16
def test_bfloat16_works_where_the_tests_run() -> None:
    assert precision.bf16_settings() in ({}, precision.WITHOUT_AMX)


def test_the_probe_finds_modules_that_this_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").touch()
    assert precision.bf16_settings("import only_here") is None
    monkeypatch.syspath_prepend(tmp_path)
    precision.bf16_settings.cache_clear()
    assert precision.bf16_settings("import only_here") == {}


@pytest.mark.parametrize(
    ("probe", "remedy"),
    [
        (
            DIES_WITH_AMX,
            "Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment before Python starts, or leave precision out.",
        ),
        (DIES, "Leave precision out."),
    ],
    ids=["dies with AMX", "dies"],
)
def test_fit_refuses_bf16_that_would_crash(probe: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ibnn.convert(nn.Linear(4, 3), seed=0).train()
    before = copy.deepcopy(model.state_dict())
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    asked, found = [], precision.bf16_settings(probe)
    monkeypatch.setattr(precision, "bf16_settings", lambda: asked.append(probe) or found)
    with pytest.raises(ValueError, match="Expected `precision`") as error:
        ibnn.fit(model, (x, y), precision="bf16", steps=2, seed=5, quiet=True)
    assert str(error.value) == (
        f'Expected `precision` to be one that works on this CPU, but got "bf16", which crashes here. {remedy}'
    )
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert asked == [probe]
    ibnn.fit(model, (x, y), steps=2, quiet=True)  # free to choose another precision, and nothing is probed for it
    assert asked == [probe]


def python_where_the_probe(does: str, folder: Path, *words: str) -> str:
    """What a Python says in which the code of the probe does something else: how the probe is made to crash."""
    (folder / "sitecustomize.py").write_text(
        f"import os, sys\nif 'torch.autocast' in sys.orig_argv[-1]:\n    exec({does!r})\n    os._exit(0)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "IBNN_TEST_BF16"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("does", "variable", "verdict"),
    [("pass", "None", "yes"), (DIES_WITH_AMX, "AVX512_CORE_FP16", "yes"), (DIES, "None", "no")],
    ids=["works", "dies with AMX", "dies"],
)
def test_the_tests_set_what_bfloat16_needs(does: str, variable: str, verdict: str, tmp_path: Path) -> None:
    code = """if True:
        import os, sys

        class Finder:
            def find_spec(name, path=None, target=None):
                if name == "torch":
                    print(os.environ.get("ONEDNN_MAX_CPU_ISA"), os.environ["IBNN_TEST_BF16"], flush=True)
                    os._exit(0)

        sys.meta_path.insert(0, Finder)
        import conftest
    """
    assert python_where_the_probe(does, tmp_path, "-c", code).split() == [variable, verdict]


@pytest.mark.bf16
def test_tests_in_bfloat16_are_skipped_where_it_crashes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest.pytest_runtest_setup(request.node)
    monkeypatch.setenv("IBNN_TEST_BF16", "no")
    with pytest.raises(pytest.skip.Exception, match="bfloat16 does not work on this CPU"):
        conftest.pytest_runtest_setup(request.node)


def test_the_makefile_is_told_what_bfloat16_needs(tmp_path: Path) -> None:
    said = python_where_the_probe(DIES_WITH_AMX, tmp_path, str(ROOT / "src" / "ibnn" / "training" / "precision.py"))
    assert said == "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16\n"
