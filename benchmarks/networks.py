"""The networks of the benchmark, and the limits of their ratios to the plain network."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.nets import VGG16, CifarResNet, LeNet, WideResNet

CLASSES = 10


class Encoder(nn.Module):
    """A pre-norm Transformer encoder of linear layers on tokens (B, T, width); as large as BERT-mini's."""

    def __init__(self, width: int = 256, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.heads = heads
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        linear = [{name: nn.Linear(*size) for name, size in sizes.items()} for _ in range(depth)]
        self.blocks = nn.ModuleList(
            nn.ModuleDict(layers | {"norm1": nn.LayerNorm(width), "norm2": nn.LayerNorm(width)}) for layers in linear
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T, width) to class scores (B, C)."""
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            q, k, v = block["qkv"](block["norm1"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + block["down"](block["up"](block["norm2"](x)).relu())
        scores: Tensor = self.head(x.mean(1))
        return scores


class Recurrent(nn.Module):
    """Classifies sequences (B, T, width) by the mean output of a recurrent layer."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU], width: int = 128) -> None:
        super().__init__()
        self.layer, self.head = layer(width, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences (B, T, width) to class scores (B, C)."""
        scores: Tensor = self.head(self.layer(x)[0].mean(1))
        return scores


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg16-small": (VGG16, (3, 32, 32)),
    "wideresnet-16-4": (lambda: WideResNet(depth=16, width=4), (3, 32, 32)),
    "resnet-20": (CifarResNet, (3, 32, 32)),
    "lenet": (LeNet, (1, 28, 28)),
    "transformer-4": (Encoder, (64, 256)),
    "transformer-4, width 128": (lambda: Encoder(width=128), (64, 128)),
    "lstm": (lambda: Recurrent(nn.LSTM), (64, 128)),
    "gru": (lambda: Recurrent(nn.GRU), (64, 128)),
}

_KINDS = ("memory", "step", "predict", "predict one")
_WIDE, _TOKENS = (1.03, 1.08, 1.02, 1.02), (1.03, 1.10, 1.02, 1.05)
_BARS: dict[str, tuple[float, ...]] = {
    "vgg16-small": _WIDE,
    "wideresnet-16-4": _WIDE,
    "resnet-20": _WIDE,
    "lenet": (1.10, 1.35, 1.10, 1.10),
    "transformer-4": _TOKENS,
    "transformer-4, width 128": _TOKENS,
    "lstm": (1.10, 1.30, 1.10),
    "gru": (1.10, 1.30, 1.10),
}
ONE_PASS = {"one pass": 1.1, "one pass, novelty": 1.35}
# Limits of the ratios, by network; "components" compares a step with 32 components to a step with one.
BARS: dict[str, dict[str, float]] = {
    net: dict(zip(_KINDS, bars, strict=False)) | {"components": 1.03, "novelty": 1.15} | ONE_PASS
    for net, bars in _BARS.items()
}
