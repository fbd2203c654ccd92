"""NETWORKS: plain modules that know nothing of ibnn, for experiments, benchmarks and tests."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def mlp(inputs: int, outputs: int, *, hidden: int = 256, layers: int = 2) -> nn.Sequential:
    """Fully connected, ReLU; `layers` hidden layers.

    >>> sum(p.numel() for p in mlp(1, 1, hidden=4, layers=1).parameters())
    13
    """
    sizes = [inputs, *[hidden] * layers]
    body = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(sizes[-1], outputs))


class LeNet(nn.Module):
    """The paper's LeNet for 28 × 28 images of one channel; `width` multiplies every hidden layer."""

    def __init__(self, classes: int = 10, *, width: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6 * width, 5)
        self.conv2 = nn.Conv2d(6 * width, 16 * width, 5)
        self.conv3 = nn.Conv2d(16 * width, 120 * width, 4)
        self.fc1 = nn.Linear(120 * width, 64 * width)
        self.fc2 = nn.Linear(64 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 1, 28, 28) to class scores (B, C)."""
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        x = self.conv3(x).relu().flatten(1)
        x = self.fc1(x).relu()
        scores: Tensor = self.fc2(x)
        return scores


class VGG16(nn.Module):
    """VGG-16 for 32 × 32 images, 512-512-C head, without BatchNorm; torchvision's names for the features.

    `width` scales the channels: 1 is the paper's network, 0.25 a quarter of its width.
    """

    def __init__(self, classes: int = 10, *, width: float = 1.0) -> None:
        super().__init__()
        channels, layers = 3, []
        for size, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            out = int(size * width)
            for _ in range(depth):
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        head = [nn.Dropout(), nn.Linear(channels, channels), nn.ReLU(inplace=True)]
        self.classifier = nn.Sequential(
            *head, nn.Dropout(), nn.Linear(channels, channels), nn.ReLU(inplace=True), nn.Linear(channels, classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to class scores (B, C)."""
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores


class _WideBlock(nn.Module):
    """Two pre-activated 3 × 3 convolutions around a shortcut."""

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
    """WideResNet-depth-width for 32 × 32 images, with biased convolutions; (28, 10) is the paper's."""

    def __init__(self, classes: int = 10, *, depth: int = 28, width: int = 10) -> None:
        super().__init__()
        blocks, sizes = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, sizes[0], 3, padding=1)
        stages = []
        for stage, (before, after) in enumerate(pairwise(sizes)):
            for block in range(blocks):
                first = block == 0
                stages.append(_WideBlock(before if first else after, after, 2 if first and stage else 1))
        self.blocks = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(sizes[-1])
        self.fc = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to class scores (B, C)."""
        x = self.bn(self.blocks(self.conv1(x))).relu()
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


class _Block(nn.Module):
    """Two 3 × 3 convolutions, each with BatchNorm, around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        same = stride == 1 and channels == out
        shortcut = [nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)]
        self.downsample: nn.Module | None = None if same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)) + (x if self.downsample is None else self.downsample(x))
        rectified: Tensor = y.relu()
        return rectified


def _stage(channels: int, out: int, stride: int, blocks: int) -> nn.Sequential:
    rest = (_Block(out, out, 1) for _ in range(blocks - 1))
    return nn.Sequential(_Block(channels, out, stride), *rest)


class CifarResNet(nn.Module):
    """ResNet-depth for 32 × 32 images (depth 6n + 2: 20, 32, 44, …), with the layer names of torchvision's ResNets."""

    def __init__(self, classes: int = 10, *, depth: int = 20) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        blocks = (depth - 2) // 6
        self.layer1 = _stage(16, 16, 1, blocks)
        self.layer2 = _stage(16, 32, 2, blocks)
        self.layer3 = _stage(32, 64, 2, blocks)
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to class scores (B, C)."""
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
