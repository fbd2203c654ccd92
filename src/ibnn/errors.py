"""MESSAGES: every complaint names the argument, what was expected, what came, and what to do."""


def complaint(argument: str, expected: str, got: object, remedy: str) -> str:
    """Words an error in its four parts.

    >>> complaint("components", "an integer of at least 1", 0, "Pass components=8.")
    'Expected `components` to be an integer of at least 1, but got 0. Pass components=8.'
    """
    return f"Expected `{argument}` to be {expected}, but got {got}. {remedy}"
