import math

import pytest
import torch
from torch import Tensor

from ibnn.data import KINDS, corrupt
from ibnn.data.corruptions import SEVERITIES, _rotated


def smooth(rows: int = 6, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Pictures with edges and slopes, more like photographs than noise is."""
    coarse = torch.rand(rows, channels, height // 4, width // 4)
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").clamp(0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 1, 28, 28), (5, 3, 32, 32), (5, 1, 8, 8), (5, 2, 12, 20)])
def test_an_image_does_not_depend_on_its_batch(kind: str, shape: tuple[int, ...]) -> None:
    pixels = torch.rand(shape)
    before, whole = pixels.clone(), corrupt(pixels, kind, 4, seed=3, first=10)
    assert torch.equal(pixels, before)
    assert whole.shape == pixels.shape
    assert (whole.amin() >= 0, whole.amax() <= 1) == (True, True)
    for i in range(5):
        assert torch.equal(whole[i : i + 1], corrupt(pixels[i : i + 1], kind, 4, seed=3, first=10 + i))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_grows_with_severity(kind: str) -> None:
    pixels = smooth(40)
    damage = [(corrupt(pixels, kind, severity) - pixels).square().mean().item() for severity in range(1, 6)]
    assert damage == sorted(damage)
    assert 0 < damage[0] < damage[4]


@pytest.mark.parametrize("kind", ["noise", "rotation"])
def test_seeds_differ(kind: str) -> None:
    pixels = smooth(8)
    assert not torch.equal(corrupt(pixels, kind, 3), corrupt(pixels, kind, 3, seed=1))
    assert not torch.equal(corrupt(pixels, kind, 3), corrupt(pixels, kind, 3, first=1))


def test_noise() -> None:
    gray = torch.full((40, 3, 32, 32), 0.5)
    for severity, std in enumerate(SEVERITIES["noise"], 1):
        noise = corrupt(gray, "noise", severity) - 0.5
        assert abs(noise.mean()) < 4 * std / noise.numel() ** 0.5
        assert abs(noise.std() - std) < 4 * std / (2 * noise.numel()) ** 0.5


def test_contrast() -> None:
    pixels = torch.rand(2, 3, 8, 8)
    mean = pixels.mean((2, 3), keepdim=True)
    torch.testing.assert_close(corrupt(pixels, "contrast", 2), mean + 0.5 * (pixels - mean))


@pytest.mark.parametrize(("height", "width"), [(9, 11), (5, 5)])
def test_blur_is_a_gaussian_sum(height: int, width: int) -> None:
    pixels, std = torch.rand(1, 1, height, width).double(), SEVERITIES["blur"][4]
    weight = [math.exp(-0.5 * (i / std) ** 2) for i in range(-4, 5)]
    weight = [w / sum(weight) for w in weight]

    def mirrored(i: int, size: int) -> int:
        return -i if i < 0 else min(i, 2 * (size - 1) - i)

    for y, x in ((0, 0), (height // 2, width // 2), (height - 1, width - 1), (height // 4, width - 2)):
        expected = sum(
            weight[i + 4] * weight[j + 4] * pixels[0, 0, mirrored(y + i, height), mirrored(x + j, width)].item()
            for i in range(-4, 5)
            for j in range(-4, 5)
        )
        assert abs(corrupt(pixels, "blur", 5)[0, 0, y, x].item() - expected) < 1e-6


def test_rotation_by_a_quarter_and_by_nothing() -> None:
    pixels = torch.rand(2, 3, 7, 7)
    turned = _rotated(pixels, torch.tensor([90.0, 0.0]))
    torch.testing.assert_close(turned[0], pixels[0].rot90(1, (1, 2)), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[1], pixels[1], atol=1e-5, rtol=0)


def test_rotation_keeps_angles_in_oblong_images() -> None:
    dot = torch.zeros(1, 1, 21, 41)
    dot[0, 0, 10, 26] = 1.0  # 6 to the right of the centre; by 30 degrees to the left it is 5.2 right and 3 up
    mass = _rotated(dot, torch.tensor([30.0]))[0, 0]
    mass = mass / mass.sum()
    right = (mass.sum(0) * (torch.arange(41) - 20)).sum()
    down = (mass.sum(1) * (torch.arange(21) - 10)).sum()
    assert abs(right - 6 * math.cos(math.pi / 6)) < 0.2
    assert abs(down + 6 * math.sin(math.pi / 6)) < 0.2


def test_rotation_goes_both_ways() -> None:
    pixels = smooth(1).expand(64, -1, -1, -1)
    turned, angle = corrupt(pixels, "rotation", 5), SEVERITIES["rotation"][4]
    left, right = (_rotated(pixels[:1], torch.tensor([sign * angle])) for sign in (1, -1))
    lefts = [torch.equal(image, left[0]) for image in turned]
    assert all(one or torch.equal(image, right[0]) for one, image in zip(lefts, turned, strict=True))
    assert 16 <= sum(lefts) <= 48  # four standard errors


def test_pixelate_averages_blocks() -> None:
    pixels = torch.rand(2, 3, 20, 12)
    blocks = pixels.view(2, 3, 5, 4, 3, 4).mean((3, 5))  # a quarter of the height and width
    expected = blocks.repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(corrupt(pixels, "pixelate", 5), expected)


@pytest.mark.parametrize(
    ("kind", "severity", "pixels"),
    [
        ("fog", 1, torch.rand(1, 1, 8, 8)),
        ("blur", 0, torch.rand(1, 1, 8, 8)),
        ("blur", 6, torch.rand(1, 1, 8, 8)),
        ("blur", 1, torch.rand(1, 1, 8, 8) + 1),
        ("blur", 1, torch.rand(1, 8, 8)),
        ("blur", 1, torch.ones(1, 1, 8, 8, dtype=torch.uint8)),
    ],
)
def test_errors(kind: str, severity: int, pixels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"Expected `.*` to be .*, but got .*\. \w+"):
        corrupt(pixels, kind, severity)
