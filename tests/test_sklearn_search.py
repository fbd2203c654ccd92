"""The search for the noise of estimators: panels of networks side by side, lines, and what is decided by them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ibnn
from ibnn.likelihood import Categorical, Gaussian
from ibnn.sklearn import IBNNRegressor
from ibnn.sklearn.line import Fitted, Line, OnLine, fit_line
from ibnn.sklearn.panel import Copies, Jury, Member, Panel, StackedLinear, panel_model
from ibnn.sklearn.search import KEPT, Candidate, Choice, Rows, decide, folds

LITTLE, MUCH = Member(0.2, 0), Member(0.5, 1)
FITTED = Fitted(torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([3.0]), torch.tensor([0.4]))


def body(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, outputs))


def members_outputs(net: nn.Sequential, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """The network with each layer's input multiplied by its part of z: the slow way."""
    first, activation, last = net
    return last(activation(first(x * parts[0])) * parts[1])


@pytest.mark.parametrize("each_row", [False, True])
def test_members_scale_the_common_noise_to_their_own(each_row: bool) -> None:
    net, x = body(), torch.randn(5, 3)
    model = panel_model(Panel(net, [LITTLE, MUCH], [], 0.5), [LITTLE, MUCH], Jury(Categorical(), [LITTLE, MUCH]), "", 0)
    z = 1 + 0.5 * torch.randn(2, 5, 11) if each_row else 1 + 0.5 * torch.randn(2, 11)
    with torch.set_grad_enabled(each_row):  # without gradients one z for all rows goes into the weights
        for draw, found in zip(z, model.outputs(x, z), strict=True):  # (J, B, M, outputs)
            for number, ratio in enumerate((0.4, 1.0)):
                expected = members_outputs(net, x, list((1 + ratio * (draw - 1)).split([3, 8], -1)))
                torch.testing.assert_close(found[:, number], expected)


def test_weights_of_a_stacked_layer_fold() -> None:
    layer = StackedLinear(nn.Linear(3, 4), torch.tensor([0.4, 1.0]))
    x, z = torch.randn(6, 2, 3), torch.rand(3)
    expected = layer(x * z, x)
    layer.weight.data = layer.folded(z).detach()
    torch.testing.assert_close(layer(x, x), expected)


def test_a_jury_adds_the_members_weighted_means_over_rows_of_other_folds() -> None:
    output, labels = torch.randn(6, 2, 3, requires_grad=True), torch.tensor([0, 1, 2, 0, 1, 2])
    fold, weight = torch.tensor([0.0, 0, 0, 1, 1, 1]), torch.tensor([1.0, 2, 1, 1, 3, 1])
    loss = Jury(Categorical(), [LITTLE, MUCH]).terms(output, Jury.join(fold, weight, labels)).loss
    each = -output.log_softmax(-1)[torch.arange(6), :, labels]  # (B, M)
    expected = (weight * each[:, 0])[3:].sum() / 5 + (weight * each[:, 1])[:3].sum() / 4
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, output)
    assert not gradient[:3, 0].any()
    assert not gradient[3:, 1].any()


def test_noise_is_learnt_where_it_is_not_predicted() -> None:
    panel = [Member(0.2, 0, predicted=False), Member(0.2, 0, predicted=True)]
    jury = Jury(Gaussian(noise="predicted"), panel, torch.tensor([0.3]).log())
    output, target = torch.randn(4, 2, 2), torch.randn(4, 1)
    rows = Jury.join(torch.ones(4), torch.ones(4), target)
    learnt = Gaussian(init_std=0.3).terms(output[:, 0, :1], target).loss
    predicted = Gaussian(noise="predicted").terms(output[:, 1], target).loss
    constant = 2 * 0.5 * np.log(2 * np.pi)  # a panel leaves it out
    torch.testing.assert_close(
        jury.terms(output, rows).loss, learnt + predicted - constant, rtol=1e-4, atol=0
    )  # σ² has a floor of 1e-6


def trained(panel: list[Member]) -> dict[str, torch.Tensor]:
    model = panel_model(Panel(body(), panel, [], 0.5), panel, Jury(Categorical(), panel), "", 0)
    torch.manual_seed(1)
    rows = Rows(torch.randn(40, 3), torch.arange(40) % 2, torch.ones(40), torch.arange(40) % 2)
    rows.train(model, ibnn.Recipe(epochs=5, batch_size=20, lr=0.01, beta=0.0, clip=0.0, latent_lr=0.0))
    return {name: p for name, p in model.net.named_parameters() if "latent" not in name}


