import math

import pytest
import torch
from scipy import stats

from ibnn.normal import address, normals, words

ROWS, NODES = 2000, 1500
GOLDEN_WORD = 973211550
GOLDEN_NORMALS = [-1.170042, 1.52383, -0.637956]


@pytest.fixture(scope="module", params=[0, 1, 2**40 + 5], ids=["seed0", "seed1", "big"])
def sample(request: pytest.FixtureRequest) -> torch.Tensor:
    return normals(address(request.param, torch.arange(ROWS)), NODES).double()


def test_moments_are_those_of_a_standard_normal(sample: torch.Tensor) -> None:
    n = sample.numel()
    # standard errors of the sample moments of N(0, 1): var x = 1, var x² = 2, var x³ = 15, var x⁴ = 96
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(sample.pow(power).mean() - expected) < 4 * math.sqrt(variance / n)


def test_distribution_passes_kolmogorov_smirnov(sample: torch.Tensor) -> None:
    assert stats.kstest(sample.flatten()[::3].numpy(), "norm").pvalue > 1e-4


def test_rows_and_columns_are_uncorrelated(sample: torch.Tensor) -> None:
    # The extreme singular values of a matrix of independent normals lie at √R ± √D; any dependence pushes them out.
    singular = torch.linalg.svdvals(sample)
    assert singular[0] == pytest.approx(math.sqrt(ROWS) + math.sqrt(NODES), rel=0.01)
    assert singular[-1] == pytest.approx(math.sqrt(ROWS) - math.sqrt(NODES), rel=0.05)


def test_neighbouring_addresses_share_nothing() -> None:
    a = normals(address(0, 0, torch.arange(500)), 400)
    for other in (
        address(1, 0, torch.arange(500)),
        address(0, 1, torch.arange(500)),
        address(0, 0, torch.arange(1, 501)),
    ):
        correlation = (a * normals(other, 400)).mean()
        assert abs(correlation) < 4 / math.sqrt(a.numel())


def test_a_row_depends_on_its_own_address_alone() -> None:
    rows = normals(address(3, torch.arange(100)), 7)
    shuffled = torch.randperm(100)
    assert torch.equal(normals(address(3, shuffled), 7), rows[shuffled])


def test_numbers_stay_what_they_are() -> None:
    # Saved models name draws by address, so these values may never change.
    assert words(address(0, 1, 2)).item() == GOLDEN_WORD
    assert normals(address(7, 3), 3).flatten().tolist() == pytest.approx(GOLDEN_NORMALS, rel=1e-5)


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    normals(address(0, torch.arange(5)), 5)
    assert torch.equal(before, torch.get_rng_state())


def test_operators_are_sound() -> None:
    torch.library.opcheck(words, (address(0, torch.arange(3)),))
    torch.library.opcheck(normals, (address(0, torch.arange(3)), 5))
