"""The command line, `ibnn …`: `app` lists the commands, each group has a file, `screen` prints results and errors."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line: the entry point of `ibnn` and `python -m ibnn`."""
    try:
        from ibnn.app.cli.app import app
    except ModuleNotFoundError as error:
        how = "pip install -c constraints.txt '.[cli]' in a clone of the repository"
        sys.exit(f"The command line needs {error.name}: {how}")
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="ibnn")
