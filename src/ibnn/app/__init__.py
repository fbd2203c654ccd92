"""Holds the command line (cli), the service (serve), and what both ask of a finished run (inputs, predictor)."""

import math
from typing import Any


def printable(text: str) -> str:
    """Returns text in which control characters, which a terminal would obey, are written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def finite(value: Any) -> Any:
    """Returns plain data with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
