"""LIKELIHOODS: what a network's output says about a target, one file a kind of target."""

from ibnn.likelihood.base import Likelihood, Temperature
from ibnn.likelihood.categorical import Bernoulli, Categorical
from ibnn.likelihood.composite import Heads, Weighted
from ibnn.likelihood.gaussian import Gaussian
from ibnn.likelihood.running import HELD

LIKELIHOODS: dict[str, type[Likelihood]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}

__all__ = [
    "HELD",
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Heads",
    "Likelihood",
    "Temperature",
    "Weighted",
]
