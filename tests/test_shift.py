"""The shift monitor: exact ranks, wealth against its definition, false alarms below what is stated, shifts found."""

import itertools
import json
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from ibnn.monitoring import shift
from ibnn.monitoring.shift import POWERS, ShiftMonitor
from ibnn.normal import address, words


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tie(seed: int, number: int) -> float:
    return (words(address(seed, 6, number)).item() + 0.5) / 2**32


def test_p_values_against_counting() -> None:
    scores = torch.randint(0, 12, (60,), generator=torch.Generator().manual_seed(0)).double()  # many ties
    found = ShiftMonitor(scores[:20], seed=3).update(scores[20:])
    for number, p in enumerate(found.tolist()):
        before, score = scores[: 20 + number], scores[20 + number]
        above, equal = int((before > score).sum()), int((before == score).sum())
        assert p == pytest.approx((above + tie(3, number) * (equal + 1)) / (21 + number), abs=1e-15)


def test_ranks_are_independent_and_uniform_over_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calibration scores, two of the stream, 24 orders: every pair of ranks comes twice."""
    monkeypatch.setattr(shift, "fewest_scores", lambda false_alarm: 1)
    pairs = Counter()
    for order in itertools.permutations([1.0, 2.0, 3.0, 4.0]):
        first, second = ShiftMonitor(order[:2]).update(order[2:]).tolist()
        pairs[int(first * 3), int(second * 4)] += 1
    assert pairs == {(a, b): 2 for a in range(3) for b in range(4)}


def test_wealth_against_its_definition() -> None:
    scores = normal(45, seed=1)
    monitor = ShiftMonitor(scores[:30])
    p = monitor.update(scores[30:] + 0.5).tolist()
    n, wealth, highest = len(p), 0.0, 0.0
    for m in range(n + 1):
        wealth = 1 / (m + 1)
        for k in range(1, m + 1):
            for power in POWERS:
                for side in (p[k - 1 : m], [1 - q for q in p[k - 1 : m]]):
                    grown = math.prod(power * q ** (power - 1) for q in side)
                    wealth += grown / (k * (k + 1)) / (2 * len(POWERS))
        highest = max(highest, wealth)
    assert math.exp(monitor.log_wealth) == pytest.approx(wealth, rel=1e-12)
    assert monitor.p_value == pytest.approx(1 / highest, rel=1e-12)


def test_p_values_of_the_stream_are_uniform_and_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift, "fewest_scores", lambda false_alarm: 1)
    streams = [ShiftMonitor(s[:5], seed=i).update(s[5:]) for i, s in enumerate(normal(600, 15, seed=2))]
    p = torch.stack(streams) - 0.5  # (600, 10)
    assert p.mean().abs() < 4 / math.sqrt(12 * p.numel())
    covariance = (p.T @ p / len(p))[~torch.eye(10, dtype=torch.bool)]
    assert covariance.abs().max() < 4.5 / 12 / math.sqrt(len(p))
    assert covariance.mean().abs() < 4 / 12 / math.sqrt(len(p) * 45)  # among a fixed set it would be near 1 / 12 / 7


@pytest.mark.parametrize("ties", [False, True])
def test_false_alarms_are_as_rare_as_stated(ties: bool) -> None:
    alpha, streams = 0.25, 300
    scores = normal(streams, 110, seed=3 + ties)
    if ties:
        scores = scores.clamp_min(0.5).mul(4).round()
    rang = 0
    for number, stream in enumerate(scores):
        monitor = ShiftMonitor(stream[:10], false_alarm=alpha, seed=number)  # few: its accidents matter
        monitor.update(stream[10:])
        rang += monitor.alarm is not None
    assert 0 < rang / streams <= alpha + 4 * math.sqrt(alpha * (1 - alpha) / streams)


@pytest.mark.parametrize(("calm", "most"), [(0, 30), (1500, 60)])
@pytest.mark.parametrize("sign", [1, -1])
def test_shifts_are_found_soon_even_late(calm: int, most: int, sign: int) -> None:
    scores = normal(300 + calm + 80, seed=5)
    monitor = ShiftMonitor(scores[:300], false_alarm=0.001)
    monitor.update(scores[300 : 300 + calm])
    assert monitor.alarm is None
    monitor.update(scores[300 + calm :] + 2 * sign)
    assert monitor.alarm is not None
    assert calm < monitor.alarm <= calm + most
    assert monitor.direction == ("higher" if sign > 0 else "lower")
    assert monitor.p_value <= 0.001


def test_order_of_calibration_and_size_of_pieces_change_nothing() -> None:
    scores = normal(80, seed=6)
    whole, pieces = ShiftMonitor(scores[:40]), ShiftMonitor(scores[:40].flip(0))
    expected = whole.update(scores[40:])
    found = torch.cat([pieces.update(part) for part in scores[40:].split(7)])
    assert torch.equal(found, expected)
    assert pieces.state() == whole.state()


@pytest.mark.parametrize("seen", [0, 25])
def test_a_restored_monitor_goes_on_exactly(seen: int) -> None:
    scores = normal(120, seed=7)
    monitor = ShiftMonitor(scores[:50], false_alarm=0.05, seed=9)
    monitor.update(scores[50 : 50 + seen])
    restored = ShiftMonitor.restored(json.loads(json.dumps(monitor.state(), allow_nan=False)))
    assert restored.log_wealth == monitor.log_wealth
    rest = scores[50 + seen :] + 1
    assert torch.equal(restored.update(rest), monitor.update(rest))
    assert restored.state() == monitor.state()
    assert monitor.alarm is not None


def test_the_bag_stays_small() -> None:
    monitor = ShiftMonitor(normal(3000, seed=8).exp())
    monitor.update(normal(3000, seed=9).exp())
    assert len(monitor.state()["values"]) < 1200
    assert sum(monitor.state()["counts"]) == 6000


def test_rounding_keeps_eight_binary_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift, "fewest_scores", lambda false_alarm: 1)
    monitor = ShiftMonitor([1.0, 1.0 + 2**-7, 1.0 + 2**-9, -3.3e-5, 0.0])
    assert monitor.state()["values"] == [pytest.approx(-3.3e-5, rel=2**-8), 0.0, 1.0, 1.0 + 2**-7]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShiftMonitor([]), "at least 16 scores for false_alarm=0.01, but got 0"),
        (lambda: ShiftMonitor([1.0, 2.0, 3.0]), "at least 16 scores for false_alarm=0.01, but got 3. With fewer"),
        (lambda: ShiftMonitor([1.0] * 19, false_alarm=0.001), "at least 20 scores for false_alarm=0.001, but got 19"),
        (lambda: ShiftMonitor([[1.0]]), "of shape (N,), but got shape (1, 1)"),
        (lambda: ShiftMonitor([1.0, math.nan]), "finite, but got nan"),
        (lambda: ShiftMonitor([1.0], false_alarm=1.0), "`false_alarm`"),
        (lambda: ShiftMonitor([1.0], seed=-1), "`seed`"),
        (lambda: ShiftMonitor([1.0] * 16).update([math.inf]), "`scores` to be finite, but got inf"),
        (lambda: ShiftMonitor.restored({"values": [1.0]}), "what `state()` returned"),
        (lambda: ShiftMonitor.restored(ShiftMonitor([1.0] * 16).state() | {"counts": [1, 2]}), "do not fit"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


@pytest.mark.parametrize("scores", [None, "a", object(), [None], [1.0, "a"], {}])
def test_scores_of_another_kind_are_refused(scores: Any) -> None:
    with pytest.raises(TypeError, match="`calibration`"):
        ShiftMonitor(scores)
    with pytest.raises(TypeError, match="`scores`"):
        ShiftMonitor([1.0] * 16).update(scores)


@pytest.mark.parametrize("alpha", [pytest.param(0.25, marks=pytest.mark.slow), 0.01])
def test_as_many_scores_as_are_needed_show_a_complete_shift(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The p-values are those of the derivation; it rings as often as stated, and with three scores much less."""
    needed, streams, length = shift.fewest_scores(alpha), 100, 400
    monkeypatch.setattr(shift, "fewest_scores", lambda false_alarm: 1)
    rang = {}
    for count in (3, needed):
        scores = normal(streams, count + length, seed=11)
        scores[:, count:] += 100
        monitors = [ShiftMonitor(s[:count], false_alarm=alpha, seed=number) for number, s in enumerate(scores)]
        p = torch.stack([m.update(s[count:]) for m, s in zip(monitors, scores, strict=True)])
        bound = torch.arange(1, length + 1) / (torch.arange(1, length + 1) + count)
        assert (p < bound).all()
        assert abs((p / bound).mean() - 0.5) < 4 / math.sqrt(12 * p.numel())  # uniform below it
        rang[count] = sum(m.alarm is not None for m in monitors) / streams
    assert rang[needed] > 0.9 - 4 * math.sqrt(0.9 * 0.1 / streams)
    assert rang[3] < rang[needed] / 2


def test_a_restored_monitor_of_few_distinct_scores_goes_on() -> None:
    monitor = ShiftMonitor([1.0] * 10 + [2.0] * 10)
    assert ShiftMonitor.restored(monitor.state()).state() == monitor.state()


def test_a_refused_score_changes_nothing() -> None:
    monitor = ShiftMonitor(normal(20, seed=0))
    before = json.dumps(monitor.state())
    with pytest.raises(ValueError, match="finite"):
        monitor.update([0.5, math.nan])
    assert json.dumps(monitor.state()) == before
