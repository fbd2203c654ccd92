"""Fully connected networks, and changes of units."""

from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(inputs: int, outputs: int, *, hidden: int = 256, layers: int = 2) -> nn.Sequential:
    """Builds a fully connected network with ReLU and `layers` hidden layers.

    >>> sum(p.numel() for p in mlp(1, 1, hidden=4, layers=1).parameters())
    13
    """
    sizes = [inputs, *[hidden] * layers]
    body = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(sizes[-1], outputs))


class Affine(nn.Module):
    """Computes x · scale + shift, both fixed: a change of units.

    >>> Affine(2.0, 1.0)(torch.tensor([3.0]))
    tensor([7.])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: float | Tensor, shift: float | Tensor) -> None:
        super().__init__()
        for name, value in (("scale", scale), ("shift", shift)):
            self.register_buffer(name, torch.as_tensor(value), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes any shape that broadcasts with scale and shift."""
        return x * self.scale + self.shift
