"""Corrupts images: degraded by known severities, to test whether a network notices.

Pure functions. Randomness is addressed by seed, kind and index of the image. So an image gets the same noise in every
batch and at every severity.
"""

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint
from ibnn.normal import Space, address, normals, words

SEVERITIES = {  # 1 to 5; noise, blur and contrast are those of CIFAR-10-C
    "noise": (0.04, 0.06, 0.08, 0.09, 0.1),  # standard deviation of the noise
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation of the Gaussian, in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor on the distance from the channel's mean
    "rotation": (5.0, 10.0, 15.0, 22.5, 30.0),  # degrees, to the left or to the right
    "pixelate": (0.9, 0.75, 0.5, 0.4, 0.25),  # factor on height and width
}
KINDS = tuple(SEVERITIES)


def corrupt(pixels: Tensor, kind: str, severity: int, *, seed: int = 0, first: int = 0) -> Tensor:
    """Corrupts images (B, C, H, W) with values in [0, 1], which stay in [0, 1], at a severity from 1 to 5.

    `first` is the index of the first image in its set; `seed` decides noise and the directions of rotations.

    >>> pixels = torch.rand(4, 3, 32, 32)
    >>> whole = corrupt(pixels, "noise", 3)
    >>> torch.equal(whole[2:], corrupt(pixels[2:], "noise", 3, first=2))
    True
    """
    check.choice("kind", kind, KINDS)
    check.integer("severity", severity, most=5, remedy="Pass severity=3.")
    check.shape("pixels", pixels, ("B", "C", "H", "W"))
    if not pixels.is_floating_point() or pixels.amin() < 0 or pixels.amax() > 1:
        got, remedy = f"{pixels.dtype} up to {float(pixels.amax()):.3g}", "Divide bytes by 255, and do not normalise."
        raise ValueError(complaint("pixels", "floats in [0, 1]", got, remedy))
    amount = SEVERITIES[kind][severity - 1]
    index = torch.arange(first, first + len(pixels), device=pixels.device)
    if kind == "noise":
        noise = normals(address(seed, Space.NOISE, index), pixels[0].numel()).view(pixels.shape).to(pixels.dtype)
        return (pixels + amount * noise).clamp(0, 1)
    if kind == "blur":
        return _blurred(pixels, amount)
    if kind == "contrast":
        mean = pixels.mean((2, 3), keepdim=True, dtype=torch.float64).to(pixels.dtype)
        return mean + (pixels - mean) * amount
    if kind == "rotation":
        left = words(address(seed, Space.ROTATION, index)) & 1
        return _rotated(pixels, amount * (2.0 * left - 1.0))
    small = [max(1, int(side * amount)) for side in pixels.shape[2:]]
    return F.interpolate(F.interpolate(pixels, small, mode="area"), pixels.shape[2:], mode="area")


def _blurred(pixels: Tensor, std: float) -> Tensor:
    """Convolves with a 9 × 9 Gaussian, an axis at a time, by sums of shifted images, which no batch size can change."""
    bell = torch.exp(-0.5 * (torch.arange(-4, 5) / std) ** 2)
    line = (bell / bell.sum()).tolist()
    height, width = pixels.shape[2:]
    padded = F.pad(pixels, (4, 4, 4, 4), mode="reflect")
    rows: Tensor = reduce(torch.add, (weight * padded[:, :, i : i + height] for i, weight in enumerate(line)))
    blurred: Tensor = reduce(torch.add, (weight * rows[..., i : i + width] for i, weight in enumerate(line)))
    return blurred.clamp(0, 1)  # the weights sum to one but for rounding


def _rotated(pixels: Tensor, degrees: Tensor) -> Tensor:
    """Rotates each image by its own angle about its centre, counterclockwise and bilinear; edges are mirrored."""
    height, width = pixels.shape[2:]
    angle = (degrees * (math.pi / 180)).to(pixels.dtype)
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
    rows = [torch.stack([cos, -sin * height / width, none], 1), torch.stack([sin * width / height, cos, none], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(pixels.shape), align_corners=False)
    turned: Tensor = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    return turned.clamp(0, 1)
