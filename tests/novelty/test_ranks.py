"""Conformal p-values: closed forms, and how often they are small."""

import math

import pytest
import torch

from ibnn.novelty.reference import log_tail, p_values


def counted(known, new):
    """p-values by counting in a loop."""
    return [(1 + sum(k >= n for k in known)) / (len(known) + 1) for n in new]


@pytest.mark.parametrize("size", [1, 2, 19, 100])
def test_p_values_count(size):
    generator = torch.Generator().manual_seed(size)
    known = torch.randint(0, 10, (size,), generator=generator).double()  # with ties
    new = torch.randint(-1, 12, (50,), generator=generator).double()
    expected = torch.tensor(counted(known.tolist(), new.tolist()), dtype=torch.float64)
    torch.testing.assert_close(p_values(known.sort().values, new).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 5, 19, 99, 100])
@pytest.mark.parametrize("level", [0.01, 0.05, 0.1, 0.5])
def test_small_p_values_are_as_frequent_as_promised(size, level):
    """Exactly floor(α (n + 1)) / (n + 1) without ties, within four standard errors over 20,000 splits."""
    splits = 20_000
    scores = torch.rand(splits, size + 1, generator=torch.Generator().manual_seed(7)).double()
    p = p_values(scores[:, 1:].sort(1).values, scores[:, :1])[:, 0]
    expected = math.floor(level * (size + 1) + 1e-9) / (size + 1)
    error = math.sqrt(max(expected * (1 - expected), 1e-12) / splits)
    assert abs((p <= level).double().mean() - expected) <= 4 * error + 1e-9
    assert expected <= level


@pytest.mark.parametrize("size", [5, 19, 100])
def test_ties_never_make_small_p_values_more_frequent(size):
    splits, generator = 20_000, torch.Generator().manual_seed(3)
    scores = torch.randint(0, 4, (splits, size + 1), generator=generator).double()
    p = p_values(scores[:, 1:].sort(1).values, scores[:, :1])[:, 0]
    for level in (0.05, 0.2, 0.3, 0.5):
        assert (p <= level).double().mean() <= level + 4 * math.sqrt(level * (1 - level) / splits)


def test_the_tail_agrees_with_the_ranks_and_falls_beyond_them():
    known = torch.arange(100.0)
    inside, outside = torch.tensor([-1.0, 40.0, 98.5, 99.0]), torch.tensor([99.0, 104.0, 1e4, math.inf])
    torch.testing.assert_close(log_tail(known, inside).exp(), p_values(known, inside))
    falling = log_tail(known, outside)
    # the highest tenth is 90 … 99: a mean excess of 5
    torch.testing.assert_close(falling[1], torch.tensor(math.log(1 / 101) - 1.0), rtol=1e-6, atol=0)
    assert (falling.diff() < 0).all()
    assert falling[-1] == -math.inf


def test_the_tail_of_equal_scores_is_finite_at_them_and_far_beyond_is_nothing():
    known = torch.ones(50)
    at, beyond = log_tail(known, torch.tensor([1.0, 2.0]))
    assert at == 0
    assert beyond < -1e3


def test_rounding_does_not_make_a_score_novel():
    """The same input has another rounding in another batch."""
    known = torch.full((50,), -0.1321767)
    rounded = known[:1] + 2e-8
    assert rounded > known[0]
    assert log_tail(known, rounded) == 0
