"""METHODS that a job can name: how each is built, and what its training and its answers cost."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ibnn.baselines import SWAG, Ensemble, MCDropout, MeanField, Plain
from ibnn.convert import convert
from ibnn.training.trainable import Trainable

Make = Callable[[int], nn.Module]  # makes the plain network of an ensemble's member, 0 for the only one


class Method(NamedTuple):
    """One method.

    Attributes:
        build: Builds it of plain networks; keyword arguments are its options.
        options: Names of the options.
        noisy_training: Whether each of a recipe's S copies of an example has its own noise; otherwise one pass of every
            network trains on it.
        noisy_answers: Whether a component answers differently from draw to draw.
        repeated: Counts the numbers in a trained model's state that its network holds already.
    """

    build: Callable[..., Trainable]
    options: tuple[str, ...] = ()
    noisy_training: bool = False
    noisy_answers: bool = False
    repeated: Callable[[Any], int] = lambda model: 0


def _options(maker: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(maker).parameters)[1:]  # the first is the network


def _ensemble(make: Make, members: int = 4, **options: Any) -> Ensemble:
    return Ensemble([make(member) for member in range(members)], **options)


def _plain(make: Make, **options: Any) -> Plain:
    return Plain(make(0), **options)


METHODS: dict[str, Method] = {
    "sgd": Method(_plain),
    "swa": Method(_plain),  # with `swa` in its recipe
    "swag": Method(
        lambda make, **options: SWAG(make(0), **options),
        _options(SWAG),
        noisy_answers=True,
        repeated=lambda model: model.mean.numel(),
    ),
    "dropout": Method(lambda make, **options: MCDropout(make(0), **options), _options(MCDropout), True, True),
    "vi": Method(lambda make, **options: MeanField(make(0), **options), _options(MeanField), True, True),
    "ensemble": Method(_ensemble, ("members",)),
    "ibnn": Method(lambda make, **options: convert(make(0), copy=False, **options), _options(convert), True, True),
}
