"""recipe="pretrained": a few epochs from trained weights, compared with `calibrate` alone and temperature scaling.

    IBNN_DATA=FOLDER python experiments/pretrained.py [--nets lenet4 resnet20] [--seeds 0]

A tenth of the epochs that the network was trained for, from what experiments/calibrate.py found (it must have run).
Scored on the test set; the recipe was settled on training images in neither split. Writes results/pretrained.json.
"""

import argparse
import time
from typing import Any

import torch
from common import Data, Results, scores
from trained import NETS, data, trained

import ibnn
from ibnn.training import steering


def cell(name: str, seed: int) -> dict[str, Any]:
    """All methods on one network."""
    before = Results("calibrate", "").cells[f"{name} {seed}"]
    net, facts = trained(name, seed)
    train, valid, test = (Data(p.x.contiguous(memory_format=torch.channels_last), p.y) for p in data(name, seed))
    report = before["reports"]["calibrate"]
    model = ibnn.convert(net, components=4, seed=seed)
    sizes = torch.tensor([latent.nodes for latent in model.latents.values()])
    model.set_posterior(mean=1.0, std=torch.tensor(list(report["profile"].values())).repeat_interleave(sizes))
    model.likelihood.set_temperature(report["temperature"])
    model.prior_std = max(report["scale"], steering.MIN_STD)
    model.set_posterior(std=model.posterior().std.clamp_min(1e-3))
    epochs = NETS[name][3] / 10
    steps = round(epochs * -(-len(train.y) // 128))
    began = time.process_time()
    history = ibnn.fit(model, train, valid, recipe="pretrained", steps=steps, calibrate=False, seed=seed, quiet=True)
    seconds = time.process_time() - began
    names = ("plain", "temperature scaling", "calibrate")
    methods = {method: {k: before["methods"][method][k] for k in ("error", "nll", "ece")} for method in names}
    methods["pretrained"] = scores(model.predict(test.x).log_probs, test.y)
    return {
        "net": name,
        "seed": seed,
        **facts,
        "epochs": epochs,
        "cpu seconds": seconds,
        "methods": methods,
        "temperature": float(model.likelihood.temperature),
        "prior_std": [round(look["prior_std"], 4) for look in history.looks],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = Results("pretrained", str(__doc__))
    for seed in options.seeds:
        for name in options.nets:
            results.run(f"{name} {seed}", lambda name=name, seed=seed: cell(name, seed))  # type: ignore[misc]
