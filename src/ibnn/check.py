"""Value checks shared by all public functions: integer, seed, number, share, choice, shape, device, path.

Each raises a ValueError (`shape` and `path` a TypeError for what is no tensor or path). The message names the
argument, says what was expected and what came, and ends with what to do.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ibnn.errors import complaint, did_you_mean


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


def seed(value: Any) -> None:
    """Raises unless a seed fits into a buffer."""
    integer("seed", value, least=0, most=2**63 - 1)


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
        remedy = did_you_mean(value, names, synonyms, otherwise="Pass one of these.")
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


def device(name: str, value: Any) -> None:
    """Raises unless a value is None or a device that this machine can compute on.

    >>> device("device", "gpu")
    Traceback (most recent call last):
    ValueError: Expected `device` to be a device of this machine, but got 'gpu'. Pass cpu.
    """
    if value is None:
        return
    try:
        usable = torch.device(value).type != "meta" and torch.zeros(1, device=value).add(1).cpu().item() == 1
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        usable = False
    if not usable:
        kind = torch.accelerator.current_accelerator()
        others = [] if kind is None else [f"{kind.type}:{n}" for n in range(torch.accelerator.device_count())]
        remedy = f"Pass {' or '.join(['cpu', *others])}."
        raise ValueError(complaint(name, "a device of this machine", repr(value), remedy))


def path(name: str, value: Any, *, folder: bool = False) -> Path:
    """Returns a path; raises unless it can name a file or, with `folder`, a folder.

    >>> path("directory", 3)
    Traceback (most recent call last):
    TypeError: Expected `directory` to be a path, but got int. Pass a string or a pathlib.Path.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(complaint(name, "a path", type(value).__name__, "Pass a string or a pathlib.Path."))
    found = Path(value)
    in_the_way = [place for place in (found, *found.parents) if folder and place.exists() and not place.is_dir()]
    if in_the_way:
        raise ValueError(complaint(name, "a folder", f"the file {in_the_way[0]}", "Choose another place."))
    if not folder and found.is_dir():
        raise ValueError(complaint(name, "a file", f"the folder {found}", "Add a name, such as model.onnx."))
    return found
