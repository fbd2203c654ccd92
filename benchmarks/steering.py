"""What beta="auto" costs: CPU seconds of a run's looks and of its end, as a share of those of the whole run.

    python benchmarks/steering.py [--json FILE]

Random images: LeNet on 2,000 (200 held out; 25 epochs), and a VGG-16 of
an eighth of the width on 5,000 (500 held out; 5 epochs), each with 1, 8 and 16 components. Longer runs have no more
looks. What is timed inside of one run cannot drift against the rest of it.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from report import parser, tell
from torch import nn

import ibnn
from ibnn.nets import VGG16, LeNet
from ibnn.training import loop
from ibnn.training.steering import Steering

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {  # network, image, rows, epochs
    "LeNet, 2,000 images": (LeNet, (1, 28, 28), 1_800, 200, 25),
    "VGG-16 / 8, 5,000 images": (partial(VGG16, width=0.125, batchnorm=True, dropout=0.0), (3, 32, 32), 4_500, 500, 5),
}


class Timed(Steering):
    """Counts the CPU seconds of looks and of the end."""

    seconds = 0.0

    def look(self, *given: Any) -> None:
        """Takes a look."""
        began = time.process_time()
        super().look(*given)
        Timed.seconds += time.process_time() - began

    def settle(self) -> None:
        """Settles the temperature."""
        began = time.process_time()
        super().settle()
        Timed.seconds += time.process_time() - began


def share(components: int, make: Callable[[], nn.Module], image: tuple[int, ...], *sizes: int) -> float:
    """Returns the share of steering in the CPU seconds of one run."""
    train, held_out, epochs = sizes
    x, y = torch.randn(train + held_out, *image), torch.randint(10, (train + held_out,))
    model = ibnn.convert(make(), components=components, seed=0)
    data = (x[:train], y[:train]), (x[train:], y[train:])
    Timed.seconds, began = 0.0, time.process_time()
    ibnn.fit(model, *data, epochs=epochs, evaluate_every=epochs, novelty=False, quiet=True)
    return round(Timed.seconds / (time.process_time() - began), 3)


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    loop.Steering = Timed  # type: ignore[misc]
    shares = {name: {f"K = {k}": share(k, *case) for k in (1, 8, 16)} for name, case in CASES.items()}
    tell({"what": "steering's share of a run's CPU seconds", "share": shares}, options.json)
