"""ibnn: any PyTorch network becomes an implicit Bayesian neural network in one call."""

import importlib as _importlib
import typing as _typing

from ibnn import metrics
from ibnn._version import __version__ as __version__
from ibnn.abstention import abstain
from ibnn.calibration import Calibration, calibrate
from ibnn.convert import Plan, convert, plan, revert
from ibnn.diagnosis import Diagnosis, diagnose
from ibnn.files.export import Exported, export
from ibnn.files.saving import Adapters, load
from ibnn.latent import Latent
from ibnn.layers.registry import register_layer
from ibnn.likelihood import Bernoulli, Categorical, Gaussian, Heads, Likelihood
from ibnn.mixture import Mixture
from ibnn.network import IBNN
from ibnn.novelty import fit_novelty
from ibnn.objective import ELBO
from ibnn.prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    GaussianPrediction,
    JointPrediction,
    Prediction,
    draws,
    predict,
)
from ibnn.sampling import DivergedChainError, Samples, sample
from ibnn.shift import ShiftMonitor

if _typing.TYPE_CHECKING:
    from ibnn.budget import Cost, cost
    from ibnn.pruning import Pruned, prune
    from ibnn.training.divergence import DivergedError
    from ibnn.training.history import History
    from ibnn.training.loop import fit
    from ibnn.training.recipe import Recipe, Schedule

# What needs more than torch, or parts of torch that take time to import, is imported when it is first used.
_LAZY = {
    "Cost": "budget",
    "DivergedError": "training.divergence",
    "History": "training.history",
    "Pruned": "pruning",
    "Recipe": "training.recipe",
    "Schedule": "training.recipe",
    "cost": "budget",
    "fit": "training",
    "prune": "pruning",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ibnn' has no attribute {name!r}")
    try:
        module = _importlib.import_module(f"ibnn.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"ibnn.{name} needs {error.name}: pip install 'ibnn[train]'") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "Cost", "Plan", "convert", "cost", "plan", "register_layer", "revert",  # surgery
    "ELBO", "IBNN", "Latent", "Mixture",  # the network
    "DivergedError", "History", "Recipe", "Schedule", "fit",  # training
    "DivergedChainError", "Samples", "sample",  # sampled posteriors
    "Calibration", "calibrate",  # calibration without training
    "Pruned", "prune",  # compression
    "Diagnosis", "diagnose",  # checking
    "Adapters", "Exported", "export", "load",  # files
    "Bernoulli", "Categorical", "Gaussian", "Heads", "Likelihood",  # tasks
    "BernoulliPrediction", "CategoricalPrediction", "GaussianPrediction", "JointPrediction", "Prediction",  # answers
    "draws", "metrics", "predict",
    "ShiftMonitor", "abstain", "fit_novelty",  # watching
]  # fmt: skip
