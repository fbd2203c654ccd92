"""The terms of the evidence lower bound, per datum."""

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ibnn import check
from ibnn.errors import complaint


class ELBO(NamedTuple):
    """The training loss and what it is made of."""

    loss: Tensor  #: The likelihood's loss + (β·kl − γ·entropy) / N for N training data, what training minimises.
    nll: Tensor  #: Mean of −log p(y | x, z) over the data of the batch, without class weights or label smoothing.
    kl: Tensor  #: KL of the posterior to the prior in nats, summed over nodes and layers, not yet divided by anything.
    entropy: Tensor  #: Ĥ, the lower bound of the posterior's entropy in nats; 0 where γ = 0 left it uncomputed.


@lru_cache(maxsize=8, typed=True)  # step after step has the same
def check_weights(*, n_data: int, data: int, samples: int, beta: float, gamma: float) -> None:
    """Raises unless the numbers of an ELBO make sense for a batch of `data` targets."""
    check.integer("samples", samples, remedy="Pass samples=1 for one draw a row.")
    if not n_data >= max(data, 1):
        expected = f"at least the {data} targets of this batch" if data else "at least 1"
        raise ValueError(complaint("n_data", expected, n_data, "Pass the number of targets in the training set."))
    for name, value in (("beta", beta), ("gamma", gamma)):
        check.number(name, value, least=0, remedy=f"Pass {name}=0 to leave the term out.")
