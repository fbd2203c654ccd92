"""Weights and nodes of the paper's networks (Table 1): python experiments/table1.py writes results/table1.json."""

from typing import NamedTuple

import torch
from common import Results
from torch import nn

from ibnn import plan
from ibnn.nets import VGG16, make


class Row(NamedTuple):
    """A line of Table 1; `printed` is the number of nodes in the paper."""

    net: str
    weights: int
    nodes: int
    ratio: float
    printed: int


# The paper's name, ours (or none, see `_layers`), classes, nodes as printed: for LeNet only the inputs of the
# convolutions, 1 + 6 + 16; in all other rows those of the linear layers too, as we do.
NETS = (
    ("LeNet", "lenet", 10, 23),
    ("AlexNet", "", 1000, 18_307),
    ("VGG16-small", "vgg16-small", 10, 5_251),
    ("VGG16-large", "", 1000, 36_995),
    ("ResNet50", "resnet50", 1000, 24_579),
    ("WideResNet-28x10", "wideresnet", 10, 9_475),
)


def table1() -> list[Row]:
    """Counts what iBNN adds to each network."""
    with torch.device("meta"):  # names and shapes without memory
        nets = [(net, make(name, classes) if name else _layers(net), printed) for net, name, classes, printed in NETS]
    plans = [(net, plan(made), printed) for net, made, printed in nets]
    return [Row(net, p.weights, p.nodes, p.weights / p.nodes, printed) for net, p, printed in plans]


def _layers(net: str) -> nn.Module:
    """Returns the layers with weights of a network for ImageNet that is only counted."""
    if net == "VGG16-large":
        features, inputs = [module for module in VGG16().features if isinstance(module, nn.Conv2d)], 512 * 7 * 7
    else:
        sizes = ((3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3))
        features, inputs = [nn.Conv2d(*size) for size in sizes], 256 * 6 * 6
    return nn.Sequential(*features, nn.Linear(inputs, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000))


def text(rows: list[dict[str, float]]) -> list[list[str]]:
    """Returns rows of text, the header first."""
    numbers = ("weights", "nodes", "ratio", "printed")
    head = ["net", "weights", "nodes", "ratio", "nodes in the paper"]
    return [head, *([str(row["net"]), *(f"{row[name]:,.0f}" for name in numbers)] for row in rows)]


if __name__ == "__main__":
    Results("table1", "weights and nodes of the paper's networks").run(
        "table1", lambda: {"rows": [row._asdict() for row in table1()]}
    )
