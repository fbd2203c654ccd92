"""Builds networks of the user's own, named `package.module:function` and imported from the current folder alone."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.machinery import PathFinder
from typing import Any

from torch import nn

from ibnn.errors import complaint, did_you_mean

FORM = "package.module:function"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Whether a name is that of a function.

    >>> is_import_path("mynets:make_net"), is_import_path("lenet"), is_import_path("mynets.py:make_net()")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def make_net(name: str, outputs: int, options: Mapping[str, Any]) -> nn.Module:
    """Imports the function and calls it as function(outputs, **options)."""
    function = find(name)
    with _own_code(name, f"a function that makes a network: {name}({outputs}, **{dict(options)})"):
        net = function(outputs, **options)
    if not isinstance(net, nn.Module):
        got = f"{name}, which returned {type(net).__name__}"
        raise TypeError(complaint("net", "a function that returns a torch.nn.Module", got, "Return the network."))
    return net


def find(name: str) -> Callable[..., Any]:
    """Imports the function from a module in the current folder, which is on `sys.path` during the import alone."""
    module, _, function = name.partition(":")
    top, here = module.partition(".")[0], os.getcwd()
    importlib.invalidate_caches()
    if (spec := PathFinder.find_spec(top, [here])) is None:
        remedy = "Run the command in the folder that has it; import a function of an installed package in a file there."
        got = f"{name}, where {here} has no module {top!r}"
        raise FileNotFoundError(complaint("net", "a function of a module in the current folder", got, remedy))
    loaded = getattr(sys.modules.get(top), "__spec__", spec)
    if loaded.origin != spec.origin:
        got = f"{name}, where {top!r} is already {loaded.origin}"
        raise ValueError(complaint("net", "of a module whose name is free", got, "Rename your module."))
    with _own_code(name, "of a module that can be imported"):
        found = vars(importlib.import_module(module))
    if not callable(found.get(function)):
        there = [each for each, value in found.items() if callable(value) and each[0] != "_"]
        remedy = did_you_mean(function, there, otherwise=f"Define it in {module}.")
        raise ValueError(complaint("net", f"a function of {module}", f"{function!r}, which it does not have", remedy))
    return found[function]  # type: ignore[no-any-return]


@contextmanager
def _own_code(name: str, expected: str) -> Iterator[None]:
    """Makes the current folder importable for a block; names errors; sends prints to stderr: stdout is for results."""
    sys.path.insert(0, here := os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        got = f"{name}, which stops: {type(error).__name__}: {error}"
        raise ValueError(complaint("net", expected, got, "Mend it; --debug shows where.")) from error
    finally:
        with suppress(ValueError):
            sys.path.remove(here)
