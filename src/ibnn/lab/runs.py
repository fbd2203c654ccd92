"""The files of a run: who may write them, which belong to it, and checksums, so that a damaged one is refused.

A run folder holds job.toml, what `fit` and `save_pretrained` write, table.json (columns of a .csv file and how they are
standardised), the answers for test and held-out inputs, and the folder one-pass. result.json (scores, costs, versions)
is written last: with it the run has finished. It is sealed, and holds the SHA-256 of the other files.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ibnn._version import __version__
from ibnn.errors import complaint
from ibnn.files import sealed
from ibnn.files.atomic import locked, read_text, write_atomically

CONFIG, JOB, TABLE, RECIPE, HISTORY = "config.json", "job.toml", "table.json", "recipe.toml", "history.csv"
MODEL, ANSWERS, RESULT = "model.safetensors", "answers.safetensors", "result.json"
ONE_PASS = "one-pass"  # folder of the network that answers in one pass
_CHECKED = (JOB, TABLE, HISTORY, CONFIG, ANSWERS, f"{ONE_PASS}/{CONFIG}")  # which has the checksum of the model
_CHECKPOINTS = "checkpoints/step-*.safetensors"
# All but job.toml; result.json first: it says "finished".
_WRITTEN = (RESULT, *_CHECKED[1:], MODEL, RECIPE, f"{ONE_PASS}/{MODEL}", _CHECKPOINTS)
_AGAIN = "Copy the folder again, or run it again: ibnn train --fresh."


def versions() -> dict[str, Any]:
    """Returns the versions of Python, torch and ibnn, and the size of the machine."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "ibnn": __version__}
    return facts | {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


@dataclass(frozen=True)
class RunFolder:
    """A run folder, which need not exist yet."""

    path: Path

    def lock(self, *, wait: bool = True, note: Callable[[str], None] | None = None) -> AbstractContextManager[bool]:
        """Keeps other processes from writing the folder, as `locked` does."""
        return locked(self.path / ".lock", wait=wait, note=note)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whole or not at all."""
        write_atomically(self.path / name, content)

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Writes result.json with the checksums of the other files, removes the checkpoints, returns its content."""
        checksums = {name: sealed.checksum(self.path / name) for name in _CHECKED if self.has(name)}
        content = {**result, "sha256": checksums}
        sealed.write_json(self.path / RESULT, content)
        self._remove(_CHECKPOINTS)  # there is nothing left to resume
        return content

    def clear(self) -> None:
        """Removes what a run has written, and nothing else, if one was begun here; hold the lock."""
        if self.begun:
            self._remove(*_WRITTEN, JOB)  # job.toml last: until then the other files are the run's

    def check_free(self) -> None:
        """Raises a ValueError if no run was begun here, and one would replace files."""
        if not self.begun and (found := self._found(*_WRITTEN)):
            names = ", ".join(str(path.relative_to(self.path)) for path in found)
            got = f"{self.path}, which has {names} but no {JOB}"
            remedy = "Choose another folder, or move these files away."
            raise ValueError(complaint("folder", "a new one, or one of a run", got, remedy))

    def _found(self, *patterns: str) -> list[Path]:
        return [path for pattern in patterns for path in self.path.glob(pattern)]

    def _remove(self, *patterns: str) -> None:
        for path in self._found(*patterns):
            path.unlink()

    def has(self, *names: str) -> bool:
        """Whether the files exist."""
        return all((self.path / name).is_file() for name in names)

    @property
    def begun(self) -> bool:
        """Whether a run was begun here."""
        return self.has(JOB)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.has(JOB, HISTORY, RESULT)

    def require(self, names: Sequence[str] = (JOB, MODEL, RESULT)) -> None:
        """Raises a FileNotFoundError unless the files exist; by default those of a finished run."""
        if missing := [name for name in names if not self.has(name)]:
            got = f"{self.path} without {' and '.join(missing)}" if self.path.is_dir() else f"no folder {self.path}"
            remedy = "Pass a folder that `ibnn train` has finished."
            raise FileNotFoundError(complaint("run", f"a folder with {', '.join(names)}", got, remedy))

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        return sealed.read_json(self.path / RESULT, remedy=_AGAIN)

    def text(self, name: str) -> str:
        """Reads the text of a file."""
        return read_text(self._verified(name))

    def answers(self) -> dict[str, Tensor]:
        """Reads the answers for the test set."""
        return safetensors.torch.load_file(self._verified(ANSWERS))

    def _verified(self, name: str) -> Path:
        """Returns the path of a file; raises unless it exists and, if the run has finished, is as it was then."""
        self.require([name])
        if self.has(RESULT):
            sealed.verify(self.path / name, self.result["sha256"].get(name, ""), remedy=_AGAIN)
        return self.path / name
