"""BNN-VI (Graves, 2011; Blundell et al., 2015): an independent Gaussian on every weight, reparameterised.

q(w) = N(m, σ²), σ = softplus(ρ);   p(w) = N(0, s²);   w = m + σ ε, one ε for all rows of a pass
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ibnn.baselines.plain import Plain, generator
from ibnn.errors import complaint
from ibnn.inputs import Inputs, logits_of
from ibnn.latent import inverse_softplus
from ibnn.layers.registry import layer_type
from ibnn.likelihood import Likelihood


class MeanField(Plain):
    """A mean-field Gaussian posterior on the weights and biases of linear and convolutional layers.

    Their present values, pretrained ones for example, are the means, and keep their names.

    Args:
        net: The network; trained in place.
        likelihood: Default `Categorical`.
        prior_std: s.
        init_std: σ at the start.
    """

    random = True

    def __init__(
        self, net: nn.Module, likelihood: Likelihood | None = None, *, prior_std: float = 0.1, init_std: float = 0.01
    ) -> None:
        super().__init__(net, likelihood)
        for name, value in (("prior_std", prior_std), ("init_std", init_std)):
            if not 0 < value < math.inf:
                raise ValueError(complaint(name, "positive", value, f"Pass {name}=0.1."))
        self.prior_std = prior_std
        layers = [(name, m) for name, m in net.named_modules() if layer_type(m)]
        if not layers:
            raise ValueError(complaint("net", "one with linear or convolutional layers", "none", "Pass another."))
        self.stochastic = tuple(  # names of the weights that are random
            f"{name}.{own}".lstrip(".") for name, layer in layers for own, _ in layer.named_parameters(recurse=False)
        )
        start = float(inverse_softplus(torch.tensor(init_std)))
        self.rho = nn.ParameterList(
            nn.Parameter(torch.full_like(net.get_parameter(name), start)) for name in self.stochastic
        )

    def posterior(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the mean and standard deviation of every random weight, by name."""
        return {n: (self.net.get_parameter(n), F.softplus(r)) for n, r in zip(self.stochastic, self.rho, strict=True)}

    def kl(self) -> Tensor:
        """Returns Σ over weights of log(s/σ) + (σ² + m²)/2s² − ½."""
        s, pairs = self.prior_std, self.posterior().values()
        kls = [math.log(s) - std.log() + (std.square() + mean.square()) / (2 * s * s) - 0.5 for mean, std in pairs]
        return torch.stack([kl.sum() for kl in kls]).sum()

    def parameter_groups(
        self, lr: float, latent_lr: float | None = None, weight_decay: float = 0.0, *, undo_k: bool = True
    ) -> list[dict[str, Any]]:
        """Returns groups for any torch optimiser; ρ is in "latents", and only weights that are not random decay."""
        groups = super().parameter_groups(lr, latent_lr, weight_decay)
        random = {id(self.net.get_parameter(name)) for name in self.stochastic}
        rest = [p for p in self.net.parameters() if id(p) not in random]
        means = [p for p in self.net.parameters() if id(p) in random]
        groups[:1] = [groups[0] | {"params": means, "weight_decay": 0.0}, groups[0] | {"params": rest}]
        latents = {"name": "latents", "params": list(self.rho), "weight_decay": 0.0}
        groups.append(latents | {"lr": lr if latent_lr is None else latent_lr})
        return [group for group in groups if group["params"]]

    def _noisy(self, args: tuple[Any, ...], kwargs: dict[str, Any], source: torch.Generator | None = None) -> Any:
        weights = {
            name: mean + std * torch.randn(mean.shape, generator=source, device=mean.device, dtype=mean.dtype)
            for name, (mean, std) in self.posterior().items()
        }
        return functional_call(self.net, weights, args, kwargs)

    @property
    def options(self) -> dict[str, Any]:
        """The prior."""
        return {"prior_std": self.prior_std}

    def _nll(self, x: Inputs, y: Tensor, samples: int) -> Tensor:
        return torch.stack([self._loss(x, y) for _ in range(samples)]).mean()  # a draw of the weights for each

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        device = self.examples.device
        yield from (logits_of(self._noisy(args, kwargs, generator(seed, number, device))) for number in numbers)
