import math

import pytest
import torch
from torch import Tensor

from ibnn.sampling import effective_size, split_rhat
from ibnn.sampling.chains import disagreement


def autoregressive(phi: float, chains: int, length: int, nodes: int, seed: int = 0) -> Tensor:
    """x_t = φ x_{t−1} + √(1 − φ²) ε, stationary, variance 1."""
    noise = torch.randn(chains, length, nodes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = noise.clone()
    for t in range(1, length):
        x[:, t] = phi * x[:, t - 1] + math.sqrt(1 - phi**2) * noise[:, t]
    return x


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9, -0.5])
def test_effective_size_of_an_autoregression(phi: float) -> None:
    x = autoregressive(phi, 4, 2000, 40)
    expected = 8000 * (1 - phi) / (1 + phi)
    found = effective_size(x)
    spread = found.std() / math.sqrt(40)
    assert abs(found.mean() / expected - 1) < 4 * spread / expected + 0.03  # the estimator itself is biased by O(1/S)


def test_effective_size_foretells_the_error_of_the_mean() -> None:
    x = autoregressive(0.8, 4, 1000, 400)
    errors = x.mean((0, 1)).square().mean()  # over 400 independent nodes; the variance is 1
    assert abs(errors * effective_size(x).mean() - 1) < 4 * math.sqrt(2 / 400) + 0.03


def test_rhat_is_the_formula() -> None:
    x = torch.randn(3, 10, 5, dtype=torch.float64)
    halves = [x[k, part] for k in range(3) for part in (slice(0, 5), slice(5, 10))]
    for node in range(5):
        columns = [half[:, node].tolist() for half in halves]
        means = [sum(c) / 5 for c in columns]
        within = sum(sum((v - m) ** 2 for v in c) / 4 for c, m in zip(columns, means, strict=True)) / 6
        between = 5 * sum((m - sum(means) / 6) ** 2 for m in means) / 5
        expected = math.sqrt((4 / 5 * within + between / 5) / within)
        assert split_rhat(x)[node].item() == pytest.approx(expected, rel=1e-12)


def test_rhat_sees_chains_apart_and_drift() -> None:
    x = torch.randn(4, 500, dtype=torch.float64)
    assert split_rhat(x) < 1.01
    apart = x + torch.tensor([[0.0], [0.0], [0.0], [2.0]])
    assert split_rhat(apart) > 1.2
    assert effective_size(apart) < 20
    drift = x + torch.linspace(-2, 2, 500)  # all chains alike, but their halves are not
    assert split_rhat(drift) > 1.2


def test_modes_and_short_chains_are_told_apart() -> None:
    x = autoregressive(0.3, 4, 200, 40)
    assert disagreement(x) is None
    apart = disagreement(x + torch.tensor([0.0, 0.0, 0.0, 4.0])[:, None, None])
    assert apart is not None
    assert "100% of the nodes" in apart[0]
    assert "mode of its own" in apart[1]
    short = disagreement(autoregressive(0.99, 4, 100, 40))
    assert short is not None
    assert "too short" in short[1]
    slightly = disagreement(x + torch.tensor([0.0, 0.0, 0.0, 1.5])[:, None, None])  # no reason to speak of modes
    assert slightly is not None
    assert "too short" in slightly[1]
    few = x.clone()
    few[0, :, :2] += 4  # one node in twenty may be off by chance
    assert disagreement(few) is None


def test_any_shape_and_an_odd_length() -> None:
    x = autoregressive(0.3, 2, 101, 6)
    whole = effective_size(x.view(2, 101, 2, 3))
    assert whole.shape == (2, 3)
    assert torch.allclose(whole.flatten(), effective_size(x))
    assert torch.equal(split_rhat(x)[2], split_rhat(x[:, :, 2]))
