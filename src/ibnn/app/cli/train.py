"""`train`: from a job file to a finished run folder."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ibnn.app.cli import settings
from ibnn.app.cli.options import Data, Json
from ibnn.app.cli.screen import Screen, check_out, misuse
from ibnn.errors import complaint
from ibnn.lab.display import COSTS, SCORES, UNCERTAINTIES
from ibnn.lab.runs import RunFolder

if TYPE_CHECKING:
    from ibnn.lab.jobs import Job, Splits

SAME = 0.02  # relative difference of temperatures that is not worth a row

_JOB = f"TOML file of a job, or one of: {', '.join(settings.names())}."
_SET = "Changes the job, e.g. train.lr=0.01 or seed=3; may be repeated."
_OUT = "Run folder; default: runs/JOB, with --set runs/JOB-HASH."
_RESUME = "Requires a run to resume, or starts over; default: resumes if there is one."


def train(
    screen: Screen,
    name: Annotated[str, typer.Argument(help=_JOB, autocompletion=settings.names, metavar="JOB")],
    set: Annotated[list[str] | None, typer.Option(help=_SET, metavar="KEY=VALUE")] = None,
    out: Annotated[Path | None, typer.Option(help=_OUT)] = None,
    data: Data = None,
    resume: Annotated[bool | None, typer.Option("--resume/--fresh", help=_RESUME)] = None,
    json: Json = False,
) -> None:
    """Trains a network, evaluates it once on the test set, and writes a run folder.

    Ctrl-C saves; the same command then resumes, and gives the same bits as an uninterrupted run.
    """
    with misuse():
        job = settings.read_job(name, set or [], data)
        home = RunFolder(out or Path("runs") / (Path(name).stem + (f"-{job.key}" if set else "")))
        check_out("--out", home.path, folder=True)
        if resume and not home.begun:
            raise ValueError(complaint("--resume", "for a run that has begun", home.path, "Leave it out to begin."))
    screen.note(f"{job.method} {job.net} on {job.data}, seed {job.seed}, into {home.path}")
    words = ["ibnn", "train", name, *(w for s in set or [] for w in ("--set", s)), "--out", str(home.path)]
    again = f"To go on: {shlex.join([*words, *(['--data', str(data)] if data else [])])}"
    try:
        result = _run(screen, job, home, data, fresh=resume is False)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(again) from None
    except SystemExit as stop:  # the training loop has saved
        screen.note(again)
        raise typer.Exit(stop.code if isinstance(stop.code, int) else 1) from None
    if json:
        return screen.json(result)
    show(screen, result)
    screen.note(_next(job, home.path, images="corrupted" in result))


def _run(screen: Screen, job: "Job", home: RunFolder, data: Path | None, *, fresh: bool) -> dict[str, Any]:
    from ibnn.lab import jobs

    if not fresh:
        with misuse((ValueError,), hint=" Or pass --fresh to replace it."):
            if (result := jobs.finished(job, home)) is not None:
                return result
    with misuse((ValueError,)):  # missing data are a FileNotFoundError: the command is right
        splits = jobs.check(job, data)
    if job.has_file:
        screen.note(_described(splits, job))
    with home.lock(note=screen.note):
        first = replace(home, path=home.path / "first")  # the plain training before it
        if fresh:
            home.clear()
            if first.begun:
                with first.lock(note=screen.note):
                    first.clear()
        options: dict[str, Any] = {"data_folder": data, "splits": splits, "first_folder": first.path}
        return jobs.run(job, home.path, **options, quiet=screen.quiet, held=True)


def _next(job: "Job", folder: Path, images: bool) -> str:
    place = shlex.quote(str(folder))
    inputs = shlex.quote(job.data) if job.has_file else "image.png" if images else "points.csv"
    trust = " --trust-code" if job.has_code else ""
    return f"Next: ibnn report {place} -o report.html · ibnn predict {place} {inputs}{trust}"


def _described(splits: "Splits", job: "Job") -> str:
    """Describes how a table was read."""
    assert splits.units is not None, "of a table"
    classes, columns = splits.whole.classes, splits.units.columns
    shown = ", ".join(classes[:6]) + (", …" if len(classes) > 6 else "")
    target = f"{len(classes)} classes ({shown})" if classes else "a number"
    held_out = f", {len(splits.valid):,} held out" if splits.valid is not None else ""
    return (
        f"{job.data}: {job.target!r} is {target}, predicted from {len(columns)} columns; {len(splits.train):,} rows to "
        f"train on{held_out}, {len(splits.whole.test.y):,} to test."  # type: ignore[union-attr]
    )


def show(screen: Screen, result: dict[str, Any]) -> None:
    """Prints the scores and costs of a run as tables."""
    names = {name: words for name, words in SCORES.items() if name in result["scores"]}
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
    rows = [
        [f"{name}{how}", *(f"{found[n]:.4f}" for n in UNCERTAINTIES)]
        for how, reading in readings.items()
        for name, found in reading["outsiders"].items()
    ]
    if rows:
        screen.table([["AUROC of outsiders by", *UNCERTAINTIES.values()], *rows])
    if "costs" in result:
        known = {words: f"{result['costs'][name]:,}" for name, words in COSTS.items() if name in result["costs"]}
        screen.table([list(known), list(known.values())])
