"""Detects when inputs no longer look like those the model was checked on, by a test that may run forever.

Every input has a score, such as its epistemic uncertainty, and a p-value among all scores so far. A *test martingale*
bets on these p-values being uneven: while the inputs are exchangeable with the calibration set no strategy can be
expected to win, so the probability that wealth ever reaches 1/α by chance is at most α (Ville's inequality).
"""

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint
from ibnn.metrics import real
from ibnn.normal import Space, address, words

POWERS = (0.1, 0.3, 0.5, 0.7, 0.9)  # ε of the bets ε p^(ε−1): strong shifts first
_BITS = 8  # of a score that count: equal scores are stored once, so memory stays small however long the stream


class ShiftMonitor:
    """Compares a stream of scores with calibration scores; ever raises a false alarm with probability ≤ `false_alarm`.

    The n-th score has the p-value

        p = (#{scores before it that are higher} + u · (1 + #{equal ones})) / (1 + #{scores before it}),

    where the calibration scores come before all others and u is uniform. If calibration scores and stream are
    exchangeable, the p-values are *exactly* uniform and independent. (Scores are rounded to 8 binary digits first.)

    Wealth starts at 1. At step k the share 1 / (k (k+1)) is staked on "the stream has shifted from here on", evenly on
    the bets ε p^(ε−1) (scores have risen) and ε (1−p)^(ε−1) (they have fallen), and stays invested from then on:

        wealth = 1 / (n+1) + Σ_k 1 / (k (k+1)) · mean over the bets of Π_{i=k…n} bet(p_i).

    So a late shift takes about 2 log k nats more evidence than an early one. A shifted stream becomes its own reference
    after a while: calibration scores must be enough to show the shift before that (`fewest_scores`).

    `seen` is n. `alarm` is the number of the score that raised the alarm, counted from 1, or None so far. `log_wealth`
    and `log_peak` are logs of the present wealth and of the highest so far.

    >>> calm = torch.rand(500, generator=torch.Generator().manual_seed(0))
    >>> monitor = ShiftMonitor(calm[:300], false_alarm=0.01)
    >>> monitor.update(calm[300:]).shape, monitor.alarm
    (torch.Size([200]), None)
    >>> p = monitor.update(torch.full((20,), 0.99))
    >>> monitor.alarm, monitor.direction
    (209, 'higher')
    """

    alarm: int | None
    _counts: list[int]  # of `_values`: distinct scores, ascending
    _size: int  # sum of the counts

    def __init__(self, calibration: Tensor | Sequence[float], *, false_alarm: float = 0.01, seed: int = 0) -> None:
        """Takes the calibration scores.

        Args:
            calibration: Scores of inputs that the model was not trained on, (N,). A few hundred reveal shifts soon;
                fewer than `fewest_scores(false_alarm)` are refused.
            false_alarm: α, the probability of ever raising the alarm, at wealth 1/α, although nothing has shifted.
            seed: Decides how ties are broken.
        """
        scores = Counter(_checked(calibration, "calibration"))
        values = sorted(scores)
        self._set(false_alarm, seed, 0, None, 0.0, None, values, [scores[value] for value in values])
        if self._size < (fewest := fewest_scores(false_alarm)):
            wanted = f"at least {fewest} scores for false_alarm={false_alarm}"
            remedy = "With fewer, even a complete shift would rarely raise the alarm. Pass more held-out scores."
            raise ValueError(complaint("calibration", wanted, self._size, remedy))

    def _set(
        self, false_alarm: Any, seed: Any, seen: Any, alarm: Any, log_peak: Any, stakes: Any, values: Any, counts: Any
    ) -> None:
        check.share("false_alarm", false_alarm, remedy="Pass false_alarm=0.01.")
        check.seed(seed)
        self.false_alarm, self.seed, self.seen, self.alarm, self.log_peak = false_alarm, seed, seen, alarm, log_peak
        self._stakes = list(stakes or [-math.inf] * (2 * len(POWERS)))  # log of each bet: those on a rise first
        self.log_wealth = _log_sum([-math.log(seen + 1), *self._stakes])
        self._values, self._counts = _checked(values, "values"), list(counts)
        self._size = sum(counts)
        if len(self._values) != len(counts):
            raise ValueError("counts that do not fit the values")

    @property
    def direction(self) -> Literal["higher", "lower"]:
        """Whether the scores have risen or fallen, according to the bets."""
        half = len(POWERS)
        return "higher" if _log_sum(self._stakes[:half]) >= _log_sum(self._stakes[half:]) else "lower"

    @property
    def p_value(self) -> float:
        """The p-value of the whole stream, valid at any time: 1 / the highest wealth so far."""
        return math.exp(-self.log_peak)

    def update(self, scores: Tensor | Sequence[float]) -> Tensor:
        """Takes the next scores of the stream; returns their p-values, (N,) float64: small for a high score."""
        stream = _checked(scores, "scores")
        index = torch.arange(self.seen, self.seen + len(stream))
        ties = (words(address(self.seed, Space.TIES, index)).double() + 0.5) / 2**32
        return torch.tensor([self._next(*each) for each in zip(stream, ties.tolist(), strict=True)], dtype=torch.double)

    def _next(self, score: float, u: float) -> float:
        place = bisect_left(self._values, score)
        if place == len(self._values) or self._values[place] != score:
            self._values.insert(place, score)
            self._counts.insert(place, 0)
        self._counts[place] += 1
        self._size += 1
        p: float = (sum(self._counts[place + 1 :]) + u * self._counts[place]) / self._size
        self.seen = k = self.seen + 1
        new = -math.log(k) - math.log(k + 1) - math.log(len(self._stakes))
        logs = [math.log(p)] * len(POWERS) + [math.log1p(-p)] * len(POWERS)
        bets = [math.log(power) + (power - 1) * log_p for log_p, power in zip(logs, POWERS * 2, strict=True)]
        self._stakes = [_log_sum([stake, new]) + bet for stake, bet in zip(self._stakes, bets, strict=True)]
        self.log_wealth = _log_sum([-math.log(k + 1), *self._stakes])
        self.log_peak = max(self.log_peak, self.log_wealth)
        if self.alarm is None and self.log_wealth >= -math.log(self.false_alarm):
            self.alarm = k
        return p

    def state(self) -> dict[str, Any]:
        """Returns everything as plain data for JSON; `restored` continues with the very same numbers."""
        own = {name: getattr(self, name) for name in ("false_alarm", "seed", "seen", "alarm", "log_peak")}
        return own | {"stakes": self._stakes if self.seen else None, "values": self._values, "counts": self._counts}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Returns the monitor whose `state` this is."""
        monitor = cls.__new__(cls)
        try:
            monitor._set(**state)
        except (TypeError, ValueError) as error:
            got, remedy = f"{type(error).__name__}: {error}", "Make a new monitor from calibration scores."
            raise ValueError(complaint("state", "what `state()` returned", got, remedy)) from error
        return monitor


def fewest_scores(false_alarm: float) -> int:
    """Returns how many calibration scores a monitor needs to find a complete and lasting shift.

    If every score of the stream is above all N calibration scores, its n-th p-value is uniform on (0, n / (N + n)),
    and the expected logarithm of the bet ε p^(ε−1) is log ε + (1 − ε) (1 + log((N + n) / n)), at first positive. N
    suffices if the positive terms of the best ε add up to log(20/α): the first step stakes 1/2 on ten bets. A complete
    shift then raises the alarm in about nine of ten streams; with twice as many scores nearly always.

    >>> [fewest_scores(alpha) for alpha in (0.25, 0.05, 0.01, 0.001)]
    [10, 13, 16, 20]
    """

    def gained(power: float, scores: int) -> float:
        gains = (math.log(power) + (1 - power) * (1 + math.log((scores + n) / n)) for n in itertools.count(1))
        return sum(itertools.takewhile(lambda gain: gain > 0, gains))

    needed = math.log(2 * 2 * len(POWERS) / false_alarm)
    return next(n for n in itertools.count(1) if max(gained(power, n) for power in POWERS) >= needed)


def _checked(scores: Tensor | Sequence[float], name: str) -> list[float]:
    """Returns rounded scores; raises unless they are finite and of shape (N,)."""
    found = real(name, scores).double()
    check.shape(name, found, ("N",), remedy="Pass one score for each input.")
    if not found.isfinite().all():
        got = found[~found.isfinite()][0].item()
        raise ValueError(complaint(name, "finite", got, "Leave out inputs that have no score."))
    fraction, exponent = torch.frexp(found)
    rounded: list[float] = torch.ldexp((fraction * 2**_BITS).round(), exponent - _BITS).tolist()
    return rounded


def _log_sum(logs: Sequence[float]) -> float:
    """Returns log Σ exp(logs), also where some, or all, are minus infinity."""
    top = max(logs)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in logs))
