"""Networks and layers that several tests share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, K = 4, 3  # rows and components


class Calls(nn.Module):
    """Calls one transposed convolution in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up = how, nn.ConvTranspose1d(2, 3, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "positional":
            return self.up(x, [12])
        if self.how == "keyword":
            return self.up(input=x, output_size=[12])
        return self.up(output_size=[12], input=x)


class Windows(nn.Module):
    """Folds the windows of a signal into the batch, sample-major."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.window = nn.Sequential(nn.Conv1d(channels, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 4))
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        windows = x.unfold(2, 2, 2).movedim(2, 1).reshape(batch * 3, -1, 2)  # (B·3, channels, width)
        return self.head(torch.tanh(self.window(windows)).reshape(batch, 12))


class TimeFirst(nn.Module):
    """A layer that sees (T, B, D), after a normalisation with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.head = nn.BatchNorm1d(3), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.norm(x).permute(1, 0, 2)).mean(0))


class Same(nn.Conv1d):
    """A subclass that is still a convolution with its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.pad(input, (1, 1)))


class Post(nn.Linear):
    """A converted layer with a converted layer inside, whose latent comes first in the order of modules."""

    def __init__(self, nodes: int, out: int) -> None:
        super().__init__(nodes, 7)
        self.post = nn.Linear(7, out)

    def forward(self, input: Tensor) -> Tensor:
        return self.post(torch.tanh(super().forward(input)))


class LowRank(nn.Linear):
    """A subclass that uses its input outside its weight too."""

    def __init__(self, nodes: int, out: int) -> None:
        super().__init__(nodes, out)
        self.down, self.up = nn.Linear(nodes, 2), nn.Linear(2, out)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.up(self.down(input))


class Standardised(nn.Conv1d):
    """A subclass that computes with another weight than its own."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        return F.conv1d(input, weight / weight.std((1, 2), keepdim=True), self.bias)
