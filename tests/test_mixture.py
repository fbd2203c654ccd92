import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from ibnn import mixture
from ibnn.mixture import Mixture


def random_mixture(components: int, nodes: int, seed: int, spread: float = 0.5) -> Mixture:
    generator = torch.Generator().manual_seed(seed)
    mean = 1 + spread * torch.randn(components, nodes, generator=generator, dtype=torch.float64)
    std = 0.1 + 0.5 * torch.rand(components, nodes, generator=generator, dtype=torch.float64)
    return Mixture(mean, std)


def montecarlo(q: Mixture, prior_std: float, draws: int) -> tuple[float, float]:
    """Independent slow reference: estimate of KL(q ‖ p) and its standard error, in numpy/scipy."""
    rng = np.random.default_rng(0)
    mean, std = q.mean.numpy(), q.std.numpy()
    k = rng.integers(len(mean), size=draws)
    z = mean[k] + std[k] * rng.standard_normal((draws, mean.shape[1]))
    joint = stats.norm.logpdf(z[:, None], mean, std).sum(-1)
    log_q = np.logaddexp.reduce(joint, axis=1) - np.log(len(mean))
    values = log_q - stats.norm.logpdf(z, 1, prior_std).sum(-1)
    return values.mean(), values.std() / math.sqrt(draws)


def kl_normal(m: float, v: float, s: float) -> float:
    return 0.5 * (v / s**2 + (m - 1) ** 2 / s**2 - 1 - math.log(v / s**2))


@pytest.mark.parametrize("nodes", [1, 3])
def test_one_component_all_kinds_are_the_gaussian_kl(nodes: int) -> None:
    q = random_mixture(1, nodes, seed=3)
    expected = sum(kl_normal(m, s**2, 0.3) for m, s in zip(q.mean[0].tolist(), q.std[0].tolist(), strict=True))
    for kl in mixture.CLOSED_FORMS.values():
        assert kl(q, 0.3).item() == pytest.approx(expected, rel=1e-12)
    noise = torch.randn(200_000, nodes, dtype=torch.float64)
    values = torch.stack([mixture.kl_montecarlo(q, 0.3, part) for part in noise.split(2_000)])
    assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))


def test_mean_is_the_paper_s_formula() -> None:
    q = random_mixture(4, 5, seed=1)
    mean, variance = q.mean.mean(0), q.std.square().sum(0) / 16
    expected = sum(kl_normal(m, v, 0.7) for m, v in zip(mean.tolist(), variance.tolist(), strict=True))
    assert mixture.kl_mean(q, 0.7).item() == pytest.approx(expected, rel=1e-12)


def test_components_is_the_mean_of_the_components_kls() -> None:
    q = random_mixture(4, 5, seed=1)
    expected = np.mean(
        [
            sum(kl_normal(m, s**2, 0.7) for m, s in zip(*row, strict=True))
            for row in zip(q.mean.tolist(), q.std.tolist(), strict=True)
        ]
    )
    assert mixture.kl_components(q, 0.7).item() == pytest.approx(expected, rel=1e-12)


def pairwise_reference(q: Mixture, prior_std: float) -> float:
    """Cross-entropies and the entropy bound, one pair and one node at a time."""
    mean, std = q.mean.tolist(), q.std.tolist()
    components, nodes = len(mean), len(mean[0])
    cross = entropy = 0.0
    for i in range(components):
        for d in range(nodes):
            m, v = mean[i][d], std[i][d] ** 2
            cross += (0.5 * math.log(2 * math.pi * prior_std**2) + (v + (m - 1) ** 2) / (2 * prior_std**2)) / components
            entropy += 0.5 * math.log(2 * math.pi * math.e * v) / components
        affinity = 0.0
        for j in range(components):
            distance = 0.0
            for d in range(nodes):
                vi, vj = std[i][d] ** 2, std[j][d] ** 2
                distance += 0.25 * (mean[i][d] - mean[j][d]) ** 2 / (vi + vj)
                distance += 0.5 * math.log((vi + vj) / (2 * math.sqrt(vi * vj)))
            affinity += math.exp(-distance) / components
        entropy -= math.log(affinity) / components
    return cross - entropy


