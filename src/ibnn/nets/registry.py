"""Every net by its name, for recipes, plans and smoke tests."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from torch import nn

from ibnn.errors import complaint
from ibnn.nets.alexnet import AlexNet
from ibnn.nets.dense import mlp
from ibnn.nets.lenet import LeNet
from ibnn.nets.resnet import CifarResNet, ResNet
from ibnn.nets.vgg import VGG16, VGG16Large
from ibnn.nets.wideresnet import WideResNet

_PIXELS = 28 * 28
_SIZES = ("inputs", "hidden", "width", "depth")  # there is no network without


class _Entry(NamedTuple):
    """How a net is built, the shape of one example, and the options it knows."""

    build: Callable[..., nn.Module]
    shape: tuple[int, ...]
    options: tuple[str, ...] = ()


def _mlp(classes: int, *, inputs: int = _PIXELS, hidden: int = 256, layers: int = 2) -> nn.Module:
    return nn.Sequential(nn.Flatten(), mlp(inputs, classes, hidden=hidden, layers=layers))  # images too


_NETS = {
    "mlp": _Entry(_mlp, (_PIXELS,), ("inputs", "hidden", "layers")),
    "lenet": _Entry(LeNet, (1, 28, 28), ("width",)),
    "alexnet": _Entry(AlexNet, (3, 224, 224), ("dropout",)),
    "vgg16-small": _Entry(VGG16, (3, 32, 32), ("width", "batchnorm", "dropout")),
    "vgg16-large": _Entry(VGG16Large, (3, 224, 224), ("batchnorm", "dropout")),
    "resnet18": _Entry(partial(ResNet, depth=18), (3, 224, 224)),
    "resnet34": _Entry(partial(ResNet, depth=34), (3, 224, 224)),
    "resnet50": _Entry(partial(ResNet, depth=50), (3, 224, 224)),
    "wideresnet": _Entry(WideResNet, (3, 32, 32), ("depth", "width")),
    "resnet20": _Entry(partial(CifarResNet, depth=20), (3, 32, 32)),
}


def names() -> tuple[str, ...]:
    """The names that `make` knows.

    >>> names()[:3]
    ('mlp', 'lenet', 'alexnet')
    """
    return tuple(_NETS)


def make(name: str, classes: int = 10, **options: float) -> nn.Module:
    """Builds a net by its name; inside `torch.device("meta")` it costs no memory.

    Args:
        name: One of `names()`.
        classes: Number of outputs.
        **options: "mlp": inputs (784), hidden (256), layers (2); "lenet" and "vgg16-small": width (1); "vgg16-small"
            and "vgg16-large": batchnorm (False); these and "alexnet": dropout (0.5); "wideresnet": depth (28), width
            (10); the others have none.

    >>> make("lenet", classes=3, width=2).fc2
    Linear(in_features=128, out_features=3, bias=True)
    """
    return _entry(name, options).build(classes, **options)


def input_shape(name: str, **options: float) -> tuple[int, ...]:
    """The shape of one example that the net takes.

    Args:
        name: One of `names()`.
        **options: As given to `make`.

    >>> input_shape("resnet50"), input_shape("mlp", inputs=8)
    ((3, 224, 224), (8,))
    """
    entry = _entry(name, options)
    return (int(options["inputs"]),) if "inputs" in options else entry.shape


def _entry(name: str, options: Mapping[str, float]) -> _Entry:
    """The net of that name, which knows all these options."""
    if name not in _NETS:
        remedy = f"Did you mean {_nearest(name, _NETS)!r}?"
        raise ValueError(complaint("name", f"one of {', '.join(_NETS)}", repr(name), remedy))
    entry = _NETS[name]
    for option, value in options.items():
        if option not in entry.options:
            expected = f"among {', '.join(entry.options)} for {name!r}" if entry.options else f"none for {name!r}"
            remedy = f"Did you mean {_nearest(option, entry.options)!r}?" if entry.options else "Leave it out."
            raise ValueError(complaint("options", expected, repr(option), remedy))
        if value < 0 or (value == 0 and option in _SIZES):
            least = "positive" if option in _SIZES else "at least 0"
            raise ValueError(complaint(option, least, value, "Leave it out for the default."))
    return entry


def _nearest(word: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.0)[0]
