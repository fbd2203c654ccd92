"""How answers change as test images turn to noise (the paper's figures 7 and 8)."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ibnn import check, metrics
from ibnn.data import DataSet
from ibnn.lab.evaluation import SHIFTED, Answers, Method
from ibnn.normal import Space, address, normals, words

GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the mix with Gaussian noise, in normalised space
SALTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # probabilities that a pixel turns black or white


def noise_curves(model: Any, whole: Any, *, samples: int, shifted: int = SHIFTED) -> dict[str, Any]:
    """Returns how entropies and error grow with two kinds of noise; nothing for data that are no images."""
    if not isinstance(whole, DataSet):
        return {}
    temperature = float(model.likelihood.temperature)
    method, part = (
        Method(model, samples, (temperature,)),
        whole.test.part(torch.arange(shifted)[: len(whole.test.labels)]),
    )
    gaussian = [method.images(whole, part, noise=partial(gaussian_mix, gamma=gamma)) for gamma in GAMMAS]
    salt = [method.images(whole, part, damage=partial(salt_and_pepper, p=p)) for p in SALTS]

    def curve(noisy: list[Answers], levels: Iterable[float]) -> list[dict[str, float]]:
        return [
            {"level": level}
            | {name: round(float(getattr(a, name).mean()), 5) for name in ("total", "aleatoric", "epistemic")}
            | {"error": metrics.error(a.probs, part.labels)}
            for level, a in zip(levels, (answers.at[temperature] for answers in noisy), strict=True)
        ]

    return {"gaussian": curve(gaussian, GAMMAS), "salt": curve(salt, SALTS)}


def salt_and_pepper(pixels: Tensor, p: float, *, seed: int = 0, first: int = 0) -> Tensor:
    """Sets each value of images (B, C, H, W) in [0, 1] to 0 with probability p/2 and to 1 with probability p/2.

    Channels of a pixel are independent, as in scikit-image and in the impulse noise of CIFAR-10-C. A larger p changes
    all values that a smaller one changes, to the same.

    >>> salt_and_pepper(torch.full((1, 1, 2, 4), 0.5), 1.0).unique().tolist()
    [0.0, 1.0]
    """
    check.number("p", p, least=0, most=1, remedy="Pass p=0.1.")
    place = torch.arange(pixels[0].numel(), device=pixels.device)
    word = words(address(seed, Space.SALT, _indices(pixels, first)[:, None], place)).view(pixels.shape)
    half = round(p / 2 * 2**32)
    return pixels.masked_fill(word < half, 0.0).masked_fill(word >= 2**32 - half, 1.0)


def gaussian_mix(x: Tensor, gamma: float, *, seed: int = 0, first: int = 0) -> Tensor:
    """Mixes noise into normalised inputs (B, …): (1 − γ) x + γ ε with ε ~ N(0, 1).

    >>> x = torch.rand(2, 3)
    >>> torch.equal(gaussian_mix(x, 0.0), x), bool((gaussian_mix(x, 1.0) == gaussian_mix(0 * x, 1.0)).all())
    (True, True)
    """
    check.number("gamma", gamma, least=0, most=1, remedy="Pass gamma=0.5.")
    noise = normals(address(seed, Space.MIX, _indices(x, first)), x[0].numel()).view(x.shape).to(x.dtype)
    return (1 - gamma) * x + gamma * noise


def _indices(x: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + len(x), device=x.device)
