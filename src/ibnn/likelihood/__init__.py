"""What a network's output says about a target: a likelihood for each kind of target."""

from ibnn.likelihood.base import Likelihood, Temperature, Terms
from ibnn.likelihood.categorical import Bernoulli, Categorical, own_activation
from ibnn.likelihood.gaussian import Gaussian
from ibnn.likelihood.heads import Heads

LIKELIHOODS: dict[str, type[Likelihood]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}
ALIASES = {"multiclass": "categorical", "softmax": "categorical", "classification": "categorical"}
ALIASES |= {"binary": "bernoulli", "multilabel": "bernoulli", "regression": "gaussian", "normal": "gaussian"}

__all__ = [
    "ALIASES", "LIKELIHOODS", "Bernoulli", "Categorical", "Gaussian", "Heads", "Likelihood", "Temperature", "Terms",
    "own_activation",
]  # fmt: skip
