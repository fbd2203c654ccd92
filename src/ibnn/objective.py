"""LOSS: the terms of the evidence lower bound, per datum."""

from typing import NamedTuple

from torch import Tensor

from ibnn.errors import complaint


class ELBO(NamedTuple):
    """The training loss and what it is made of.

    Attributes:
        loss: nll + β·kl/N − γ·entropy/N, what training minimises.
        nll: Mean of −log p(y | x, z) over the data of the batch.
        kl: KL of the posterior to the prior in nats, summed over nodes and layers, not yet divided by anything.
        entropy: Ĥ, the lower bound of the posterior's entropy in nats; 0 where γ = 0 left it uncomputed.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    entropy: Tensor


def elbo(nll: Tensor, kl: Tensor, entropy: Tensor, *, n_data: int, beta: float, gamma: float) -> ELBO:
    """Weighs the terms; N = `n_data` is the size of the training set and the only divisor of KL and entropy.

    >>> import torch
    >>> elbo(torch.tensor(2.0), torch.tensor(10.0), torch.tensor(0.0), n_data=100, beta=1.0, gamma=0.0).loss.item()
    2.0999999046325684
    """
    return ELBO(nll + penalty(kl, entropy, n_data=n_data, beta=beta, gamma=gamma), nll, kl, entropy)


def penalty(kl: Tensor, entropy: Tensor, *, n_data: int, beta: float, gamma: float) -> Tensor:
    """Returns the part of the loss that all parts of a batch share, (β·kl − γ·entropy)/N."""
    return (beta * kl - gamma * entropy) / n_data


def check_weights(*, n_data: int, data: int, samples: int, beta: float, gamma: float) -> None:
    """Raises unless the numbers of an ELBO make sense for a batch of `data` targets."""
    if not isinstance(samples, int) or samples < 1:
        remedy = "Pass samples=1 for one draw a row."
        raise ValueError(complaint("samples", "an integer of at least 1", samples, remedy))
    if not n_data >= max(data, 1):
        expected = f"at least the {data} targets of this batch" if data else "at least 1"
        remedy = "Pass the number of targets in the training set (dense targets: pixels, several outputs: all of them)."
        raise ValueError(complaint("n_data", expected, n_data, remedy))
    for name, value in (("beta", beta), ("gamma", gamma)):
        if not 0 <= value < float("inf"):
            raise ValueError(complaint(name, "finite and not negative", value, f"Pass {name}=0 to leave the term out."))
