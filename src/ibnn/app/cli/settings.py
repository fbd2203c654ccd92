"""SETTINGS: a job read from a file or by name, with the changes of `--set key=value`."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ibnn import nets
from ibnn.errors import complaint, nearest
from ibnn.files.atomic import read_toml
from ibnn.nets.own import find

if TYPE_CHECKING:
    from ibnn.lab.jobs import Job

_JOBS = resources.files("ibnn.lab") / "job_files"
_SYNONYMS = {"dropout_rate": "rate", "dropout": "rate", "p": "rate", "k": "components", "n_components": "components"}
_SYNONYMS |= {"num_components": "components", "n_members": "members", "size": "members", "prior": "prior_std"}


def parsed(settings: list[str], flag: str) -> dict[str, Any]:
    """Returns settings, such as "train.lr=0.01", as nested tables; a value that is not TOML is a string."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, last = key.strip().split(".")
        if not equals or not all((*path, last)):
            example = "seed=3" if flag == "--set" else "width=2"
            raise ValueError(complaint(flag, "key=value", repr(setting), f"Pass e.g. {flag} {example}."))
        table = found
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                got = f"{key!r} below a value"
                raise ValueError(complaint(flag, "one value per key", got, "Leave one of them out."))
        table[last] = _value(text.strip())
    return found


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


def names() -> list[str]:
    """Returns the names of the jobs that come with the library."""
    return sorted(entry.name.removesuffix(".toml") for entry in _JOBS.iterdir() if entry.name.endswith(".toml"))


def read_job(name: str, settings: list[str], data: Path | None = None) -> "Job":
    """Returns a job by file or by name, with changes; checks all that can be checked without data."""
    from ibnn.lab.jobs import METHODS, Job, check_data, check_weights, merged

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
    else:
        nets.input_shape(job.net, **job.net_options)
    options = METHODS[job.method].options
    for option in job.method_options:
        if option not in options:
            remedy = f"Did you mean {nearest(option, options, _SYNONYMS)!r}?" if options else "Leave it out."
            raise ValueError(complaint("method_options", f"options of {job.method!r}", repr(option), remedy))
    return job


def _fields(name: str) -> dict[str, Any]:
    if name in names():
        return tomllib.loads((_JOBS / f"{name}.toml").read_text(encoding="utf-8"))
    if Path(name).is_file():
        return read_toml(Path(name))
    near = nearest(Path(name).stem, names())
    expected = f"a TOML file, or one of {', '.join(names())}"
    raise FileNotFoundError(complaint("JOB", expected, repr(name), f"Did you mean {near!r}?"))
