"""Prints results to stdout and the rest to stderr; turns errors into a message and an exit code."""

import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ibnn.app import finite, printable
from ibnn.errors import DamagedError, complaint

Json = Annotated[bool, typer.Option("--json", help="Prints JSON on stdout, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Prints results and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Prints the traceback of an error.")]
_EXTRAS = dict.fromkeys(("starlette", "uvicorn", "python_multipart"), "serve")
_EXTRAS |= {"matplotlib": "demo", "sklearn": "demo", "jinja2": "demo", "onnxruntime": "export"}


class MisuseError(Exception):
    """The command was used wrongly: exit code 2."""


@contextmanager
def misuse(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds inside, by default those of wrong arguments, into `MisuseError`."""
    try:
        yield
    except Exception as error:
        wrong = isinstance(error, kinds or (ValueError, TypeError, FileNotFoundError))
        if not wrong or isinstance(error, DamagedError):  # which is not the user's fault
            raise
        raise MisuseError(str(error)) from error


def check_out(option: str, path: Path | None, *, folder: bool = False) -> None:
    """Raises, before any work, for a file or folder that cannot be written. Missing folders are created later."""
    if path is None:
        return
    kind, other = ("a folder", "the file") if folder else ("a file", "the folder")
    if path.exists() and path.is_dir() != folder:
        raise MisuseError(complaint(option, kind, f"{other} {path}", "Pass another one."))
    above = path if path.is_dir() else next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        got = f"{path}: {above} {'cannot be written to' if above.is_dir() else 'is a file'}"
        raise MisuseError(complaint(option, f"{kind} that can be written", got, "Pass another one."))


def require(*packages: str) -> None:
    """Raises, before any work, for the first package that is not installed, and says how to install it."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"This command needs {package}, which is not installed", name=package)


class Screen:
    """Prints for a command: results as JSON or as text; `quiet` omits notes and progress."""

    def __init__(self, quiet: bool, as_json: bool = False) -> None:
        self.quiet, self.as_json = quiet, as_json

    def note(self, text: str) -> None:
        """Prints a line that is not a result to stderr."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Prints a failure after which the command goes on to stderr."""
        print(printable(f"Error: {text}"), file=sys.stderr, flush=True)

    def json(self, value: Any) -> None:
        """Prints a result; numbers that JSON does not have become null."""
        print(json.dumps(finite(value), indent=1, ensure_ascii=False))

    def result(self, value: Any, text: str) -> None:
        """Prints a result as JSON or as text."""
        self.json(value) if self.as_json else print(printable(text))

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Prints a header and rows; words are aligned left, numbers right."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = Table()
        for number, name in enumerate(rows[0]):
            numeric = number > 0 and all(row[number][:1] in "0123456789−-+–" for row in rows[1:])
            shown.add_column(Text(printable(name)), justify="right" if numeric else "left", overflow="fold")
        for row in rows[1:]:
            shown.add_row(*(Text(printable(cell)) for cell in row))
        # a pipe has no width: nothing is wrapped there
        Console(width=None if sys.stdout.isatty() else 500, highlight=False).print(shown)


def register(
    app: typer.Typer, function: Callable[..., None], *, name: str | None = None, panel: str = "", has_json: bool = True
) -> None:
    """Registers a function, whose first parameter is the screen, as a command with --json, --quiet and --debug.

    A parameter whose type is a dataclass stands for an option of each of its fields.
    """
    _, *given = inspect.signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in given if is_dataclass(each.annotation)}

    def command(*, json: Json = False, quiet: Quiet = False, debug: Debug = False, **options: Any) -> None:
        with reported(debug):
            for group, made in groups.items():
                options[group] = made(**{field.name: options.pop(field.name) for field in fields(made)})
            function(Screen(quiet, json), **options)
            sys.stdout.flush()

    own: list[inspect.Parameter] = []
    for each in given:
        own += inspect.signature(groups[each.name]).parameters.values() if each.name in groups else [each]
    *shared, _ = list(inspect.signature(command).parameters.values())[0 if has_json else 1 :]
    keywords = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *shared]
    functools.update_wrapper(command, function)
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    about = "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(function) or "").split("\n\n"))
    app.command(name, help=about, rich_help_panel=panel or None)(command)


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turns errors into a message on stderr and an exit code."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):  # typer ends quietly when the reader has closed the pipe
        raise
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        message, code = _worded(error)
        print(printable(message), file=sys.stderr, flush=True)
        raise typer.Exit(code) from None


def _worded(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return f"Interrupted. {error}".rstrip(), 130
    if isinstance(error, MisuseError):
        return f"Error: {error}", 2
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get((error.name or "").split(".")[0], "cli")
        how = f"pip install -c constraints.txt '.[{extra}]' in a clone of the repository"
        hint = "" if "pip install" in str(error) else f". To install it: {how}"
        return f"Error: {error}{hint}", 1
    if isinstance(error, ValueError | TypeError | OSError) or type(error).__module__.startswith("ibnn."):
        return f"Error: {error}", 1
    return f"Error: unexpected {type(error).__name__}: {error}. Run again with --debug to see where.", 1
