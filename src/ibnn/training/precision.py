"""Finds out whether bfloat16 works on this CPU.

Some CPUs in virtual machines announce instructions (AMX) that kill the process that uses them. So bfloat16 is tried in
a process of its own. `python -m ibnn.training.precision` prints the environment variables that it needs. They must be
set before torch is imported, so this file does without it.
"""

import functools
import os
import subprocess
import sys
from contextlib import suppress

WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}  # for oneDNN, which computes for torch
PROBE = """
import torch
with torch.autocast("cpu", torch.bfloat16):
    torch.nn.Linear(64, 32)(torch.randn(16, 64, requires_grad=True)).sum().backward()
    torch.nn.Conv2d(16, 32, 3)(torch.randn(4, 16, 12, 12, requires_grad=True)).sum().backward()
"""


@functools.cache
def bf16_settings(probe: str = PROBE, seconds: float = 120.0) -> dict[str, str] | None:
    """Returns the environment variables that bfloat16 needs on this CPU, or None if the probe never ends well."""
    for settings in ({}, WITHOUT_AMX):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | settings  # finds the torch found here
        command = [sys.executable, "-P", "-c", probe]
        with suppress(subprocess.TimeoutExpired, subprocess.CalledProcessError):
            subprocess.run(command, env=environment, timeout=seconds, capture_output=True, check=True)
            return settings
    return None


def bf16_fault() -> str:
    """Returns what is wrong with bfloat16 on this CPU and what to do, "" if it works. The first call takes seconds."""
    settings = bf16_settings()
    if settings == {}:
        return ""
    from ibnn.errors import complaint

    words = " ".join(f"{name}={value}" for name, value in (settings or {}).items())
    remedy = f"Set {words} in the environment before Python starts, or leave" if words else "Leave"
    return complaint(
        "precision", "one that works on this CPU", '"bf16", which crashes here', f"{remedy} precision out."
    )


if __name__ == "__main__":
    needed = bf16_settings()
    print(*(f"{name}={value}" for name, value in (needed or {}).items()))
    if needed is None:
        print("bfloat16 does not work on this CPU.", file=sys.stderr)
