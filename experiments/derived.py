"""Models made of kept runs: rows of a recipe with `of`, by the name in `make`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from others import abnn, ivon, laplace

import ibnn
from ibnn.lab.parts import Splits


def joined(models: Sequence[Any], splits: Splits, samples: int) -> Any:
    """Returns a model as it is, or several as an ensemble."""
    return ibnn.Ensemble(models) if len(models) > 1 else models[0]


def one_pass(models: Sequence[Any], splits: Splits, samples: int) -> Any:
    """Distils a model or an ensemble into one network, on the training and held-out images without their labels."""
    images = [part for part in (splits.train, splits.valid) if part is not None]
    x = torch.cat([part.__getitems__(list(range(len(part))))[0] for part in images])
    x = x.repeat(-(-100 // len(x)), 1, 1, 1)  # smoke runs have fewer than `distil` takes
    return ibnn.distil(joined(models, splits, samples), x, samples=samples, progress=False)


DERIVED: dict[str, Callable[[Sequence[Any], Splits, int], Any]] = {
    **{"ensemble": joined, "one-pass": one_pass},
    **{"ivon": ivon, "laplace": laplace, "abnn": abnn},
}
