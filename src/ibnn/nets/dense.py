"""Fully connected."""

from itertools import pairwise

from torch import nn


def mlp(inputs: int, outputs: int, *, hidden: int = 256, layers: int = 2) -> nn.Sequential:
    """Fully connected, ReLU; `layers` hidden layers.

    >>> sum(p.numel() for p in mlp(1, 1, hidden=4, layers=1).parameters())
    13
    """
    sizes = [inputs, *[hidden] * layers]
    body = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(sizes[-1], outputs))
