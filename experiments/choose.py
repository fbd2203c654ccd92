"""The rivals' own settings, chosen on held-out images (never the test set): python choose.py

LeNet on 5,000 Fashion-MNIST images with the epochs of the benchmark, one seed that the benchmark does not use; for the
regression, three hidden layers and the points of another seed.
"""

import sys

import torch
from common import Results

from ibnn.analysis import regression
from ibnn.jobs import Job, make_data, make_method
from ibnn.training import fit

GRID = {
    "dropout": [{"rate": rate} for rate in (0.05, 0.1, 0.2, 0.3)],
    "vi": [{"prior_std": prior} for prior in (0.05, 0.1, 0.2, 0.4)],
}
BETAS = (0.1, 0.01, 0.001)  # weights of the KL of BNN-VI below 1, with the prior that is best at 1
PRIORS = (0.2, 0.4, 0.8)
BASE = Job(
    net="lenet",
    data="fashion-mnist",
    examples=6000,
    valid=1000,
    seed=100,
    train={"epochs": 60, "evaluate_every": 60, "eval_samples": 20},
)


def main(methods: list[str]) -> None:
    torch.set_num_threads(1)
    results = Results(
        "choose", "held-out NLL of the baselines' own settings; LeNet, 5,000 Fashion-MNIST images, seed 100"
    )
    splits = make_data(BASE)
    for prior in PRIORS if not methods or "regression" in methods else ():
        fields = {"method": "vi", "method_options": {"prior_std": prior}, "layers": 3, "seed": 100}
        fields |= {"train": {"steps": 2000}}
        results.run(
            f"regression vi {{'prior_std': {prior}}}", lambda f=fields: {"valid_nll": regression(f)["scores"]["nll"]}
        )
    jobs = [BASE.but(method=method, method_options=options) for method, grid in GRID.items() for options in grid]
    names = [f"{job.method} {job.method_options}" for job in jobs]
    jobs += [BASE.but(method="vi", method_options={"prior_std": 0.2}, train={"beta": beta}) for beta in BETAS]
    names += [f"vi {{'prior_std': 0.2}}, beta {beta}" for beta in BETAS]
    for name, job in zip(names, jobs, strict=True):

        def work(job: Job = job) -> dict[str, float]:
            history = fit(make_method(job, 10), splits.train, splits.valid, recipe=job.full_recipe(), quiet=True)
            return {name: value for name, value in history.rows[-1].items() if name.startswith("valid_")}

        if not methods or job.method in methods:
            results.run(name, work)


if __name__ == "__main__":
    main(sys.argv[1:])
