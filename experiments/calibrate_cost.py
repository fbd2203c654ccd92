"""What `ibnn.calibrate` costs, in passes over the held-out rows, and what it gains over temperature scaling.

    IBNN_DATA=FOLDER python experiments/calibrate_cost.py [--nets lenet4 resnet20-small] [--rows 1000] [--draws both]

Scored on training images in neither split; no test image is used. "resnet20-small" is a ResNet-20 of half width,
trained for 12 epochs on 3,000 CIFAR-10 images of 16 × 16 pixels. Writes results/calibrate_cost.json.
"""

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from common import Data, Results, images, parts, scores
from torch import Tensor, nn
from trained import CACHE, trained

import ibnn
from ibnn.baselines import Plain, scale_temperature
from ibnn.nets import CifarResNet

SCORED = 1_500  # images


def small(data: Data) -> Data:
    """Images of half the size."""
    return Data(F.avg_pool2d(data.x, 2).contiguous(memory_format=torch.channels_last), data.y)


def network(name: str, seed: int) -> tuple[nn.Module, Data, Data]:
    """A trained network, held-out images, and others to score on."""
    if name == "lenet4":
        _, valid, scored = parts(images("fashion-mnist", train=True), [10_000, 2_000, SCORED], seed)
        return trained(name, seed)[0], valid, scored
    train, valid, scored = map(small, parts(images("cifar-10", train=True), [3_000, 3_000, SCORED], seed))
    torch.manual_seed(seed)
    net = CifarResNet(depth=20, width=0.5).to(memory_format=torch.channels_last)
    path = CACHE / f"{name}-{seed}.pt"
    if not path.exists():
        ibnn.fit(Plain(net), train, epochs=12, lr=3e-3, batch_size=64, evaluate_every=12, seed=seed, quiet=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), path)
    net.load_state_dict(torch.load(path))
    return net.eval(), valid, scored


def cell(name: str, seed: int, rows: int, draws: Any) -> dict[str, Any]:
    """Temperature scaling and `calibrate` on some held-out images."""
    net, valid, scored = network(name, seed)
    valid = Data(valid.x[:rows], valid.y[:rows])
    plain, model = Plain(net), ibnn.convert(net, components=8, seed=seed, draws=draws)
    temperature, passed = scale_temperature(plain, valid), 0

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal passed
        passed += len(args[0])

    began = time.process_time()
    with model.net.register_forward_pre_hook(count):
        report = ibnn.calibrate(model, valid, seed=seed, progress=False)
    seconds = time.process_time() - began
    print(report, flush=True)
    logs = [m.predict(scored.x, progress=False).log_probs for m in (plain, model)]
    gain = torch.stack([F.nll_loss(log, scored.y, reduction="none") for log in logs])
    gain = gain[0] - gain[1]
    return {
        "net": name,
        "seed": seed,
        "rows": len(valid.y),
        "draws": draws,
        "passes": passed / len(valid.y),
        "cpu seconds": seconds,
        "temperature": temperature,
        "scale": report.scale,
        "calibrated temperature": report.temperature,
        "cross nll": report.cross_nll,
        "cross-fitted gain": report.gain,
        "temperature scaling": scores(logs[0], scored.y),
        "calibrate": scores(logs[1], scored.y),
        "gain": [float(gain.mean()), float(gain.std() / len(gain) ** 0.5)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["lenet4", "resnet20-small"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000])
    parser.add_argument("--draws", nargs="+", default=["channel", "both"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = Results("calibrate_cost", str(__doc__))
    for seed in options.seeds:
        for name in options.nets:
            for rows in options.rows:
                for draws in options.draws:
                    results.run(f"{name} {seed}, {rows} rows, {draws}", lambda: cell(name, seed, rows, draws))  # noqa: B023
