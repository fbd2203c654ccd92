"""ARGUMENTS: refuses arguments and data that make no sense, before anything is trained."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ibnn.batches import Source
from ibnn.errors import complaint
from ibnn.inputs import batch_length, check_rows, tree_map
from ibnn.layers.observe import explaining_shapes
from ibnn.normal import generators_restored
from ibnn.prediction import refuse_nan
from ibnn.training.recipe import Recipe
from ibnn.training.trainable import Trainable

Callback = Callable[[dict[str, Any], Any], None]


def check_options(
    recipe: Any, folder: Path | None, resume: str, callbacks: Sequence[Callback], n_data: int | None
) -> None:
    """Raises if an argument of `fit` makes no sense, whatever the data."""
    if not isinstance(recipe, Recipe):
        got, remedy = type(recipe).__name__, "Pass fields: fit(..., lr=0.01)."
        raise TypeError(complaint("recipe", "a Recipe, the name of one, or None", got, remedy))
    if resume not in ("auto", "never", "must"):
        raise ValueError(complaint("resume", '"auto", "never" or "must"', repr(resume), 'Pass "auto".'))
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        got, remedy = repr(callbacks), "Pass callbacks=[function]: it is called as function(row, model)."
        raise TypeError(complaint("callbacks", "a list of functions", got, remedy))
    if n_data is not None and (isinstance(n_data, bool) or not isinstance(n_data, int) or n_data < 1):
        remedy = "Pass the number of targets in the training set, or leave it out: they are counted."
        raise ValueError(complaint("n_data", "an integer of at least 1", repr(n_data), remedy))
    for place in () if folder is None else (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(complaint("run_dir", "a folder", f"the file {place}", "Pass another name."))


def check_data(model: Trainable, source: Source, name: str) -> None:
    """Raises if the network cannot take the inputs, or the likelihood the targets, of the argument of this name.

    Tensors and validation data are checked as a whole; of training data that have to be loaded, the first batch. One
    batch goes through the network.
    """
    device, output, rows = next(model.parameters()).device, None, 0
    with generators_restored(), torch.no_grad():
        for share in source.epoch(0, 0):
            x, y = (tree_map(lambda t: t.to(device), part) for part in (share.x, share.y))
            if output is None:
                with explaining_shapes(model.net, x, name):
                    output = next(model.each_draw(x, 1, 0))[0]
                    check_rows(output, batch_length(x))
            if isinstance(source.data, tuple):
                refuse_nan(source.data[0], argument=name, infinity=True)
                model.likelihood.check(output, source.data[1].to(device))
                return
            model.likelihood.check(output, y)
            if name == "train":  # NaN in a later batch is found, with its row, when the loss is not finite
                return
            refuse_nan(x, rows, name, infinity=True)
            rows += share.total
