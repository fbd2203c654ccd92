"""Shows a progress bar on stderr; nothing without a terminal or without rich."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Self, TypeVar

T = TypeVar("T")


class _Nothing:
    """Does nothing, whatever it is asked to do."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        return self


class Bar:
    """A bar on stderr that counts up to a total, if there is one.

    >>> with Bar("training", total=3, shown=False) as bar:
    ...     bar.advance()
    ...     bar.update(done=3, title="nearly done")
    """

    def __init__(
        self, title: str, total: int | None = None, *, done: int = 0, shown: bool = True, in_bytes: bool = False
    ) -> None:
        live = _draw(in_bytes) if shown and sys.stderr.isatty() else None
        self.drawn = live is not None  # whether someone can see it
        self._live: Any = live or _Nothing()
        self._task = self._live.add_task(title, total=total, completed=done)
        self._live.start()

    def advance(self) -> None:
        """Counts one more step."""
        self._live.advance(self._task)

    def update(self, *, done: int, total: int | None = None, title: str | None = None) -> None:
        """Sets how much is done, and of how much, and the text."""
        self._live.update(self._task, completed=done, total=total, description=title)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Removes the bar."""
        self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def track(items: Iterable[T], title: str) -> Iterator[T]:
    """Yields items under a bar."""
    with Bar(title, len(items) if isinstance(items, Sized) else None) as bar:
        for item in items:
            yield item
            bar.advance()


def _draw(in_bytes: bool) -> Any:
    """Returns rich's live display, or None where rich is missing."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    count = progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn()
    columns = ("{task.description}", progress.BarColumn(20), count, progress.TimeRemainingColumn())
    return progress.Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True)
