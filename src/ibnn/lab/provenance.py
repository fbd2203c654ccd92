"""PROVENANCE: what a result needs to be believed: versions, commit, machine."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ibnn._version import __version__


def provenance(*packages: str) -> dict[str, Any]:
    """Versions of Python, torch, ibnn and the named packages, the commit, and the size of the machine.

    >>> sorted(provenance())
    ['commit', 'cores', 'ibnn', 'machine', 'python', 'threads', 'torch']
    """
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "ibnn": __version__}
    facts |= {package: importlib.metadata.version(package) for package in packages}
    return facts | {
        "commit": COMMIT,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """The commit the library runs from, with + if files of it are changed; None without git or outside a checkout."""
    try:
        # that of this file, too: installed below a repository, it is not part of its commits
        commit, _ = _git("rev-parse", "HEAD", f"HEAD:./{Path(__file__).name}").split()
        return commit[:12] + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


COMMIT = _commit()  # read with the code: a long run may see later commits
