"""SIZES: how many weights and nodes a network has, and the paper's Table 1."""

from typing import NamedTuple

import torch
from torch import nn

from ibnn.convert import plan
from ibnn.nets import make


class Size(NamedTuple):
    """Number of parameters, of latent variables, and of parameters to one latent variable."""

    weights: int
    nodes: int
    ratio: float


class Row(NamedTuple):
    """A line of Table 1; `printed` is the number of nodes in the paper."""

    net: str
    weights: int
    nodes: int
    ratio: float
    printed: int


# The paper's name, ours, classes, nodes as printed: for LeNet only the inputs of the convolutions, 1 + 6 + 16;
# in all other rows those of the linear layers too, as we do.
_TABLE_1 = (
    ("LeNet", "lenet", 10, 23),
    ("AlexNet", "alexnet", 1000, 18_307),
    ("VGG16-small", "vgg16-small", 10, 5_251),
    ("VGG16-large", "vgg16-large", 1000, 36_995),
    ("ResNet50", "resnet50", 1000, 24_579),
    ("WideResNet-28x10", "wideresnet", 10, 9_475),
)


def count(net: nn.Module) -> Size:
    """Counts without touching the network, which may be on the meta device.

    >>> count(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    Size(weights=26, nodes=7, ratio=3.7142857142857144)
    """
    planned = plan(net)
    return Size(planned.weights, planned.nodes, planned.weights / planned.nodes)


def table1() -> list[Row]:
    """Table 1 of the paper: what iBNN adds to each of its networks.

    >>> for row in table1():
    ...     print(f"{row.net:<16} {row.weights:>11,} {row.nodes:>6,} {row.ratio:>5,.0f} {row.printed:>6,}")
    LeNet                 41,806    207   202     23
    AlexNet           61,100,840 18,307 3,338 18,307
    VGG16-small       15,245,130  5,251 2,903  5,251
    VGG16-large      138,357,544 36,995 3,740 36,995
    ResNet50          25,557,032 24,579 1,040 24,579
    WideResNet-28x10  36,489,290  9,475 3,851  9,475
    """
    with torch.device("meta"):  # names and shapes without memory
        return [Row(net, *count(make(name, classes)), printed) for net, name, classes, printed in _TABLE_1]
