"""STRENGTH: how strong the noise of training should be, told by held-out labels while training goes on.

Training is looked at now and then. A network wants more noise if it is more confident on held-out data than it is right
(the temperature T that would mend its held-out NLL is above 1), and less if T is below 1; it may be a little
underconfident where it fits the training data, noise and all, much better than held-out data. The prior's standard
deviation s follows. The KL gets a fixed weight per node and datum (`GRIP`), so that s means the same noise for 200 and
for 20,000 nodes, for 1,000 and for 1,000,000 examples; `prior_std` as converted is where s starts.
"""

import math

from ibnn.likelihood import Likelihood

FIRST, LAST, LOOKS = 0.2, 0.9, 25  # shares of training before the first and the last look, and how many there are
GAIN, RISE, FALL = 0.5, 0.25, 0.06  # log s moves by so much of what the network wants, and no further up or down
FIT = 0.6  # a training NLL below this share of the held-out one is too good
SHY = 0.5  # then log T may be so far below 0
WEAKER = (1.0, 0.7, 0.5, 0.35, 0.25)  # factors on σ that are tried at the end, in turn, where T is below 1
WEAKEST, STRONGEST = 0.02, 1.5  # bounds of s
SHARE, FEWEST_LOOKS = 0.6, 6  # of the training's forward passes that looks may add, but so many looks there are
GRIP = 20.0  # weight of the KL, in nats per datum for a nat per node
ROWS, DRAWS = 1000, 8  # a look takes so many held-out examples, and at least so many draws of each
FEWEST, FEWEST_HELD_OUT = 500, 100  # training examples there must be to hold some out, and held-out ones to steer by


def look_steps(total: int, looks: int | None = None) -> frozenset[int]:
    """The steps before which training is looked at.

    >>> sorted(look_steps(1000))[:3]
    [200, 229, 258]
    """
    looks = looks or LOOKS
    steps = (int(total * (FIRST + (LAST - FIRST) * look / max(looks - 1, 1))) for look in range(looks))
    return frozenset(step for step in steps if step)  # something must have been seen


def afford(training_rows: int, held_out: int) -> tuple[int, int]:
    """How many looks, and how many held-out examples each: their forward passes are at most `SHARE` of the training's.

    That is with `DRAWS` draws of each; more than `DRAWS` components make a draw each, and as many more passes.

    >>> afford(30_000, 2_000), afford(1_000_000, 2_000)
    ((9, 250), (25, 1000))
    """
    budget = SHARE * training_rows / DRAWS  # held-out examples in all
    looks = min(max(int(budget / min(held_out, ROWS // 4)), FEWEST_LOOKS), LOOKS)
    return looks, min(max(int(budget / looks), ROWS // 4), ROWS)


def grip(t: float, *, n_data: int, nodes: int) -> float:
    """β when the share t of training is done: it has risen to `GRIP` per node and datum by the first look."""
    return GRIP * n_data / nodes * min(1.0, t / FIRST)


def wish(likelihood: Likelihood, *, temperature: float, training_nll: float, held_out_nll: float) -> float:
    """How much more noise a network wants: the logarithm of a factor, negative for less.

    It is log T, and more if the training data are fitted too well: a network that overfits is steered to be
    underconfident (down to T = e^-`SHY`), because noise lowers its error and a temperature mends its confidence.

    Args:
        likelihood: Says whether NLLs are compared by ratio (of probabilities) or by difference (of densities).
        temperature: T that mends the held-out NLL best, over the present one.
        training_nll: Of single draws, as in the training loss.
        held_out_nll: Of all draws together at that temperature.
    """
    if likelihood.discrete:
        gap = math.log(max(held_out_nll, 1e-9) / max(training_nll, 1e-9))
    else:
        gap = held_out_nll - training_nll
    return math.log(temperature) + max(0.0, min(SHY, gap + math.log(FIT)))


def next_std(prior_std: float, wish: float) -> float:
    """s after a look.

    >>> round(next_std(0.3, 0.2), 3), round(next_std(0.3, -5.0), 3)
    (0.332, 0.283)
    """
    change = max(-FALL, min(RISE, GAIN * wish))
    return max(WEAKEST, min(STRONGEST, prior_std * math.exp(change)))


def held_out_rows(rows: int) -> int:
    """How many of so many training examples are held out: a tenth, but at least 100 and at most 5,000.

    >>> held_out_rows(2_000), held_out_rows(60_000)
    (200, 5000)
    """
    return min(max(rows // 10, FEWEST_HELD_OUT), 5000)
