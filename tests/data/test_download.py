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

from ibnn.data import download, get
from ibnn.data.sets import KNOWN

FOUR_PARTS = r"Expected `.*` to be .*, but got .*\. \w+"


class Server(ThreadingHTTPServer):
    """Publishes `files`; breaks off the first `breaks` answers in the middle; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.breaks, self.errors = 0, 0
        self.ranges = "right"  # or "none", "other", "beyond"
        self.headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append((self.path, wanted))
        content = server.files.get(self.path)
        if content is None or server.errors:
            server.errors -= content is not None
            return self.send_error(404 if content is None else 503)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges != "none" else 0
        if start and server.ranges == "beyond":
            return self.send_error(416)
        shown = start + (1 if start and server.ranges == "other" else 0)
        body = content[shown:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}")
        for name, value in ({"Content-Length": str(len(body))} | server.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if server.breaks:
            server.breaks -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for variable in ("IBNN_MIRROR", "IBNN_DATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.001)
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
    assert [path for path, _ in server.asked] == [f"/published/{first}", f"/published/{second}"]
    assert contents(tmp_path) == {f"mnist/{name}": content for name, content in files.items()}


def test_a_broken_connection_is_taken_up(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.breaks = 2
    get("mnist", tmp_path)
    size = len(next(iter(files.values())))
    half = size // 2
    assert [wanted for _, wanted in server.asked[:3]] == [None, f"bytes={half}-", f"bytes={half + (size - half) // 2}-"]
    assert contents(tmp_path) == {f"mnist/{name}": content for name, content in files.items()}


def test_files_are_kept_as_published_even_if_their_compression_is_labelled(
    files: dict[str, bytes], server: Server, tmp_path: Path
) -> None:
    server.headers = {"Content-Encoding": "gzip"}  # as Apache says of .gz files
    get("mnist", tmp_path)
    assert contents(tmp_path) == {f"mnist/{name}": content for name, content in files.items()}


@pytest.mark.parametrize("ranges", ["none", "other", "beyond"])
def test_servers_without_right_ranges(files: dict[str, bytes], server: Server, tmp_path: Path, ranges: str) -> None:
    server.breaks, server.ranges = 1, ranges
    get("mnist", tmp_path)
    assert contents(tmp_path) == {f"mnist/{name}": content for name, content in files.items()}


def test_a_busy_server_is_asked_again(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.errors = 2
    get("mnist", tmp_path)
    assert len(server.asked) == 6


def test_retries_end(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.breaks = 100
    with pytest.raises(ConnectionError, match=FOUR_PARTS):
        get("mnist", tmp_path, retries=2)
    assert len(server.asked) == 3
    assert list(tmp_path.iterdir()) == []


def test_no_such_file(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(ConnectionError, match="HTTP 404") as error:
        get("mnist", tmp_path)
    assert len(server.asked) == 1  # it will not be there a second later
    assert "published/train-images" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_no_server(tmp_path: Path, server: Server) -> None:
    with pytest.raises(ConnectionError, match=FOUR_PARTS):
        get("mnist", tmp_path, mirror="http://127.0.0.1:9", retries=0)
    assert list(tmp_path.iterdir()) == []


def test_wrong_checksum(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    first, second, *_ = files
    server.files[f"/published/{second}"] = b"another file"
    with pytest.raises(ValueError, match=FOUR_PARTS) as error:
        get("mnist", tmp_path)
    assert second in str(error.value)
    assert contents(tmp_path) == {f"mnist/{first}": files[first]}  # what was right stays


def test_mirror(files: dict[str, bytes], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files = {f"/mirror/mnist/{name}": content for name, content in files.items()}
    get("mnist", tmp_path / "a", mirror=f"{server.url}/mirror/")
    monkeypatch.setenv("IBNN_MIRROR", f"{server.url}/mirror")
    monkeypatch.setenv("IBNN_DATA", str(tmp_path / "b"))
    get("mnist")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != {}
    with pytest.raises(ValueError, match=FOUR_PARTS):
        get("mnist", tmp_path, mirror="ftp://127.0.0.1")


def test_unknown_and_embedded_sets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=FOUR_PARTS):
        get("cifar", tmp_path)
    get("digits", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written(files: dict[str, bytes], server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=FOUR_PARTS):
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


def test_archive_that_was_put_there(server: Server, tmp_path: Path) -> None:
    content = archive(GOOD)
    publish_archive(server, content)
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(content)
    get("cifar-100", tmp_path)
    assert server.asked == []
    assert set(contents(tmp_path)) == {"cifar-100-binary.tar.gz", *KNOWN["cifar-100"].members}


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc"}
HOSTILE = {
    "upwards": archive(GOOD, (member("../evil", 1), b"x")),
    "upwards inside": archive(GOOD, (member("cifar-100-binary/../../evil", 1), b"x")),
    "absolute": archive(GOOD, (member("/tmp/ibnn-evil", 1), b"x")),
    "symlink": archive(GOOD, (member("cifar-100-binary/link", **LINK), b"")),
    "symlink in a member's place": archive({}, (member("cifar-100-binary/train.bin", **LINK), b"")),
    "hard link": archive(GOOD, (member("cifar-100-binary/l", type=tarfile.LNKTYPE, linkname="/etc/passwd"), b"")),
    "device": archive(GOOD, (member("cifar-100-binary/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3), b"")),
    "pipe": archive(GOOD, (member("cifar-100-binary/pipe", type=tarfile.FIFOTYPE), b"")),
    "folder in a member's place": archive({}, (member("cifar-100-binary/train.bin", type=tarfile.DIRTYPE), b"")),
    "oversized member": archive(GOOD | {"cifar-100-binary/train.bin": TRAIN + b"a"}),
    "undersized member": archive(GOOD | {"cifar-100-binary/train.bin": TRAIN[1:]}),
    "oversized readme": archive(GOOD | {"cifar-100-binary/readme.txt": b"0" * (2 << 20)}),
    "missing member": archive({"cifar-100-binary/train.bin": TRAIN}),
    "truncated": archive(GOOD)[:-40],
    "no archive": b"<html>",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives(server: Server, tmp_path: Path, kind: str) -> None:
    publish_archive(server, HOSTILE[kind])
    folder = tmp_path / "deep" / "data"
    with pytest.raises(ValueError, match=FOUR_PARTS) as error:
        get("cifar-100", folder)
    assert "cifar-100-binary.tar.gz" in str(error.value)
    assert contents(tmp_path) == {}
    assert list(folder.iterdir()) == []
    assert not Path("/tmp/ibnn-evil").exists()


def test_checksum_comes_before_unpacking(server: Server, tmp_path: Path) -> None:
    publish_archive(server, archive(GOOD))
    server.files["/published/cifar-100-binary.tar.gz"] = HOSTILE["upwards"]
    with pytest.raises(ValueError, match="md5"):  # not the path
        get("cifar-100", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_second_member_of_the_same_name_is_not_taken(server: Server, tmp_path: Path) -> None:
    again = member("cifar-100-binary/train.bin", len(TRAIN)), b"z" * len(TRAIN)
    publish_archive(server, archive(GOOD, again))
    get("cifar-100", tmp_path)
    assert contents(tmp_path)["cifar-100-binary/train.bin"] == TRAIN
