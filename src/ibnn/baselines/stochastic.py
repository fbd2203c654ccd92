"""Methods with random weights: MC-dropout, mean-field variational inference and SWAG."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parameters_to_vector

from ibnn import check
from ibnn.baselines.plain import Plain
from ibnn.errors import complaint
from ibnn.inputs import Inputs, batch_length, repeat_rows, tree_map
from ibnn.latent import inverse_softplus
from ibnn.layers.registry import layer_type
from ibnn.likelihood import Likelihood, Terms
from ibnn.threads import one_at_a_time

LEAST_SELU = -1.7580993408473766  # −λα: alpha dropout sets entries to it


def normal_like(x: Tensor, source: torch.Generator | None) -> Tensor:
    """Draws standard normals: from a draw's own generator, which is the CPU's, or from the device's global one."""
    if source is None:
        return torch.randn_like(x)
    return torch.randn(x.shape, generator=source, dtype=x.dtype).to(x.device)


class _Mask(nn.Module):
    """Dropout whose mask, within a draw, is the same for every row, so that a draw is one function of x."""

    def __init__(self, own: _DropoutNd) -> None:
        super().__init__()
        self.own, self.p = own, own.p  # attention of transformers reads p
        self.source: torch.Generator | None = None  # of the current draw

    def forward(self, x: Tensor) -> Tensor:
        own, rate = self.own, self.own.p
        if self.source is None:
            return own(x)  # type: ignore[no-any-return]
        entries = isinstance(own, nn.Dropout | nn.AlphaDropout)  # the others drop channels
        shape = x.shape[1:] if entries else (*x.shape[1:2], *[1] * (x.dim() - 2))
        mask = torch.rand(shape, generator=self.source).to(x.device) >= rate
        if isinstance(own, nn.AlphaDropout | nn.FeatureAlphaDropout):  # keeps mean 0 and variance 1
            scale = 1 / math.sqrt((1 - rate) * (1 + rate * LEAST_SELU**2))
            return scale * (torch.where(mask, x, LEAST_SELU) - rate * LEAST_SELU)
        return x * mask / (1 - rate)

    def hook(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Drops entries of a layer's input."""
        return (self(args[0]), *args[1:])


class MCDropout(Plain):
    """MC-dropout (Gal & Ghahramani, 2016): dropout stays on in prediction; all else is in eval mode.

    Args:
        net, likelihood: As of `Plain`.
        rate: Share of the inputs that is dropped before every linear and convolutional layer but the first, instead
            of the network's own dropout. None keeps the network's own dropout layers.
    """

    random, saved_options = True, ("rate",)

    def __init__(self, net: nn.Module, likelihood: Likelihood | None = None, *, rate: float | None = None) -> None:
        super().__init__(net, likelihood)
        self.rate = rate
        if rate is not None:
            check.share("rate", rate, remedy="Pass 0.1, or None for the network's own.")
        own = [(m, n, c) for m in net.modules() for n, c in m._modules.items() if isinstance(c, _DropoutNd)]
        if rate is None and not any(child.p > 0 for _, _, child in own):
            raise ValueError(complaint("rate", "given", "a network without dropout", "Pass rate=0.1."))
        for module, name, child in own:
            setattr(module, name, _Mask(child if rate is None else nn.Dropout(0.0)))
        layers = [m for m in net.modules() if layer_type(m)][1:] if rate is not None else []
        for layer in layers:
            layer.input_dropout = _Mask(nn.Dropout(rate or 0.0))
            layer.register_forward_pre_hook(layer.input_dropout.hook)
        self.train(self.training)

    def _terms(self, x: Inputs, y: Tensor, samples: int) -> Terms:
        rows = batch_length(x)
        x, y = tree_map(lambda tensor: repeat_rows(tensor, rows, samples), (x, y))
        return super()._terms(x, y, 1)

    def _noisy(self, args: tuple[Any, ...], kwargs: dict[str, Any], source: torch.Generator | None = None) -> Any:
        masks = [m for m in self.net.modules() if isinstance(m, _Mask)]
        try:
            for mask in masks:
                mask.source = source
            return super()._noisy(args, kwargs)
        finally:
            for mask in masks:
                mask.source = None


class MeanField(Plain):
    """BNN-VI (Graves, 2011; Blundell et al., 2015): an independent Gaussian on every linear and convolutional weight.

    q(w) = N(m, σ²), σ = softplus(ρ);   p(w) = N(0, s²);   w = m + σ ε, one ε for all rows of a pass. The present
    weights and biases, pretrained ones for example, are the means, and keep their names.

    Args:
        net, likelihood: As of `Plain`.
        prior_std: s.
        init_std: σ at the start.
    """

    random, saved_options = True, ("prior_std",)

    def __init__(
        self, net: nn.Module, likelihood: Likelihood | None = None, *, prior_std: float = 0.1, init_std: float = 0.01
    ) -> None:
        super().__init__(net, likelihood)
        for name, value in (("prior_std", prior_std), ("init_std", init_std)):
            check.number(name, value, above=0, remedy=f"Pass {name}=0.1.")
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

    @one_at_a_time
    def posterior(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the mean and standard deviation of every random weight, by name."""
        return {n: (self.net.get_parameter(n), F.softplus(r)) for n, r in zip(self.stochastic, self.rho, strict=True)}

    def kl(self) -> Tensor:
        """Returns Σ over weights of log(s/σ) + (σ² + m²)/2s² − ½."""
        s, pairs = self.prior_std, self.posterior().values()
        kls = [math.log(s) - std.log() + (std.square() + mean.square()) / (2 * s * s) - 0.5 for mean, std in pairs]
        return torch.stack([kl.sum() for kl in kls]).sum()

    @one_at_a_time
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
        weights = {name: mean + std * normal_like(mean, source) for name, (mean, std) in self.posterior().items()}
        return functional_call(self.net, weights, args, kwargs)

    def _terms(self, x: Inputs, y: Tensor, samples: int) -> Terms:
        terms = [super(MeanField, self)._terms(x, y, 1) for _ in range(samples)]  # a draw of weights each
        return Terms(*(torch.stack(parts).mean() for parts in zip(*terms, strict=True)))


class SWAG(Plain):
    """SWAG (Maddox et al., 2019): a Gaussian through the weights that training passes, low rank plus diagonal.

    w = m + ε₁ √d / √2 + D ε₂ / √(2(R − 1)),   d = mean of w² − m², D the last R deviations from the running mean.
    Moments are collected once an epoch where the recipe of `fit` has `swa` below 1. All draws use the
    BatchNorm statistics of the mean, which `fit` estimates (the paper estimates them for each draw).

    Args:
        net: The network; trained in place. At the end its weights are the mean (SWA).
        likelihood: Default `Categorical`.
        rank: R, how many deviations are kept.
    """

    count: Tensor
    mean: Tensor
    square: Tensor
    deviations: Tensor
    saved_options = ("rank",)

    def __init__(self, net: nn.Module, likelihood: Likelihood | None = None, *, rank: int = 20) -> None:
        super().__init__(net, likelihood)
        check.integer("rank", rank, least=2, remedy="Pass rank=20.")
        self.rank, weights = rank, parameters_to_vector(net.parameters()).detach()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=weights.device))
        self.register_buffer("mean", torch.zeros_like(weights))
        self.register_buffer("square", torch.zeros_like(weights))
        self.register_buffer("deviations", weights.new_zeros(rank, len(weights)))

    @one_at_a_time
    def collect(self) -> None:
        """Adds the current weights to the moments."""
        weights = parameters_to_vector(self.net.parameters()).detach()
        self.count += 1
        self.mean += (weights - self.mean) / self.count
        self.square += (weights.square() - self.square) / self.count
        self.deviations[(int(self.count) - 1) % self.rank] = weights - self.mean

    @one_at_a_time
    def end_epoch(self, *, collect: bool, last: bool) -> bool:
        """Collects where `fit` asks for it; at the end, the mean of what was collected takes the weights' place."""
        if collect:
            self.collect()
        if last and int(self.count):
            with torch.no_grad():
                for parameter, value in zip(self.net.parameters(), self._parts(self.mean), strict=True):
                    parameter.copy_(value)
        return int(self.count) > 0

    def _parts(self, weights: Tensor) -> list[Tensor]:
        own = list(self.net.parameters())
        return [part.view_as(p) for part, p in zip(weights.split([p.numel() for p in own]), own, strict=True)]

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether draws differ: not before the second collection."""
        return int(self.count) > 1

    def _noisy(self, args: tuple[Any, ...], kwargs: dict[str, Any], source: torch.Generator | None = None) -> Any:
        if source is None or not self.random:
            return super()._noisy(args, kwargs)
        std = (self.square - self.mean.square()).clamp_min(1e-30).sqrt() / 2**0.5
        kept = self.deviations[: int(self.count)]
        weights = self.mean + std * normal_like(std, source)
        weights += normal_like(kept[:, 0], source) @ kept / (2 * (len(kept) - 1)) ** 0.5
        names = [name for name, _ in self.net.named_parameters()]
        return functional_call(self.net, dict(zip(names, self._parts(weights), strict=True)), args, kwargs)
