"""Builds networks of the user's own, named `package.module:function` and imported from the current folder alone."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
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
    try:
        inspect.signature(function).bind(outputs, **options)
    except TypeError as error:
        expected, got = f"what {name} takes beside the number of outputs", f"{dict(options) or 'none'} ({error})"
        remedy = f"It is called as {name.partition(':')[2]}(outputs, **net_options)."
        raise ValueError(complaint("net_options", expected, got, remedy)) from None
    try:
        with _importable(Path.cwd()):
            net = function(outputs, **options)
    except Exception as error:
        raise _failure(name, f"a function that makes a network of {outputs} outputs", error) from error
    if not isinstance(net, nn.Module):
        got = f"{name}, which returned {type(net).__name__}"
        raise TypeError(complaint("net", "a function that returns a torch.nn.Module", got, "Return the network."))
    return net


def takes(name: str, option: str) -> bool:
    """Whether the function has a parameter of that name."""
    return option in inspect.signature(find(name)).parameters


def find(name: str) -> Callable[..., Any]:
    """Imports the function from a module in the current folder, which is on `sys.path` during the import alone."""
    module, _, function = name.partition(":")
    top, here = module.partition(".")[0], Path.cwd()
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(top, [str(here)])
    if spec is None:
        remedy = "Run the command in the folder that has it; import a function of an installed package in a file there."
        got = f"{name}, where {here} has no module {top!r}"
        raise FileNotFoundError(complaint("net", "a function of a module in the current folder", got, remedy))
    loaded = sys.modules.get(top)
    if loaded is not None and _place(loaded.__spec__) != _place(spec):
        got = f"{name}, where {top!r} is already {_place(loaded.__spec__) or 'built into Python'}"
        raise ValueError(complaint("net", "of a module whose name is free", got, "Rename your module."))
    try:
        with _importable(here):
            found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:
        raise _failure(name, "of a module that can be imported", error) from error
    if found is None:
        there = [each for each, value in vars(sys.modules[module]).items() if callable(value) and each[0] != "_"]
        remedy = did_you_mean(function, there, otherwise=f"Define it in {module}.")
        raise ValueError(complaint("net", f"a function of {module}", f"{function!r}, which it does not have", remedy))
    if not callable(found):
        got = f"{name}, which is a {type(found).__name__}"
        raise TypeError(complaint("net", "a function that makes a network", got, "Name a function or a class."))
    return found  # type: ignore[no-any-return]


def _failure(name: str, expected: str, error: BaseException) -> ValueError:
    got = f"{name}, which stops: {type(error).__name__}: {error}"
    return ValueError(complaint("net", expected, got, "Mend it; --debug shows where."))


def _place(spec: ModuleSpec | None) -> str | None:
    """Returns the file of a module, or the folder of a package without __init__.py."""
    place = next(iter(spec.submodule_search_locations or ()), spec.origin) if spec else None
    return os.path.realpath(place) if place else None


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Puts a folder first on `sys.path` for the length of a block, whose prints go to stderr: stdout is for results."""
    sys.path.insert(0, str(folder))
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(folder))
