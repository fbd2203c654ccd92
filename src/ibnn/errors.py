"""Words errors: every complaint names the argument, what was expected, what came, and what to do."""

import difflib
from collections.abc import Iterable, Mapping

NEAR = 0.6  # least similarity of two words, of 1, for one to be suggested for the other


class DamagedError(ValueError):
    """A file is not as it was written: the one who asked for it did nothing wrong."""


class DivergedError(RuntimeError):
    """Training produced a loss or a gradient that is not finite; the last good checkpoint is in place."""


def complaint(argument: str, expected: str, got: object, remedy: str) -> str:
    """Words an error in its four parts.

    >>> complaint("components", "an integer of at least 1", 0, "Pass components=8.")
    'Expected `components` to be an integer of at least 1, but got 0. Pass components=8.'
    """
    return f"Expected `{argument}` to be {expected}, but got {got}. {remedy}"


def nearest(word: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str | None:
    """Returns the known name that an unknown word, or a synonym of one, most probably means; None if no name is near.

    >>> nearest("epocs", ["epochs", "lr"]), nearest("Learning-Rate", ["epochs", "lr"], {"learning_rate": "lr"})
    ('epochs', 'lr')
    """
    names = list(known)
    meant = {other: name for other, name in (synonyms or {}).items() if name in names} | {name: name for name in names}
    spelt = str(word).lower().replace("-", "_")
    by_spelling = {other.lower().replace("-", "_"): name for other, name in reversed(meant.items())}
    inside = [
        other for other in by_spelling if len(other) > 3 and (other in spelt or (len(spelt) > 3 and spelt in other))
    ]
    close = difflib.get_close_matches(spelt, by_spelling, n=1, cutoff=NEAR)
    found = close or sorted(inside, key=len, reverse=True)
    return by_spelling[found[0]] if found else None


def did_you_mean(
    word: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None, *, otherwise: str
) -> str:
    """Returns a question that suggests the nearest known name, or another remedy if no name is near.

    >>> did_you_mean("meen", ["mean"], otherwise="Pass one."), did_you_mean("softmax", ["mean"], otherwise="Pass one.")
    ("Did you mean 'mean'?", 'Pass one.')
    """
    near = nearest(word, known, synonyms)
    return otherwise if near is None else f"Did you mean {near!r}?"
