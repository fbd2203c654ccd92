"""Every net by its name, for recipes, plans and smoke tests."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ibnn import check
from ibnn.errors import complaint
from ibnn.nets.convnets import VGG16, LeNet
from ibnn.nets.dense import mlp
from ibnn.nets.resnet import CifarResNet, ResNet, WideResNet

_PIXELS = 28 * 28


class _Entry(NamedTuple):
    """How a net is built, the shape of one example, and a check of each option that it knows."""

    build: Callable[..., nn.Module]
    shape: tuple[int, ...]
    options: Mapping[str, Callable[[str, Any], None]] = {}


def _mlp(classes: int, *, inputs: int = _PIXELS, hidden: int = 256, layers: int = 2) -> nn.Module:
    return nn.Sequential(nn.Flatten(), mlp(inputs, classes, hidden=hidden, layers=layers))  # images too


def _flag(name: str, value: Any) -> None:
    check.integer(name, int(value) if isinstance(value, bool) else value, least=0, most=1, remedy=_REMEDY)


_REMEDY = "Leave it out for the default."
_SIZE, _DEPTH = (partial(check.integer, most=most, remedy=_REMEDY) for most in (2**20, 1000))
_FACTOR = partial(check.number, above=0, remedy=_REMEDY)
_SHARE = partial(check.number, least=0, most=1, remedy=_REMEDY)
_NETS = {
    "mlp": _Entry(_mlp, (_PIXELS,), {"inputs": _SIZE, "hidden": _SIZE, "layers": partial(_DEPTH, least=0)}),
    "lenet": _Entry(LeNet, (1, 28, 28), {"width": _SIZE}),
    "vgg16-small": _Entry(VGG16, (3, 32, 32), {"width": _FACTOR, "batchnorm": _flag, "dropout": _SHARE}),
    "resnet18": _Entry(partial(ResNet, depth=18), (3, 224, 224)),
    "resnet50": _Entry(partial(ResNet, depth=50), (3, 224, 224)),
    "wideresnet": _Entry(WideResNet, (3, 32, 32), {"depth": _DEPTH, "width": _SIZE}),
    "resnet20": _Entry(partial(CifarResNet, depth=20), (3, 32, 32), {"width": _FACTOR}),
}


def names() -> tuple[str, ...]:
    """Returns the names that `make` knows."""
    return tuple(_NETS)


def make(name: str, classes: int = 10, **options: float) -> nn.Module:
    """Builds a net by its name; inside `torch.device("meta")` it costs no memory.

    Args:
        name: One of `names()`.
        classes: Number of outputs.
        **options: "mlp": inputs (784), hidden (256), layers (2); "lenet", "vgg16-small" and "resnet20": width (1);
            "vgg16-small": batchnorm (False), dropout (0.5); "wideresnet": depth (28), width (10); the others have none.

    >>> make("lenet", classes=3, width=2).fc2
    Linear(in_features=128, out_features=3, bias=True)
    """
    check.integer("classes", classes)
    return _entry(name, options).build(classes, **options)


def input_shape(name: str, **options: float) -> tuple[int, ...]:
    """Returns the shape of one example for the net that `make` builds from the same name and options.

    >>> input_shape("resnet50"), input_shape("mlp", inputs=8)
    ((3, 224, 224), (8,))
    """
    shape = _entry(name, options).shape
    return (int(options["inputs"]),) if "inputs" in options else shape


def _entry(name: str, options: Mapping[str, float]) -> _Entry:
    """Returns the net of that name; raises unless it knows all these options."""
    check.choice("name", name, _NETS)
    known = _NETS[name].options
    for option, value in options.items():
        if not known:
            raise ValueError(complaint("options", f"none for {name!r}", repr(option), "Leave it out."))
        check.choice("options", option, known)
        known[option](option, value)
    return _NETS[name]
