"""Defines the options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ibnn import check
from ibnn.app.cli.screen import Screen, misuse

if TYPE_CHECKING:
    from ibnn.app.predictor import Predictor

_MODEL = "Finished run folder, folder of `save_pretrained`, or exported .onnx file."
Risk = Annotated[float, typer.Option(help="Abstains so that at most this share of the answers is wrong; 1: never.")]
_NOVELTY = "Withholds inputs whose p-value is at most this; 0: never; default: 0.01, or the smallest there is."
Novelty = Annotated[float | None, typer.Option(help=_NOVELTY)]
_FALLBACK = "Mixes answers with the base rates where the p-value is below this; default: never."
_TRUST = "Imports the run's own network code from the current folder."
TrustCode = Annotated[bool, typer.Option("--trust-code", help=_TRUST)]
_NET = "Makes the plain network of a saved model: a function of the current folder that takes no arguments."
_DEVICE = "Where the model computes, such as cuda:1; default: the CPU."
_ONE_PASS = "Answers by a network that learnt what the draws say; a run that has none is distilled first."
_DATA = "Folder of data sets; default: $IBNN_DATA or ./data."
Data = Annotated[Path | None, typer.Option("--data", exists=True, file_okay=False, help=_DATA)]
NewData = Annotated[Path | None, typer.Option("--data", file_okay=False, help=_DATA)]  # may be created


@dataclass
class Trained:
    """Options that say which model is read, and where it computes; `register` spells them out in a command."""

    model: Annotated[Path, typer.Argument(help=_MODEL, metavar="MODEL")]
    samples: Annotated[int | None, typer.Option(min=1, help="Draws per component; default: the job's, or 5.")] = None
    device: Annotated[str | None, typer.Option(help=_DEVICE)] = None
    net: Annotated[str | None, typer.Option(help=_NET, metavar="MODULE:FUNCTION")] = None
    trust_code: TrustCode = False

    def __post_init__(self) -> None:
        """Raises for a device that does not exist, before anything is read."""
        with misuse():
            check.device("--device", self.device)

    def read(self, screen: Screen, data: Path | None = None) -> "Predictor":
        """Reads the model; one that does not exist is misuse. `data` is the folder to distil a run from."""
        from ibnn.app.predictor import Predictor

        with misuse():
            return Predictor.read(**vars(self), data=data, note=None if screen.quiet else screen.note)


@dataclass
class Source(Trained):
    """The same, and how the model predicts."""

    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0
    fallback: Annotated[float | None, typer.Option(help=_FALLBACK)] = None
    one_pass: Annotated[bool, typer.Option("--one-pass", help=_ONE_PASS)] = False
