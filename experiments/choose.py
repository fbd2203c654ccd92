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
    for method in methods or GRID:
        if method == "regression":
            continue
        for options in GRID[method]:
            job = BASE.but(method=method, method_options=options)

            def work(job: Job = job) -> dict[str, float]:
                history = fit(make_method(job, 10), splits.train, splits.valid, recipe=job.full_recipe(), quiet=True)
                return {name: value for name, value in history.rows[-1].items() if name.startswith("valid_")}

            results.run(f"{method} {options}", work)


if __name__ == "__main__":
    main(sys.argv[1:])
