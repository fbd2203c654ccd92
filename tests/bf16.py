"""Finds out whether bfloat16 works on this CPU; prints the environment variables that it needs.

Some CPUs in virtual machines announce instructions (AMX) that kill the process that uses them. So bfloat16 is tried in
a process of its own. The variables must be set before torch is imported, so this file does without it.
"""

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


def bf16_settings(probe: str = PROBE, seconds: float = 120.0) -> dict[str, str] | None:
    """Returns the environment variables that bfloat16 needs on this CPU, or None if the probe never ends well."""
    for settings in ({}, WITHOUT_AMX):
        with suppress(subprocess.TimeoutExpired, subprocess.CalledProcessError):
            command = [sys.executable, "-P", "-c", probe]
            subprocess.run(command, env=os.environ | settings, timeout=seconds, capture_output=True, check=True)
            return settings
    return None


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in (bf16_settings() or {}).items()))
