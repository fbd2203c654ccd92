"""Registers the commands in the order in which a user meets them, and words the help."""

from typing import Annotated

import typer

from ibnn._version import __version__
from ibnn.app.cli.explore import data_get, data_list, demo, plan
from ibnn.app.cli.finished import evaluate, export, report, serve
from ibnn.app.cli.predict import predict
from ibnn.app.cli.screen import register
from ibnn.app.cli.train import prune, train

STORY = """Networks that know what they do not know.

Train one from a job file, ask it about your images or tables, and let it abstain where it would be wrong too often.
"""

EXAMPLES = """[bold]Start here[/bold]
  ibnn demo                               needs no data: a table and figures
  ibnn train digits-mlp                   train on embedded digits
  ibnn predict runs/digits-mlp a.png      labels, uncertainty, abstentions
  ibnn report runs/digits-mlp             one page with all results
[bold]Then[/bold]
  ibnn plan --net resnet50                which layers would be converted
  ibnn data get fashion-mnist             download a larger data set
  ibnn train fashion-mnist-lenet --set seed=1
  ibnn train my.toml --set train.lr=0.01  a job of your own
  ibnn prune runs/digits-mlp --keep 0.5   a smaller and faster network
  ibnn export runs/digits-mlp --pixels    one file for onnxruntime
  ibnn serve runs/digits-mlp              over HTTP
  ibnn serve saved/ --net mynets:make     a model that you saved in Python

[bold]Exit codes[/bold]
  0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated
"""

app = typer.Typer(
    help=STORY,
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
sets = typer.Typer(no_args_is_help=True, help="Lists and downloads data sets.")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ibnn {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_version, is_eager=True, help="Prints the version.")


@app.callback()
def _everywhere(version: Annotated[bool, _VERSION] = False) -> None:
    """Takes options before the command; typer shows `help` above."""


for first in (demo, plan):
    register(app, first, panel="Explore")
app.add_typer(sets, name="data", rich_help_panel="Explore")
register(sets, data_list, name="list")
register(sets, data_get, name="get")
for command in (train, predict, evaluate, report, prune, export):
    register(app, command, panel="Train and predict")
register(app, serve, panel="Train and predict", has_json=False)
