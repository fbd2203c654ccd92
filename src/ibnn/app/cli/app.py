"""The commands, in the order one meets them, and the help that teaches them."""

from typing import Annotated

import typer

from ibnn._version import __version__
from ibnn.app.cli.answer import evaluate, predict
from ibnn.app.cli.bench import bench
from ibnn.app.cli.export import export
from ibnn.app.cli.look import data_get, data_list, demo, plan
from ibnn.app.cli.paper import report, reproduce
from ibnn.app.cli.screen import Debug, Quiet, register
from ibnn.app.cli.serve import serve
from ibnn.app.cli.train import train

STORY = """Networks that know what they do not know.

Train one by a recipe, ask it about your images, and let it abstain where it would be wrong too often.
"""

EXAMPLES = """[bold]Start here[/bold]
  ibnn demo                               no data needed: table and figures
  ibnn train digits-mlp                   trains on embedded digits
  ibnn predict runs/digits-mlp a.png      labels, uncertainty, abstentions
  ibnn report runs/digits-mlp             all that was measured, on a page
[bold]Then[/bold]
  ibnn plan --net resnet50                what would be converted
  ibnn data get fashion-mnist             larger data
  ibnn train fashion-mnist-lenet --set seed=1
  ibnn train my.toml --set train.lr=0.01  a job of your own
  ibnn export runs/digits-mlp --pixels    one file for onnxruntime
  ibnn serve runs/digits-mlp              over HTTP, with a page to try it

[bold]Exit codes[/bold]
  0 done, 1 failed while working, 2 wrong usage, 130 interrupted
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


@app.callback()
def _everywhere(
    quiet: Quiet = False,
    debug: Debug = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    """Options before the command; `help` above is what is shown."""


register(app, demo, panel="Look first")
register(app, plan, panel="Look first")
register(app, bench, panel="Look first")
app.add_typer(sets, name="data", rich_help_panel="Look first")
register(sets, data_list, name="list")
register(sets, data_get, name="get")
register(app, train, panel="Train and ask")
register(app, predict, panel="Train and ask")
register(app, evaluate, panel="Train and ask")
register(app, report, panel="Train and ask")
register(app, export, panel="Train and ask")
register(app, serve, panel="Train and ask")
register(app, reproduce, panel="The paper")
