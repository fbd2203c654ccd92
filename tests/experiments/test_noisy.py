"""Noise in images, and the curves of answers under it, against direct computation."""

import pytest
import torch
from noisy import GAMMAS, SALTS, gaussian_mix, noise_curves, salt_and_pepper
from torch import nn

from ibnn import metrics
from ibnn.baselines import Plain
from ibnn.data import DataSet, Split, corrupt


def test_salt_and_pepper() -> None:
    pixels, p = torch.full((50, 3, 16, 16), 0.5), 0.3
    spoilt = salt_and_pepper(pixels, p, seed=2, first=4)
    for value in (0.0, 1.0):
        share = (spoilt == value).float().mean()
        assert abs(share - p / 2) < 4 * (p / 2 / spoilt.numel()) ** 0.5
    assert not torch.equal(spoilt[:, 0], spoilt[:, 1])  # each channel has its own chance
    assert torch.equal(spoilt[7:8], salt_and_pepper(pixels[:1], p, seed=2, first=11))
    assert torch.equal(salt_and_pepper(pixels, 0.0), pixels)
    more = salt_and_pepper(pixels, 0.6, seed=2, first=4)
    assert torch.equal(more[spoilt != 0.5], spoilt[spoilt != 0.5])
    assert salt_and_pepper(pixels, 1.0).unique().tolist() == [0.0, 1.0]


def test_gaussian_mix() -> None:
    x = torch.randn(200, 3, 8, 8)
    noise = gaussian_mix(x, 1.0, seed=1)
    assert abs(noise.mean()) < 4 / noise.numel() ** 0.5
    assert abs(noise.std() - 1) < 4 / (2 * noise.numel()) ** 0.5
    torch.testing.assert_close(gaussian_mix(x, 0.3, seed=1), 0.7 * x + 0.3 * noise)
    assert torch.equal(gaussian_mix(x, 0.0), x)
    assert torch.equal(gaussian_mix(x, 0.3, seed=1)[5:7], gaussian_mix(x[5:7], 0.3, seed=1, first=5))


def test_impossible_amounts_of_noise_are_refused() -> None:
    with pytest.raises(ValueError, match="`p`"):
        salt_and_pepper(torch.rand(1, 1, 8, 8), 1.1)
    with pytest.raises(ValueError, match="`gamma`"):
        gaussian_mix(torch.rand(1, 1, 8, 8), -0.1)


def test_kinds_of_noise_are_independent() -> None:
    x = torch.full((100, 1, 16, 16), 0.5)
    a, b = corrupt(x, "noise", 1) - 0.5, gaussian_mix(x, 1.0)
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 4 / a.numel() ** 0.5


def test_curves_are_those_of_direct_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (300, 1, 6, 6), generator=generator, dtype=torch.uint8)
    split = Split(images, images[:, 0, 0, 0].long() % 4)
    whole = DataSet("made", split, split, (0.4,), (0.3,), tuple("abcd"), True)
    torch.manual_seed(0)
    model = Plain(nn.Sequential(nn.Flatten(), nn.Linear(36, 4))).eval()
    found = noise_curves(model, whole, samples=5, shifted=280)
    part, labels = images[:280].float() / 255, split.labels[:280]
    salted = model.net((salt_and_pepper(part, SALTS[2]) - 0.4) / 0.3).softmax(1).detach()
    entropy = torch.distributions.Categorical(salted).entropy().mean()
    assert found["salt"][2]["total"] == pytest.approx(entropy.item(), abs=1e-4)
    assert found["salt"][2]["epistemic"] == 0
    mixed = model.net(gaussian_mix((part - 0.4) / 0.3, GAMMAS[3])).softmax(1).detach()
    assert found["gaussian"][3]["error"] == pytest.approx(metrics.error(mixed, labels))
    clean = metrics.error(model.net((part - 0.4) / 0.3).softmax(1).detach(), labels)
    assert found["gaussian"][0]["error"] == found["salt"][0]["error"] == pytest.approx(clean)
    assert noise_curves(model, None, samples=1) == {}
