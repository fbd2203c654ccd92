"""AlexNet, in torchvision's layout."""

from collections import OrderedDict

from torch import nn


class AlexNet(nn.Sequential):
    """AlexNet for 224 × 224 images, or any from 63 × 63; torchvision's checkpoints load as they are.

    >>> import torch
    >>> with torch.device("meta"):
    ...     net = AlexNet()
    >>> sum(p.numel() for p in net.parameters())
    61100840
    """

    def __init__(self, classes: int = 1000, *, dropout: float = 0.5) -> None:
        layers: list[nn.Module] = []  # whose indices are the checkpoint's names
        for channels, out, kernel, stride, padding, pooled in (
            (3, 64, 11, 4, 2, True),
            (64, 192, 5, 1, 2, True),
            (192, 384, 3, 1, 1, False),
            (384, 256, 3, 1, 1, False),
            (256, 256, 3, 1, 1, True),
        ):
            layers += [nn.Conv2d(channels, out, kernel, stride, padding), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(3, 2)] if pooled else []
        hidden = ((256 * 6 * 6, 4096), (4096, 4096))
        head = [m for a, b in hidden for m in (nn.Dropout(dropout), nn.Linear(a, b), nn.ReLU(inplace=True))]
        features, pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(6)
        classifier = nn.Sequential(*head, nn.Linear(4096, classes))
        super().__init__(OrderedDict(features=features, avgpool=pool, flatten=nn.Flatten(), classifier=classifier))
