import json
import re
from pathlib import Path
from typing import Any

import pytest

from ibnn.lab import demo

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"epochs": 3, "samples": 1}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("demo")
    return out, demo.run(out, seed=0, recipe=SMALL)


def test_result_file_table_and_figures(ran: tuple[Path, dict[str, Any]]) -> None:
    out, result = ran
    saved = json.loads((out / "results.json").read_text())
    assert saved == result
    rows = demo.table(saved)
    assert [row[0] for row in rows[1:]] == list(demo.NAMES)
    for row, values in zip(rows[1:], saved["metrics"].values(), strict=True):
        assert row[2].startswith(f"{values['nll'][0]:.3f} ")
        assert row[1].startswith(f"{100 * values['error'][0]:.1f} ")
    for name in ("reliability", "digits", "entropy"):
        content = (out / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


def test_quiet_leaves_the_table(
    ran: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", lambda *_, **options: asked.append(options) or ran[1])
    asked: list[dict[str, Any]] = []
    told = []
    for words in (["--quiet"], []):
        assert demo.main(words) == 0
        told.append(capsys.readouterr().out)
    assert asked == [{"quiet": True}, {"quiet": False}]
    assert told[1].startswith(told[0])
    assert "Look at" in told[1].removeprefix(told[0])
    assert told[0].rstrip()[-1] == "┘"


def test_splits_are_disjoint_and_leave_the_held_out_classes_out() -> None:
    train, valid, test, ood = demo.load_splits(0, demo.RECIPE)
    keys = [{tuple(row) for row in part.x.flatten(1).tolist()} for part in (train, valid, test)]
    assert not keys[0] & (keys[1] | keys[2])
    assert not keys[1] & keys[2]
    assert (len(train.y), len(valid.y)) == (80, 240)
    assert all(int(part.y.max()) == 7 for part in (train, valid, test))
    assert len(train.y) + len(valid.y) + len(test.y) + len(ood) == 1797


@pytest.mark.slow
def test_choices_never_look_at_test_labels(
    ran: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(seed: int, recipe: dict[str, Any]) -> Any:
        train, valid, test, ood = original(seed, recipe)
        return train, valid, test._replace(y=(test.y + 1) % 8), ood

    original = demo.load_splits
    monkeypatch.setattr(demo, "load_splits", spoiled)
    other = demo.run(tmp_path, seed=0, recipe=SMALL)
    assert other["chosen"] == ran[1]["chosen"]
    assert other["metrics"] != ran[1]["metrics"]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setattr(demo, "run", missing)
    assert demo.main([]) == 1
    assert "pip install 'ibnn[demo,train]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--seed", "-1"], "--seed must be"), (["--out", __file__], "--out must be")]
)
def test_bad_arguments_are_refused_before_training(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.main(arguments)
    assert words in capsys.readouterr().err


def test_the_results_page_shows_the_committed_result() -> None:
    result = json.loads((ROOT / "experiments" / "results" / "demo.json").read_text())
    block = re.search(
        r"<!-- demo:begin -->\n(.*)<!-- demo:end -->", (ROOT / "docs" / "results.md").read_text(), re.DOTALL
    )
    assert block is not None
    results = json.loads((ROOT / "experiments" / "results" / "demo-seeds.json").read_text())
    figure = "![reliability](figures/demo-reliability.png)\n"
    assert block[1] == f"{demo.markdown(result)}\n{demo.seeds_markdown(results)}\n{figure}"
    assert [r["seed"] for r in (result, *results)] == [0, 300, 301, 302, 303, 304]
    assert all(r["recipe"] == demo.RECIPE for r in (result, *results))
