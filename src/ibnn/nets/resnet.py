"""Residual networks: ResNets with torchvision's layer names, for ImageNet and for 32 × 32 images, and wide ResNets."""

from functools import partial
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


_STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}  # blocks of each stage, by depth


class ResNet(nn.Module):
    """ResNet-18 or -50 for 224 × 224 images; torchvision's checkpoints load as they are.

    >>> import torch
    >>> with torch.device("meta"):
    ...     net = ResNet(depth=50)
    >>> sum(p.numel() for p in net.parameters())
    25557032
    """

    def __init__(self, classes: int = 1000, *, depth: int = 18) -> None:
        super().__init__()
        if depth not in _STAGES:
            known = ", ".join(map(str, _STAGES))
            raise ValueError(complaint("depth", f"one of {known}", repr(depth), "For 32 × 32 images see CifarResNet."))
        one, two, three, four = _STAGES[depth]
        stage, factor = partial(_stage, bottleneck=depth == 50), 4 if depth == 50 else 1
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.layer1 = stage(64, 64, one, 1)
        self.layer2 = stage(64 * factor, 128, two, 2)
        self.layer3 = stage(128 * factor, 256, three, 2)
        self.layer4 = stage(256 * factor, 512, four, 2)
        self.fc = nn.Linear(512 * factor, classes)
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 224, 224), or any size, to class scores (B, C)."""
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


class CifarResNet(nn.Module):
    """ResNet for 32 × 32 images, of depth 6n + 2: 20, 32, 44, …; layer names are torchvision's.

    `width` scales the channels: 1 is the usual network.

    >>> sum(p.numel() for p in CifarResNet(depth=20).parameters())
    272474
    """

    def __init__(self, classes: int = 10, *, depth: int = 20, width: float = 1.0) -> None:
        super().__init__()
        blocks, (one, two, three) = (depth - 2) // 6, (int(size * width) for size in (16, 32, 64))
        self.conv1, self.bn1 = _conv(3, one, 3), nn.BatchNorm2d(one)
        self.layer1 = _stage(one, one, blocks, 1)
        self.layer2 = _stage(one, two, blocks, 2)
        self.layer3 = _stage(two, three, blocks, 2)
        for module in self.modules():
            if isinstance(module, _Block) and module.downsample is None:
                # drawn and dropped, since every block once drew a shortcut: seeds keep giving the same weights
                _conv(module.conv1.in_channels, module.conv1.out_channels, 1)
        self.fc = nn.Linear(three, classes)
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to class scores (B, C)."""
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


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


class WideResNet(nn.Module):
    """Wide ResNet for 32 × 32 images, whose convolutions have biases; the paper's is 28 deep and 10 wide.

    >>> sum(p.numel() for p in WideResNet(depth=10, width=1).parameters())
    78186
    """

    def __init__(self, classes: int = 10, *, depth: int = 28, width: int = 10) -> None:
        super().__init__()
        blocks, sizes = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, sizes[0], 3, padding=1)
        stages: list[nn.Module] = []
        for before, after in pairwise(sizes):
            stride = 2 if stages else 1
            stages += [_WideBlock(after if i else before, after, 1 if i else stride) for i in range(blocks)]
        self.blocks = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(sizes[-1])
        self.fc = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to class scores (B, C)."""
        x = self.bn(self.blocks(self.conv1(x))).relu()
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
