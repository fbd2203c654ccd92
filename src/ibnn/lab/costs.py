"""COSTS of a method: what its training took, and what an answer takes."""

from typing import Any

from ibnn.lab.job import Job
from ibnn.lab.methods import METHODS
from ibnn.network import NUMBERS
from ibnn.training.history import History
from ibnn.training.trainable import Trainable


def costs(job: Job, model: Trainable, history: History, first: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the costs of a run, by the names of `ibnn.lab.display.COSTS`.

    Args:
        job: What was run.
        model: The trained method.
        history: Of its training.
        first: Costs of the plain training that came first.
    """
    first = first or {"train_seconds": 0.0, "rows": 0}
    method, recipe = METHODS[job.method], job.full_recipe()
    trainings = [history.first, history] if history.first else [history]
    passes = recipe.samples if method.noisy_training else model.components  # of a training row
    latents = sum(p.numel() for name, p in model.named_parameters() if ".latent." in name or name.startswith("rho."))
    numbers = [value for name, value in model.state_dict().items() if name not in NUMBERS]
    stored = sum(value.numel() for value in numbers if value.is_floating_point())
    return {
        "train_seconds": round(first["train_seconds"] + sum(training.seconds for training in trainings), 3),
        "rows": first["rows"] + passes * sum(_rows(job, training) for training in trainings),
        "steering_rows": sum(training.looked for training in trainings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "latents": latents,
        "stored": stored - method.repeated(model),
        "forwards": model.components * (job.samples if method.noisy_answers else 1),
    }


def _rows(job: Job, history: History) -> int:
    """Counts the examples of a training, each as often as it was used."""
    recipe, last = job.full_recipe(), history.rows[-1]
    batch = min(recipe.batch_size, history.examples)
    return int(last["step"] * batch if recipe.steps else last["epoch"] * history.examples)
