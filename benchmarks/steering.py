"""What beta="auto" adds to a run: CPU seconds of a steered run over those of the same run with fixed s and β.

    python benchmarks/steering.py [--json FILE]

LeNet, 2,000 random images (200 held out) and 10,000 (1,000 held out), a quarter of the epochs of
experiments/strength.py: longer runs have no more steering steps.
"""

import time
from typing import Any

import torch
from report import parser, tell

import ibnn
from ibnn.nets import LeNet
from ibnn.training import steering

CASES = {"2,000 images": (1_800, 200, 25), "10,000 images": (9_000, 1_000, 10)}  # training, held out, epochs


def seconds(train: int, held_out: int, epochs: int, **options: Any) -> float:
    """CPU seconds of one run."""
    x, y = torch.randn(train + held_out, 1, 28, 28), torch.randint(10, (train + held_out,))
    model = ibnn.convert(LeNet(), seed=0)
    began = time.process_time()
    data = (x[:train], y[:train]), (x[train:], y[train:])
    ibnn.fit(model, *data, epochs=epochs, evaluate_every=epochs, quiet=True, **options)
    return time.process_time() - began


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    ratios = {}
    for name, case in CASES.items():
        fixed = {"beta": steering.KL_WEIGHT * case[0] / 207, "beta_warmup": steering.FIRST}
        ratios[name] = round(seconds(*case, beta="auto") / seconds(*case, **fixed), 3)
    tell({"what": "CPU seconds of a steered run over a run of fixed strength, LeNet", "ratio": ratios}, options.json)
