"""VGG-16: small for 32 × 32 images, large for ImageNet in torchvision's layout."""

import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.nets.initialise import he_convolutions


def _features(*, width: float = 1.0, batchnorm: bool = False) -> nn.Sequential:
    """The thirteen convolutions; their places in the Sequential are the names in torchvision's checkpoints."""
    channels = 3
    layers: list[nn.Module] = []
    for size, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        out = int(size * width)
        for _ in range(depth):
            norm = [nn.BatchNorm2d(out)] if batchnorm else []
            layers += [nn.Conv2d(channels, out, 3, padding=1), *norm, nn.ReLU(inplace=True)]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class VGG16(nn.Module):
    """VGG-16 for 32 × 32 images, 512-512-C head; torchvision's names for the features.

    `width` scales the channels: 1 is the paper's network, 0.25 a quarter of its width. The paper's has no BatchNorm.
    `dropout` is the rate before the hidden layers of the head.

    >>> sum(p.numel() for p in VGG16(width=0.125).parameters())
    239538
    """

    def __init__(self, classes: int = 10, *, width: float = 1.0, batchnorm: bool = False, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = _features(width=width, batchnorm=batchnorm)
        last = int(512 * width)
        head = [m for _ in range(2) for m in (nn.Dropout(dropout), nn.Linear(last, last), nn.ReLU(inplace=True))]
        self.classifier = nn.Sequential(*head, nn.Linear(last, classes))
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to class scores (B, C)."""
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores


class VGG16Large(nn.Module):
    """VGG-16 for 224 × 224 images, 4096-4096-C head; torchvision's vgg16 and vgg16_bn checkpoints load as they are.

    >>> import torch
    >>> with torch.device("meta"):
    ...     net = VGG16Large()
    >>> sum(p.numel() for p in net.parameters())
    138357544
    """

    def __init__(self, classes: int = 1000, *, batchnorm: bool = False, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = _features(batchnorm=batchnorm)
        hidden = ((512 * 7 * 7, 4096), (4096, 4096))
        head = [m for a, b in hidden for m in (nn.Linear(a, b), nn.ReLU(inplace=True), nn.Dropout(dropout))]
        self.classifier = nn.Sequential(*head, nn.Linear(4096, classes))
        he_convolutions(self)
        for module in self.classifier:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 224, 224), or any from 32 × 32, to class scores (B, C)."""
        x = F.adaptive_avg_pool2d(self.features(x), 7)
        scores: Tensor = self.classifier(x.flatten(1))
        return scores
