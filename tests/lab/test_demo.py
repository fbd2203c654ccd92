import functools
import json
import re
from pathlib import Path
from typing import Any

import figures
import pytest

from ibnn import metrics
from ibnn.lab import demo

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"epochs": 3, "samples": 1, "components": 2, "valid_per_class": 13}


def run(out: Path) -> dict[str, Any]:
    """The demo, with few resamples in its intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "bootstrap", functools.partial(metrics.bootstrap, resamples=20))
        return demo.run(out, seed=0, recipe=SMALL)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("demo")
    return out, run(out)


def test_result_file_table_and_figures(ran: tuple[Path, dict[str, Any]]) -> None:
    out, result = ran
    saved = json.loads((out / "results.json").read_text())
    assert saved == result
    rows = demo.table(saved)
    assert [row[0] for row in rows[1:]] == list(demo.NAMES)
    for row, values in zip(rows[1:], saved["metrics"].values(), strict=True):
        assert row[2].startswith(f"{values['nll'][0]:.3f} ")
        assert row[1].startswith(f"{100 * values['error'][0]:.1f} ")
    for name in ("reliability", "novelty"):
        content = (out / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


def test_far_images_are_called_novel_and_known_ones_are_not(ran: tuple[Path, dict[str, Any]]) -> None:
    novelty = ran[1]["novelty"]
    assert list(novelty) == list(demo.KINDS)
    test, unseen, inverted, noise = novelty.values()
    assert test["0.05"] < 0.15  # 80 held-out images
    assert min(inverted["auroc"], noise["auroc"]) > 0.95
    assert unseen["auroc"] > 0.5
    assert test["auroc"] == 0.5
    assert demo.novelty_table(ran[1])[1][1:4] == [f"{100 * test['0.01']:.1f} %", f"{100 * test['0.05']:.1f} %", "–"]


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
    other = run(tmp_path)
    assert other["chosen"] == ran[1]["chosen"]
    assert other["metrics"] != ran[1]["metrics"]


def seeds_markdown(results: list[dict[str, Any]]) -> str:
    """Means over several seeds, and how often the iBNN wins."""
    lines = ["| mean of seeds 300–304 | error % | NLL | ECE | OOD AUROC |", "|---|---|---|---|---|"]
    for name in demo.NAMES:
        means = {m: sum(r["metrics"][name][m][0] for r in results) / len(results) for m in results[0]["metrics"][name]}
        values = (f"{100 * means['error']:.1f}", *(f"{means[m]:.3f}" for m in ("nll", "ece", "ood_auroc")))
        lines.append(f"| {' | '.join((name, *values))} |")
    wins = sum(r["metrics"]["iBNN"]["nll"][0] < r["metrics"]["plain + T"]["nll"][0] for r in results)
    words = f"iBNN has a lower NLL than plain + T on {wins} of {len(results)} seeds."
    return "\n".join([*lines, "", words, ""])


def test_the_results_page_shows_the_committed_result() -> None:
    result = json.loads((ROOT / "experiments" / "results" / "demo.json").read_text())
    block = re.search(
        r"<!-- demo:begin -->\n(.*)<!-- demo:end -->", (ROOT / "docs" / "results.md").read_text(), re.DOTALL
    )
    assert block is not None
    results = json.loads((ROOT / "experiments" / "results" / "demo-seeds.json").read_text())
    figure = "![reliability](figures/demo-reliability.png)\n"
    table, novelty = figures.markdown(demo.table(result)), figures.markdown(demo.novelty_table(result))
    words = f"{table}\n\n{seeds_markdown(results)}\n{figure}"
    assert block[1] == f"{words}\n{novelty}\n\n![novelty](figures/demo-novelty.png)\n"
    assert [r["seed"] for r in (result, *results)] == [0, 300, 301, 302, 303, 304]
    assert all(r["recipe"] == demo.RECIPE for r in (result, *results))
