"""FILES: written whole or not at all, locked by one process at a time, and named where they cannot be read."""

import json
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ibnn.errors import complaint

_AGAIN = "Correct the file, or copy it again if it was damaged."


@contextmanager
def locked(path: Path, *, wait: bool = True, waiting: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Holds the lock of a file beside, or in, what it protects; without waiting, False if another process has it.

    The file is hidden, holds the number of the process, and is removed when the lock is released; so are folders that
    were made for it and stayed empty, unless another process waits. A killed process leaves the file, but no lock.

    Args:
        path: The lock file; its name should begin with a dot.
        wait: Whether to wait for another process.
        waiting: Told once, before waiting, which process has the lock.
    """
    import fcntl  # not on Windows

    while True:
        made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+")  # noqa: SIM115  closed below, in every case
        except (FileExistsError, FileNotFoundError):  # the process before removed the folder in between
            if path.parent.exists() and not path.parent.is_dir():
                raise
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                if waiting is not None:
                    file.seek(0)
                    waiting(file.read().strip())
                    waiting = None
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _names(path, file.fileno()):  # removed by the process before, which had it
                continue
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)  # while the lock is held: who opened it before sees that it is gone
                with suppress(OSError):  # no longer empty
                    for folder in made:
                        folder.rmdir()
            return


def _names(path: Path, descriptor: int) -> bool:
    """Whether a path is that of an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that at any moment there is the old one or the new one, whole."""
    with replacing(path) as (temporary,):
        temporary.write_bytes(content)


@contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Yields temporary files in one folder; after the block all are on disk before they are renamed, in this order.

    If the block or the disk fails, the old files stay and no temporary ones are left.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "numbers.txt"
    >>> with replacing(path) as (temporary,):
    ...     size = temporary.write_text("1 2 3")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('1 2 3', 1)
    """
    folder = paths[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = tuple(path.with_name(f".{path.name}.{uuid4().hex}.tmp") for path in paths)
    try:
        yield temporary
        for path in temporary:
            _fsync(path, os.O_RDWR)
        for written, path in zip(temporary, paths, strict=True):
            os.replace(written, path)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _fsync(folder, os.O_RDONLY)  # the new names, too, survive a power cut


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file; raises a ValueError that names the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(complaint(str(path), "text in UTF-8", error, _AGAIN)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file; raises a ValueError that names the file and the line."""
    return _parsed(path, tomllib.loads, "TOML")  # type: ignore[no-any-return]


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises a ValueError that names the file and the line."""
    return _parsed(path, json.loads, "JSON")


def _parsed(path: Path, parse: Callable[[str], Any], kind: str) -> Any:
    text = read_text(path)
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:  # both parsers say in which line, unless it is the last
        where = str(error).replace("at end of document", f"at the end, line {len(text.splitlines()) or 1}")
        raise ValueError(complaint(str(path), kind, f"an error: {where}", _AGAIN)) from None
