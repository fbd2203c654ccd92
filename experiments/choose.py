"""The rivals' own settings, chosen on held-out data (never the test set): python choose.py

LeNet on 5,000 Fashion-MNIST images and the quarter VGG-16 on 10,000 of CIFAR-10, with the epochs of the benchmark, one
seed that the benchmark does not use; for the regression, three hidden layers, 30 points, and 100 others held out.
"""

import functools
import sys

import torch
from common import Results

from ibnn.lab.jobs import Job, make_data, make_method
from ibnn.training.loop import fit

GRID = {
    "dropout": [{"rate": rate} for rate in (0.05, 0.1, 0.2, 0.3)],
    "vi": [{"prior_std": prior} for prior in (0.05, 0.1, 0.2, 0.4)],
}
BETAS = (0.1, 0.01, 0.001)  # weights of the KL of BNN-VI below 1, with the prior that is best at 1
REGRESSION = [(prior, 1.0) for prior in (0.05, 0.1, 0.2, 0.4, 0.8)] + [(0.2, beta) for beta in (*BETAS, 0.0001)]
BASE = Job(
    net="lenet",
    data="fashion-mnist",
    examples=6000,
    valid=1000,
    seed=100,
    train={"epochs": 60, "evaluate_every": 60, "eval_samples": 20},
)
VGG = Job(
    net="vgg16-small",
    net_options={"width": 0.25, "batchnorm": True, "dropout": 0.0},
    data="cifar-10",
    examples=11000,
    valid=1000,
    seed=100,
    train={"epochs": 20, "evaluate_every": 20, "eval_samples": 20},
)
CURVE = Job(
    net="mlp",
    net_options={"layers": 3},
    data="toy-regression",
    examples=130,
    valid=100,
    seed=100,
    train={"steps": 2000, "evaluate_every": 2000, "eval_samples": 40},
)
VGG_RATES = (0.05, 0.1, 0.2)
VGG_BETAS = (0.1, 0.01, 0.001)


def main(methods: list[str]) -> None:
    torch.set_num_threads(1)
    results = Results(
        "choose", "held-out NLL of the baselines' own settings; LeNet, 5,000 Fashion-MNIST images, seed 100"
    )
    splits = functools.cache(lambda net: make_data({job.net: job for job in (BASE, VGG, CURVE)}[net]))
    grid = {}
    for prior, beta in REGRESSION:
        name = f"regression vi {{'prior_std': {prior}}}" + ("" if beta == 1 else f", beta {beta}")
        grid[name] = _variational(CURVE, beta, prior)
    for method, choices in GRID.items():
        grid |= {f"{method} {options}": BASE.but(method=method, method_options=options) for options in choices}
    for beta in BETAS:
        grid[f"vi {{'prior_std': 0.2}}, beta {beta}"] = _variational(BASE, beta)
    for rate in VGG_RATES:
        grid[f"VGG-16/4 dropout {rate}"] = VGG.but(method="dropout", method_options={"rate": rate})
    for beta in VGG_BETAS:
        grid[f"VGG-16/4 vi {{'prior_std': 0.2}}, beta {beta}"] = _variational(VGG, beta)
    for name, job in grid.items():

        def work(job: Job = job) -> dict[str, float]:
            data = splits(job.net)
            model = make_method(job, len(data.whole.classes))
            history = fit(model, data.train, data.valid, recipe=job.full_recipe(), quiet=True)
            return {name: value for name, value in history.rows[-1].items() if name.startswith("valid_")}

        if not methods or any(word in name for word in methods):
            results.run(name, work, job.key)


def _variational(base: Job, beta: float, prior: float = 0.2) -> Job:
    """BNN-VI with a prior, by default the best one at β = 1, and another weight of the KL."""
    changed = base.but(method="vi", method_options={"prior_std": prior})
    return changed if beta == 1 else changed.but(train={"beta": beta})


if __name__ == "__main__":
    main(sys.argv[1:])
