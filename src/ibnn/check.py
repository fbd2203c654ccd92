"""Value checks shared by all public functions: integer, number, share, choice, shape.

Each raises a ValueError (`shape` a TypeError for what is no tensor). The message names the argument, says what was
expected and what came, and ends with what to do.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ibnn.errors import complaint, nearest


def integer(name: str, value: Any, *, least: int = 1, most: int | None = None, remedy: str = "") -> None:
    """Raises unless a value is an integer in [least, most].

    >>> integer("components", 0, remedy="Pass components=8.")
    Traceback (most recent call last):
    ValueError: Expected `components` to be an integer of at least 1, but got 0. Pass components=8.
    """
    expected = f"an integer of at least {least}" if most is None else f"an integer in {least} … {most}"
    remedy = remedy or f"Pass {name}={least}."
    known = isinstance(value, int) and not isinstance(value, bool)
    if not known or value < least or (most is not None and value > most):
        raise ValueError(complaint(name, expected, repr(value), remedy))


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    remedy: str = "",
) -> None:
    """Raises unless a value is a finite number with least ≤ value ≤ most and above < value < below.

    >>> number("prior_std", -1, above=0, remedy="Pass prior_std=0.3.")
    Traceback (most recent call last):
    ValueError: Expected `prior_std` to be a number above 0, but got -1. Pass prior_std=0.3.
    """
    limits = [("of at least", least), ("above", above), ("of at most", most), ("below", below)]
    words = " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))
    expected, remedy = f"a number {words}".strip() if words else "a finite number", remedy or "Pass one."
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (known and least <= value <= most and above < value < below):
        raise ValueError(complaint(name, expected, repr(value), remedy))


def share(name: str, value: Any, *, remedy: str = "") -> None:
    """Raises unless a value is a number between 0 and 1, neither included.

    >>> share("level", 1.5, remedy="Pass level=0.9.")
    Traceback (most recent call last):
    ValueError: Expected `level` to be a number above 0 and below 1, but got 1.5. Pass level=0.9.
    """
    number(name, value, above=0, below=1, remedy=remedy)


def choice(name: str, value: Any, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> None:
    """Raises unless a value is one of the known names; suggests the one that was probably meant.

    >>> choice("kl", "meen", ["mean", "components"])
    Traceback (most recent call last):
    ValueError: Expected `kl` to be one of mean, components, but got 'meen'. Did you mean 'mean'?
    """
    names = list(known)
    if not isinstance(value, str) or value not in names:
        remedy = f"Did you mean {nearest(value, names, synonyms)!r}?"
        raise ValueError(complaint(name, f"one of {', '.join(names)}", repr(value), remedy))


def shape(name: str, value: Any, expected: tuple[int | str, ...], *, remedy: str = "") -> None:
    """Raises unless a value is a tensor of this shape; a string stands for any length.

    >>> import torch
    >>> shape("z", torch.zeros(2, 3), ("draws", 4))
    Traceback (most recent call last):
    ValueError: Expected `z` to be a tensor of shape (draws, 4), but got shape (2, 3). Pass one of that shape.
    """
    wanted = f"a tensor of shape ({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
    remedy = remedy or "Pass one of that shape."
    if not isinstance(value, Tensor):
        raise TypeError(complaint(name, wanted, type(value).__name__, remedy))
    fits = value.dim() == len(expected) and all(
        isinstance(size, str) or size == actual for size, actual in zip(expected, value.shape, strict=True)
    )
    if not fits:
        raise ValueError(complaint(name, wanted, f"shape {tuple(value.shape)}", remedy))
