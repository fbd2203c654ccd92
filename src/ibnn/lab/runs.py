"""RUN FOLDERS: the files of a run, who may write them, and checksums, so that a damaged one is refused.

A run folder holds job.toml, what `fit` writes (recipe.toml, history.csv, checkpoints), the trained model
(model.safetensors and config.json, as `save_pretrained` writes them), answers.safetensors (the answers for the test
set), result.json (scores, costs, provenance), for a .csv file table.json (its columns, and how they are standardised)
and, after it was asked, held_out.safetensors. Nothing in it is pickled. result.json is written last: with it the run
has finished. It holds the SHA-256 of the others and of itself. Run folders from before there were checksums are read,
with a warning.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ibnn._version import __version__
from ibnn.errors import DamagedError, complaint
from ibnn.files.atomic import locked, read_json, read_text, read_toml, write_atomically
from ibnn.network import NUMBERS

CONFIG, JOB, TABLE, RECIPE, HISTORY = "config.json", "job.toml", "table.json", "recipe.toml", "history.csv"
MODEL, ANSWERS, HELD_OUT, RESULT = "model.safetensors", "answers.safetensors", "held_out.safetensors", "result.json"
FORMAT_VERSION = 1
_CHECKED = (JOB, TABLE, HISTORY, MODEL, CONFIG, ANSWERS)
_CHECKPOINTS = "checkpoints/step-*.safetensors"
# All but job.toml; result.json first: it says "finished".
_WRITTEN = (RESULT, *_CHECKED[1:], HELD_OUT, RECIPE, "chains/chains.safetensors", _CHECKPOINTS)
_AGAIN = "Copy the folder again, or run it again: ibnn train --fresh."
T = TypeVar("T")
log = logging.getLogger("ibnn")


def versions() -> dict[str, Any]:
    """Returns the versions of Python, torch and ibnn, and the size of the machine."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "ibnn": __version__}
    return facts | {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


@dataclass(frozen=True)
class RunFolder:
    """A run folder, which need not exist yet.

    >>> import tempfile, torch
    >>> folder = RunFolder(Path(tempfile.mkdtemp()) / "run")
    >>> folder.write(JOB, b'net = "mlp"')
    >>> folder.write_tensors(MODEL, {"weight": torch.ones(2)})
    >>> result = folder.finish({"name": "mine", "scores": {}})
    >>> sorted(result["sha256"]), RunFolder(folder.path).tensors(MODEL)["weight"].tolist()
    (['job.toml', 'model.safetensors', 'result.json'], [1.0, 1.0])
    """

    path: Path

    # ------------------------------------------------------------------------------------------------------- writing

    def lock(self, *, wait: bool = True, note: Callable[[str], None] | None = None) -> AbstractContextManager[bool]:
        """Keeps other processes from writing the folder; see `ibnn.files.atomic.locked`.

        Args:
            wait: Whether to wait for another process; if not, the context is False where one has the folder.
            note: Called with a message before waiting.
        """

        def waiting(process: str) -> None:
            if note is not None:
                note(f"{self.path} is in use: waiting for process {process or 'that has it'} to finish.")

        return locked(self.path / ".lock", wait=wait, waiting=waiting)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whole or not at all."""
        write_atomically(self.path / name, content)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
        """Writes tensors and facts about them."""
        whole = {key: value.contiguous() for key, value in tensors.items()}
        self.write(name, safetensors.torch.save(whole, metadata=dict(facts) if facts else None))

    def finish(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Writes result.json with the checksums of all files, removes the checkpoints, and returns its content."""
        content = {**result, "format_version": FORMAT_VERSION}
        sums = {name: self.checksum(name) for name in _CHECKED if self.has(name)}
        content["sha256"] = sums | {RESULT: _checksum_of(content)}
        self.write(RESULT, (json.dumps(content, indent=1) + "\n").encode())
        self._remove([_CHECKPOINTS])  # there is nothing left to resume
        return content

    def clear(self) -> None:
        """Removes what a run has written, and nothing else, if one was begun here; hold the lock."""
        if self.begun:
            self._remove(_WRITTEN)
            (self.path / JOB).unlink()  # last: until then the other files are the run's

    def check_free(self) -> None:
        """Raises a ValueError if no run was begun here, and one would replace files."""
        if not self.begun and (found := self._found(_WRITTEN)):
            names = ", ".join(str(path.relative_to(self.path)) for path in found)
            remedy = "Choose another folder, or move these files away."
            got = f"{self.path}, which has {names} but no {JOB}"
            raise ValueError(complaint("folder", "a new one, or one of a run", got, remedy))

    def _found(self, patterns: Sequence[str]) -> list[Path]:
        return [path for pattern in patterns for path in self.path.glob(pattern)]

    def _remove(self, patterns: Sequence[str]) -> None:
        for path in self._found(patterns):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    # ------------------------------------------------------------------------------------------------------- reading

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
        content = self._parsed(read_json, RESULT)
        if not isinstance(content, dict):
            raise self.damaged(RESULT, "a JSON object", type(content).__name__)
        if (version := content.get("format_version", FORMAT_VERSION)) != FORMAT_VERSION:
            expected, remedy = f"of format version {FORMAT_VERSION}", "Upgrade: pip install -U ibnn."
            raise ValueError(complaint(str(self.path / RESULT), expected, version, remedy))
        sums = content.get("sha256")
        if sums is None:
            _warn(self.path)
            return content
        bare = {key: value for key, value in content.items() if key != "sha256"}
        if not isinstance(sums, dict) or sums.get(RESULT) != _checksum_of(bare):
            raise self.damaged(RESULT)
        return content

    def job(self) -> dict[str, Any]:
        """Reads the fields of job.toml."""
        self._check(JOB)
        return self._parsed(read_toml, JOB)

    def text(self, name: str) -> str:
        """Reads the text of a file."""
        self.require([name])
        self._check(name)
        return self._parsed(read_text, name)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Reads the tensors of a file."""
        self.require([name])
        self._check(name)
        try:
            return safetensors.torch.load_file(self.path / name)
        except (safetensors.SafetensorError, OSError) as error:
            raise self.damaged(name, "a safetensors file", error) from None

    def answers(self) -> dict[str, Tensor]:
        """Reads the answers for the test set."""
        return self.tensors(ANSWERS)

    def model_state(self) -> dict[str, Tensor]:
        """Reads the state dict of the trained model; runs from before there was a config.json had all of it but s."""
        state = self.tensors(MODEL)
        if not self.has(CONFIG):
            numbers = {"prior_std": self.result["training"].get("prior_std")}
        else:
            self._check(CONFIG)
            config = self._parsed(read_json, CONFIG)
            state |= {name: state[kept] for name, kept in config["tied"].items()}
            numbers = {name: config.get(name) for name in NUMBERS}
        return {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items() if v is not None} | state

    def checksum(self, name: str = MODEL) -> str:
        """Returns the SHA-256 of a file."""
        with open(self.path / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def damaged(self, name: str, expected: str = "as the run wrote it", got: object = "") -> DamagedError:
        """Returns an error that names a file; by default one whose checksum is wrong."""
        got = got or "a damaged or changed file (its checksum differs)"
        return DamagedError(complaint(str(self.path / name), expected, got, _AGAIN))

    def _check(self, name: str) -> None:
        """Raises if a file is not what it was when the run finished."""
        if not self.has(RESULT):  # not finished: there are no checksums yet
            return
        expected = self.result.get("sha256", {}).get(name)
        if expected is not None and self.checksum(name) != expected:
            raise self.damaged(name)

    def _parsed(self, read: Callable[[Path], T], name: str) -> T:
        try:
            return read(self.path / name)
        except ValueError as error:
            raise DamagedError(str(error)) from None


def _checksum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=64)  # once a folder
def _warn(path: Path) -> None:
    log.warning("%s has no checksums (an earlier version wrote it): damage to its files would go unnoticed.", path)
