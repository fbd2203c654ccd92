"""PLAN: how many rows may go through the network, and what for.

Everything together costs at most `PASSES` passes over the held-out rows, or over `LEAST` rows if there are fewer. A row
counts once for every draw it is run with, and three times where a gradient is taken.
"""

import math
from dataclasses import dataclass

PASSES, LEAST = 40, 1000
FIRST = 8  # draws of all held-out rows that are held against temperature scaling, before more of those that disagree
DRAWS, MANY = (8, 16), 2500  # draws of a row in the search, for fewer than so many rows and for more
SWEEP = 8  # scales that the search begins with, at most, on a quarter of what it may cost
MOST_ROWS = 4000  # in the search
BATCH, COPIES, GRADIENT = 32, 4, 3  # rows and draws of one step of the profile, and what its gradient costs


@dataclass(frozen=True)
class Plan:
    """What may be spent, in rows through the network.

    Attributes:
        total: On everything.
        search: On the search, and what comes before it.
        novelty: At the end, on what layers see of all rows.
        samples: Draws per component that all rows are checked with; fewer than answers have if those are too many.
        rows: That the search begins with.
        draws: Of each row in the search.
        steps: Of the profile; 0 if it is not wanted.
    """

    total: int
    search: int
    novelty: int
    samples: int
    rows: int
    draws: int
    steps: int


def plan(rows: int, *, components: int, samples: int, trained: bool, steps: int, batch_size: int) -> Plan:
    """Divides the passes among the search, its profile, and the check of all rows.

    Args:
        rows: How many are held out.
        components: K.
        samples: S, draws per component of answers.
        trained: Whether components differ, so that even an answer without noise takes K passes.
        steps: Most steps of the profile; 0 if it is not wanted.
        batch_size: Of the network's passes.

    >>> plan(5000, components=8, samples=5, trained=False, steps=80, batch_size=256)
    Plan(total=200000, search=114216, novelty=5784, samples=1, rows=153, draws=16, steps=80)
    """
    total, first = PASSES * max(rows, LEAST), samples
    if 4 * components * samples * rows > total:  # two checks with all draws would take more than half of it
        first = min(samples, math.ceil(FIRST / components))
    looked = components * first  # draws of every row in a check
    check = looked + (looked if first == samples else max(looked, FIRST))
    before = components + looked if trained else 1
    novelty = rows + 3 * min(batch_size, rows) + 16
    left = max(total - (check + before) * rows - novelty, 6 * rows)
    step = GRADIENT * BATCH * COPIES
    steps = min(steps, max(left // 3 // step, 1))
    draws = DRAWS[rows >= MANY]
    few = max(1, (left - steps * step) // 4 // (SWEEP * draws))
    return Plan(total, left + before * rows, novelty, first, min(few, rows, MOST_ROWS // 4), draws, steps)
