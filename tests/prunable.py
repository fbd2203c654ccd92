"""Networks whose channels can be cut, and networks whose cannot."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ibnn

X = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def model_of(net: nn.Module, **options: object) -> ibnn.IBNN:
    """Converts a network whose BatchNorm layers do something."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -1, 1)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
    return ibnn.convert(net, components=2, seed=0, **options).eval()


class Residual(nn.Module):
    """BatchNorm, two convolutions around a shortcut, and a flatten of places before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.inner, self.inner_norm = nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.outer, self.head = nn.Conv2d(6, 8, 3, padding=1), nn.Linear(8 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.outer(self.inner_norm(self.inner(x)).relu())
        return self.head(F.max_pool2d(x, 2).flatten(1))


class Mobile(nn.Module):
    """A depthwise convolution, a gate of each channel, channels last before a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depth = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depth(self.first(x).relu()).relu()
        gate = self.excite(self.squeeze(x.mean((2, 3))).relu()).sigmoid()
        return self.head((x * gate[:, :, None, None]).permute(0, 2, 3, 1).flatten(1))


class Joined(nn.Module):
    """Two branches side by side; a layer called twice; places repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 6, 3, padding=1)
        self.twice, self.up = nn.Conv2d(10, 10, 1), nn.Conv2d(10, 6, 1)
        self.wide, self.head = nn.Conv2d(6, 10, 1), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x), self.right(x)], 1).relu()
        x = F.interpolate(self.up(self.twice(self.twice(x).relu()).relu()), scale_factor=2).tanh()
        return self.head(self.wide(x).amax((2, 3)))


class Padded(nn.Module):
    """A shortcut padded with zeros, as that of a ResNet for CIFAR."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.head = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 10, 1), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.head((self.wide(x) + F.pad(x, (0, 0, 0, 0, 2, 2))).amax((2, 3)))


CUTTABLE = {"residual": Residual, "mobile": Mobile, "joined": Joined}


class Uncuttable(nn.Module):
    """A convolution `made` whose outputs go to a linear layer `head` in a way that mixes them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, features = way, {"amax": 16, "pixel_shuffle": 32}.get(way, 8)
        self.made, self.head = nn.Conv2d(1, 8, 3, padding=1, groups=1), nn.Linear(features, 3)
        self.grouped, self.tied, self.again = nn.Conv2d(8, 8, 1, groups=2), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8))
        if way == "tied":
            self.again.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.made(x).relu()
        if self.way == "view":
            x = x.view(-1, 2, 4, 4, 4).transpose(1, 2).reshape(-1, 8, 4, 4)
        elif self.way == "pixel_shuffle":
            return self.head(F.pixel_shuffle(x, 2).amax(3).flatten(1)[:, :32].repeat(1, 2)[:, :32])
        elif self.way == "grouped":
            x = self.grouped(x)
        elif self.way == "amax":
            return self.head(x.amax(1).flatten(1))
        x = x.mean((2, 3))
        if self.way == "softmax":
            x = x.softmax(1)
        elif self.way == "tied":
            x = self.again(self.tied(x).relu())
        elif self.way == "mul":
            x = x * self.scale
        elif self.way == "linear":
            x = F.linear(x, self.tied.weight.t())
        elif self.way == "hard-coded":
            x = x[:, :, None].expand(-1, -1, 2).reshape(-1, 16).view(-1, 8, 2).mean(2)
        return self.head(x)


UNCUTTABLE = {  # and what its error names
    "view": "the network fails", "pixel_shuffle": "is mixed", "grouped": "'grouped' is a grouped convolution",
    "amax": "is mixed", "softmax": "is mixed", "tied": "'tied' shares its weight", "mul": "the network fails",
    "linear": "is mixed", "hard-coded": "the network fails",
}  # fmt: skip
