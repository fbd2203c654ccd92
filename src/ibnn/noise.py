"""How the prior's noise is divided among layers, channels and units.

Where no layer's input has places, or `draws` is "channel" (the paper's form), every node has the prior N(1, s²). Else a
convolution's noise is divided between its channels and its units, and less goes to each layer of a deep network.
`convert` does not divide; `fit` and `calibrate` do, and a loop of your own may call `divide_noise`.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ibnn.latent import Latent
from ibnn.normal import Space, address, normals

if TYPE_CHECKING:
    from ibnn.network import IBNN

DrawsPer = Literal["channel", "unit", "both"]

START = 0.05  # where σ and τ start
HARDLY = 1e-3  # share of the noise that a few channels get
TRAINED = 0.03  # the least share in training: learning rates could not keep to a smaller one
CHANNELS = 0.5  # noise of channels relative to that of units, where both have some
LAYERS = 4  # layers of a network whose units have noise s in each; the noise of all layers adds up


def shares(latents: Iterable[Latent], draws: DrawsPer) -> tuple[list[float], list[float]]:
    """Returns the noise of each layer's channels (or only nodes) and of its units, relative to the network's."""
    found = [_share(latent, draws) for latent in latents]
    if all(channels == HARDLY and not units for channels, units in found):  # a few channels are all there is
        found = [(1.0, 0.0)] * len(found)
    return [channels for channels, _ in found], [units for _, units in found]


def _share(latent: Latent, draws: DrawsPer) -> tuple[float, float]:
    if latent.narrow:
        return HARDLY, 0.0
    if draws == "channel" or not latent.placed:
        return 1.0, 0.0
    return (HARDLY, 1.0) if draws == "unit" else (CHANNELS, 1.0)


def depth_factor(latents: Iterable[Latent], draws: DrawsPer) -> float:
    """Returns √(`LAYERS` / L) for L layers with noise, where units have some, else 1.

    What noise does to the output adds up over layers, so a deep network takes less in each.
    """
    channels, units = shares(latents, draws)
    if draws == "channel" or not any(units):
        return 1.0
    return math.sqrt(LAYERS / sum(c > HARDLY or u > 0 for c, u in zip(channels, units, strict=True)))


def has_units(model: "IBNN") -> Tensor:
    """Returns whether the units of each layer's input have factors of their own, (layers,)."""
    placed = [latent.placed and model.draws != "channel" for latent in model.latents.values()]
    return torch.tensor(placed, device=model.unit_std.device)


def divide_noise(model: "IBNN") -> Tensor:
    """Divides the prior's noise among layers, channels and units; returns τ of each layer, (layers,).

    Where units have no noise, all layers have the same, as in the paper.
    """
    if not bool(has_units(model).any()):
        return torch.zeros_like(model.unit_std)
    channels, units = torch.tensor(shares(model.latents.values(), model.draws)).to(model.unit_std)
    depth = depth_factor(model.latents.values(), model.draws)
    model.prior_factors.copy_(channels.clamp(min=TRAINED) * depth)
    unit_std: Tensor = model.prior_std * depth * units
    return unit_std


def initial(model: "IBNN", init_std: float) -> tuple[Tensor, Tensor]:
    """Returns the μ ~ N(1, σ0²) and σ ~ |N(0.05, 0.02²)| that latents start with, (K, nodes) each, on the CPU."""
    row, seed, nodes = torch.arange(model.components), model.init_seed, model.nodes
    mean = 1 + init_std * normals(address(seed, Space.INIT_MEAN, row), nodes)
    return mean, (START + 0.02 * normals(address(seed, Space.INIT_STD, row), nodes)).abs()
