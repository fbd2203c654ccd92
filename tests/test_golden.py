"""Every answer is what it was when `golden.json` was written; `python tests/golden.py --write` writes it anew."""

import json

import golden
import pytest

EXPECTED = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("group", golden.GROUPS)
def test_answers_are_unchanged(group: str) -> None:
    found, expected = golden.GROUPS[group](), EXPECTED[group]
    assert found.keys() == expected.keys()
    relative = golden.TOLERANCES.get(group, 1e-6)
    near = {
        name: pytest.approx(value, rel=relative, abs=relative / 10, nan_ok=True) for name, value in expected.items()
    }
    changed = {name: (found[name], expected[name]) for name, value in near.items() if found[name] != value}
    assert not changed


def test_there_are_enough_numbers() -> None:
    assert set(EXPECTED) == set(golden.GROUPS)
    assert sum(map(len, EXPECTED.values())) >= 45
