"""Trained plain networks for the experiments on trained networks: kept in a cache folder, made when they are missing.

IBNN_DATA=FOLDER python experiments/trained.py lenet4 resnet20 vgg16-quarter [--seeds 0 1 2]
"""

import argparse
import os
import time
from pathlib import Path

import torch
from common import Splits, images, parts, train_plain
from safetensors.torch import load_file, save_file
from torch import nn

from ibnn.nets import VGG16, CifarResNet, LeNet

CACHE = Path(os.environ.get("IBNN_CACHE", Path(__file__).parent / "cache"))
NETS = {  # network, data set, training images, epochs, learning rate
    "lenet4": (lambda: LeNet(width=4), "fashion-mnist", 10_000, 40, 1e-3),
    "resnet20": (lambda: CifarResNet(depth=20), "cifar-10", 10_000, 16, 3e-3),
    "resnet20-half": (lambda: CifarResNet(depth=20, width=0.5), "cifar-10", 10_000, 8, 3e-3),
    "vgg16-quarter": (lambda: VGG16(width=0.25, batchnorm=True, dropout=0.0), "cifar-10", 10_000, 12, 3e-3),
}


def data(name: str, seed: int) -> Splits:
    """The network's training images, 2,000 held-out labels and the test set."""
    _, source, count, _, _ = NETS[name]
    return Splits(*parts(images(source, train=True), [count, 2_000], seed), images(source, train=False))


def trained(name: str, seed: int) -> tuple[nn.Module, dict[str, float]]:
    """The network trained until it fits its training images, and the costs."""
    make, _, _, epochs, lr = NETS[name]
    torch.manual_seed(seed)
    net = make().to(memory_format=torch.channels_last)
    path = CACHE / f"{name}-{seed}.safetensors"
    if not path.exists():
        train, began = data(name, seed).train, time.monotonic()
        model = train_plain(net, train, epochs=epochs, seed=seed, lr=lr)
        facts = [0.0, time.monotonic() - began, epochs]
        facts[0] = (model.predict(train.x).labels != train.y).double().mean().item()
        CACHE.mkdir(parents=True, exist_ok=True)
        state = {k: v.contiguous() for k, v in net.state_dict().items()}
        save_file(state | {"_facts": torch.tensor(facts)}, path)
    state = load_file(path)
    error, seconds, epochs = state.pop("_facts").tolist()
    net.load_state_dict(state)
    return net.eval(), {"training error": error, "training seconds": seconds, "training epochs": epochs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("nets", nargs="+", choices=NETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    for seed in options.seeds:
        for name in options.nets:
            print(name, seed, trained(name, seed)[1], flush=True)
