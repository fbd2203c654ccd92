"""ResNets with torchvision's layer names: for ImageNet, and for 32 × 32 images."""

import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.nets.initialise import he_convolutions


def _conv(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


class _BasicBlock(nn.Module):
    """Two 3 × 3 convolutions, each with BatchNorm, around a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class _Bottleneck(nn.Module):
    """A strided 3 × 3 convolution between two of 1 × 1, each with BatchNorm, around a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1, self.bn1 = _conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, out, 1), nn.BatchNorm2d(out)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


_Block = type[_BasicBlock] | type[_Bottleneck]

_STAGES: dict[int, tuple[_Block, tuple[int, int, int, int]]] = {  # by depth: the block, and how many in each stage
    18: (_BasicBlock, (2, 2, 2, 2)),
    34: (_BasicBlock, (3, 4, 6, 3)),
    50: (_Bottleneck, (3, 4, 6, 3)),
}


def _stage(block: _Block, channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    out, downsample = width * block.expansion, None
    if stride != 1 or channels != out:
        downsample = nn.Sequential(_conv(channels, out, 1, stride), nn.BatchNorm2d(out))
    rest = (block(out, width) for _ in range(blocks - 1))
    return nn.Sequential(block(channels, width, stride, downsample), *rest)


class ResNet(nn.Module):
    """ResNet-18, -34 or -50 for 224 × 224 images; torchvision's checkpoints load as they are.

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
        block, (one, two, three, four) = _STAGES[depth]
        factor = block.expansion
        self.conv1, self.bn1 = _conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.layer1 = _stage(block, 64, 64, one, 1)
        self.layer2 = _stage(block, 64 * factor, 128, two, 2)
        self.layer3 = _stage(block, 128 * factor, 256, three, 2)
        self.layer4 = _stage(block, 256 * factor, 512, four, 2)
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

    >>> sum(p.numel() for p in CifarResNet(depth=20).parameters())
    272474
    """

    def __init__(self, classes: int = 10, *, depth: int = 20) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(3, 16, 3), nn.BatchNorm2d(16)
        blocks = (depth - 2) // 6
        self.layer1 = _stage(_BasicBlock, 16, 16, blocks, 1)
        self.layer2 = _stage(_BasicBlock, 16, 32, blocks, 2)
        self.layer3 = _stage(_BasicBlock, 32, 64, blocks, 2)
        for module in self.modules():
            if isinstance(module, _BasicBlock) and module.downsample is None:
                # drawn and dropped, since every block once drew a shortcut: seeds keep giving the same weights
                _conv(module.conv1.in_channels, module.conv1.out_channels, 1)
        self.fc = nn.Linear(64, classes)
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to class scores (B, C)."""
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
