"""DOWNLOAD: sets from where they were published, or from a mirror, checked before anything is unpacked.

A file is downloaded beside its place, checked, and moved there whole. A connection that breaks is taken up where it
broke, if the server can. Whatever goes wrong, nothing half-written stays.
"""

import gzip
import hashlib
import logging
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

from ibnn.data.sets import data_folder, known
from ibnn.errors import complaint
from ibnn.progress import Bar

PAUSE = 1.0  # seconds before the first retry; doubles with each
_SMALL = 1 << 20  # what an archive may have besides its expected members: a readme


class Source(NamedTuple):
    """Where a set was published, and what is right.

    Attributes:
        url: Of the folder with the files.
        files: md5 of each file as published.
        members: If the file is an archive: path, bytes and, where known, md5 of what is taken out of it.
    """

    url: str
    files: Mapping[str, str]
    members: Mapping[str, tuple[int, str | None]] = MappingProxyType({})


SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar-10": Source(
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        {
            "cifar-10-batches-bin/data_batch_1.bin": (30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
            "cifar-10-batches-bin/data_batch_2.bin": (30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
            "cifar-10-batches-bin/data_batch_3.bin": (30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
            "cifar-10-batches-bin/data_batch_4.bin": (30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
            "cifar-10-batches-bin/data_batch_5.bin": (30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
            "cifar-10-batches-bin/test_batch.bin": (30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
        },
    ),
    "cifar-100": Source(
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        {"cifar-100-binary/train.bin": (153_700_000, None), "cifar-100-binary/test.bin": (30_740_000, None)},
    ),
}


def get(
    name: str,
    folder: str | Path | None = None,
    *,
    mirror: str | None = None,
    progress: bool = True,
    retries: int = 3,
) -> Path:
    """Downloads a set, unless it is there and right, and returns the folder of its files.

    An archive that lies in `folder` already, and is right, is unpacked from there.

    >>> get("cifar-10", "data", mirror="https://mirror.example.org/sets")  # doctest: +SKIP
    PosixPath('data/cifar-10-batches-bin')

    Args:
        name: One of `ibnn.data.names()`.
        folder: Where sets are; IBNN_DATA or `data` if not given.
        mirror: Address of a server with NAME/FILE, to be used in place of the publishers' (checksums stay theirs);
            IBNN_MIRROR if not given.
        progress: Shows a bar, in a terminal.
        retries: How often to try again after a broken connection.
    """
    place = data_folder(folder) / known(name).where
    if name not in SOURCES:  # comes with a package
        return place
    mirror = server(mirror)
    source, root = SOURCES[name], data_folder(folder)
    url = f"{mirror.rstrip('/')}/{name}" if mirror else source.url
    try:
        with Bar(name, shown=progress, in_bytes=True) as bar:
            _fill(source, url, root, place, retries, bar)
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        remedy = "Make room and allow writing there, or pass another folder."
        raise OSError(complaint("folder", "one that can be written to", f"{root} ({error})", remedy)) from error
    return place


def server(mirror: str | None) -> str | None:
    """The mirror's address: the given one, or the environment variable IBNN_MIRROR, or None for the publishers'."""
    mirror = mirror or os.environ.get("IBNN_MIRROR")
    if mirror and not mirror.startswith(("http://", "https://")):
        raise ValueError(complaint("mirror", "an http or https address", repr(mirror), "Pass https://…"))
    return mirror


def _fill(source: Source, url: str, root: Path, place: Path, retries: int, bar: Bar) -> None:
    """Puts everything that is missing or wrong into its place."""
    if source.members and all(_right(root / path, md5, size) for path, (size, md5) in source.members.items()):
        return
    missing = [file for file in source.files if source.members or not _right(place / file, source.files[file])]
    if not missing:
        return
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".get-", dir=root) as beside:
        usual = Path(beside, ".usual")
        usual.touch()  # with the permissions that the umask leaves
        for file in missing:
            here = root / file
            local = bool(source.members) and _right(here, source.files[file])
            got = here if local else _download(f"{url}/{file}", source.files[file], Path(beside), retries, bar)
            moves = {place / file: got}
            if source.members:
                _unpack(got, source.members, Path(beside))
                moves = {root / path: Path(beside) / path for path in source.members}
            for target, made in moves.items():
                target.parent.mkdir(exist_ok=True)
                made.chmod(usual.stat().st_mode)  # temporary files are their owner's alone
                os.replace(made, target)


def _right(path: Path, md5: str | None, size: int | None = None) -> bool:
    if not path.is_file() or size not in (None, path.stat().st_size):
        return False
    if md5 is None:
        return True
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest() == md5


# ------------------------------------------------------------------------------------------------------------- fetching


def _download(url: str, md5: str, folder: Path, retries: int, bar: Bar) -> Path:
    """One file, by pooch: into a temporary file, checked, then renamed."""
    try:
        import pooch  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"ibnn.data.get needs {error.name}: pip install 'ibnn[data]'") from error
    logger: logging.Logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # the bar tells enough
    try:
        fetch, name = partial(_fetch, retries=retries, bar=bar), url.rsplit("/", 1)[1]
        return Path(pooch.retrieve(url, f"md5:{md5}", fname=name, path=folder, downloader=fetch))
    except ValueError as error:
        remedy = "Try again; if it stays so, pass another mirror."
        raise ValueError(complaint(url, f"a file of md5 {md5}", "another one, now deleted", remedy)) from error
    finally:
        logger.setLevel(level)


def _fetch(url: str, path: str, _pooch: object, *, retries: int, bar: Bar) -> None:
    """Downloads to `path`; after a broken connection asks for the rest."""
    import requests
    import urllib3

    for attempt in range(retries + 1):
        try:
            return _fetch_rest(url, Path(path), bar)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            answer = getattr(error, "response", None)
            code = 0 if answer is None else answer.status_code
            if attempt == retries or (400 <= code < 500 and code not in (408, 429)):
                got = f"HTTP {code}" if code else f"{type(error).__name__}: {error}"
                remedy = "Check the connection, or pass another mirror: ibnn data get --mirror, or IBNN_MIRROR."
                raise ConnectionError(complaint("mirror", f"a server that has {url}", got, remedy)) from error
        time.sleep(PAUSE * 2**attempt)


def _fetch_rest(url: str, path: Path, bar: Bar) -> None:
    """Appends what `path` does not have yet; from the start if the server does not know ranges."""
    import requests

    have = path.stat().st_size
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
        rest = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if answer.status_code in (206, 416) and not rest:  # not what was asked for: the next attempt starts anew
            os.truncate(path, 0)
            raise requests.ConnectionError("the server sent another range")
        answer.raise_for_status()
        have = have if rest else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with open(path, "ab" if rest else "wb") as file:
            for chunk in answer.raw.stream(1 << 16, decode_content=False):
                file.write(chunk)
                have += len(chunk)
                bar.update(done=have, total=total, title=url.rsplit("/", 1)[1])


# ------------------------------------------------------------------------------------------------------------ unpacking


def _unpack(archive: Path, members: Mapping[str, tuple[int, str | None]], into: Path) -> None:
    """Takes the expected members out. An archive with anything dangerous, or of a size not expected, is refused."""
    left = dict(members)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                size = left.pop(member.name, (None, None))[0]
                _check(archive, member, size)
                if size is not None:
                    tar.extract(member, into, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refusal(archive, f"a broken one ({error})") from error
    if left:
        raise _refusal(archive, f"one without {next(iter(left))}")


def _check(archive: Path, member: tarfile.TarInfo, size: int | None) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise _refusal(archive, f"one with the path {member.name}")
    if not (member.isreg() or (member.isdir() and size is None)):
        raise _refusal(archive, f"{member.name}, which is not a plain file")
    if member.size > _SMALL if size is None else member.size != size:
        raise _refusal(archive, f"{member.name} of {member.size} bytes")


def _refusal(archive: Path, got: str) -> ValueError:
    remedy = "Nothing was unpacked. Pass another mirror."
    return ValueError(complaint(archive.name, "an archive of the set's files alone", got, remedy))
