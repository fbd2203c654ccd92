"""`train`: a job from a recipe to a finished run folder."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibnn.cli import settings
from ibnn.cli.screen import Interrupted, Json, MisuseError, Screen, misuse
from ibnn.errors import complaint

if TYPE_CHECKING:
    from ibnn.jobs import Job, Splits

WRITTEN = (
    "result.json",
    "job.toml",
    "table.json",
    "model.safetensors",
    "answers.safetensors",
    "held_out.safetensors",
    "recipe.toml",
    "history.csv",
)

Data = Annotated[Path | None, typer.Option("--data", help="Where data sets are; default $IBNN_DATA or ./data.")]


def train(
    screen: Screen,
    recipe: Annotated[
        str,
        typer.Argument(
            help=f"A TOML file of a job, or one of: {', '.join(settings.names())}.",
            autocompletion=settings.names,
            metavar="RECIPE",
        ),
    ],
    set: Annotated[
        list[str] | None,
        typer.Option(help="Changes the job, e.g. train.lr=0.01 or seed=3; repeat for more.", metavar="KEY=VALUE"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; default runs/RECIPE.")] = None,
    data: Data = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--fresh", help="Insists on going on, or starts anew; default: goes on if it can."),
    ] = None,
    json: Json = False,
) -> None:
    """Trains a network, evaluates it once on the test set, and writes a run folder.

    Ctrl-C saves; the same command goes on where it was stopped, to the very same bits.
    """
    with misuse():
        job = settings.read_job(recipe, set or [], data)
    stem = Path(recipe).stem + (f"-{job.key}" if set else "")
    folder = out or Path("runs") / stem
    splits = _own_parts(job, data) if resume is False or not (folder / "result.json").exists() else None
    _prepare(folder, job, resume)
    from ibnn.jobs import run

    screen.note(f"{job.method} {job.net} on {job.data}, seed {job.seed}, into {folder}")
    if splits is not None and job.has_file:
        screen.note(_told(splits, job))
    words = ["ibnn", "train", recipe, *(w for s in set or [] for w in ("--set", s)), "--out", str(folder)]
    again = f"To go on: {shlex.join([*words, *(['--data', str(data)] if data else [])])}"
    try:
        result = run(job, folder, data_folder=data, splits=splits, first_folder=folder / "first", quiet=screen.quiet)
    except KeyboardInterrupt:
        raise Interrupted(again) from None
    except SystemExit as stop:  # the engine has saved
        screen.note(again)
        raise typer.Exit(stop.code if isinstance(stop.code, int) else 1) from None
    if json:
        screen.json(result)
        return
    show(screen, result)
    place = shlex.quote(str(folder))
    inputs = shlex.quote(job.data) if job.has_file else "image.png" if "corrupted" in result else "points.csv"
    inputs += " --trust-code" if job.has_code else ""
    screen.note(f"Next: ibnn report {place} -o report.html · ibnn predict {place} {inputs}")


def _own_parts(job: "Job", data: Path | None) -> "Splits | None":
    """Reads a table of your own, and makes a network of your own for the data: what is wrong with them is misuse."""
    from ibnn.jobs import check_net, make_data, make_method

    if not job.has_file and not job.has_code:
        return None
    with misuse():
        splits = make_data(job, data)
        check_net(job, splits)
        make_method(job, len(splits.whole.classes), units=splits.units)
    return splits


def _told(splits: "Splits", job: "Job") -> str:
    """What a table was taken for."""
    assert splits.units is not None, "of a table"
    classes, columns = splits.whole.classes, splits.units.columns
    shown = ", ".join(classes[:6]) + (", …" if len(classes) > 6 else "")
    target = f"{len(classes)} classes ({shown})" if classes else "a number"
    held_out = f", {len(splits.valid):,} held out" if splits.valid is not None else ""
    return (
        f"{job.data}: {job.target!r} is {target}, predicted from {len(columns)} columns; {len(splits.train):,} rows to "
        f"train on{held_out}, {len(splits.whole.test.y):,} to test."  # type: ignore[union-attr]
    )


def _prepare(folder: Path, job: Any, resume: bool | None) -> None:
    """Sees to it that the folder fits what is asked for."""
    from ibnn.jobs import Job

    there = (folder / "job.toml").is_file()
    if folder.exists() and not folder.is_dir():
        raise MisuseError(complaint("--out", "a folder", f"the file {folder}", "Pass another one."))
    if resume is False and there:
        for place in (folder, folder / "first"):
            for name in WRITTEN:
                (place / name).unlink(missing_ok=True)
            for path in (*place.glob("checkpoints/*"), *place.glob("refit/checkpoints/*")):
                path.unlink()
    elif resume and not there:
        raise MisuseError(complaint("--resume", "of a run that was begun", folder, "Leave it out to begin."))
    elif there and Job.from_toml(folder / "job.toml") != job:
        got = f"{folder}, which holds another job"
        remedy = "Pass another --out, or --fresh to replace it."
        raise MisuseError(complaint("--out", "a new folder or one of this job", got, remedy))


def show(screen: Screen, result: dict[str, Any]) -> None:
    """The scores of a run as tables."""
    names = {"error": "error %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "aurc": "AURC"}
    names |= {"rmse": "RMSE", "coverage": "in 90 % interval"}
    names = {name: words for name, words in names.items() if name in result["scores"]}
    own = result["temperature"]
    readings = {"as answered" + (f" (T = {own:.3g})" if own != 1 else ""): result}
    if "tempered" in result:
        readings |= {f"with temperature {result['tempered']['temperature']:.3g}": result["tempered"]}
    rows = []
    for what in ("test", "corrupted") if "corrupted" in result else ("test",):
        for how, reading in readings.items():
            scores = reading["scores"] if what == "test" else reading["corrupted"]["all"]
            cells = [f"{100 * scores[n]:.2f}" if n == "error" else f"{scores[n]:.4f}" for n in names]
            rows.append([f"{what}, {how}", *cells])
    screen.table([[result.get("name", ""), *names.values()], *rows])
    doubts = {"max_prob": "largest probability", "total": "total entropy", "epistemic": "epistemic part"}
    rows = [
        [f"{name}, {how}", *(f"{found[n]:.4f}" for n in doubts)]
        for how, reading in readings.items()
        for name, found in reading["outsiders"].items()
    ]
    if rows:
        screen.table([["AUROC of outsiders by", *doubts.values()], *rows])
    if "costs" in result:
        from ibnn.jobs import COSTS

        known = {words: f"{result['costs'][name]:,}" for name, words in COSTS.items() if name in result["costs"]}
        screen.table([list(known), list(known.values())])