def test_pairwise_and_entropy_bound_match_a_loop_over_pairs() -> None:
    q = random_mixture(5, 3, seed=2)
    assert mixture.kl_pairwise(q, 0.4).item() == pytest.approx(pairwise_reference(q, 0.4), rel=1e-10)
    single_cross = q.std.square() + (q.mean - 1).square()
    cross = (0.5 * math.log(2 * math.pi * 0.16) + single_cross / (2 * 0.16)).sum(-1).mean()
    assert (cross - mixture.entropy_bound(q)).item() == pytest.approx(mixture.kl_pairwise(q, 0.4).item(), rel=1e-10)


def test_montecarlo_and_bounds_against_numerical_integration() -> None:
    q = random_mixture(3, 1, seed=5, spread=1.0)

    def density(z: float) -> float:
        return float(np.mean(stats.norm.pdf(z, q.mean.numpy().ravel(), q.std.numpy().ravel())))

    def integrand(z: float) -> float:
        return density(z) * (math.log(density(z)) - stats.norm.logpdf(z, 1, 0.5))

    exact = integrate.quad(integrand, -6, 8, limit=400, points=q.mean.numpy().ravel())[0]
    values = torch.stack([mixture.kl_montecarlo(q, 0.5, torch.randn(300, 1, dtype=torch.float64)) for _ in range(1000)])
    assert abs(values.mean() - exact) < 4 * values.std() / math.sqrt(len(values))
    assert exact <= mixture.kl_pairwise(q, 0.5) <= mixture.kl_components(q, 0.5)
    entropy = integrate.quad(
        lambda z: -density(z) * math.log(density(z)), -6, 8, limit=400, points=q.mean.numpy().ravel()
    )[0]
    assert mixture.entropy_bound(q) <= entropy


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [0.05, 0.5, 2.0])
def test_order_of_the_kls_on_random_mixtures(seed: int, spread: float) -> None:
    q = random_mixture(4, 3, seed, spread)
    estimate, error = montecarlo(q, 0.5, draws=20_000)
    pairwise, components = mixture.kl_pairwise(q, 0.5), mixture.kl_components(q, 0.5)
    assert estimate - 4 * error <= pairwise <= components + 1e-12


def test_equal_components_are_one_component() -> None:
    one = random_mixture(1, 6, seed=7)
    many = Mixture(one.mean.repeat(5, 1), one.std.repeat(5, 1))
    for kind in ("components", "pairwise"):
        kl = mixture.CLOSED_FORMS[kind]
        assert kl(many, 0.3).item() == pytest.approx(kl(one, 0.3).item(), rel=1e-12)
    assert mixture.entropy_bound(many).item() == pytest.approx(mixture.entropy_bound(one).item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["mean", "components", "pairwise"])
def test_permuting_components_changes_nothing(kind: str) -> None:
    q = random_mixture(6, 4, seed=8)
    order = torch.randperm(6)
    kl = mixture.CLOSED_FORMS[kind]
    assert kl(q, 0.3).item() == pytest.approx(kl(Mixture(q.mean[order], q.std[order]), 0.3).item(), rel=1e-12)


def test_log_prob_is_joint_over_nodes() -> None:
    q = random_mixture(3, 2, seed=9)
    z = torch.randn(4, 2, dtype=torch.float64)
    expected = [
        math.log(
            np.mean(
                [
                    math.prod(stats.norm.pdf(row.numpy(), m.numpy(), s.numpy()))
                    for m, s in zip(q.mean, q.std, strict=True)
                ]
            )
        )
        for row in z
    ]
    assert q.log_prob(z).tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["mean", "components", "pairwise"])
def test_gradients(kind: str) -> None:
    q = random_mixture(3, 2, seed=4)

    def kl(mean: Tensor, std: Tensor) -> Tensor:
        return mixture.CLOSED_FORMS[kind](Mixture(mean, std), 0.3)

    assert torch.autograd.gradcheck(kl, (q.mean.requires_grad_(), q.std.requires_grad_()))
