"""What the command line prints and writes of names that others chose."""

import pytest

from ibnn.app.cli.predict import _cell
from ibnn.app.cli.screen import Screen


def test_names_are_neither_formulas_nor_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    safe = {"=1+1": "'=1+1", "@a": "'@a", "-1": "-1", "+2.5": "+2.5", "cat": "cat", "\x1b[2J": "\\x1b[2J"}
    assert {name: _cell(name) for name in safe} == safe
    screen = Screen(quiet=False)
    screen.note("\x1b[2J")
    screen.error("\x9b2J")
    screen.table([["\x1b[1ma"], ["\x1b[2Jb"]])
    assert not {"\x1b", "\x9b"} & set("".join(capsys.readouterr()))
