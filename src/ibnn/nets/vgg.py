"""VGG-16: small for 32 × 32 images, large for ImageNet in torchvision's layout."""

from collections import OrderedDict

from torch import nn

from ibnn.nets.initialise import he_convolutions


def _features(*, width: float = 1.0, batchnorm: bool = False) -> nn.Sequential:
    """Returns the thirteen convolutions; their indices are the names in torchvision's checkpoints."""
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


class VGG16(nn.Sequential):
    """VGG-16 for 32 × 32 images, 512-512-C head; torchvision's names for the features.

    `width` scales the channels: 1 is the paper's network, 0.25 a quarter of its width. The paper's has no BatchNorm.
    `dropout` is the rate before the hidden layers of the head.

    >>> sum(p.numel() for p in VGG16(width=0.125).parameters())
    239538
    """

    def __init__(self, classes: int = 10, *, width: float = 1.0, batchnorm: bool = False, dropout: float = 0.5) -> None:
        features, last = _features(width=width, batchnorm=batchnorm), int(512 * width)
        head = [m for _ in range(2) for m in (nn.Dropout(dropout), nn.Linear(last, last), nn.ReLU(inplace=True))]
        classifier = nn.Sequential(*head, nn.Linear(last, classes))
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
        he_convolutions(self)


class VGG16Large(nn.Sequential):
    """VGG-16 for 224 × 224 images, or any from 32 × 32; torchvision's vgg16 and vgg16_bn checkpoints load as they are.

    >>> import torch
    >>> with torch.device("meta"):
    ...     net = VGG16Large()
    >>> sum(p.numel() for p in net.parameters())
    138357544
    """

    def __init__(self, classes: int = 1000, *, batchnorm: bool = False, dropout: float = 0.5) -> None:
        features, hidden = _features(batchnorm=batchnorm), ((512 * 7 * 7, 4096), (4096, 4096))
        head = [m for a, b in hidden for m in (nn.Linear(a, b), nn.ReLU(inplace=True), nn.Dropout(dropout))]
        classifier, pool = nn.Sequential(*head, nn.Linear(4096, classes)), nn.AdaptiveAvgPool2d(7)
        super().__init__(OrderedDict(features=features, avgpool=pool, flatten=nn.Flatten(), classifier=classifier))
        he_convolutions(self)
        for module in classifier:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)