def test_members_do_not_affect_each_other() -> None:
    together, alone = trained([LITTLE, MUCH]), trained([MUCH])
    for name, parameter in alone.items():
        torch.testing.assert_close(together[name][1:], parameter, rtol=1e-4, atol=1e-5)


def test_networks_that_cannot_be_stacked_have_their_own_noise() -> None:
    panel = [LITTLE, MUCH._replace(fold=0)]
    model = panel_model(Copies([body(), body()]), panel, Jury(Categorical(), panel), "0", 0)
    assert list(model.latents) == ["nets.0.2", "nets.1.2"]
    torch.testing.assert_close(model.posterior().std, torch.tensor([[0.2] * 8 + [0.5] * 8]))
    assert model(torch.randn(5, 3)).shape == (5, 2, 2)


def test_a_network_on_a_line_learns_what_the_line_leaves() -> None:
    net, x = body(1), torch.randn(5, 3)
    expected = x @ FITTED.weight.T + 3.0 + 0.4 * net(x)
    torch.testing.assert_close(OnLine(Line(FITTED, predicted=False), net)(x), expected)
    both = OnLine(Line(FITTED, predicted=True), nn.Sequential(nn.Linear(3, 2)))
    with torch.no_grad():
        both.body[0].weight.zero_()
        both.body[0].bias.zero_()
    mean, std = Gaussian(noise="predicted").split(both(x))
    torch.testing.assert_close(mean, x @ FITTED.weight.T + 3.0)
    torch.testing.assert_close(std, torch.full_like(std, 0.4), rtol=1e-4, atol=0)


def test_a_line_is_the_weighted_ridge_line() -> None:
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(400, 2)), random.integers(1, 4, 400).astype(float)
    y = x @ [[1.0, 0.0], [0.0, -2.0]] + 0.5 * random.normal(size=(400, 2))
    found, repeated = fit_line(x, y, weight), np.repeat(np.arange(400), weight.astype(int))
    design = np.c_[x, np.ones(400)][repeated]
    expected = np.linalg.lstsq(design, y[repeated], rcond=None)[0]
    np.testing.assert_allclose(found.weight.T, expected[:2], atol=0.02)  # a small penalty
    np.testing.assert_allclose(found.rest, 0.5, rtol=0.1)
    assert fit_line(x, x[:, :1], weight).rest == pytest.approx(0.01)  # nothing is left


def test_a_straight_line_is_exact_without_training() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3))
    y = x @ [3.0, -1.0, 0.5] + 7
    model = IBNNRegressor((8,), prior_std=0.3, epochs=1, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.999


def test_folds_cover_all_rows_and_every_class() -> None:
    labels = np.repeat([0, 1], [60, 20])
    found = folds(80, labels, 0, one=False)
    assert [np.bincount(labels[found == fold]).tolist() for fold in range(4)] == [[15, 5]] * 4
    assert np.bincount(folds(80, None, 0, one=False)).tolist() == [20] * 4
    one = folds(80, labels, 0, one=True)
    assert np.bincount(labels[one == 0]).tolist() == [15, 5]
    assert set(one.tolist()) == {-1, 0}


def test_the_likelier_kind_of_noise_is_taken_and_strengths_are_averaged() -> None:
    candidates = [Candidate(std, kind) for kind in (False, True) for std in (0.2, 0.5)]
    gap = np.log(3) / 50  # with 50 data three times as likely
    choice = decide(candidates, [1.0, 1.0 + gap, 2.0, 2.0], [1.5, 1.5, 9.0, 9.0], 50)
    assert choice == Choice(pytest.approx(0.2**0.75 * 0.5**0.25), False, pytest.approx(1.5**KEPT))
    assert decide(candidates, [2.0, 2.0, 1.0, 3.0], [9.0, 9.0, 1.2, 9.0], 50) == Choice(
        pytest.approx(0.2), True, pytest.approx(1.2**KEPT)
    )


def sine(rows: int, growing: bool) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.uniform(-3, 3, (rows, 1))
    std = 0.05 + 0.15 * (x[:, 0] + 3) if growing else 0.5
    return x, np.sin(x[:, 0]) + std * random.normal(size=rows)


@pytest.mark.parametrize("growing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_held_out_rows_tell_whether_noise_depends_on_the_input(growing: bool) -> None:
    model = IBNNRegressor((16, 16), components=2, epochs=40, random_state=0).fit(*sine(300, growing))
    assert model.model_.likelihood.options["noise"] == ("predicted" if growing else "learnt")
    _, (left, right) = model.predict([[-2.5], [2.5]], return_std=True)
    assert (right > 2 * left) if growing else right == pytest.approx(left, rel=0.3)
    assert right == pytest.approx(0.05 + 0.15 * 5.5 if growing else 0.5, rel=0.4)
