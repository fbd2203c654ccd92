"""Trajectories keep volume, and proposals are accepted so that the distribution stays as it is."""

import pytest
import torch
from torch import Tensor

from ibnn.sampling import hmc as kernels


def test_leapfrog_goes_back_and_keeps_volume() -> None:
    def energy(z: Tensor, each: bool = True) -> tuple[Tensor, Tensor]:
        return 0.25 * z.pow(4).sum(1), z.pow(3)

    z, v = torch.randn(50, 2, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    end, v_end, _, gradient = kernels.leapfrog(z, v, energy(z)[1], energy, scale, 0.1, 7)
    back, v_back, *_ = kernels.leapfrog(end, -v_end, gradient, energy, scale, 0.1, 7)
    assert torch.allclose(back, z, atol=1e-12)
    assert torch.allclose(v_back, -v, atol=1e-12)

    def flat(both: Tensor) -> Tensor:
        at = both.view(1, 4)
        moved = kernels.leapfrog(at[:, :2], at[:, 2:], at[:, :2].pow(3), energy, scale, 0.1, 7)
        return torch.cat([moved[0], moved[1]], 1)[0]

    jacobian = torch.autograd.functional.jacobian(flat, torch.cat([z[0], v[0]]))
    assert torch.linalg.det(jacobian).item() == pytest.approx(1, abs=1e-10)


def test_metropolis_balances_every_pair_of_cells() -> None:
    """Detailed balance of HMC on a double well: as many moves from a cell to another as back."""
    generator = torch.Generator().manual_seed(0)

    def energy(z: Tensor, each: bool = True) -> tuple[Tensor, Tensor]:
        return 2 * (z[:, 0] ** 2 - 1) ** 2, 8 * z * (z**2 - 1)

    grid = torch.linspace(-4, 4, 8001, dtype=torch.float64)
    density = (-energy(grid[:, None])[0]).exp()
    cells = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    expected = (
        torch.zeros(4, dtype=torch.float64).scatter_add_(0, torch.bucketize(grid, cells), density) / density.sum()
    )
    one = torch.ones(1, dtype=torch.float64)
    place = torch.multinomial(density, 200_000, replacement=True, generator=generator)
    z = grid[place][:, None]
    v = torch.randn(z.shape, generator=generator, dtype=torch.float64)
    potential, gradient = energy(z)
    end, v_end, after, _ = kernels.leapfrog(z, v, gradient, energy, one, 0.4, 4)
    gained = after + kernels.kinetic(v_end, one) - potential - kernels.kinetic(v, one)
    taken = torch.rand(len(z), generator=generator, dtype=torch.float64) < (-gained).exp()
    assert 0.3 < taken.double().mean() < 0.9  # so that the test means something
    moved = torch.where(taken[:, None], end, z)
    flow = torch.zeros(16).index_add_(
        0, torch.bucketize(z[:, 0], cells) * 4 + torch.bucketize(moved[:, 0], cells), torch.ones(len(z))
    )
    flow = flow.view(4, 4)
    assert ((flow - flow.T).abs() <= 4 * (flow + flow.T).sqrt()).all()
    found = flow.sum(0) / len(z)
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / len(z)).sqrt()).all()
