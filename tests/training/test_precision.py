import os
import subprocess
import sys
from pathlib import Path

import bf16
import conftest
import pytest

# What a probe does on a CPU that announces AMX and has none, and on one where nothing helps.
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_WITH_AMX = f"import os\nif os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX512_CORE_FP16':\n    {DIES}"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPUs in question the tests themselves run with the variable."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)


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
    assert bf16.bf16_settings(probe) == settings


def test_a_probe_that_hangs_is_ended() -> None:
    assert bf16.bf16_settings("import time; time.sleep(600)", seconds=0.5) is None


@pytest.mark.bf16
def test_bfloat16_works_where_the_tests_run() -> None:
    assert bf16.bf16_settings() in ({}, bf16.WITHOUT_AMX)


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
    said = python_where_the_probe(DIES_WITH_AMX, tmp_path, str(ROOT / "tests" / "bf16.py"))
    assert said == "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16\n"
