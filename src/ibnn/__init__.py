"""ibnn: any PyTorch network becomes an implicit Bayesian neural network in one call."""

import importlib as _importlib
import typing as _typing

from ibnn import metrics
from ibnn.calibration import Calibration, calibrate
from ibnn.convert import Plan, convert, plan, revert
from ibnn.diagnosis import Diagnosis, diagnose
from ibnn.export import Exported, export
from ibnn.latent import Latent
from ibnn.layers import register_layer
from ibnn.likelihood import Bernoulli, Categorical, Gaussian, Heads, Likelihood
from ibnn.mixture import Mixture
from ibnn.network import IBNN
from ibnn.objective import ELBO
from ibnn.prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    GaussianPrediction,
    JointPrediction,
    Prediction,
    predict,
)
from ibnn.shift import ShiftMonitor

if _typing.TYPE_CHECKING:
    from ibnn.budget import Cost, cost
    from ibnn.divergence import DivergedError
    from ibnn.monitor import History
    from ibnn.recipe import Recipe, Schedule
    from ibnn.saving import Adapters, load
    from ibnn.training import fit

__version__ = "0.1.0"

# What needs more than torch, or parts of torch that take time to import, is imported when it is first used.
_LAZY = {
    "Adapters": "saving",
    "Cost": "budget",
    "DivergedError": "divergence",
    "History": "monitor",
    "Recipe": "recipe",
    "Schedule": "recipe",
    "cost": "budget",
    "fit": "training",
    "load": "saving",
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
    # surgery
    "Cost",
    "Plan",
    "convert",
    "cost",
    "plan",
    "register_layer",
    "revert",
    # the network
    "ELBO",
    "IBNN",
    "Latent",
    "Mixture",
    # training
    "DivergedError",
    "History",
    "Recipe",
    "Schedule",
    "fit",
    # calibration without training
    "Calibration",
    "calibrate",
    # checking
    "Diagnosis",
    "diagnose",
    # files
    "Adapters",
    "Exported",
    "export",
    "load",
    # tasks
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Heads",
    "Likelihood",
    # answers
    "BernoulliPrediction",
    "CategoricalPrediction",
    "GaussianPrediction",
    "JointPrediction",
    "Prediction",
    "metrics",
    "predict",
    # watching
    "ShiftMonitor",
]
