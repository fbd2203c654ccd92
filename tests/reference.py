"""Slow references: the z that layers met, a row at a time through plain layers, weights folded entry by entry, loops
over draws in numpy that split uncertainty."""

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
from ibnn.latent import Latent

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@contextlib.contextmanager
def captured(model: ibnn.IBNN) -> Iterator[dict[str, list[Tensor]]]:
    """The z that each layer met, call by call, by the layer's name."""
    met: dict[str, list[Tensor]] = {name: [] for name in model.latents}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def see(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if (z := layer.latent.current()[0]) is not None:  # not in a run that looks for the batch
                met[name].append(z.detach().clone())

        return see

    handles = [model.net.get_submodule(name).register_forward_hook(note(name)) for name in met]
    try:
        yield met
    finally:
        for handle in handles:
            handle.remove()


def give(latent: Latent, z: Tensor | None) -> None:
    """Lets a layer multiply its input by z until it is given None."""
    latent.current_pass.z = None if z is None else {latent.number: z}
    latent.current_pass.units = {latent.number: None}


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


def entropy_split(logits: Tensor, binary: bool = False) -> dict[str, Tensor]:
    """Entropies of draws (K, S, B, C) of logits, in nats and float64, without a use of the library.

    total = H[mean_ks p], aleatoric = mean_ks H[p], between = total − mean_k H[mean_s p], within = the rest.
    """
    values = logits.detach().double().numpy()
    if binary:  # two classes for each label
        values = np.stack([values, np.zeros_like(values)], -1)
    powers = np.exp(values - values.max(-1, keepdims=True))
    p = powers / powers.sum(-1, keepdims=True)

    def entropy(q: np.ndarray) -> np.ndarray:
        return -(q * np.log(np.where(q > 0, q, 1))).sum(-1)

    total = entropy(sum(draw for component in p for draw in component) / (len(p) * len(p[0])))
    aleatoric = sum(entropy(draw) for component in p for draw in component) / (len(p) * len(p[0]))
    components = sum(entropy(sum(component) / len(component)) for component in p) / len(p)
    return _tensors(total, aleatoric, total - components, components - aleatoric)


def variance_split(means: Tensor, variances: Tensor) -> dict[str, Tensor]:
    """The law of total variance for draws (K, S, B, …) of means and noise variances, in float64.

    total = E[mean² + variance] − E[mean]², in deviations from the first draw against cancellation.
    """
    m, v = means.detach().double().numpy(), variances.detach().double().numpy()
    centre = m[0, 0]
    draws = [(m[k, s] - centre, v[k, s]) for k in range(len(m)) for s in range(len(m[0]))]
    total = sum(d**2 + noise for d, noise in draws) / len(draws) - (sum(d for d, _ in draws) / len(draws)) ** 2
    aleatoric = sum(noise for _, noise in draws) / len(draws)
    between = np.stack([component.mean(0) for component in m]).var(0)
    return _tensors(total, aleatoric, between, total - aleatoric - between)


def _tensors(*parts: np.ndarray) -> dict[str, Tensor]:
    return dict(zip(("total", "aleatoric", "between", "within"), map(torch.from_numpy, parts), strict=True))


def check_split(
    prediction: ibnn.Prediction, expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    """Asserts that all parts are finite, nowhere negative and those of a reference; `epistemic` is the sum of two."""
    for name, part in (expected | {"epistemic": expected["between"] + expected["within"]}).items():
        found = getattr(prediction, name)
        assert bool((found >= 0).all()), name
        torch.testing.assert_close(found.double(), part, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


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
