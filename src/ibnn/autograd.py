"""The inverse of softplus, and which tensors are plain."""

import torch
from torch import Tensor, nn

# Classes whose operations are torch's own. Others (fake, distributed) do not go through kernels, nor are they kept.
PLAIN: set[type] = {Tensor, nn.Parameter}


def inverse_softplus(y: Tensor) -> Tensor:
    """Returns ρ with softplus(ρ) = y ≥ 0.

    >>> import torch.nn.functional as F
    >>> torch.allclose(F.softplus(inverse_softplus(torch.tensor([0.05, 3.0]))), torch.tensor([0.05, 3.0]))
    True
    """
    return y + torch.log(-torch.expm1(-y))
