"""Slow references: the z that layers met, a row at a time through plain layers, weights folded entry by entry."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from cases import K
from torch import Tensor, nn

import ibnn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@contextlib.contextmanager
def captured(model: ibnn.IBNN) -> Iterator[dict[str, list[Tensor]]]:
    """The z that each layer met, call by call, by the layer's name."""
    met: dict[str, list[Tensor]] = {name: [] for name in model.latents}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda layer, args, output: met[name].append(layer.latent.z.detach().clone())

    handles = [model.net.get_submodule(name).register_forward_hook(note(name)) for name in met]
    try:
        yield met
    finally:
        for handle in handles:
            handle.remove()


def multiplied(net: nn.Module, z: dict[str, Tensor]) -> nn.Module:
    """A plain copy of the net with z (D,) multiplied into the inputs of its layers by hooks written here."""
    net = copy.deepcopy(net)

    def times(row: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            spatial = args[0].dim() - 2 if isinstance(layer, CONVOLUTIONS) else 0
            return (args[0] * row.reshape(-1, *[1] * spatial), *args[1:])

        return hook

    for name, row in z.items():
        net.get_submodule(name).register_forward_pre_hook(times(row))
    return net


def row_by_row(net: nn.Module, z: dict[str, Tensor], x: Tensor) -> Tensor:
    """The plain net on one row at a time, each with its own z (R, D): what a training forward must compute."""
    return torch.cat([multiplied(net, {n: rows[i] for n, rows in z.items()})(x[i : i + 1]) for i in range(len(x))])


def folded_entry_by_entry(layer: nn.Module, z: Tensor) -> Tensor:
    """W[o, i] = U[o, i] · z[the node that o and i stand for]."""
    weight = layer.weight.detach().clone()
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    groups = getattr(layer, "groups", 1)
    for o, i in itertools.product(range(weight.shape[0]), range(weight.shape[1])):
        node = o if transposed else o // (weight.shape[0] // groups) * (len(z) // groups) + i
        weight[o, i] = weight[o, i] * z[node]
    return weight


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def converted(net: nn.Module, **options: object) -> ibnn.IBNN:
    return ibnn.convert(net, **{"components": K, "init_std": 0.3, "likelihood": "gaussian", "seed": 5, **options})


def nll_reference(likelihood: ibnn.Likelihood, draws: Tensor, target: Tensor, temperature: float) -> float:
    """Written out in numpy: the mean over draws of the probability, its logarithm, the mean over data."""
    z, y = draws.double().numpy().reshape(-1, *draws.shape[2:]), target.numpy()  # (J, N, 3)
    if isinstance(likelihood, ibnn.Categorical):
        p = np.exp(z / temperature) / np.exp(z / temperature).sum(-1, keepdims=True)
        density = p[:, np.arange(len(y)), y]
    elif isinstance(likelihood, ibnn.Bernoulli):
        density = 1 / (1 + np.exp(-np.where(y == 1, 1, -1) * z / temperature))
    else:
        density = np.exp(-0.5 * ((y - z) / temperature) ** 2) / (temperature * math.sqrt(2 * math.pi))
    return float(-np.log(density.mean(0)).mean())
