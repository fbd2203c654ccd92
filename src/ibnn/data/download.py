"""DOWNLOAD: fetches data sets from their publishers, or a mirror, and checks them before anything is unpacked.

Files are downloaded into a temporary folder, checked, and moved into place whole. A broken connection is resumed where
it broke, if the server can. Whatever goes wrong, no partial file stays.
"""

import gzip
import hashlib
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from ibnn.data.sets import Known, data_folder, known
from ibnn.errors import complaint
from ibnn.files.atomic import replaced
from ibnn.progress import Bar

PAUSE = 1.0  # seconds before the first retry; doubles with each
_SMALL = 1 << 20  # bytes that an archive's other members, such as a readme, may have


def get(
    name: str, folder: str | Path | None = None, *, mirror: str | None = None, progress: bool = True, retries: int = 3
) -> Path:
    """Downloads a set, unless it is there and its checksums are right, and returns the folder of its files.

    A correct archive that already lies in `folder` is unpacked from there.

    >>> get("cifar-10", "data", mirror="https://mirror.example.org/sets")  # doctest: +SKIP
    PosixPath('data/cifar-10-batches-bin')

    Args:
        name: One of `ibnn.data.names()`.
        folder: Where sets are; default IBNN_DATA or `data`.
        mirror: Address of a server with NAME/FILE, in place of the publishers' (checksums stay theirs); default
            IBNN_MIRROR.
        progress: Shows a bar, in a terminal.
        retries: How often to try again after a broken connection.
    """
    root, entry = data_folder(folder), known(name)
    place = root / entry.where
    if entry.url is None:
        return place
    mirror = server(mirror)
    url = f"{mirror.rstrip('/')}/{name}" if mirror else entry.url
    try:
        with Bar(name, shown=progress, in_bytes=True) as bar:
            _fill(entry, url, root, partial(_fetch, retries=retries, bar=bar))
    except ConnectionError:
        raise
    except OSError as error:
        remedy = "Make room and allow writing there, or pass another folder."
        raise OSError(complaint("folder", "one that can be written to", f"{root} ({error})", remedy)) from error
    return place


def server(mirror: str | None) -> str | None:
    """Returns the mirror's address: the given one, else IBNN_MIRROR, else None for the publishers'."""
    mirror = mirror or os.environ.get("IBNN_MIRROR")
    if mirror and not mirror.startswith(("http://", "https://")):
        raise ValueError(complaint("mirror", "an http or https address", repr(mirror), "Pass https://…"))
    return mirror


def _fill(entry: Known, url: str, root: Path, fetch: partial[None]) -> None:
    """Puts every file that is missing or wrong into its place."""
    if entry.members and all(_right(root / path, md5, size) for path, (size, md5) in entry.members.items()):
        return
    place = root / entry.where
    missing = [file for file, md5 in entry.files.items() if entry.members or not _right(place / file, md5)]
    if not missing:
        return
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".get-", dir=root) as temporary:
        beside = Path(temporary)
        for file in missing:
            given = entry.members and _right(root / file, entry.files[file])
            if not given:
                fetch(f"{url}/{file}", beside / file, entry.files[file])
            moves = {place / file: beside / file}
            if entry.members:
                _unpack((root if given else beside) / file, entry.members, beside)
                moves = {root / path: beside / path for path in entry.members}
            with replaced(*moves) as targets:
                for made, target in zip(moves.values(), targets, strict=True):
                    os.replace(made, target)


def _right(path: Path, md5: str | None, size: int | None = None) -> bool:
    if not path.is_file() or size not in (None, path.stat().st_size):
        return False
    if md5 is None:
        return True
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest() == md5


def _fetch(url: str, path: Path, md5: str, *, retries: int, bar: Bar) -> None:
    """Downloads to `path`, which does not exist yet, and checks the md5."""
    try:
        import requests
        from urllib3.exceptions import HTTPError
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"ibnn.data.get needs {error.name}: pip install 'ibnn[data]'") from error
    path.touch()
    for attempt in range(retries + 1):
        try:
            _fetch_rest(url, path, bar)
            break
        except (requests.RequestException, HTTPError) as error:
            answer = getattr(error, "response", None)
            code = 0 if answer is None else answer.status_code
            if attempt == retries or (400 <= code < 500 and code not in (408, 429)):
                got = f"HTTP {code}" if code else f"{type(error).__name__}: {error}"
                remedy = "Check the connection, or pass another mirror: ibnn data get --mirror, or IBNN_MIRROR."
                raise ConnectionError(complaint("mirror", f"a server that has {url}", got, remedy)) from error
        time.sleep(PAUSE * 2**attempt)
    if not _right(path, md5):
        remedy = "Try again; if it stays so, pass another mirror."
        raise ValueError(complaint(url, f"a file of md5 {md5}", "another one, now deleted", remedy))


def _fetch_rest(url: str, path: Path, bar: Bar) -> None:
    """Appends the missing rest to `path`, or starts over if the server does not know ranges."""
    import requests

    have = path.stat().st_size
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
        rest = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if answer.status_code in (206, 416) and not rest:
            os.truncate(path, 0)  # so that the next attempt starts over
            raise requests.ConnectionError("the server sent another range")
        answer.raise_for_status()
        have = have if rest else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with open(path, "ab" if rest else "wb") as file:
            for chunk in answer.raw.stream(1 << 16, decode_content=False):  # Apache calls .gz files encoded
                file.write(chunk)
                have += len(chunk)
                bar.update(done=have, total=total, title=url.rsplit("/", 1)[1])


def _unpack(archive: Path, members: Mapping[str, tuple[int, str | None]], into: Path) -> None:
    """Extracts the expected members; refuses an archive with anything dangerous or of an unexpected size."""
    left = dict(members)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                size, path = left.pop(member.name, (None, None))[0], PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise tarfile.TarError(f"the path {member.name}")
                if not (member.isreg() or (member.isdir() and size is None)):
                    raise tarfile.TarError(f"{member.name} is not a plain file")
                if member.size > _SMALL if size is None else member.size != size:
                    raise tarfile.TarError(f"{member.name} of {member.size} bytes")
                if size is not None:
                    tar.extract(member, into, filter="data")
        if left:
            raise tarfile.TarError(f"no {next(iter(left))}")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        got, remedy = f"a broken or unsafe one ({error})", "Nothing was unpacked. Pass another mirror."
        raise ValueError(complaint(archive.name, "an archive of the set's files alone", got, remedy)) from error
