"""Downloads data sets from their publishers, or a mirror, and checks them before they are put in place."""

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ibnn.data.sets import data_folder, known
from ibnn.errors import complaint
from ibnn.files.atomic import replaced
from ibnn.progress import Bar

RETRIES = 3  # after a failure


def get(name: str, folder: str | Path | None = None, *, mirror: str | None = None, progress: bool = True) -> Path:
    """Downloads a set, unless it is there and its checksums are right, and returns the folder of its files.

    It is put into `folder`, by default IBNN_DATA or `data`. `mirror` is the address of a server with NAME/FILE, by
    default IBNN_MIRROR, in place of the publishers'; checksums stay theirs.
    """
    root, entry = data_folder(folder), known(name)
    place = root / entry.where
    if entry.url is None or all(_right(root / path, md5, size) for path, (size, md5) in entry.kept.items()):
        return place
    mirror = server(mirror)
    url = f"{mirror.rstrip('/')}/{name}" if mirror else entry.url
    root.mkdir(parents=True, exist_ok=True)
    with Bar(name, shown=progress, in_bytes=True) as bar:
        for file, md5 in entry.files.items():
            if not entry.members and _right(place / file, md5):
                continue
            with tempfile.TemporaryDirectory(prefix=".get-", dir=root) as beside:
                archive = _fetched(f"{url}/{file}", file, md5, Path(beside), bar)
                moves = {place / file: archive}
                if entry.members:
                    with tarfile.open(archive) as tar:  # its checksum is right
                        for path in entry.members:
                            tar.extract(path, beside, filter="data")
                    moves = {root / path: Path(beside) / path for path in entry.members}
                with replaced(*moves) as targets:
                    for made, target in zip(moves.values(), targets, strict=True):
                        os.replace(made, target)
    return place


def server(mirror: str | None) -> str | None:
    """Returns the mirror's address: the given one, else IBNN_MIRROR, else None for the publishers'."""
    mirror = mirror or os.environ.get("IBNN_MIRROR")
    if mirror and not mirror.startswith(("http://", "https://")):
        raise ValueError(complaint("mirror", "an http or https address", repr(mirror), "Pass https://…"))
    return mirror


def _right(path: Path, md5: str | None, size: int | None = None) -> bool:
    if not path.is_file() or size not in (None, path.stat().st_size):
        return False
    with open(path, "rb") as file:
        return md5 is None or hashlib.file_digest(file, "md5").hexdigest() == md5


def _fetched(url: str, name: str, md5: str, folder: Path, bar: Bar) -> Path:
    """Downloads a file and returns its path; raises unless it has the checksum."""
    import pooch
    import requests
    from urllib3.exceptions import HTTPError

    def download(url: str, file: str, _: Any) -> None:
        try:
            with requests.get(url, headers={"Accept-Encoding": "identity"}, stream=True, timeout=30) as answer:
                answer.raise_for_status()
                total, done = answer.headers.get("Content-Length"), 0
                with open(file, "wb") as out:
                    for chunk in answer.raw.stream(1 << 16, decode_content=False):  # Apache calls .gz files encoded
                        done += out.write(chunk)
                        bar.update(done=done, total=int(total) if total else None, title=name)
        except HTTPError as error:  # the connection broke
            raise requests.ConnectionError(error) from error

    pooch.get_logger().setLevel("WARNING")
    files = pooch.create(folder, "", registry={name: f"md5:{md5}"}, urls={name: url}, retry_if_failed=RETRIES)
    try:
        return Path(files.fetch(name, downloader=download))
    except requests.RequestException as error:
        code = getattr(error.response, "status_code", None)
        got = f"HTTP {code}" if code else f"{type(error).__name__}: {error}"
        remedy = "Check the connection, or pass another mirror: ibnn data get --mirror, or IBNN_MIRROR."
        raise ConnectionError(complaint("mirror", f"a server that has {url}", got, remedy)) from error
