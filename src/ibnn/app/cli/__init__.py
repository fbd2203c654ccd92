"""The command line, `ibnn …`: `app` lists the commands, each group has a file, `screen` prints results and errors."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line: the entry point of `ibnn` and `python -m ibnn`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell has closed it: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the end
    try:
        from ibnn.app.cli.app import app
    except ModuleNotFoundError as error:
        how = "pip install -c constraints.txt '.[cli]' in a clone of the repository"
        sys.exit(f"The command line needs {error.name}: {how}")
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="ibnn")
