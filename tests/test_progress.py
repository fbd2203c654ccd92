"""The bar: silent where nobody sees it, on stderr where somebody does."""

import io
import sys
from collections.abc import Iterator

import pytest

from ibnn.progress import Bar, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes stderr one; called in the test, as pytest puts its own there after a fixture."""
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def use(bar: Bar) -> None:
    with bar:
        bar.advance()
        bar.update(done=2, total=4, title="later")
        bar.say("[a line] of 5 words")


def test_without_a_terminal_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("training", 3)
    use(bar)
    assert not bar.drawn
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_is_not_shown_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    bar = Bar("training", 3, shown=False)
    use(bar)
    assert not bar.drawn
    assert terminal.getvalue() == ""


def test_without_rich_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich", None)
    bar = Bar("training", 3)
    use(bar)
    assert not bar.drawn
    assert terminal.getvalue() == ""


def test_a_terminal_sees_title_count_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    pytest.importorskip("rich")
    with Bar("training", 3, done=1) as bar:
        assert bar.drawn
        bar.advance()
        bar.say("[a line] of 5 words")
        bar.update(done=3, total=4, title="later")
    shown = terminal.getvalue()
    assert "training" in shown
    assert "1/3" in shown
    assert "[a line] of 5 words\n" in shown  # no markup
    assert "later" in shown
    assert "3/4" in shown


def test_bytes_are_counted_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    pytest.importorskip("rich")
    with Bar("download", 2_000_000, in_bytes=True) as bar:
        bar.update(done=1_000_000, total=2_000_000)
    assert "1.0/2.0 MB" in terminal.getvalue()


def test_track_yields_all_items_of_any_length_and_counts_them_when_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    pytest.importorskip("rich")
    assert list(track([1, 2, 3], "predict")) == [1, 2, 3]
    assert "3/3" in terminal.getvalue()

    def endless() -> Iterator[int]:
        yield from (4, 5)

    assert list(track(endless(), "stream")) == [4, 5]
    assert "2/?" in terminal.getvalue()


def test_a_bar_is_taken_down_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    pytest.importorskip("rich")
    bar = Bar("training", 3)
    with pytest.raises(ZeroDivisionError), bar:
        _ = 1 / 0
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased
