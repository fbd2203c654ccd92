"""The library on a second device: a simulated one, or a real one (`IBNN_TEST_DEVICE=cuda make test`)."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import device_contract
import pytest

LIMITS = {"step": 2, "eval": 2, "predict": 4}  # values read by the host and copies, in one call


@functools.cache
def outcome() -> dict[str, Any]:
    """What the contract found, in a process of its own: a registered device stays registered."""
    script = Path(device_contract.__file__)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", device_contract.CASES)
def test_the_device_gives_the_numbers_of_the_cpu(name: str) -> None:
    found = outcome()["cases"][name]
    assert isinstance(found, float), found
    assert found <= (1e-6 if device_contract.NAME == "sim" else 1e-3)


@pytest.mark.skipif(device_contract.NAME != "sim", reason="only the simulated device counts")
@pytest.mark.parametrize("net", ["convolutions", "gru", "transformer"])
@pytest.mark.parametrize("call", LIMITS)
def test_calls_hardly_talk_with_the_host(net: str, call: str) -> None:
    assert sum(outcome()["talk"][f"{net}: {call}"].values()) <= LIMITS[call]


@pytest.mark.skipif(device_contract.NAME != "sim", reason="only the simulated device counts")
@pytest.mark.parametrize("net", ["convolutions", "gru", "transformer"])
def test_a_draw_does_not_talk_with_the_host(net: str) -> None:
    talk = outcome()["talk"]
    assert talk[f"{net}: more draws"] == talk[f"{net}: predict"]


@pytest.mark.skipif(device_contract.NAME != "sim", reason="only the simulated device counts")
def test_one_pass_hardly_talks_with_the_host() -> None:
    assert sum(outcome()["talk"]["one pass: predict"].values()) <= LIMITS["predict"]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float16"])
def test_a_step_keeps_hardly_more_than_the_plain_network(dtype: str) -> None:
    assert outcome()["kept"][dtype] <= 1.03
