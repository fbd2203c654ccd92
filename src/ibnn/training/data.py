"""The data of a run: read, checked, and divided into what is trained on and what is held out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ibnn.batches import Source, as_source
from ibnn.errors import complaint
from ibnn.generators import generators_restored, seed_generators
from ibnn.inputs import batch_length, check_rows, tree_map
from ibnn.layers.explain import explaining_shapes
from ibnn.likelihood import Likelihood, own_activation
from ibnn.prediction import draws, predict, refuse_nan
from ibnn.training.recipe import Recipe
from ibnn.training.trainable import Trainable

log = logging.getLogger("ibnn")

MIN_TRAIN_ROWS = 500  # of fewer training examples none are held out
MIN_HELD_OUT, MAX_HELD_OUT = 100, 5000  # with fewer held-out examples the noise is not steered
SHARED = 0.1  # of the validation rows may be among the training rows by chance
UNITS_ROWS = 1000  # training examples whose targets decide the units of outputs


def check_data(model: Trainable, source: Source, name: str, *, held_out: bool) -> Tensor:
    """Raises if the network cannot take the inputs, or the likelihood the targets; returns a draw of outputs.

    Tensors and held-out data are checked as a whole; of training data that have to be loaded, the first batch.
    """
    device, rows, shapes = next(model.parameters()).device, 0, set[torch.Size]()
    output: Tensor | None = None
    with generators_restored(), torch.no_grad():
        for share in source.epoch(0, 0):
            x, y = tree_map(lambda t: t.to(device), (share.x, share.y))
            shapes.add(y.shape[1:])
            if len(shapes) > 1:  # padded batch by batch; held-out targets are scored together
                got = " and ".join(f"(B, {', '.join(map(str, shape))})" for shape in sorted(shapes))
                remedy = "Pad them to one length, or pass beta=1.0 and no valid."
                raise ValueError(complaint(name, "batches with targets of one shape, to hold out rows", got, remedy))
            if output is None:
                with explaining_shapes(model.net, x, name):
                    output = next(model.each_draw(x, 1, 0))[0]
                    check_rows(output, batch_length(x))
            if isinstance(source.data, tuple):
                refuse_nan(source.data[0], argument=name, infinity=True)
                model.likelihood.check(output, source.data[1].to(device))
                return output
            model.likelihood.check(output, y)
            if not held_out:  # NaN in a later batch is found when the loss is not finite
                return output
            if name == "valid":
                refuse_nan(x, rows, name, infinity=True)
            rows += share.total
    assert output is not None, "no data are empty"
    return output


class Split(NamedTuple):
    """The data of a run."""

    train: Source
    held_out: Source | None  # evaluated, and steered by
    given: int  # number of training examples before some were held out
    note: str = ""  # why the noise is not steered although the recipe asks for it


def read_data(model: Trainable, train: Any, valid: Any, recipe: Recipe) -> Split:
    """Reads and checks the data; where the noise is steered without validation data, some rows are held out."""
    options: dict[str, Any] = {"workers": recipe.workers, "pack": model.likelihood.pack}
    source, held_out = train, valid  # read already where an ensemble trains
    if not isinstance(train, Source):
        source = as_source(train, batch_size=recipe.batch_size, **options)
    if valid is not None and not isinstance(valid, Source):
        held_out = as_source(valid, batch_size=256, name="valid", shuffled=False, **options)
        if source.shared(held_out) > SHARED or (
            held_out.rows == source.rows and held_out.fingerprint() == source.fingerprint()
        ):
            log.warning("`valid` shares rows with `train`: noise is chosen by rows that were learnt. Pass other rows.")
    if valid is None and recipe.patience:
        raise ValueError(complaint("patience", "0 without validation data", recipe.patience, "Pass valid=(x, y)."))
    output = check_data(model, source, "train", held_out=False)
    if source is not train and (end := own_activation(model.likelihood, model.net, output[None])):
        log.warning(f"The network ends in a {end}, and the likelihood adds its own: return logits.")
    if held_out is not None:
        check_data(model, held_out, "valid", held_out=True)
    split = Split(source, held_out, source.rows)
    if recipe.beta == "auto":
        split = hold_out(source, held_out, recipe.seed)
        own = dict(source.loading).get("collate_fn", default_collate) is not default_collate
        if held_out is None and split.held_out is not None and own:  # it may pad targets batch by batch
            check_data(model, split.held_out, "train", held_out=True)
    if recipe.calibrate and split.held_out is None:
        raise ValueError(complaint("valid", "held-out data to calibrate by", None, "Pass valid=(x, y)."))
    return split


def hold_out(source: Source, held_out: Source | None, seed: int) -> Split:
    """Returns the data to train on and to steer by, or a note why the noise cannot be steered."""
    note, train = "", source
    if held_out is not None and held_out.rows < MIN_HELD_OUT:
        note = f"only {held_out.rows} held-out examples"
    elif held_out is None and not source.divisible:
        note = "no held-out data, and none can be split off where a sampler or iterable decides"
    elif held_out is None and source.rows < MIN_TRAIN_ROWS:
        note = f"no held-out data, and only {source.rows} examples"
    elif held_out is None:
        train, held_out = source.split(min(max(source.rows // 10, MIN_HELD_OUT), MAX_HELD_OUT), seed)
    return Split(train, held_out, source.rows, note)


def count_targets(likelihood: Likelihood, source: Source) -> int:
    """Returns N: counted in tensors; in a Dataset, as many targets per example as the first batch has."""
    if isinstance(source.data, tuple):
        return likelihood.count(source.data[1])
    with generators_restored():
        first = next(source.epoch(0, 0))
    return max(round(source.rows * likelihood.count(first.y) / len(first.y)), source.batch_size)


def choose_units(model: Trainable, source: Source, seed: int) -> None:
    """Lets the likelihood of an untrained network choose the units of its outputs by some training targets."""
    if model.likelihood.discrete:
        return
    device, outputs, targets = next(model.parameters()).device, list[Tensor](), list[Tensor]()
    with generators_restored(), torch.no_grad():
        seed_generators(seed)
        for share in source.epoch(seed, 0):
            x, y = tree_map(lambda t: t.to(device), (share.x, share.y))
            if targets and y.shape[1:] != targets[0].shape[1:]:
                break
            outputs.append(next(model.each_draw(x, 1, 0))[0])
            targets.append(y)
            if sum(map(len, targets)) >= UNITS_ROWS:
                break
    model.likelihood.standardise(torch.cat(outputs), torch.cat(targets))


@dataclass(frozen=True)
class HeldOut:
    """Predicts held-out data; several workers share the batches."""

    model: Trainable
    source: Source
    device: torch.device
    seed: int

    def scores(self, samples: int) -> dict[str, float]:
        """Returns the likelihood's scores for S draws per component."""
        inputs, targets = self.source.inputs()
        prediction = predict(self.model, inputs, samples=samples, progress=False)
        return self.model.likelihood.score(prediction, torch.cat(targets).cpu())

    def draws(
        self, samples: int, rows: int, *, components: Sequence[int] | None = None, turn: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns draws (K, S, N, …) for about so many of the examples, others in every turn, and their targets."""
        source = self.source
        if source.divisible and source.rows > rows:
            source = source.split(rows, self.seed + turn)[1]  # a random part: they may be sorted
        inputs, targets = source.inputs(rows)
        outputs = draws(self.model, inputs, samples=samples, seed=turn, components=components)
        return outputs.to(self.device), torch.cat(targets).to(self.device)
