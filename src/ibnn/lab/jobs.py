"""Trains and evaluates a job into a run folder, and reads run folders back."""

import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import safetensors.torch
import torch
from torch import nn

from ibnn.data import TABLES, DataSet, Images, Standardisation
from ibnn.errors import DamagedError, complaint
from ibnn.files import model_folder
from ibnn.files.saving import load, save_pretrained
from ibnn.lab.evaluation import evaluate, scores_of
from ibnn.lab.job import Job
from ibnn.lab.methods import METHODS
from ibnn.lab.parts import Splits, architecture, make_data, make_method, plain_net, prepare
from ibnn.lab.runs import ANSWERS, CONFIG, JOB, ONE_PASS, RESULT, TABLE, RunFolder, versions
from ibnn.network import IBNN, STATE
from ibnn.novelty.fitting import ROWS, fit_novelty_if_possible
from ibnn.one_pass import OnePass, distil, mean_network
from ibnn.prediction import check_level
from ibnn.pruning import prune, rebuild
from ibnn.training.history import History
from ibnn.training.loop import fit
from ibnn.training.trainable import Trainable

log = logging.getLogger("ibnn")


def run(
    job: Job,
    folder: Path,
    *,
    data_folder: str | Path | None = None,
    splits: Splits | None = None,
    first_folder: Path | None = None,
    quiet: bool = False,
    held: bool = False,
) -> dict[str, Any]:
    """Trains, evaluates once on the test set, and writes the run folder; resumes where it was stopped.

    Returns the content of result.json; a job that has finished is not run again. If another process uses the folder,
    waits for it, unless the caller holds the folder's lock (`held`). `splits` are the data, if they are loaded already.
    `first_folder` is that of the training that comes first (of the plain network, or of the one to prune); by default
    one next to `folder`, named by the key of that job, so that runs share it.
    """
    home = RunFolder(Path(folder))
    if (found := finished(job, home)) is not None:  # before the lock: the folder may be read-only
        return found
    with nullcontext() if held else home.lock(note=None if quiet else log.warning):
        if (found := finished(job, home)) is not None:  # by the process that had the lock
            return found
        splits, model = prepare(job, data_folder, splits)
        if job.fallback is not None:  # before the training that the evaluation would be the end of
            check_level("fallback", job.fallback, 0 if splits.valid is None else min(len(splits.valid), ROWS) // 2 * 2)
        if job.prune is None:  # else there is nothing to go on with until the network is thin
            _begin(job, splits, home)
        spent, facts = None, dict[str, Any]()
        if (before := job.before()) is not None:
            place = first_folder or home.path.parent / before.key
            spent = run(before, place, data_folder=data_folder, splits=splits, quiet=quiet)["costs"]
            first: Any = read_run(place, trust_code=True).model  # trained with that code, or read with trust
            if job.prune is None:
                model = make_method(job, len(splits.whole.classes), first.net.state_dict(), splits.units)
            else:
                model, facts = _pruned(job, first, splits, quiet)
                _begin(job, splits, home)
        cast(nn.Module, model).to(job.device)
        history = fit(model, splits.train, splits.valid, recipe=job.full_recipe(), run_dir=home.path, quiet=quiet)
        save_pretrained(model, home.path, architecture=architecture(job, splits))  # type: ignore[arg-type]
        options: dict[str, Any] = {"samples": job.samples, "fallback": job.fallback, "data_folder": data_folder}
        measured = evaluate(model, splits.whole, splits.valid, **options)
        home.write(ANSWERS, safetensors.torch.save(measured.answers))
        if facts and splits.valid is not None:
            facts["pruned"]["held_out"].append(scores_of(model, splits.valid, samples=job.samples))
        if job.one_pass:
            student = _distilled(model, job, splits, quiet=quiet)
            save_pretrained(student, home.path / ONE_PASS, architecture=architecture(job, splits))
            facts["one_pass"] = _measured(student, splits)
        kept = f" {job.prune['keep']:.0%}" if job.prune else ""
        result = {
            "name": f"{job.method} {job.net}{kept} {job.data} seed {job.seed}",
            "job": job.model_dump(exclude_unset=True),
            **measured.result,
            "costs": costs(job, model, history, spent),
            "diagnosis": history.summary,
            "training": _training(history),
            "classes": list(splits.whole.classes),
            "provenance": versions(),
            **facts,
        }
        return home.finish(result)


def _begin(job: Job, splits: Splits, home: RunFolder) -> None:
    """Writes what a run is begun with; job.toml first, which makes the folder one of a run."""
    home.write(JOB, job.to_toml().encode())
    if splits.units is not None and splits.units.sha256 is not None:
        if home.has(TABLE) and Standardisation.from_json(home.text(TABLE)).sha256 != splits.units.sha256:
            got = f"{home.path}, which was begun before the table changed"
            raise ValueError(complaint("folder", "a new one, or one of this table", got, "Start anew: --fresh."))
        home.write(TABLE, f"{splits.units.to_json()}\n".encode())


def _pruned(job: Job, dense: IBNN, splits: Splits, quiet: bool) -> tuple[Trainable, dict[str, Any]]:
    """Returns the model that was trained first without the channels that it needs least, and what was cut."""
    held_out = [] if splits.valid is None else [scores_of(dense, splits.valid, samples=job.samples)]
    found = prune(dense, splits.unaugmented, cast(Any, job.prune)["keep"], seed=job.seed, quiet=quiet)
    sizes = [found.before._asdict(), found.after._asdict()]
    return found.model, {"pruned": {"sizes": sizes, "held_out": held_out}}


def _distilled(model: Any, job: Job, splits: Splits, *, quiet: bool) -> OnePass:
    """Distils a trained method on its training and held-out inputs; the same inputs recognise novel ones."""
    train = splits.unaugmented
    parts = [train] if splits.valid is None else [train, splits.valid]
    x = torch.cat([part.__getitems__(list(range(len(part))))[0] for part in parts])
    student = distil(model, x, samples=job.samples, seed=job.seed, progress=not quiet)
    fit_novelty_if_possible(student, train, splits.valid, seed=job.seed)
    return student


def _measured(student: OnePass, splits: Splits) -> dict[str, Any]:
    """Returns the test scores of a student, and how far it is from the draws on inputs that it was not taught."""
    whole: Any = splits.whole
    known = Images(whole.test, mean=whole.mean, std=whole.std) if isinstance(whole, DataSet) else whole.test
    return {"scores": scores_of(student, known, samples=1), "agreement": student.report[""]._asdict()}


def costs(job: Job, model: Trainable, history: History, first: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the costs of a run, by the names of `COSTS` in display; `first` are those of the training before it."""
    first = first or {"train_seconds": 0.0, "rows": 0}
    method, recipe, last = METHODS[job.method], job.full_recipe(), history.rows[-1]
    passes = recipe.samples if method.noisy_training else model.components  # of a training row
    batch = min(recipe.batch_size, history.examples)
    rows = last["step"] * batch if recipe.steps else last["epoch"] * history.examples
    latents = sum(p.numel() for name, p in model.named_parameters() if ".latent." in name or name.startswith("rho."))
    others = *STATE, "reference.", "held_out."
    numbers = [value for name, value in model.state_dict().items() if not name.startswith(others)]
    stored = sum(value.numel() for value in numbers if value.is_floating_point())
    return {
        "train_seconds": round(first["train_seconds"] + history.seconds, 3),
        "rows": first["rows"] + passes * int(rows),
        "steering_rows": history.looked,
        "parameters": sum(p.numel() for p in model.parameters()),
        "latents": latents,
        "stored": stored - method.repeated(model),
        "forwards": model.components * (job.samples if model.random else 1),
    }


def _training(history: History) -> dict[str, Any]:
    """Returns the last row of training, the lowest held-out NLL, and s where it was steered."""
    last = {name: history.rows[-1][name] for name in ("epoch", "nll", "kl", "valid_nll") if name in history.rows[-1]}
    valid = [row["valid_nll"] for row in history.rows if "valid_nll" in row]
    steered = {"prior_std": history.looks[-1]["prior_std"]} if history.looks else {}
    return last | ({"lowest_valid_nll": min(valid)} if valid else {}) | steered


def finished(job: Job, home: RunFolder) -> dict[str, Any] | None:
    """Returns the result of a folder where this job has finished; raises for a folder of another job or program."""
    if not home.begun:
        home.check_free()
        return None
    if (saved := _job_of(home)) != job:
        got = f"{home.path}, one of another job ({saved.net}, {saved.data}, {saved.method}, seed {saved.seed})"
        remedy = "Choose another folder, or replace it: ibnn train --fresh."
        raise ValueError(complaint("folder", "a new one, or one of this job", got, remedy))
    return home.result if home.has(RESULT) else None


def _job_of(home: RunFolder) -> Job:
    text = home.text(JOB)
    try:
        return Job.from_toml(text)
    except ValueError as error:
        raise DamagedError(f"{home.path / JOB} is no job of this version of ibnn. {error}") from None


class Run(NamedTuple):
    """A finished run, read back from its folder `home`; of points also their `units`."""

    job: Job
    model: Trainable
    result: dict[str, Any]
    home: RunFolder
    units: Standardisation | None = None

    def student(self, data: str | Path | None = None, note: Callable[[str], None] | None = None) -> OnePass:
        """Returns the network that answers in one pass; distils it from the run's data, and stores it, if it is new."""
        folder, config = self.home.path / ONE_PASS, f"{ONE_PASS}/{CONFIG}"
        if self.home.has(config):
            if config in self.result["sha256"]:  # the job's own
                self.home.text(config)
            found: Any = load(folder, mean_network(getattr(self.model, "members", [self.model])[0]))
            return found.eval()  # type: ignore[no-any-return]
        if note is not None:
            note(f"{self.home.path} has no one-pass network yet. Distils one into {folder}, from the data of the run.")
        splits = make_data(self.job, data, self.units)
        student = _distilled(self.model, self.job, splits, quiet=note is None)
        with suppress(OSError):  # a read-only folder
            save_pretrained(student, folder, architecture=architecture(self.job, splits))
        return student


def read_run(folder: str | Path, *, trust_code: bool = False) -> Run:
    """Returns the job, the trained method in eval mode, and the result of a run folder.

    With `trust_code`, a network that the run names as "package.module:function" is imported from the current folder,
    which runs code; without it such a run is refused.
    """
    home = RunFolder(Path(folder))
    home.require()
    job, result = _job_of(home), home.result
    if job.has_code and not trust_code:
        remedy = "If you trust that module of the current folder, pass --trust-code (trust_code=True) to import it."
        got = f"one whose network is code, {job.net}"
        raise ValueError(complaint("folder", "a run of a network of the library", got, remedy))
    units = TABLES[job.data].units if job.data in TABLES else None
    if job.has_file:
        units = Standardisation.from_json(home.text(TABLE))
    home.text(CONFIG)  # raises if it has changed since
    net = plain_net(job, len(result["classes"]), units)
    if job.prune is not None:
        net = rebuild(net, model_folder.read_tensors(home.path, model_folder.read_config(home.path)))
    return Run(job, load(home.path, net, copy=False).eval(), result, home, units)
