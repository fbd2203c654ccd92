"""SCREEN: results go to stdout and everything else to stderr; errors become one message and an exit code."""

import functools
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ibnn.errors import DamagedError, complaint, nearest

_SYNONYMS = {
    word: option
    for option, words in {
        "out": "output output_dir output_file out_dir outdir dir folder run_dir save_to",
        "data": "data_dir data_folder dataset_dir root",
        "data-set": "dataset",
        "samples": "draws n_samples num_samples",
        "seed": "random_state random_seed",
        "net": "model network arch architecture",
        "option": "options",
        "classes": "num_classes n_classes",
        "fresh": "restart overwrite force",
        "resume": "continue",
        "set": "config override",
        "risk": "error alpha threshold",
        "scale": "white divide max",
        "host": "address bind ip",
        "megabytes": "max_size limit",
        "false-alarm": "alpha",
        "methods": "method",
        "quiet": "silent",
        "debug": "verbose traceback",
    }.items()
    for word in words.split()
}
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Results and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Shows where an error came from.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]


class MisuseError(Exception):
    """Something is wrong with the command itself, not with its work."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what to do next."""


@contextmanager
def misuse() -> Iterator[None]:
    """What goes wrong inside was asked wrongly."""
    try:
        yield
    except DamagedError:  # not the fault of the one who asked
        raise
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise MisuseError(str(error)) from error


def check_out(option: str, path: Path, *, folder: bool = False) -> None:
    """Complains, before any work, of a file or folder that could not be written. Missing folders are made later."""
    kind, other = ("a folder", "the file") if folder else ("a file", "the folder")
    if path.exists() and path.is_dir() != folder:
        raise ValueError(complaint(option, kind, f"{other} {path}", "Pass another one."))
    above = path if path.is_dir() else next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "cannot be written to" if above.is_dir() else "is a file"
        raise ValueError(
            complaint(option, f"{kind} that can be written", f"{path}: {above} {why}", "Pass another one.")
        )


class Screen:
    """Where a command prints.

    Attributes:
        quiet: Notes and progress are left out.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def note(self, text: str) -> None:
        """A line that is not a result, on stderr."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Something that failed while the command goes on, on stderr."""
        print(f"Error: {text}", file=sys.stderr, flush=True)

    def json(self, value: Any) -> None:
        """A result on stdout; numbers that JSON does not have become null."""
        print(json.dumps(finite(value), indent=1, ensure_ascii=False))

    def table(self, rows: Sequence[Sequence[str]], title: str | None = None) -> None:
        """A header and rows on stdout; names to the left, numbers to the right."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = Table(title=title, title_justify="left")
        for number, name in enumerate(rows[0]):
            numeric = number > 0 and all(row[number][:1] in "0123456789−-+–" for row in rows[1:])
            shown.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows[1:]:
            shown.add_row(*map(Text, row))
        # a pipe has no width: nothing is folded or cut there
        Console(width=None if sys.stdout.isatty() else 500, highlight=False).print(shown)


def finite(value: Any) -> Any:
    """The same plain data with None for numbers that are not finite.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def register(app: typer.Typer, function: Callable[..., None], *, name: str | None = None, panel: str = "") -> None:
    """Makes a command of a function whose first parameter is the screen; adds --quiet and --debug, and words errors."""
    _, *own = inspect.signature(function).parameters.values()
    flags = {"ctx": typer.Context, "quiet": Quiet, "debug": Debug}
    more = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for key, kind in flags.items()]
    more = [parameter.replace(default=False) if parameter.name != "ctx" else parameter for parameter in more]

    @functools.wraps(function)
    def command(*, ctx: typer.Context, quiet: bool, debug: bool, **options: Any) -> None:
        before = ctx.find_root().params  # ibnn --quiet COMMAND
        with told(debug or before.get("debug", False)):
            function(Screen(quiet or before.get("quiet", False)), **options)
            sys.stdout.flush()

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    command.__signature__ = inspect.Signature([*keywords, *more])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*keywords, *more)}
    app.command(name, cls=_Command, rich_help_panel=panel or None)(command)


class _Command(TyperCommand):
    """A command that knows synonyms of its options, and of what `--set` changes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's; an option that there is not comes with the one that was probably meant."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # the class itself is typer's own affair
                error.possibilities = [self._meant(error.option_name.lstrip("-"))]  # type: ignore[attr-defined]
            raise

    def _meant(self, word: str) -> str:
        given = (option for each in self.params for option in (*each.opts, *each.secondary_opts))
        known = {option.lstrip("-"): option for option in given if option.startswith("--")}
        if "set" in known:
            from ibnn.lab.jobs import meanings

            if (name := word.lower().replace("-", "_")) in meanings():
                return f"--set {meanings()[name]}=…"
        return known[nearest(word, known, _SYNONYMS)]


@contextmanager
def told(debug: bool) -> Iterator[None]:
    """Turns errors into a message on stderr and an exit code."""
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError:  # the reader has seen enough; nothing more is flushed to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        message, code = _worded(error)
        print(message, file=sys.stderr, flush=True)
        raise typer.Exit(code) from None


def _worded(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return f"Interrupted. {error}".rstrip(), 130
    if isinstance(error, MisuseError):
        return f"Error: {error}", 2
    if isinstance(error, ModuleNotFoundError):
        known = "pip install" in str(error)
        return f"Error: {error}" + (
            "" if known else f". Install what is missing: pip install 'ibnn[{_extra(error)}]'"
        ), 1
    if isinstance(error, ValueError | TypeError | OSError) or type(error).__module__.startswith("ibnn."):
        return f"Error: {error}", 1
    return f"Error: unexpected {type(error).__name__}: {error}. Run again with --debug to see where.", 1


def _extra(error: ModuleNotFoundError) -> str:
    package = (error.name or "").split(".")[0]
    if package in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        return "serve"
    return "demo" if package in ("matplotlib", "sklearn") else "cli"
