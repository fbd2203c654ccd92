"""Defines the options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Prints results and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Prints the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Prints JSON on stdout, and nothing else there.")]
RunFolder = Annotated[Path, typer.Argument(help="Run folder that `ibnn train` has finished.", metavar="RUN")]
Samples = Annotated[int | None, typer.Option(min=1, help="Draws per component; default: the job's.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Risk = Annotated[float, typer.Option(help="Abstains so that at most this share of the answers is wrong; 1: never.")]
_NOVELTY = "Withholds inputs whose p-value is at most this; 0: never; default: 0.01, or the smallest there is."
Novelty = Annotated[float | None, typer.Option(help=_NOVELTY)]
_FALLBACK = "Mixes answers with the base rates where the p-value is below this; default: never."
Fallback = Annotated[float | None, typer.Option(help=_FALLBACK)]
_TRUST = "Imports the run's own network code from the current folder."
TrustCode = Annotated[bool, typer.Option("--trust-code", help=_TRUST)]
_DATA = "Folder of data sets; default: $IBNN_DATA or ./data."
Data = Annotated[Path | None, typer.Option("--data", exists=True, file_okay=False, help=_DATA)]
NewData = Annotated[Path | None, typer.Option("--data", file_okay=False, help=_DATA)]  # may be created
