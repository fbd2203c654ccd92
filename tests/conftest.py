import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from bf16 import bf16_settings
from chromium import browser

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("experiments", "benchmarks")]
# Found out once, before torch is imported; the workers of pytest-xdist inherit both variables.
if "IBNN_TEST_BF16" not in os.environ:
    settings = bf16_settings()
    os.environ |= (settings or {}) | {"IBNN_TEST_BF16": "no" if settings is None else "yes"}

import torch

__all__ = ["browser"]  # a fixture

# What would colour or fold the help texts; what lets processes that tests start compile all modules anew.
for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A proxy between the tests and their own servers.
os.environ |= {"COLUMNS": "80", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

torch.set_num_threads(1)  # the tests themselves run side by side
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)  # a busy machine is no failure
hypothesis.settings.load_profile("steady")


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from walking all that was imported, again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("bf16") and os.environ["IBNN_TEST_BF16"] == "no":
        pytest.skip("bfloat16 does not work on this CPU")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_accelerate_state() -> Iterator[None]:
    """Clears what the Trainer leaves behind: a precision that other tests may not want."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
