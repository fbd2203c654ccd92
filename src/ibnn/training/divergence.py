"""Says why training stops on numbers that are not finite."""

from typing import Any, NoReturn

from ibnn.errors import complaint
from ibnn.inputs import tensors
from ibnn.training.recipe import Recipe
from ibnn.training.trainable import Trainable


class DivergedError(RuntimeError):
    """Training produced a loss or a gradient that is not finite; the last good checkpoint is in place."""


def refuse_divergence(model: Trainable, x: Any, what: str, step: int, recipe: Recipe, folder: Any) -> NoReturn:
    """Raises because of inputs that are not finite, or because the run has diverged."""
    if not all(bool(t.isfinite().all()) for t in tensors(x) if t.is_floating_point()):
        got = f"NaN or infinity in the batch of step {step}"
        raise ValueError(complaint("train", "finite", got, "Clean or drop such rows."))
    named = [(name, p) for name, p in model.named_parameters()]
    named += [(f"gradient of {name}", p.grad) for name, p in named if p.grad is not None]
    bad = next((f" ({name} is not finite)" for name, tensor in named if not bool(tensor.isfinite().all())), "")
    kept = f" The last good checkpoint is kept in {folder}." if folder else ""
    raise DivergedError(
        f"Training diverged at step {step}: {what}{bad}. Lower lr={recipe.lr:g} or "
        f"latent_lr={recipe.latent_lr:g}, set clip and latent_clip to 1, or convert with less init_std.{kept}"
    )
