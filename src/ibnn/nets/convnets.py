"""Convolutions, then a fully connected head: LeNet and VGG-16, the latter with torchvision's names."""

from collections import OrderedDict

from torch import nn


class LeNet(nn.Sequential):
    """The paper's LeNet for 28 × 28 images of one channel; `width` multiplies every hidden layer.

    >>> sum(p.numel() for p in LeNet().parameters())
    41806
    """

    def __init__(self, classes: int = 10, *, width: int = 1) -> None:
        layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(1, 6 * width, 5), "relu1": nn.ReLU()}
        layers |= {"pool1": nn.MaxPool2d(2), "conv2": nn.Conv2d(6 * width, 16 * width, 5), "relu2": nn.ReLU()}
        layers |= {"pool2": nn.MaxPool2d(2), "conv3": nn.Conv2d(16 * width, 120 * width, 4), "relu3": nn.ReLU()}
        layers |= {"flatten": nn.Flatten(), "fc1": nn.Linear(120 * width, 64 * width), "relu4": nn.ReLU()}
        super().__init__(OrderedDict(layers | {"fc2": nn.Linear(64 * width, classes)}))


class VGG16(nn.Sequential):
    """VGG-16 for 32 × 32 images, 512-512-C head; torchvision's names for the features.

    `width` scales the channels: 1 is the paper's network, 0.25 a quarter of its width. The paper's has no BatchNorm.
    `dropout` is the rate before the hidden layers of the head.

    >>> sum(p.numel() for p in VGG16(width=0.125).parameters())
    239538
    """

    def __init__(self, classes: int = 10, *, width: float = 1.0, batchnorm: bool = False, dropout: float = 0.5) -> None:
        channels, layers = 3, list[nn.Module]()  # indices of the layers are the names in torchvision's checkpoints
        for size, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            out = int(size * width)
            for _ in range(depth):
                norm = [nn.BatchNorm2d(out)] if batchnorm else []
                layers += [nn.Conv2d(channels, out, 3, padding=1), *norm, nn.ReLU(inplace=True)]
                channels = out
            layers.append(nn.MaxPool2d(2))
        head = [m for _ in range(2) for m in (nn.Dropout(dropout), nn.Linear(out, out), nn.ReLU(inplace=True))]
        classifier = nn.Sequential(*head, nn.Linear(out, classes))
        super().__init__(OrderedDict(features=nn.Sequential(*layers), flatten=nn.Flatten(), classifier=classifier))
        he_convolutions(self)


def he_convolutions(net: nn.Module) -> None:
    """Draws convolution weights from He's normal by fan-out, as torchvision does, and zeroes biases."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
