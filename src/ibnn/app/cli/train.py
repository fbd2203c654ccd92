"""The commands `train` (a job, changed by `--set`, into a run folder) and `prune` (a run into another one)."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ibnn import check, lab
from ibnn.app.cli.options import Data, TrustCode
from ibnn.app.cli.screen import Screen, check_out, misuse
from ibnn.errors import complaint, nearest
from ibnn.files.atomic import read_toml
from ibnn.lab.display import tables
from ibnn.lab.imported_net import find
from ibnn.lab.runs import RunFolder

if TYPE_CHECKING:
    from ibnn.lab.job import Job
    from ibnn.lab.parts import Splits

_JOBS = Path(lab.__path__[0]) / "job_files"


def parsed(settings: list[str], flag: str) -> dict[str, Any]:
    """Returns settings, such as "train.lr=0.01", as nested tables; a value that is not TOML is a string."""
    lines = dict[str, str]()  # the last one wins
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        try:
            tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:  # a string without quotes
            text = json.dumps(text, ensure_ascii=False)
        lines[key] = f"{key} {equals} {text}"
    try:
        return tomllib.loads("\n".join(lines.values()))
    except tomllib.TOMLDecodeError as error:
        example = "seed=3" if flag == "--set" else "width=2"
        got = f"{', '.join(settings)} ({error})"
        raise ValueError(complaint(flag, "key=value, with one value per key", got, f"Pass {flag} {example}.")) from None


def names() -> list[str]:
    """Returns the names of the jobs that come with the library."""
    return sorted(path.stem for path in _JOBS.glob("*.toml"))


def read_job(name: str, settings: list[str], data: Path | None = None) -> "Job":
    """Returns a job by file or by name, with changes; checks all that can be checked without data."""
    from ibnn.lab.job import Job, merged
    from ibnn.lab.parts import check_data, check_weights

    changes = parsed(settings, "--set")
    fields = merged(_fields(name), changes)
    given = changes.get("train")
    for one, other in (("epochs", "steps"), ("steps", "epochs")):  # the setting wins over the file
        if isinstance(given, dict) and one in given and other not in given:
            fields["train"].pop(other, None)
    job = Job(**fields)
    check_data(job.data, data)
    check_weights(job)
    if job.has_code:
        find(job.net)
    return job


def _fields(name: str) -> dict[str, Any]:
    file = _JOBS / f"{name}.toml" if name in names() else Path(name)
    if file.is_file():
        return read_toml(file)
    by_stem = {each: each for each in names()} | {path.stem: str(path) for path in Path(name).parent.glob("*.toml")}
    near = nearest(Path(name).stem, by_stem)
    remedy = "Check the name." if near is None else f"Did you mean {by_stem[near]!r}?"
    raise FileNotFoundError(complaint("JOB", f"a TOML file, or one of {', '.join(names())}", repr(name), remedy))


_JOB = f"TOML file of a job, or one of: {', '.join(names())}."
_SET = "Changes the job, e.g. train.lr=0.01 or seed=3; may be repeated."
_OUT = "Run folder; default: runs/JOB, with --set runs/JOB-HASH."


def train(
    screen: Screen,
    name: Annotated[str, typer.Argument(help=_JOB, autocompletion=names, metavar="JOB")],
    set: Annotated[list[str] | None, typer.Option(help=_SET, metavar="KEY=VALUE")] = None,
    out: Annotated[Path | None, typer.Option(help=_OUT)] = None,
    data: Data = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Starts over; default: resumes a run that has begun.")] = False,
) -> None:
    """Trains a network, evaluates it once on the test set, and writes a run folder.

    Ctrl-C saves; the same command then resumes, and gives the same bits as an uninterrupted run.
    """
    with misuse():
        job = read_job(name, set or [], data)
        home = RunFolder(out or Path("runs") / (Path(name).stem + (f"-{job.key}" if set else "")))
        if fresh or not home.finished:  # a finished run is only read
            check_out("--out", home.path, folder=True)
    screen.note(f"{job.method} {job.net} on {job.data}, seed {job.seed}, into {home.path}")
    words = ["ibnn", "train", name, *(w for s in set or [] for w in ("--set", s)), "--out", str(home.path)]
    again = f"To go on: {shlex.join([*words, *(['--data', str(data)] if data else [])])}"
    _run(screen, job, home, home.path / "first", data, again, fresh)


_KEEP = "Share of the multiply–adds of linear layers and convolutions that stays."
_EPOCHS = "Epochs for which the thinner network is trained on."
_THIN = "Run folder of the thinner network; default: RUN-KEEP."


def prune(
    screen: Screen,
    folder: Annotated[Path, typer.Argument(help="Run folder that `ibnn train` has finished.", metavar="RUN")],
    keep: Annotated[float, typer.Option(help=_KEEP)] = 0.5,
    epochs: Annotated[int, typer.Option(min=1, help=_EPOCHS)] = 5,
    out: Annotated[Path | None, typer.Option(help=_THIN)] = None,
    data: Data = None,
    trust_code: TrustCode = False,
) -> None:
    """Makes the network of a run thinner: fewer channels in its layers, so that it is smaller and faster.

    The channels that the training loss needs least are removed, and the thinner network is trained on as the run was,
    for a few epochs. The result is a run folder like any other; the given run stays as it is. Only runs of the method
    ibnn can be pruned; if too much cannot be cut, an error names the layers. Ctrl-C saves; the same command goes on.

    Example: ibnn prune runs/digits-mlp --keep 0.25 --out runs/thin && ibnn export runs/thin
    """
    from ibnn.lab.jobs import read_run

    home = RunFolder(out or Path(f"{folder}-{keep:g}"))
    with misuse():
        check.share("--keep", keep, remedy="Pass 0.5 for half.")
        job = read_run(folder, trust_code=trust_code).job
        if job.method != "ibnn":
            remedy = f"Train one: ibnn train … --set method=ibnn, or convert its network ({job.net}) in Python."
            raise ValueError(complaint("RUN", 'a run of method = "ibnn", whose nodes have latents', job.method, remedy))
        if job.prune is not None:
            got, remedy = f"one that kept {job.prune['keep']:.0%}", "Prune that run's original again, and keep less."
            raise ValueError(complaint("RUN", "a run that was not pruned before", got, remedy))
        check_out("--out", home.path, folder=True)
    job = job.but(prune={"keep": keep, "epochs": epochs})
    screen.note(f"{folder} to {keep:.0%} of its multiply–adds, epochs: {epochs}, into {home.path}")
    _run(screen, job, home, folder, data, "The same command goes on.", fresh=False)


def _run(screen: Screen, job: "Job", home: RunFolder, first: Path, data: Path | None, again: str, fresh: bool) -> None:
    """Runs a job, or reads its finished run, and prints the result; `again` says how to go on if it is interrupted."""
    from ibnn.lab import jobs, parts

    with misuse():
        home.check_free()
        result = None if fresh else jobs.finished(job, home)
    if result is None:
        with misuse(ValueError):  # missing data are a FileNotFoundError: the command is right
            splits, _ = parts.prepare(job, data)
        if job.has_file:
            screen.note(_described(splits, job))
        try:
            with home.lock(note=screen.note):
                if fresh:
                    home.clear()
                    RunFolder(first).clear()  # the training before it
                options: Any = {"data_folder": data, "splits": splits, "first_folder": first, "held": True}
                result = jobs.run(job, home.path, **options, quiet=screen.quiet)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(again) from None
        except SystemExit as stop:  # the training loop has saved
            screen.note(again)
            raise typer.Exit(stop.code if isinstance(stop.code, int) else 1) from None
    if screen.as_json:
        return screen.json(result)
    show(screen, result)
    place, trust = shlex.quote(str(home.path)), " --trust-code" if job.has_code else ""
    inputs = shlex.quote(job.data) if job.has_file else "image.png" if "corrupted" in result else "points.csv"
    screen.note(f"Next: ibnn report {place} -o report.html · ibnn predict {place} {inputs}{trust}")


def _described(splits: "Splits", job: "Job") -> str:
    classes, test = splits.whole.classes, cast(Any, splits.whole.test)
    target = f"{len(classes)} classes ({', '.join(classes[:6])}{', …' * (len(classes) > 6)})" if classes else "a number"
    rows = f"{len(splits.train):,} rows to train on, {len(splits.valid or ()):,} held out, {len(test):,} to test"
    return f"{job.data}: {job.target!r} is {target}; {rows}."


def show(screen: Screen, result: dict[str, Any]) -> None:
    """Prints the scores and costs of a run as tables."""
    for rows in tables(result):
        screen.table(rows)
