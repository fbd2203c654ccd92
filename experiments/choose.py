"""The rivals' own settings, chosen on held-out data (never the test set): python choose.py

LeNet on 5,000 Fashion-MNIST images (of double width for dropout) and the quarter VGG-16 on 10,000 of CIFAR-10, with the
epochs and optimisers of the benchmark and one seed that it does not use; for the regression, three hidden layers, 30
points, and 100 others held out.
"""

import sys
from functools import cache
from typing import Any

import torch
from common import Results

from ibnn.lab.job import Job
from ibnn.lab.parts import Splits, make_data, make_method
from ibnn.training.loop import fit

BETAS = (0.1, 0.01, 0.001)  # weights of the KL of BNN-VI below 1, with the prior that is best at 1
LENET = Job(
    net="lenet",
    data="fashion-mnist",
    examples=6000,
    valid=1000,
    seed=100,
    train={"epochs": 60, "evaluate_every": 60, "eval_samples": 20},
)
VGG = LENET.but(
    net="vgg16-small",
    net_options={"width": 0.25, "batchnorm": True, "dropout": 0.0},
    data="cifar-10",
    examples=11000,
    train={"epochs": 20, "evaluate_every": 20},
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


def grid() -> dict[str, Job]:
    """The jobs by name."""
    jobs = {}
    for prior, beta in [*((p, 1) for p in (0.05, 0.1, 0.2, 0.4, 0.8)), *((0.2, b) for b in (*BETAS, 0.0001))]:
        jobs["regression " + _name(prior, beta)] = _variational(CURVE, prior, beta)
    for rate in (0.05, 0.1, 0.2, 0.3):
        options = {"method": "dropout", "method_options": {"rate": rate}}
        jobs[f"LeNet × 2 dropout {rate}"] = LENET.but(net_options={"width": 2}, **options)
    for prior, beta in [*((p, 1) for p in (0.05, 0.1, 0.2, 0.4)), *((0.2, b) for b in BETAS)]:
        jobs["LeNet " + _name(prior, beta)] = _variational(LENET, prior, beta)
    for rate in (0.05, 0.1):
        recipe = {"recipe": "paper-vgg16-cifar10", "train": {"samples": 1}}  # as the benchmark trains it
        jobs[f"VGG-16/4 dropout {rate}"] = VGG.but(method="dropout", method_options={"rate": rate}, **recipe)
    for beta in (0.01, 0.001):
        jobs["VGG-16/4 " + _name(0.2, beta)] = _variational(VGG, 0.2, beta)
    return jobs


def _name(prior: float, beta: float) -> str:
    return f"vi {{'prior_std': {prior}}}" + ("" if beta == 1 else f", beta {beta}")


def _variational(base: Job, prior: float, beta: float) -> Job:
    """BNN-VI with a prior and a weight of the KL."""
    train = {} if beta == 1 else {"beta": beta}
    return base.but(method="vi", method_options={"prior_std": prior}, train=train)


@cache
def splits(net: str) -> Splits:
    """The data, which all jobs on a network share."""
    return make_data({job.net: job for job in (LENET, VGG, CURVE)}[net])


def held_out(job: Job) -> dict[str, Any]:
    """Trains a job; its scores on held-out data."""
    data = splits(job.net)
    model = make_method(job, len(data.whole.classes))
    history = fit(model, data.train, data.valid, recipe=job.full_recipe(), quiet=True)
    return {name: value for name, value in history.rows[-1].items() if name.startswith("valid_")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = Results("choose", "held-out NLL of the baselines' own settings; seed 100")
    for name, job in grid().items():
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            results.run(name, lambda job=job: held_out(job), job.key)  # type: ignore[misc]
