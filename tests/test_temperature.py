"""The search for the best temperature, against dense grids and closed forms."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import nll_reference
from torch import Tensor, nn

from ibnn.likelihood import Bernoulli, Categorical, Gaussian, Heads, Likelihood
from ibnn.likelihood.temperature import PRICE, best_temperature, confidence, nll, supported_temperature

LIKELIHOODS = [Categorical, Bernoulli, Gaussian]
LOG_GRID = np.linspace(-math.log(3), math.log(20), 4001)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tempered(likelihood: Likelihood, scale: float, rows: int = 3000) -> tuple[Tensor, Tensor]:
    """One draw (1, 1, N, …) and labels that are drawn from it at the temperature `scale`."""
    logits = 4 * torch.randn(rows, 3, generator=generator())
    if isinstance(likelihood, Categorical):
        target = torch.multinomial((logits / scale).softmax(1), 1, generator=generator(1))[:, 0]
    elif isinstance(likelihood, Bernoulli):
        target = torch.bernoulli((logits / scale).sigmoid(), generator=generator(1))
    else:
        target = logits + scale * torch.randn(rows, 3, generator=generator(1))
    return logits[None, None], target


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_nll_is_written_out(kind: type[Likelihood], temperature: float) -> None:
    likelihood = kind()
    _, target = tempered(likelihood, 2.0, rows=50)
    draws = torch.randn(2, 3, 50, 3, generator=generator(5))
    likelihood.set_temperature(1.7)
    found = nll(likelihood, draws, target, temperature)
    assert found == pytest.approx(nll_reference(likelihood, draws, target, temperature), rel=1e-5)
    assert likelihood.temperature == torch.tensor(1.7)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        nll(likelihood, draws, target[:7], temperature)
    assert likelihood.temperature == torch.tensor(1.7)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("scale", [0.6, 2.0])
def test_best_temperature_is_that_of_a_dense_grid(kind: type[Likelihood], scale: float) -> None:
    likelihood = kind()
    draws, target = tempered(likelihood, scale, rows=1000)
    likelihood.set_temperature(5.0)  # where the search does not begin
    found = best_temperature(likelihood, draws, target)
    grid = LOG_GRID[abs(LOG_GRID - math.log(scale)) < 0.3]
    nlls = [nll_reference(likelihood, draws, target, math.exp(log_t)) for log_t in grid]
    best = int(np.argmin(nlls))
    assert math.log(found) == pytest.approx(grid[best], abs=4e-3)  # float32 NLLs are flat to that
    curvature = (nlls[best - 50] - 2 * nlls[best] + nlls[best + 50]) / (50 * (grid[1] - grid[0])) ** 2
    assert abs(math.log(found / scale)) < 4 / math.sqrt(target.numel() * curvature)  # four standard errors
    assert likelihood.temperature == 5.0


def test_best_temperature_of_gaussian_noise_in_closed_form() -> None:
    """A single draw: T = root mean square residual over standard deviation."""
    likelihood = Gaussian(init_std=0.4)
    draws, target = tempered(likelihood, 1.3)
    expected = (target - draws[0, 0]).square().mean().sqrt().item() / 0.4
    assert best_temperature(likelihood, draws, target) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("scale", [0.05, 50.0])
@pytest.mark.parametrize("kind", [Categorical, Bernoulli])
def test_scaled_logits_scale_the_best_temperature(kind: type[Likelihood], scale: float) -> None:
    """The optimum of labels that were drawn from the logits, and of them scaled, far beyond 1/3 and 20."""
    likelihood = kind()
    draws, target = tempered(likelihood, 1.0)
    best = best_temperature(likelihood, draws, target)
    found = [best_temperature(likelihood, scale * draws, target, rough=rough) for rough in (False, True)]
    assert found == pytest.approx([scale * best] * 2, rel=0.02)
    assert confidence(likelihood, scale * draws, target)[0] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_labels_that_are_all_right_ask_for_a_finite_temperature(scale: float) -> None:
    """N labels lose N log(1 + 2 e^(−u)) at u = scale / T; u grows, from 3 · scale on, while e-folds save a nat."""
    draws = scale * nn.functional.one_hot(torch.arange(60) % 3, 3).float()[None, None]
    u = np.linspace(3 * scale, 60 + 3 * scale, 400001)
    expected = scale / u[np.argmin(60 * np.log1p(2 * np.exp(-u)) + np.log(u))]
    assert best_temperature(Categorical(), draws, torch.arange(60) % 3) == pytest.approx(expected, rel=1e-3)
    assert expected == pytest.approx(1 / 3) if scale == 30 else expected < 0.03


def test_labels_that_are_all_wrong_ask_for_a_finite_temperature() -> None:
    draws = 30 * nn.functional.one_hot(torch.arange(60) % 3, 3).float()[None, None]
    found = best_temperature(Categorical(), draws, (torch.arange(60) + 1) % 3)
    log_t = np.linspace(math.log(20), 12, 100001)
    expected = log_t[np.argmin(60 * np.log(2 + np.exp(30 / np.exp(log_t))) + log_t)]
    assert math.log(found) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("right", "wrong"), [(300, 100), (40, 60), (3, 1), (12, 1), (2, 2)])
def test_a_price_in_closed_form(right: int, wrong: int) -> None:
    """At logits (2, 0) and u = 2/T a factor of e in T saves u · (wrong − n·σ(−u)) nats: the price, or less at T = 1."""
    draws, target = (
        torch.tensor([[[[2.0, 0.0]]]]).expand(1, 1, right + wrong, 2),
        torch.tensor([0] * right + [1] * wrong),
    )
    found = best_temperature(Categorical(), draws, target, price=PRICE)
    u = 2 / found
    slope = u * (wrong - (right + wrong) / (1 + math.exp(u)))  # nats that a factor of e in T would save
    if found == 1:
        assert abs(slope) <= PRICE
    elif 1 / 3 < found < 20:
        assert slope == pytest.approx(math.copysign(PRICE, found - 1), abs=0.05)
    assert (found == 1) == (right + wrong < 20)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_supported_temperature_mends_overconfidence(kind: type[Likelihood]) -> None:
    likelihood = kind()
    draws, target = tempered(likelihood, 2.0, rows=400)
    best = best_temperature(likelihood, draws, target)
    assert best > supported_temperature(likelihood, draws, target) > 0.95 * best
    assert likelihood.temperature == 1


def test_a_supported_temperature_leaves_calibrated_networks_mostly_alone() -> None:
    """Of calibrated draws with few labels most keep exactly the present temperature, also one that is not 1."""
    kept = []
    for seed in range(12):
        logits = 2 * torch.randn(60, 3, generator=generator(seed))
        target = torch.multinomial((logits / 1.5).softmax(1), 1, generator=generator(100 + seed))[:, 0]
        likelihood = Categorical()
        likelihood.set_temperature(1.5)
        kept.append(supported_temperature(likelihood, logits[None, None], target) == 1.5)
        assert best_temperature(likelihood, logits[None, None], target) != 1.5
    assert sum(kept) >= 8


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 0.3, 1.4, 19.9, 21.0, 3e4])
def test_the_search_goes_beyond_the_bounds(ratio: float) -> None:
    """A single draw of Gaussian noise: T = root mean square residual over standard deviation; N ± 1 divides beyond."""
    likelihood = Gaussian(init_std=1.0)
    target = ratio * torch.randn(200, 1, generator=generator())
    mean_square = target.square().mean().item()
    beyond = (mean_square > 20**2) - (mean_square < 1 / 3**2)
    expected = math.sqrt(200 * mean_square / (200 + beyond))
    found, precise = (best_temperature(likelihood, torch.zeros(1, 1, 200, 1), target, rough=r) for r in (True, False))
    assert found == pytest.approx(expected, rel=2e-3)
    assert precise == pytest.approx(expected, rel=1e-4)


def test_a_temperature_that_helps_nothing_is_one() -> None:
    draws = 200 * nn.functional.one_hot(torch.arange(60) % 3, 3).float()[None, None]
    assert best_temperature(Categorical(), draws, torch.arange(60) % 3, price=PRICE) == 1.0  # the NLL is 0 at any


def test_confidence_is_relative_to_the_current_temperature() -> None:
    """Draws that are all alike and want T = 2, at a current temperature of 4, want half of it."""
    for kind in LIKELIHOODS:
        likelihood = kind()
        draws, target = tempered(likelihood, 2.0)
        best = best_temperature(likelihood, draws, target)
        likelihood.set_temperature(4.0)
        relative, lowest = confidence(likelihood, draws.expand(3, 2, -1, -1), target)
        assert relative == pytest.approx(best / 4, rel=1e-4)
        assert lowest == pytest.approx(nll(likelihood, draws, target, best), rel=1e-5)


def test_confidence_of_heads_is_that_of_their_mean_answers() -> None:
    """By a dense grid: heads have temperatures of their own, which count once."""
    likelihood = Heads({"a": Categorical(), "b": Bernoulli()})
    draws, relative = torch.randn(2, 3, 400, 4, generator=generator()), torch.tensor([2.0, 0.5])
    noisy = draws[0, 0] + torch.randn(400, 4, generator=generator(1))
    y = {"a": noisy[:, :3].argmax(1), "b": (noisy[:, 3:] > 0).float()}
    likelihood.read({"a": draws[0, 0, :, :3], "b": draws[0, 0, :, 3:]})
    likelihood.set_temperature(1.5, relative)
    probs = (draws[..., :3] / 3.0).double().softmax(-1).mean((0, 1))
    yes = (draws[..., 3] / 0.75).double().sigmoid().mean((0, 1))
    signed = yes.logit() * (2 * y["b"][:, 0] - 1)
    nlls = [
        (F.cross_entropy(probs.log() / t, y["a"]) - F.logsigmoid(signed / t).mean()).item() / 2
        for t in np.exp(LOG_GRID)
    ]
    found, lowest = confidence(likelihood, draws, likelihood.pack(y))
    assert math.log(found) == pytest.approx(LOG_GRID[np.argmin(nlls)], abs=2e-3)
    assert lowest == pytest.approx(min(nlls), rel=1e-5)
    assert likelihood.relative.tolist() == [2.0, 0.5]
