"""Adapts the level of sets and intervals to a stream that drifts, so that in the long run they cover as promised."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint
from ibnn.metrics import real


class AdaptiveLevel:
    """A level for sets and intervals that follows how often they covered (Gibbs and Candès, 2021).

    Sets that cover with probability 0.9 do so for inputs like the held-out ones. On a stream that drifts, ask for
    `adaptive.level` in place of 0.9, and report whether the target was covered once it is known:

        level ← level + rate · (target − 1)  if it was covered,  level + rate · target  if it was missed,

    with `target` the coverage that is wanted. So the level rises after a miss. Whatever the stream does, even if it is
    chosen against you, the share covered of T reported targets is within (1 + rate · (d + 1)) / (rate · T) of `target`.
    Here d is the largest number of answers that were given after an answer and before its target was reported.

    Targets may arrive late and in any order: until then the level stays, and only d grows. Targets that never arrive
    change nothing, and nothing is promised for their answers. The promise is an average over time, not one for each
    input. A level of 1 asks for all classes or an infinite interval: then calibrate again. `seen` is the number of
    reported targets, and `covered` how many of them were covered: keep both to go on in another process.

    >>> adaptive = AdaptiveLevel(0.9, rate=0.05)
    >>> adaptive.update([True, True, False])
    >>> round(adaptive.level, 3), adaptive.coverage
    (0.935, 0.6666666666666666)
    """

    def __init__(self, target: float = 0.9, *, rate: float = 0.01) -> None:
        """Starts at the level that is wanted.

        Args:
            target: Share of targets that sets or intervals are to cover in the long run.
            rate: Step size. A larger one follows a change sooner, and its levels vary more.
        """
        check.share("target", target, remedy="Pass target=0.9.")
        check.number("rate", rate, above=0, below=1, remedy="Pass rate=0.01.")
        self.target, self.rate = target, rate
        self.seen = self.covered = 0

    @property
    def level(self) -> float:
        """The level to ask for next, from 0 to 1."""
        return min(max(self.target + self.rate * (self.seen * self.target - self.covered), 0.0), 1.0)

    @property
    def coverage(self) -> float:
        """Share of the reported targets that were covered; nan without any."""
        return self.covered / self.seen if self.seen else float("nan")

    def update(self, covered: Tensor | Sequence[bool]) -> None:
        """Takes whether the answers that were given covered their targets, (N,), as they become known."""
        found = real("covered", covered)
        if found.dtype != torch.bool or found.dim() != 1:
            got = f"{found.dtype} of shape {tuple(found.shape)}"
            raise ValueError(complaint("covered", "booleans of shape (N,)", got, "Pass (low <= y) & (y <= high)."))
        self.seen += len(found)
        self.covered += int(found.sum())
