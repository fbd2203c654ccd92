"""ASKING a finished run: read inputs, predict, abstain. Shared by the command line and the service."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """Returns plain data with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
