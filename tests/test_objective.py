"""The evidence lower bound: its terms, their weights, and numbers that make no sense."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import ibnn
from ibnn.mixture import entropy_bound
from ibnn.objective import check_weights

WEIGHTS: dict[str, Any] = {"n_data": 10, "data": 4, "samples": 1, "beta": 1.0, "gamma": 0.0}


@pytest.mark.parametrize(("beta", "gamma"), [(1.0, 0.0), (0.5, 0.25), (0.0, 2.0), (0.0, 0.0)])
def test_kl_and_entropy_are_divided_by_the_training_set_and_nll_is_not(beta: float, gamma: float) -> None:
    model = ibnn.convert(nn.Linear(3, 2).double(), components=2, seed=0)
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    found, kl = model.elbo(x, y, n_data=40, beta=beta, gamma=gamma), model.kl()
    entropy = entropy_bound(model.posterior()) if gamma else torch.zeros_like(kl)
    assert (found.kl.item(), found.entropy.item()) == (kl.item(), entropy.item())  # not weighted
    assert found.loss.item() == pytest.approx((found.nll + (beta * kl - gamma * entropy) / 40).item(), rel=1e-12)
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(found.loss, parameters, retain_graph=True)
    expected = torch.autograd.grad(found.nll + (beta * found.kl - gamma * found.entropy) / 40, parameters)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(gradient, expected, strict=True))


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
