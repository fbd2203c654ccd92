"""LeNet."""

import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Module):
    """The paper's LeNet for 28 × 28 images of one channel; `width` multiplies every hidden layer.

    >>> sum(p.numel() for p in LeNet().parameters())
    41806
    """

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
