"""Initial weights of the convolutional families."""

from torch import nn


def he_convolutions(net: nn.Module) -> None:
    """Draws convolution weights from He's normal by fan-out, as torchvision does, and zeroes biases.

    >>> conv = nn.Conv2d(3, 4, 1)
    >>> he_convolutions(conv)
    >>> conv.bias.tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
