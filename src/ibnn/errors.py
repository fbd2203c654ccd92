"""Words errors: every complaint names the argument, what was expected, what came, and what to do."""

import difflib
from collections.abc import Iterable, Mapping


class DamagedError(ValueError):
    """A file is not as it was written: the one who asked for it did nothing wrong."""


def complaint(argument: str, expected: str, got: object, remedy: str) -> str:
    """Words an error in its four parts.

    >>> complaint("components", "an integer of at least 1", 0, "Pass components=8.")
    'Expected `components` to be an integer of at least 1, but got 0. Pass components=8.'
    """
    return f"Expected `{argument}` to be {expected}, but got {got}. {remedy}"


def nearest(word: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Returns the known name that an unknown word most probably means.

    Args:
        word: What was given.
        known: The names there are, at least one.
        synonyms: Other words for some of them; those for names that are not known are ignored.

    >>> nearest("epocs", ["epochs", "lr"]), nearest("Learning-Rate", ["epochs", "lr"], {"learning_rate": "lr"})
    ('epochs', 'lr')
    """
    names = list(known)
    meant = {other: name for other, name in (synonyms or {}).items() if name in names} | {name: name for name in names}
    spelt = str(word).lower().replace("-", "_")
    return meant.get(spelt) or meant[difflib.get_close_matches(str(word), meant, n=1, cutoff=0.0)[0]]
