"""Jinja templates rendered to single HTML files: every value is escaped, styles and scripts are inlined."""

import re
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")  # HTML forbids them


def environment(package: str) -> Environment:
    """Returns a Jinja environment for the templates of a package; values are escaped and lose control characters."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _clean(value: Any) -> Any:
    return _CONTROL.sub("", value) if isinstance(value, str) and not isinstance(value, Markup) else value


def inlined(package: str, name: str) -> Markup:
    """Returns a stylesheet or script of a package, to be put into a page as it is."""
    return Markup((resources.files(package) / "templates" / name).read_text(encoding="utf-8").strip())


def style(package: str, name: str) -> Markup:
    """Returns the stylesheet of a package after the one that all pages share."""
    return inlined("ibnn.lab", "base.css") + "\n" + inlined(package, name)
