"""ibnn: any PyTorch network becomes an implicit Bayesian neural network in one call."""

import importlib as _importlib
import typing as _typing

from ibnn._version import __version__ as __version__
from ibnn.convert import Plan, convert, plan, revert
from ibnn.errors import DivergedError
from ibnn.latent import Latent
from ibnn.layers.registry import register_layer
from ibnn.likelihood import Bernoulli, Categorical, Gaussian, Heads, Likelihood
from ibnn.mixture import Mixture
from ibnn.network import IBNN
from ibnn.objective import ELBO
from ibnn.prediction import BernoulliPrediction, CategoricalPrediction, GaussianPrediction, JointPrediction, Prediction
from ibnn.prediction.predict import conformalize, draws, predict

if _typing.TYPE_CHECKING:
    from ibnn import metrics
    from ibnn.app.serve.start import serve
    from ibnn.baselines import Ensemble
    from ibnn.budget import Cost, cost
    from ibnn.calibration import Calibration, calibrate
    from ibnn.diagnosis import Diagnosis, diagnose
    from ibnn.files.export import Exported, export
    from ibnn.files.saving import load
    from ibnn.monitoring import AdaptiveLevel, ShiftMonitor, abstain
    from ibnn.novelty import fit_novelty
    from ibnn.one_pass import OnePass, distil
    from ibnn.pruning import Pruned, prune
    from ibnn.sampling import DivergedChainError, Samples, sample
    from ibnn.training.history import History
    from ibnn.training.loop import fit
    from ibnn.training.recipe import Recipe, Schedule

# The core is imported above. Everything else is imported on first use, from these modules.
_LAZY = {
    "metrics": "metrics", "serve": "app.serve.start",
    "Cost": "budget", "cost": "budget",
    "Calibration": "calibration", "calibrate": "calibration",
    "Diagnosis": "diagnosis", "diagnose": "diagnosis",
    "Ensemble": "baselines", "OnePass": "one_pass", "distil": "one_pass",
    "Exported": "files.export", "export": "files.export", "load": "files.saving",
    "AdaptiveLevel": "monitoring", "ShiftMonitor": "monitoring", "abstain": "monitoring",
    "fit_novelty": "novelty",
    "Pruned": "pruning", "prune": "pruning",
    "DivergedChainError": "sampling", "Samples": "sampling", "sample": "sampling",
    "History": "training.history",
    "Recipe": "training.recipe", "Schedule": "training.recipe", "fit": "training.loop",
}  # fmt: skip


def __getattr__(name: str) -> _typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ibnn' has no attribute {name!r}")
    try:
        module = _importlib.import_module(f"ibnn.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        extra = "serve" if name == "serve" else "train"
        hint = f"pip install -c constraints.txt '.[{extra}]' in a clone of the repository"
        raise ModuleNotFoundError(f"ibnn.{name} needs {error.name}: {hint}", name=error.name) from error
    return module if name == "metrics" else getattr(module, name)


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
    "Ensemble", "OnePass", "distil",  # several networks as one, and one pass for all draws
    "Exported", "export", "load", "serve",  # files and service
    "Bernoulli", "Categorical", "Gaussian", "Heads", "Likelihood",  # tasks
    "BernoulliPrediction", "CategoricalPrediction", "GaussianPrediction", "JointPrediction", "Prediction",  # answers
    "conformalize", "draws", "metrics", "predict",
    "AdaptiveLevel", "ShiftMonitor", "abstain", "fit_novelty",  # monitoring
]  # fmt: skip
