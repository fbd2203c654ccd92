"""The methods that a job can name: how each is built of plain networks, and what it costs."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ibnn.baselines import SWAG, Ensemble, MCDropout, MeanField, Plain
from ibnn.convert import convert
from ibnn.training.trainable import Trainable

Make = Callable[[int], nn.Module]  # makes the plain network of an ensemble's member, 0 for the only one


class Method(NamedTuple):
    """How a method is built, and what it costs."""

    build: Callable[..., Trainable]  # of a `Make`; keyword arguments are its options
    options: tuple[str, ...] = ("members",)  # their names
    noisy_training: bool = False  # each of a recipe's S copies of an example has its own noise, else it trains once
    repeated: Callable[[Any], int] = lambda model: 0  # numbers in its state that its network holds already


def _options(maker: Callable[..., Any]) -> tuple[str, ...]:
    return (*tuple(inspect.signature(maker).parameters)[1:], "members")  # the first is the network


def _one(method: Callable[..., Any], members: int = 1) -> Callable[..., Any]:
    """Returns how a method is built; several `members`, this many by default, are an ensemble."""

    def build(make: Make, members: int = members, **options: Any) -> Any:
        made = [method(make(member), **copy.deepcopy(options)) for member in range(members)]
        return Ensemble(made) if members > 1 else made[0]

    return build


METHODS: dict[str, Method] = {
    "sgd": Method(_one(Plain)),
    "swa": Method(_one(Plain)),  # with `swa` in its recipe
    "swag": Method(_one(SWAG), _options(SWAG), repeated=lambda model: model.mean.numel()),
    "dropout": Method(_one(MCDropout), _options(MCDropout), noisy_training=True),
    "vi": Method(_one(MeanField), _options(MeanField), noisy_training=True),
    "ensemble": Method(_one(Plain, 4)),
    "ibnn": Method(_one(lambda net, **options: convert(net, copy=False, **options)), _options(convert), True),
}
