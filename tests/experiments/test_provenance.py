import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import provenance
import pytest

import ibnn


def commit() -> str | None:
    """The commit as a new process would see it."""
    provenance.commit.cache_clear()
    return provenance.commit()


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of the library, where it takes itself to be."""
    path = tmp_path / "inside" / "__init__.py"
    path.parent.mkdir()
    shutil.copyfile(ibnn.__file__, path)
    monkeypatch.setattr(ibnn, "__file__", str(path))
    yield path
    provenance.commit.cache_clear()


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_the_commit_is_that_of_the_code_and_a_change_is_marked(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):  # as in a hook
        monkeypatch.delenv(name, raising=False)
    git(copied.parent, "init", "-q", "..")
    assert commit() is None  # installed below a repository
    git(copied.parent, "commit", "-q", "--allow-empty", "-m", "first")
    assert commit() is None
    git(copied.parent, "add", ".")
    git(copied.parent, "commit", "-q", "-m", "second")
    head = git(copied.parent, "rev-parse", "HEAD")[:12]
    assert commit() == head
    copied.write_text(copied.read_text() + "\n")
    assert commit() == f"{head}+"


def test_nothing_is_known_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() is None
    assert provenance.provenance()["python"]
    provenance.commit.cache_clear()
