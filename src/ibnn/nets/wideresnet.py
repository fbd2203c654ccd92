"""Wide ResNets."""

from itertools import pairwise

from torch import Tensor, nn


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
