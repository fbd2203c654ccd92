"""Writes files completely or not at all, lets one process at a time hold a lock, and reads text with clear errors."""

import errno
import glob
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from ibnn.errors import complaint

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_REMEDY = "Correct the file, or copy it again if it was damaged."


@contextmanager
def locked(path: Path, *, wait: bool = True, note: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Holds a lock file; yields False, without waiting, if `wait` is False and another process has it.

    The file contains the process id; `note` is told before waiting for that process. On release the file is removed. A
    killed process leaves it behind, but not the lock. Without file locks (Windows, some network file systems) nothing
    is held.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # a link is refused: it could name any file, and this one is overwritten
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                if note is not None:
                    process = file.read().strip() or "that has it"
                    note(f"{path.parent} is in use: waiting for process {process} to finish.")
                    note = None
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            try:
                if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    continue
            except FileNotFoundError:  # the previous holder has removed this file
                continue
            os.truncate(file.fileno(), 0)
            os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)  # while the lock is held, so that others who opened it notice
            return


@contextmanager
def replaced(*paths: Path) -> Iterator[list[Path]]:
    """Yields an empty temporary file beside each path; if the block succeeds, they replace the paths, in this order.

    At any moment, and after a power cut, each path has its old content or its new one, whole. Files get the permissions
    that the umask leaves, and missing folders are made.
    """
    temporary = [path.with_name(f".{path.name}.{uuid4().hex[:12]}.tmp") for path in paths]
    try:
        for path in temporary:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        mode = temporary[0].stat().st_mode
        yield temporary
        for path in temporary:
            path.chmod(mode)  # whoever wrote it may have made it the owner's alone
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        for path, place in zip(temporary, paths, strict=True):
            os.replace(path, place)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        for folder in {path.parent for path in paths}:
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)  # so that the new name survives, too
            os.close(descriptor)


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Removes temporary files of these names that killed writers left; call it where no other process writes them."""
    for name in names:
        for path in folder.glob(f".{glob.escape(name)}.{'?' * 12}.tmp"):
            path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file by `replaced`."""
    with replaced(path) as (temporary,):
        temporary.write_bytes(content)


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file; raises a ValueError that names the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(complaint(str(path), "text in UTF-8", error, _REMEDY)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file; raises a ValueError that names the file and the line."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the parser names the line, unless it is the last
        where = str(error).replace("at end of document", f"at the end, line {len(text.splitlines()) or 1}")
        raise ValueError(complaint(str(path), "TOML", f"an error: {where}", _REMEDY)) from None
