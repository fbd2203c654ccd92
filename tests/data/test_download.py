import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ibnn.data import get
from ibnn.data.download import RETRIES
from ibnn.data.sets import KNOWN


class Server(ThreadingHTTPServer):
    """Publishes `files`; breaks off the first `breaks` answers in the middle; keeps the paths that were asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.breaks, self.errors = 0, 0
        self.headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(self.path)
        content = server.files.get(self.path)
        if content is None or server.errors:
            server.errors -= content is not None
            return self.send_error(404 if content is None else 503)
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(content))} | server.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if server.breaks:
            server.breaks -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for variable in ("IBNN_MIRROR", "IBNN_DATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    for name in ("mnist", "cifar-100"):
        monkeypatch.setitem(KNOWN, name, KNOWN[name])  # put back after the test
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def files(server: Server) -> dict[str, bytes]:
    """Four files in place of MNIST's, at the publishers' address."""
    made = {name: gzip.compress(bytes(range(256)) * 400 + name.encode()) for name in KNOWN["mnist"].files}
    server.files = {f"/published/{name}": content for name, content in made.items()}
    published = {name: md5(content) for name, content in made.items()}
    KNOWN["mnist"] = KNOWN["mnist"]._replace(url=f"{server.url}/published", files=published)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_registry() -> None:
    for name, entry in KNOWN.items():
        assert (entry.url is None) == (name == "digits")
        assert {Path(path).parent.name for path in entry.members} <= {entry.where}
        digests = [*entry.files.values(), *(digest for _, digest in entry.members.values() if digest)]
        assert all(len(bytes.fromhex(digest)) == 16 for digest in digests)
    assert sum(len(entry.files) for entry in KNOWN.values()) == 10


def test_get(files: dict[str, bytes], server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert get("mnist", tmp_path / "new" / "data") == tmp_path / "new" / "data" / "mnist"
    assert contents(tmp_path / "new" / "data") == {f"mnist/{name}": content for name, content in files.items()}
    assert capfd.readouterr() == ("", "")  # quiet where there is no terminal


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_are_what_the_umask_leaves(
    files: dict[str, bytes], umask: int, mode: int, server: Server, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        get("mnist", tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.gz")} == {mode}


def test_what_is_there_and_right_is_not_downloaded(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    get("mnist", tmp_path)
    server.asked.clear()
    get("mnist", tmp_path)
    assert server.asked == []
    first, second, *_ = files
    (tmp_path / "mnist" / first).write_bytes(b"wrong")
    (tmp_path / "mnist" / second).unlink()
    get("mnist", tmp_path)
    assert server.asked == [f"/published/{first}", f"/published/{second}"]
    assert contents(tmp_path) == {f"mnist/{name}": content for name, content in files.items()}


def test_a_broken_connection_is_tried_again(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.breaks = 2
    get("mnist", tmp_path)
    assert len(server.asked) == 6
    assert contents(tmp_path) == {f"mnist/{name}": content for name, content in files.items()}


def test_files_are_kept_as_published_even_if_their_compression_is_labelled(
    files: dict[str, bytes], server: Server, tmp_path: Path
) -> None:
    server.headers = {"Content-Encoding": "gzip"}  # as Apache says of .gz files
    get("mnist", tmp_path)
    assert contents(tmp_path) == {f"mnist/{name}": content for name, content in files.items()}


def test_a_busy_server_is_asked_again(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.errors = 2
    get("mnist", tmp_path)
    assert len(server.asked) == 6


def test_retries_end(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.breaks = 100
    with pytest.raises(ConnectionError, match="`"):
        get("mnist", tmp_path)
    assert len(server.asked) == 1 + RETRIES
    assert list(tmp_path.iterdir()) == []


def test_no_such_file(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(ConnectionError, match=r"`mirror` .*404") as error:
        get("mnist", tmp_path)
    assert "published/train-images" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_no_server(tmp_path: Path, server: Server) -> None:
    with pytest.raises(ConnectionError, match="`"):
        get("mnist", tmp_path, mirror="http://127.0.0.1:9")
    assert list(tmp_path.iterdir()) == []


def test_wrong_checksum(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    first, second, *_ = files
    server.files[f"/published/{second}"] = b"another file"
    with pytest.raises(ValueError, match=rf"hash of .*{second}"):
        get("mnist", tmp_path)
    assert contents(tmp_path) == {f"mnist/{first}": files[first]}  # what was right stays


def test_mirror(files: dict[str, bytes], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files = {f"/mirror/mnist/{name}": content for name, content in files.items()}
    get("mnist", tmp_path / "a", mirror=f"{server.url}/mirror/")
    monkeypatch.setenv("IBNN_MIRROR", f"{server.url}/mirror")
    monkeypatch.setenv("IBNN_DATA", str(tmp_path / "b"))
    get("mnist")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != {}
    with pytest.raises(ValueError, match="`"):
        get("mnist", tmp_path, mirror="ftp://127.0.0.1")


def test_unknown_and_embedded_sets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`"):
        get("cifar", tmp_path)
    get("digits", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileExistsError, match=str(tmp_path / "file")):
        get("mnist", tmp_path / "file")


# ------------------------------------------------------------------------------------------------------------- archives

TRAIN, TEST = b"a" * 5000, b"b" * 700
GOOD = {"cifar-100-binary/train.bin": TRAIN, "cifar-100-binary/test.bin": TEST, "cifar-100-binary/readme.txt": b"hello"}


def member(name: str, size: int = 0, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size = size
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def archive(files: dict[str, bytes], *extra: tuple[tarfile.TarInfo, bytes]) -> bytes:
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            tar.addfile(member("cifar-100-binary", type=tarfile.DIRTYPE))
            for info, content in [(member(name, len(content)), content) for name, content in files.items()] + [*extra]:
                tar.addfile(info, io.BytesIO(content))
        return buffer.getvalue()


def publish_archive(server: Server, content: bytes) -> None:
    name = "cifar-100-binary.tar.gz"
    server.files = {f"/published/{name}": content}
    members = {"cifar-100-binary/train.bin": (len(TRAIN), None), "cifar-100-binary/test.bin": (len(TEST), md5(TEST))}
    KNOWN["cifar-100"] = KNOWN["cifar-100"]._replace(
        url=f"{server.url}/published", files={name: md5(content)}, members=members
    )


def test_archive(server: Server, tmp_path: Path) -> None:
    publish_archive(server, archive(GOOD))
    expected = {"cifar-100-binary/train.bin": TRAIN, "cifar-100-binary/test.bin": TEST}
    get("cifar-100", tmp_path)
    get("cifar-100", tmp_path)
    assert len(server.asked) == 1
    assert contents(tmp_path) == expected
    for wrong in ("test.bin", "train.bin"):  # another content, another size
        (tmp_path / "cifar-100-binary" / wrong).write_bytes(b"c" * len(TEST))
        get("cifar-100", tmp_path)
        assert contents(tmp_path) == expected
    assert len(server.asked) == 3


def test_checksum_comes_before_unpacking(server: Server, tmp_path: Path) -> None:
    publish_archive(server, archive(GOOD))
    server.files["/published/cifar-100-binary.tar.gz"] = archive({}, (member("../evil", 1), b"x"))
    with pytest.raises(ValueError, match=r"hash of .*cifar-100-binary\.tar\.gz"):
        get("cifar-100", tmp_path)
    assert list(tmp_path.iterdir()) == []
