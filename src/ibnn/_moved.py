"""Keeps documented modules importable under the names they had before they moved into rooms."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOMS = {
    **dict.fromkeys(("recipe",), "training"),
    **dict.fromkeys(("saving",), "files"),
    **dict.fromkeys(("evaluation", "figures", "jobs", "provenance", "report", "reproduce", "runs"), "lab"),
    **dict.fromkeys(("asking", "serve"), "app"),
}


class _Finder(MetaPathFinder, Loader):
    """Finds `ibnn.jobs` where it is now, `ibnn.lab.jobs`; both names give the same module."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        moved = fullname.startswith("ibnn.") and fullname.split(".")[1] in _ROOMS
        return ModuleSpec(fullname, self) if moved else None

    def exec_module(self, module: ModuleType) -> None:
        _, name = module.__name__.split(".", 1)
        sys.modules[module.__name__] = import_module(f"ibnn.{_ROOMS[name.split('.')[0]]}.{name}")


sys.meta_path.insert(0, _Finder())  # before the finder by path, which would load submodules twice
