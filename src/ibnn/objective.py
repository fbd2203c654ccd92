"""The terms of the evidence lower bound, per datum."""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ibnn import check
from ibnn.errors import complaint

if TYPE_CHECKING:
    from ibnn.likelihood import Terms


class ELBO(NamedTuple):
    """The training loss and what it is made of.

    Attributes:
        loss: The likelihood's loss + β·kl/N − γ·entropy/N, what training minimises.
        nll: Mean of −log p(y | x, z) over the data of the batch, without class weights or label smoothing.
        kl: KL of the posterior to the prior in nats, summed over nodes and layers, not yet divided by anything.
        entropy: Ĥ, the lower bound of the posterior's entropy in nats; 0 where γ = 0 left it uncomputed.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    entropy: Tensor


def elbo(terms: "Terms", kl: Tensor, entropy: Tensor, *, n_data: int, beta: float, gamma: float) -> ELBO:
    """Weighs the terms; N = `n_data` is the size of the training set and the only divisor of KL and entropy.

    >>> import ibnn, torch
    >>> terms = ibnn.Gaussian().terms(torch.ones(2, 1), torch.zeros(2, 1))
    >>> found = elbo(terms, torch.tensor(10.0), torch.tensor(0.0), n_data=100, beta=1.0, gamma=0.0)
    >>> round((found.loss - found.nll).item(), 4)
    0.1
    """
    return ELBO(terms.loss + (beta * kl - gamma * entropy) / n_data, terms.nll, kl, entropy)


@lru_cache(maxsize=8, typed=True)  # step after step has the same
def check_weights(*, n_data: int, data: int, samples: int, beta: float, gamma: float) -> None:
    """Raises unless the numbers of an ELBO make sense for a batch of `data` targets."""
    check.integer("samples", samples, remedy="Pass samples=1 for one draw a row.")
    if not n_data >= max(data, 1):
        expected = f"at least the {data} targets of this batch" if data else "at least 1"
        remedy = "Pass the number of targets in the training set (dense targets: pixels, several outputs: all of them)."
        raise ValueError(complaint("n_data", expected, n_data, remedy))
    for name, value in (("beta", beta), ("gamma", gamma)):
        check.number(name, value, least=0, remedy=f"Pass {name}=0 to leave the term out.")
