"""Redundancy: moments by hand, and weights that make up for what others tell."""

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn.pruning.channels import find_channels
from ibnn.pruning.cutting import without
from ibnn.pruning.redundancy import compensate, second_moments, unexplained


def test_second_moments_are_those_of_many_draws() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(5, 6, 1), nn.Conv2d(6, 2, 1, bias=False)).double()
    model = ibnn.convert(net, components=2, seed=0, draws="both").eval()
    model.set_posterior(mean=1 + 0.3 * torch.randn(2, 11), std=0.4, unit_std=0.5)
    x = torch.randn(7, 5, 3, 3).double()
    found = second_moments(model, find_channels(net, x), [x[:4], x[4:]])
    flat = x.movedim(1, -1).reshape(-1, 5)  # rows and places
    assert found["0"].shape == (6, 6)  # with the constant
    assert found["1"].shape == (6, 6)  # which has no bias
    z = model.draw_latents(40_000, seed=1).z[:, :5].double()
    z = z * (1 + 0.5 * torch.randn(len(z), 5).double())
    drawn = flat[torch.arange(len(z)) % len(flat)] * z
    each = torch.cat([drawn, torch.ones(len(z), 1)], 1)
    products = each[:, :, None] * each[:, None]
    error = products.std(0) / len(z) ** 0.5
    assert bool(((products.mean(0) - found["0"]).abs() <= 4.5 * error + 1e-3).all())


def test_what_others_tell_is_that_of_least_squares() -> None:
    a = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).double() @ torch.rand(4, 4).double()
    for node in range(4):
        others = a[:, [n for n in range(4) if n != node]]
        left = a[:, node] - others @ torch.linalg.lstsq(others, a[:, node]).solution
        expected = left.square().sum() / a[:, node].square().sum()
        assert float(unexplained(a.T @ a, 4)[node]) == pytest.approx(float(expected))


def _cut(net: nn.Module, x: Tensor, gone: slice, std: float = 0.0) -> tuple[ibnn.IBNN, ibnn.IBNN]:
    """Returns a model without some channels of its first layer, as it is and made up for."""
    model = ibnn.convert(net, components=1, init_std=0.0, seed=0).eval()
    model.set_posterior(mean=1.0, std=std)
    channels = find_channels(net, x)
    lost = set(channels.layers["0"].outs[gone].tolist())
    bare, whole = without(model, channels, lost), without(model, channels, lost)
    compensate(whole, model, channels, lost, second_moments(model, channels, [x]))
    return bare, whole


def test_weights_and_bias_are_those_of_least_squares() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double(), torch.randn(300, 6).double()
    _, thin = _cut(net, x, slice(5, 8))
    hidden = torch.cat([net[:2](x)[:, :5], torch.ones(300, 1)], 1).detach()
    expected = torch.linalg.lstsq(hidden, net(x).detach()).solution.T
    found: nn.Linear = thin.net[2]
    torch.testing.assert_close(torch.cat([found.weight, found.bias[:, None]], 1), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("last", [nn.Conv2d(8, 3, 3), nn.Conv2d(8, 3, 1, bias=False)])
def test_a_copy_is_made_up_for(last: nn.Module) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), last), torch.randn(20, 2, 8, 8)
    with torch.no_grad():
        net[0].weight[6:], net[0].bias[6:] = 2 * net[0].weight[:2], 2 * net[0].bias[:2]
        expected = net(x)
        bare, thin = (each.net(x) for each in _cut(net, x, slice(6, 8)))
    scale = float(expected.std())
    assert float((thin - expected).abs().max()) < 0.01 * scale
    assert float((bare - expected).abs().max()) > 0.5 * scale


def test_noise_tells_less() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(300, 6)
    changes = [
        float((thin.net[2].weight - bare.net[2].weight).detach().norm())
        for bare, thin in (_cut(net, x, slice(5, 8), std) for std in (0.0, 0.5, 2.0))
    ]
    assert changes[0] > changes[1] > changes[2] > 0
