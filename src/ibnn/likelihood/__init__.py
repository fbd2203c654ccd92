"""What a network's output says about a target: a likelihood for each kind of target."""

from ibnn.likelihood.base import Likelihood, Temperature, Terms
from ibnn.likelihood.categorical import Bernoulli, Categorical
from ibnn.likelihood.gaussian import Gaussian
from ibnn.likelihood.heads import Heads
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
    "Terms",
]
