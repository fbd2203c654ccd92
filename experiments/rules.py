"""The rule of steering: where s starts, how fast it moves, and whether the image itself has noise.

    IBNN_DATA=FOLDER python experiments/rules.py [--cells lenet-1] [--rules "as it is" …] [--seeds 0 1]

As `form.py`, whose cells these are: all data are training images, and a part that nothing has seen is scored, clean
and corrupted, so the rule may be chosen by it. A rule is a set of constants in place of those of `ibnn`, which the
file states. *lenet-1* is the LeNet of the benchmark, *slow* the network *small* without BatchNorm. Writes
results/rules.json. Its rules *later*, in which confidence and gap may lag behind early in training
(by `LAG` and `BEHIND`), are of the commits that it names; they were not adopted.
"""

import argparse
import contextlib
from functools import partial
from typing import Any
from unittest import mock

from common import Results
from form import CELLS, METHODS, Cell, run, small

from ibnn import noise
from ibnn.nets import LeNet
from ibnn.training import loop, steering

CELLS = CELLS | {
    "lenet-1": Cell(LeNet, "fashion-mnist", (5000, 1000, 4000), 60),
    "slow": Cell(partial(small, normalised=False), "cifar-10", (8000, 1000, 2000), 15, 1e-3, flips=True),
}
RULES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "start 1": {"START": 1.0},
    "image 0.5": {"TRAINED": 0.5},
    "image 1": {"TRAINED": 1.0},
    "start 1, image 0.5": {"START": 1.0, "TRAINED": 0.5},
    "channels 1": {"CHANNELS": 1.0},
    **{f"fixed {std}": {"START": std / 0.3, "RISE": 0.0, "FALL": 0.0} for std in (0.1, 0.2, 0.3, 0.45)},
    "start 1, underfit 0": {"START": 1.0, "UNDERFIT": 0.0},
    "start 1, underfit 0.1": {"START": 1.0, "UNDERFIT": 0.1},
    "start 1, first 0.5": {"START": 1.0, "FIRST": 0.5},
    "start 1, first 0.5, image 0.5": {"START": 1.0, "FIRST": 0.5, "TRAINED": 0.5},
    "start 1, gap 0.1": {"START": 1.0, "GAP": 0.1},
    "looks 0.4": {"BUDGET": 0.4},
}
WHERE: dict[str, Any] = {"TRAINED": noise, "CHANNELS": noise, "START": loop}


def ruled(cell: Cell, rule: dict[str, Any], seed: int, method: str) -> dict[str, Any]:
    """Trains by a rule, and scores."""
    with contextlib.ExitStack() as stack:
        for name, value in rule.items():
            stack.enter_context(mock.patch.object(WHERE.get(name, steering), name, value))
        return {"constants": rule} | run(cell, METHODS[method], seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--method", choices=METHODS, default="both, K = 8")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = Results("rules", str(__doc__))
    for seed in options.seeds:
        for name in options.cells:
            for rule in options.rules:
                given = partial(ruled, CELLS[name], RULES[rule], seed, options.method)
                results.run(f"{name} {options.method}, {rule} {seed}", given)
