"""Distils runs into networks that answer in one pass; a run keeps its own in the folder one-pass."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ibnn.data import DataSet, Images
from ibnn.files.saving import load, save_pretrained
from ibnn.lab.evaluation import scores_of
from ibnn.lab.job import Job
from ibnn.lab.parts import Splits, architecture, make_data
from ibnn.lab.runs import CONFIG, ONE_PASS, RunFolder
from ibnn.novelty.fitting import fit_novelty_if_possible
from ibnn.one_pass import OnePass, distil, mean_network


def distilled(model: Any, job: Job, splits: Splits, *, quiet: bool) -> OnePass:
    """Distils a trained method on its training and held-out inputs; the same inputs recognise novel ones."""
    train = splits.unaugmented
    parts = [train] if splits.valid is None else [train, splits.valid]
    x = torch.cat([part.__getitems__(list(range(len(part))))[0] for part in parts])
    student = distil(model, x, samples=job.samples, seed=job.seed, progress=not quiet)
    fit_novelty_if_possible(student, train, splits.valid, seed=job.seed)
    return student


def measured(student: OnePass, splits: Splits) -> dict[str, Any]:
    """Returns the test scores of a student, and how far it is from the draws on inputs that it was not taught."""
    whole: Any = splits.whole
    known = Images(whole.test, mean=whole.mean, std=whole.std) if isinstance(whole, DataSet) else whole.test
    return {"scores": scores_of(student, known, samples=1), "agreement": student.report[""]._asdict()}


def of_run(
    run: Any, home: RunFolder, data: str | Path | None = None, note: Callable[[str], None] | None = None
) -> OnePass:
    """Returns the one-pass network of a finished run; if there is none, distils it from the run's data, and stores."""
    folder, config, model = home.path / ONE_PASS, f"{ONE_PASS}/{CONFIG}", run.model
    if home.has(config):
        if config in home.result["sha256"]:  # the job's own
            home.text(config)
        found: Any = load(folder, mean_network(getattr(model, "members", [model])[0]))
        return found.eval()  # type: ignore[no-any-return]
    if note is not None:
        note(f"{home.path} has no one-pass network yet. Distils one into {folder}, from the data of the run.")
    splits = make_data(run.job, data, run.units)
    student = distilled(model, run.job, splits, quiet=note is None)
    with suppress(OSError):  # a read-only folder
        save_pretrained(student, folder, architecture=architecture(run.job, splits))
    return student
