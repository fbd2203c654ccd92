"""SWAG (Maddox et al., 2019): a Gaussian through the weights that training passes, low rank plus diagonal.

w = m + ε₁ √d / √2 + D ε₂ / √(2(R − 1)),   d = mean of w² − m², D the last R deviations from the running mean
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ibnn.baselines.plain import Plain, generator
from ibnn.errors import complaint
from ibnn.inputs import logits_of
from ibnn.likelihood import Likelihood


class SWAG(Plain):
    """Moments of the weights along training, collected once an epoch where the recipe of `fit` has `swa` below 1.

    All draws use the BatchNorm statistics of the mean, which `fit` estimates (the paper estimates them for each draw).

    Args:
        net: The network; trained in place. At the end its weights are the mean (SWA).
        likelihood: Default `Categorical`.
        rank: R, how many deviations are kept.
    """

    count: Tensor
    mean: Tensor
    square: Tensor
    deviations: Tensor

    def __init__(self, net: nn.Module, likelihood: Likelihood | None = None, *, rank: int = 20) -> None:
        super().__init__(net, likelihood)
        if not isinstance(rank, int) or rank < 2:
            raise ValueError(complaint("rank", "an integer of at least 2", rank, "Pass rank=20."))
        weights = self._weights()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=weights.device))
        self.register_buffer("mean", torch.zeros_like(weights))
        self.register_buffer("square", torch.zeros_like(weights))
        self.register_buffer("deviations", weights.new_zeros(rank, len(weights)))

    def _weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    def collect(self) -> None:
        """Adds the current weights to the moments."""
        weights = self._weights()
        self.deviations[int(self.count) % len(self.deviations)] = 0
        self.count += 1
        self.mean += (weights - self.mean) / self.count
        self.square += (weights.square() - self.square) / self.count
        self.deviations[(int(self.count) - 1) % len(self.deviations)] = weights - self.mean

    def settle(self) -> None:
        """Puts the mean into the network."""
        with torch.no_grad():
            for parameter, value in zip(self.net.parameters(), self._parts(self.mean), strict=True):
                parameter.copy_(value)

    def end_epoch(self, *, collect: bool, last: bool) -> bool:
        """Collects where `fit` asks for it; at the end, the mean of what was collected takes the weights' place."""
        if collect:
            self.collect()
        if last and int(self.count):
            self.settle()
        return int(self.count) > 0

    def _parts(self, weights: Tensor) -> list[Tensor]:
        own = list(self.net.parameters())
        return [part.view_as(p) for part, p in zip(weights.split([p.numel() for p in own]), own, strict=True)]

    @property
    def options(self) -> dict[str, Any]:
        """The rank."""
        return {"rank": len(self.deviations)}

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether draws differ: not before the second collection."""
        return int(self.count) > 1

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        if not self.random:
            yield from super()._draws(args, kwargs, numbers, seed)
            return
        names, device = [name for name, _ in self.net.named_parameters()], self.mean.device
        std = (self.square - self.mean.square()).clamp_min(1e-30).sqrt() / 2**0.5
        kept = self.deviations[: int(self.count)]
        for number in numbers:
            source = generator(seed, number, device)
            weights = self.mean + std * torch.randn(std.shape, generator=source, device=device)
            weights += torch.randn(len(kept), generator=source, device=device) @ kept / (2 * (len(kept) - 1)) ** 0.5
            drawn = dict(zip(names, self._parts(weights), strict=True))
            yield logits_of(functional_call(self.net, drawn, args, kwargs))
