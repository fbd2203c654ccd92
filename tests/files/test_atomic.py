"""Files that are whole, locks that are left by nobody, and files that cannot be read."""

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from ibnn.files.atomic import locked, read_text, read_toml, remove_leftovers, replaced, write_atomically


def test_a_lock_keeps_others_out_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / ".lock"
    with locked(path) as mine:
        assert mine
        assert path.read_text() == str(os.getpid())
        with locked(path, wait=False) as second:
            assert not second
        assert path.exists()  # who did not get it does not remove it
    assert not path.exists()
    with locked(path):
        (path.parent / "kept").touch()
    assert [p.name for p in path.parent.iterdir()] == ["kept"]


def test_waiting_is_told_once_and_with_the_process(tmp_path: Path) -> None:
    told: list[str] = []
    waits, order = threading.Event(), []

    def second() -> None:
        with locked(tmp_path / ".lock", note=lambda text: (told.append(text), waits.set())):
            order.append("second")

    with locked(tmp_path / ".lock"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    assert told == [f"{tmp_path} is in use: waiting for process {os.getpid()} to finish."]
    assert not list(tmp_path.iterdir())


def _count(folder: Path, times: int) -> None:
    for _ in range(times):
        with locked(folder / "made" / ".lock"):
            path = folder / "count"
            path.write_text(str(int(path.read_text()) + 1))


def test_processes_take_turns_although_the_lock_file_is_removed_each_time(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    spawn = multiprocessing.get_context("fork")
    others = [spawn.Process(target=_count, args=(tmp_path, 200)) for _ in range(4)]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "count").read_text() == "800"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["count"]


def test_a_dead_process_leaves_its_file_but_not_its_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("4194304")
    with locked(tmp_path / ".lock", wait=False) as mine:
        assert mine
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(OSError, match=r"\.lock"), locked(tmp_path / ".lock"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / ".lock").is_symlink()


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    with replaced(tmp_path / "a") as (temporary,):
        name = temporary.name
    for kept in ("a", ".a.tmp", name.replace("a", "b", 1), "a.tmp"):
        (tmp_path / kept).touch()
    (tmp_path / name).touch()
    remove_leftovers(tmp_path, ["a"])
    assert sorted(os.listdir(tmp_path)) == sorted(["a", ".a.tmp", name.replace("a", "b", 1), "a.tmp"])


def test_a_write_replaces_the_content_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a"
    for content in (b"old and long", b"new"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == ["a"]


def test_files_are_replaced_together_after_the_block(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("old")
    with replaced(first, second) as (one, two):
        one.write_text("new")
        one.chmod(0o600)  # as some writers do
        two.write_text("other")
        assert first.read_text() == "old"
        assert not second.exists()
    assert (first.read_text(), second.read_text()) == ("new", "other")
    assert first.stat().st_mode == second.stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def write_half(path: Path) -> None:
        path.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replaced(path, tmp_path / "b") as (one, _):
        write_half(one)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_path_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    with replaced(tmp_path / "a") as (mine,), replaced(tmp_path / "a") as (theirs,):
        assert mine != theirs


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_what_the_umask_leaves(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("content", "read", "words"),
    [
        (b"a = 1\nb = = 2\n", read_toml, "to be TOML, but got an error: Invalid value (at line 2, column 5)"),
        (b"a = 1\nb = ", read_toml, "(at the end, line 2)"),
        (b"\xff", read_text, "to be text in UTF-8"),
        (b"\xff", read_toml, "to be text in UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(content: bytes, read: object, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.file").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.file") as caught:
        read(tmp_path / "a.file")  # type: ignore[operator]
    assert words in str(caught.value)


def test_a_mark_of_byte_order_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_toml(tmp_path / "a.toml") == {"a": 1}
