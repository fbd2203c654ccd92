"""Residual networks: ResNets with torchvision's layer names, for ImageNet and for 32 × 32 images, and wide ResNets."""

from collections import OrderedDict
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.nets.convnets import he_convolutions


def _conv(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


class _Block(nn.Module):
    """Two 3 × 3 convolutions, or, as a bottleneck, one between two of 1 × 1; with BatchNorm, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int = 1, *, bottleneck: bool = False) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        downsample = None
        if stride != 1 or channels != out:  # drawn first, as seeds expect
            downsample = nn.Sequential(_conv(channels, out, 1, stride), nn.BatchNorm2d(out))
        first, second = ((1, 1), (3, stride)) if bottleneck else ((3, stride), (3, 1))  # kernel and stride
        self.conv1, self.bn1 = _conv(channels, width, *first), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, *second), nn.BatchNorm2d(width)
        if bottleneck:
            self.conv3, self.bn3 = _conv(width, out, 1), nn.BatchNorm2d(out)
        self.downsample, self.bottleneck = downsample, bottleneck

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.bottleneck:
            y = self.bn3(self.conv3(y.relu()))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def _stage(channels: int, width: int, blocks: int, stride: int, *, bottleneck: bool = False) -> nn.Sequential:
    first, out = _Block(channels, width, stride, bottleneck=bottleneck), 4 * width if bottleneck else width
    return nn.Sequential(first, *(_Block(out, width, bottleneck=bottleneck) for _ in range(blocks - 1)))


def _pooled(width: int, classes: int) -> dict[str, nn.Module]:
    """Returns the end of each network: averages over the image, and a linear layer."""
    return {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(width, classes)}


_STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}  # blocks of each stage, by depth


class ResNet(nn.Sequential):
    """ResNet-18 or -50 for 224 × 224 images; torchvision's checkpoints load as they are.

    >>> import torch
    >>> with torch.device("meta"):
    ...     net = ResNet(depth=50)
    >>> sum(p.numel() for p in net.parameters())
    25557032
    """

    def __init__(self, classes: int = 1000, *, depth: int = 18) -> None:
        if depth not in _STAGES:
            known = ", ".join(map(str, _STAGES))
            raise ValueError(complaint("depth", f"one of {known}", repr(depth), "For 32 × 32 images see CifarResNet."))
        layers = {"conv1": _conv(3, 64, 7, 2), "bn1": nn.BatchNorm2d(64), "relu": nn.ReLU()}
        layers["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
        channels, bottleneck = 64, depth == 50
        for number, blocks in enumerate(_STAGES[depth]):
            width = 64 * 2**number
            layers[f"layer{number + 1}"] = _stage(channels, width, blocks, 2 if number else 1, bottleneck=bottleneck)
            channels = 4 * width if bottleneck else width
        super().__init__(OrderedDict(layers | _pooled(channels, classes)))
        he_convolutions(self)


class CifarResNet(nn.Sequential):
    """ResNet for 32 × 32 images, of depth 6n + 2: 20, 32, 44, …; layer names are torchvision's.

    `width` scales the channels: 1 is the usual network.

    >>> sum(p.numel() for p in CifarResNet(depth=20).parameters())
    272474
    """

    def __init__(self, classes: int = 10, *, depth: int = 20, width: float = 1.0) -> None:
        one, two, three = (int(size * width) for size in (16, 32, 64))
        layers = {"conv1": _conv(3, one, 3), "bn1": nn.BatchNorm2d(one), "relu": nn.ReLU()}
        for number, (before, after) in enumerate(((one, one), (one, two), (two, three))):
            layers[f"layer{number + 1}"] = _stage(before, after, (depth - 2) // 6, 2 if number else 1)
        for block in [block for number in (1, 2, 3) for block in layers[f"layer{number}"].children()]:
            if block.downsample is None:
                # drawn and dropped, since every block once drew a shortcut: seeds keep giving the same weights
                _conv(block.conv1.in_channels, block.conv1.out_channels, 1)
        super().__init__(OrderedDict(layers | _pooled(three, classes)))
        he_convolutions(self)


class _WideBlock(nn.Module):
    """Two 3 × 3 convolutions with pre-activation around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, out, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(out), nn.Conv2d(out, out, 3, stride=stride, padding=1)
        same = stride == 1 and channels == out
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.bn1(x).relu())
        y = self.conv2(self.bn2(y).relu())
        total: Tensor = y + self.shortcut(x)
        return total


class WideResNet(nn.Sequential):
    """Wide ResNet for 32 × 32 images, whose convolutions have biases; the paper's is 28 deep and 10 wide.

    >>> sum(p.numel() for p in WideResNet(depth=10, width=1).parameters())
    78186
    """

    def __init__(self, classes: int = 10, *, depth: int = 28, width: int = 10) -> None:
        count, sizes = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        first, blocks = nn.Conv2d(3, sizes[0], 3, padding=1), list[nn.Module]()
        for before, after in pairwise(sizes):
            stride = 2 if blocks else 1
            blocks += [_WideBlock(after if i else before, after, 1 if i else stride) for i in range(count)]
        layers = {"conv1": first, "blocks": nn.Sequential(*blocks), "bn": nn.BatchNorm2d(sizes[-1]), "relu": nn.ReLU()}
        super().__init__(OrderedDict(layers | _pooled(sizes[-1], classes)))
