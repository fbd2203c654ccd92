"""The evidence lower bound: its terms, their weights, and numbers that make no sense."""

import math
from typing import Any

import pytest
import torch

from ibnn.likelihood import Terms
from ibnn.objective import check_weights, elbo

WEIGHTS: dict[str, Any] = {"n_data": 10, "data": 4, "samples": 1, "beta": 1.0, "gamma": 0.0}


@pytest.mark.parametrize(("beta", "gamma"), [(1.0, 0.0), (0.5, 0.25), (0.0, 2.0), (0.0, 0.0)])
def test_kl_and_entropy_are_divided_by_the_training_set_and_nll_is_not(beta: float, gamma: float) -> None:
    loss, kl, entropy = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.7, 30.0, 8.0))
    nll, count = torch.tensor(1.2), torch.tensor(4.0)
    terms = elbo(Terms(loss, nll, count, count), kl, entropy, n_data=40, beta=beta, gamma=gamma)
    assert terms.loss.item() == pytest.approx(1.7 + beta * 30 / 40 - gamma * 8 / 40, rel=1e-12)
    assert (terms.nll, terms.kl, terms.entropy) == (nll, kl, entropy)  # as they came, not weighted
    gradients = torch.autograd.grad(terms.loss, [loss, kl, entropy])
    assert [g.item() for g in gradients] == pytest.approx([1.0, beta / 40, -gamma / 40])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 0}, "`samples` to be an integer of at least 1, but got 0"),
        ({"samples": 1.5}, "`samples` to be an integer of at least 1, but got 1.5"),
        ({"n_data": 3}, "`n_data` to be at least the 4 targets of this batch, but got 3"),
        ({"n_data": 0, "data": 0}, "`n_data` to be at least 1, but got 0"),
        ({"n_data": math.nan}, "`n_data` to be at least the 4 targets"),
        ({"beta": -0.1}, "`beta`"),
        ({"beta": math.inf}, "`beta`"),
        ({"gamma": math.nan}, "`gamma`"),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, Any], words: str) -> None:
    check_weights(**WEIGHTS)
    with pytest.raises(ValueError, match=words):
        check_weights(**WEIGHTS | change)


def test_the_smallest_numbers_that_make_sense() -> None:
    check_weights(n_data=4, data=4, samples=1, beta=0.0, gamma=0.0)
    check_weights(n_data=1, data=0, samples=1, beta=0.0, gamma=0.0)  # all targets ignored
