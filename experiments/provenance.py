"""What a result needs to be believed: versions, commit, machine."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ibnn

GOLDEN = Path(__file__).parents[1] / "tests" / "golden.json"


def provenance(*packages: str) -> dict[str, Any]:
    """Returns the versions of Python, torch, ibnn and the named packages, the commit, and the size of the machine."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "ibnn": ibnn.__version__}
    facts |= {package: importlib.metadata.version(package) for package in packages}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return facts | {"commit": commit(), "training_code": training_code()} | machine


def training_code() -> str | None:
    """Returns a hash of the numbers that pin training (tests/golden.json): code that trains alike has the same."""
    if not GOLDEN.exists():
        return None
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    pinned = json.dumps({name: golden[name] for name in ("elbo", "fit", "averages", "baselines", "swag")})
    return hashlib.sha256(pinned.encode()).hexdigest()[:12]


@cache
def commit() -> str | None:
    """Returns the commit that the library runs from, with + if its files are changed; None outside a checkout.

    Calls git only once: call it before a long run, during which the checkout may change.
    """
    try:
        # the commit has this file, too: installed below a repository, the library is not part of its commits
        found, _ = _git("rev-parse", "HEAD", "HEAD:./__init__.py").split()
        return found[:12] + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    here = Path(ibnn.__file__).parent
    done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
