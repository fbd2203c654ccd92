"""`train`: a job from a recipe to a finished run folder."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibnn.app.cli import settings
from ibnn.app.cli.screen import Interrupted, Json, MisuseError, Screen, check_out, misuse
from ibnn.errors import DamagedError, complaint

if TYPE_CHECKING:
    from ibnn.lab.jobs import Job, Splits
    from ibnn.lab.runs import RunFolder

SAME = 0.02  # relative difference of temperatures that changes nothing to speak of

Data = Annotated[
    Path | None,
    typer.Option("--data", exists=True, file_okay=False, help="Where data sets are; default $IBNN_DATA or ./data."),
]


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
    out: Annotated[
        Path | None, typer.Option(help="The run folder; default runs/RECIPE, and with --set runs/RECIPE-HASH.")
    ] = None,
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
    from ibnn.lab import jobs
    from ibnn.lab.runs import RunFolder

    with misuse():
        job = settings.read_job(recipe, set or [], data)
    stem = Path(recipe).stem + (f"-{job.key}" if set else "")
    folder = out or Path("runs") / stem
    home = RunFolder(folder)
    with misuse():
        check_out("--out", folder, folder=True)
        if resume and not home.begun:
            raise ValueError(complaint("--resume", "of a run that was begun", folder, "Leave it out to begin."))
    screen.note(f"{job.method} {job.net} on {job.data}, seed {job.seed}, into {folder}")
    words = ["ibnn", "train", recipe, *(w for s in set or [] for w in ("--set", s)), "--out", str(folder)]
    again = f"To go on: {shlex.join([*words, *(['--data', str(data)] if data else [])])}"
    try:
        result = _finished(home, job) if resume is not False else None
        if result is None:
            splits = _checked(job, data)
            if job.has_file:
                screen.note(_told(splits, job))
            with home.lock(note=screen.note):
                if resume is False:
                    _clear(home, screen)
                options: dict[str, Any] = {"data_folder": data, "splits": splits, "first_folder": folder / "first"}
                result = jobs.run(job, folder, **options, quiet=screen.quiet, held=True)
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


def _checked(job: "Job", data: Path | None) -> "Splits":
    """The data of a job that can run."""
    from ibnn.lab.jobs import check

    try:
        return check(job, data)
    except DamagedError:
        raise
    except ValueError as error:  # missing data are not misuse: the command is right
        raise MisuseError(str(error)) from error


def _clear(home: "RunFolder", screen: Screen) -> None:
    """Removes what was trained before, the plain training that came first included."""
    home.clear()
    first = replace(home, path=home.path / "first")
    if first.begun:
        with first.lock(note=screen.note):
            first.clear()


def _finished(home: "RunFolder", job: "Job") -> dict[str, Any] | None:
    """The result of a folder where the job has finished; a folder of another job is misuse."""
    from ibnn.lab.jobs import finished

    try:
        return finished(job, home)
    except DamagedError:
        raise
    except ValueError as error:
        raise MisuseError(f"{error} Or pass --fresh to replace it.") from error


def show(screen: Screen, result: dict[str, Any]) -> None:
    """The scores of a run as tables."""
    names = {"error": "error %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "aurc": "AURC"}
    names |= {"rmse": "RMSE", "coverage": "in 90 % interval"}
    names = {name: words for name, words in names.items() if name in result["scores"]}
    readings = {"": result}
    if "tempered" in result and abs(result["tempered"]["temperature"] / result["temperature"] - 1) > SAME:
        readings |= {f", + temperature scaling (T = {result['tempered']['temperature']:.3g})": result["tempered"]}
    rows = []
    for what in ("test", "corrupted") if "corrupted" in result else ("test",):
        for how, reading in readings.items():
            scores = reading["scores"] if what == "test" else reading["corrupted"]["all"]
            cells = [f"{100 * scores[n]:.2f}" if n == "error" else f"{scores[n]:.4f}" for n in names]
            rows.append([f"{what}{how}", *cells])
    screen.table([[result.get("name", ""), *names.values()], *rows])
    doubts = {"max_prob": "largest probability", "total": "total entropy", "epistemic": "epistemic part"}
    rows = [
        [f"{name}{how}", *(f"{found[n]:.4f}" for n in doubts)]
        for how, reading in readings.items()
        for name, found in reading["outsiders"].items()
    ]
    if rows:
        screen.table([["AUROC of outsiders by", *doubts.values()], *rows])
    if "costs" in result:
        from ibnn.lab.jobs import COSTS

        known = {words: f"{result['costs'][name]:,}" for name, words in COSTS.items() if name in result["costs"]}
        screen.table([list(known), list(known.values())])
