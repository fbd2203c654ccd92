"""Corrupts images: degraded by known severities, to test whether a network notices.

Pure functions. Randomness is addressed by seed, kind and index of the image, where `first` is the index of the first
one. So an image gets the same noise in every batch and at every severity.
"""

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint
from ibnn.normal import Address, Space, address, normals, words

SEVERITIES = {  # 1 to 5; noise, blur and contrast are those of CIFAR-10-C
    "noise": (0.04, 0.06, 0.08, 0.09, 0.1),  # standard deviation of the noise
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation of the Gaussian, in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor on the distance from the channel's mean
    "rotation": (5.0, 10.0, 15.0, 22.5, 30.0),  # degrees, to the left or to the right
    "pixelate": (0.9, 0.75, 0.5, 0.4, 0.25),  # factor on height and width
}
KINDS = tuple(SEVERITIES)


def corrupt(pixels: Tensor, kind: str, severity: int, *, seed: int = 0, first: int = 0) -> Tensor:
    """Corrupts images (B, C, H, W) with values in [0, 1], which stay in [0, 1].

    >>> pixels = torch.rand(4, 3, 32, 32)
    >>> whole = corrupt(pixels, "noise", 3)
    >>> torch.equal(whole[2:], corrupt(pixels[2:], "noise", 3, first=2))
    True

    Args:
        pixels: Images before normalising.
        kind: One of `KINDS`.
        severity: From 1 to 5.
        seed: Decides noise and the directions of rotations.
        first: Index of the first image in its set.
    """
    check.choice("kind", kind, KINDS)
    check.integer("severity", severity, most=5, remedy="Pass severity=3.")
    _check(pixels)
    amount = SEVERITIES[kind][severity - 1]
    if kind == "noise":
        return (pixels + amount * _normals(address(seed, Space.NOISE, _indices(pixels, first)), pixels)).clamp(0, 1)
    if kind == "blur":
        return _blurred(pixels, amount)
    if kind == "contrast":
        mean = pixels.mean((2, 3), keepdim=True, dtype=torch.float64).to(pixels.dtype)
        return mean + (pixels - mean) * amount
    if kind == "rotation":
        left = words(address(seed, Space.ROTATION, _indices(pixels, first))) & 1
        return _rotated(pixels, amount * (2.0 * left - 1.0))
    small = [max(1, int(side * amount)) for side in pixels.shape[2:]]
    return F.interpolate(F.interpolate(pixels, small, mode="area"), pixels.shape[2:], mode="area")


def salt_and_pepper(pixels: Tensor, p: float, *, seed: int = 0, first: int = 0) -> Tensor:
    """Sets each value of images (B, C, H, W) in [0, 1] to 0 with probability p/2 and to 1 with probability p/2.

    Channels of a pixel are independent, as in scikit-image and in the impulse noise of CIFAR-10-C. A larger p changes
    all values that a smaller one changes, to the same.

    >>> salt_and_pepper(torch.full((1, 1, 2, 4), 0.5), 1.0).unique().tolist()
    [0.0, 1.0]
    """
    _check(pixels)
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
    return (1 - gamma) * x + gamma * _normals(address(seed, Space.MIX, _indices(x, first)), x)


def _check(pixels: Tensor) -> None:
    check.shape("pixels", pixels, ("B", "C", "H", "W"))
    if not pixels.is_floating_point() or pixels.amin() < 0 or pixels.amax() > 1:
        got, remedy = f"{pixels.dtype} up to {float(pixels.amax()):.3g}", "Divide bytes by 255, and do not normalise."
        raise ValueError(complaint("pixels", "floats in [0, 1]", got, remedy))


def _indices(x: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + len(x), device=x.device)


def _normals(at: Address, x: Tensor) -> Tensor:
    return normals(at, x[0].numel()).view(x.shape).to(x.dtype)


def _blurred(pixels: Tensor, std: float) -> Tensor:
    """Convolves with a 9 × 9 Gaussian, an axis at a time, by sums of shifted images, which no batch size can change."""
    bell = torch.exp(-0.5 * (torch.arange(-4, 5) / std) ** 2)
    line = (bell / bell.sum()).tolist()
    height, width = pixels.shape[2:]
    padded = pixels[:, :, _mirrored(height)][..., _mirrored(width)]
    rows: Tensor = reduce(torch.add, (weight * padded[:, :, i : i + height] for i, weight in enumerate(line)))
    blurred: Tensor = reduce(torch.add, (weight * rows[..., i : i + width] for i, weight in enumerate(line)))
    return blurred.clamp(0, 1)  # the weights sum to one but for rounding


def _mirrored(side: int) -> Tensor:
    """Returns indices of a side padded by 4 at both ends, reflected as often as a short side needs."""
    period = max(1, 2 * (side - 1))
    places = torch.arange(-4, side + 4) % period
    return torch.minimum(places, period - places)


def _rotated(pixels: Tensor, degrees: Tensor) -> Tensor:
    """Rotates each image by its own angle about its centre, counterclockwise and bilinear; edges are mirrored."""
    height, width = pixels.shape[2:]
    angle = (degrees * (math.pi / 180)).to(pixels.dtype)
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
    rows = [torch.stack([cos, -sin * height / width, none], 1), torch.stack([sin * width / height, cos, none], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(pixels.shape), align_corners=False)
    turned: Tensor = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    return turned.clamp(0, 1)
