"""ibnn: any PyTorch network becomes an implicit Bayesian neural network in one call."""

from ibnn import metrics
from ibnn.convert import Plan, convert, plan, revert
from ibnn.latent import Latent
from ibnn.layers import register_layer
from ibnn.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from ibnn.mixture import Mixture
from ibnn.network import IBNN
from ibnn.objective import ELBO
from ibnn.prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    GaussianPrediction,
    Prediction,
    predict,
)

__version__ = "0.1.0"

__all__ = [
    # surgery
    "Plan",
    "convert",
    "plan",
    "register_layer",
    "revert",
    # the network
    "ELBO",
    "IBNN",
    "Latent",
    "Mixture",
    # tasks
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    # answers
    "BernoulliPrediction",
    "CategoricalPrediction",
    "GaussianPrediction",
    "Prediction",
    "metrics",
    "predict",
]
