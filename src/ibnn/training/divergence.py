"""Stops training on numbers that are not finite, and says where they come from."""

from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ibnn.batches import Share, Source
from ibnn.errors import complaint
from ibnn.inputs import batch_length, call_arguments, tensors
from ibnn.layers.bypass import returned
from ibnn.training.recipe import Recipe
from ibnn.training.trainable import Trainable


class DivergedError(RuntimeError):
    """Training produced a loss or a gradient that is not finite; the last good checkpoint is in place."""


class Guard(NamedTuple):
    """Checks the loss and the gradients of a run."""

    model: Trainable
    source: Source
    recipe: Recipe
    folder: Path | None

    def check_loss(self, loss: Tensor, piece: Share, step: int) -> None:
        """Raises if the loss of a piece of a batch is not finite."""
        if not bool(loss.detach().isfinite()):
            self._fail(f"the loss is {loss.item()} ({_first_not_finite(self.model, piece)})", piece, step)

    def check_gradient(self, norm: Any, parameters: list[nn.Parameter], share: Share, step: int) -> None:
        """Raises if the norm of the gradients is not finite."""
        if bool(torch.isfinite(torch.as_tensor(norm))):
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        bad = [names[id(p)] for p in parameters if p.grad is not None and not bool(p.grad.isfinite().all())]
        what = f"the gradient of {bad[0]!r} is not finite" if bad else "the gradient's norm overflows"
        self._fail(what, share, step)

    def _fail(self, what: str, piece: Share, step: int) -> NoReturn:
        """Raises with the number of the row if inputs are not finite; else the run has diverged."""
        recipe, rows = self.recipe, batch_length(piece.x)
        for tensor in tensors(piece.x):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == rows and not tensor.isfinite().all():
                row = piece.offset + int((~tensor.isfinite()).reshape(rows, -1).any(1).nonzero()[0])
                epoch, batch = divmod(step, self.source.steps)
                number = self.source.number(recipe.seed, epoch, batch, row)
                place = f"row {row} of batch {batch}" if number is None else f"row {number}"
                raise ValueError(complaint("train", "finite", f"NaN or infinity in {place}", "Clean or drop that row."))
        kept = f" The last good checkpoint is kept in {self.folder}." if self.folder else ""
        raise DivergedError(
            f"Training diverged at step {step}: {what}. Lower lr={recipe.lr:g} or "
            f"latent_lr={recipe.latent_lr:g}, set clip and latent_clip to 1, or convert with less init_std.{kept}"
        )


def _first_not_finite(model: Trainable, piece: Share) -> str:
    """Names the first parameter that is not finite, or the first layer whose output is not."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"parameter {name!r} is not finite"
    names, (args, kwargs) = {m: name for name, m in model.net.named_modules()}, call_arguments(piece.x)
    with torch.no_grad(), returned(model.net) as made:
        model(*args, **kwargs)
    for module, output in made:
        if not bool(output.isfinite().all()):
            return f"first in the output of layer {names[module]!r}"
    return "in the loss itself: are targets and inputs finite?"
