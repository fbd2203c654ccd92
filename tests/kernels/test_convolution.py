"""Layers that compute their output from x and a z for each row at once, against products that autograd knows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import converted, give
from torch import Tensor, nn

import ibnn
from ibnn import kernels, units
from ibnn.kernels import convolution

B, C = 3, 4
CONVOLUTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1-d": (lambda: nn.Conv1d(C, 5, 3, stride=2, padding=1), (9,)),
    "2-d": (lambda: nn.Conv2d(C, 5, (3, 2), stride=(1, 2), padding=(2, 1)), (7, 6)),
    "3-d": (lambda: nn.Conv3d(C, 5, 2), (3, 4, 5)),
    "groups": (lambda: nn.Conv2d(C, 6, 3, groups=2, padding=1, bias=False), (5, 5)),
    "dilated": (lambda: nn.Conv2d(C, 5, 2, dilation=2), (6, 6)),
    "few places": (lambda: nn.Conv2d(C, 5, 4), (5, 5)),
    "no bias": (lambda: nn.Conv2d(C, 5, 3, bias=False), (9, 9)),
}


def double(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def run_of(layer: Any, units: units.Units | None) -> Callable[..., Tensor]:
    """The layer's output as a function of x, z, weight and bias."""
    how = layer.stride, layer.padding, layer.dilation, False, (0,) * len(layer.stride), layer.groups
    return lambda x, z, w, b=None: convolution._Convolution.apply(x, z, w, b, how, units)


def convolved(layer: Any, x: Tensor, z: Tensor, drawn: units.Units | None = None) -> Tensor:
    return run_of(layer, drawn)(x, z, layer.weight, layer.bias)


@pytest.mark.parametrize("has_units", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**18])  # patches row by row, and all at once
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_values_and_derivatives_of_convolutions(
    name: str, at_once: int, has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(convolution, "_PATCHES", at_once)
    make, places = CONVOLUTIONS[name]
    layer = make().double()
    drawn = units.Units(torch.tensor(0.4, dtype=torch.float64), torch.tensor([5, 77, 123456])) if has_units else None
    run = run_of(layer, drawn)
    own = [p.detach().requires_grad_() for p in layer.parameters()]
    z = double(B, C, *[1] * len(places))
    for grad in (True, False):  # a first layer's input needs none
        x = double(B, C, *places, grad=grad)
        factors = 1 if drawn is None else 1 + 0.4 * drawn.noise(x)
        torch.testing.assert_close(run(x, z, *own), layer(x * z * factors))
        wanted = [t for t in (x, z, *own) if t.requires_grad]
        gradient = torch.randn_like(layer(x))
        expected = torch.autograd.grad(layer_of(layer, x * z * factors, own), wanted, gradient)
        torch.testing.assert_close(torch.autograd.grad(run(x, z, *own), wanted, gradient), expected)
        assert torch.autograd.gradcheck(run, (x, z, *own), fast_mode=True)
        assert torch.autograd.gradgradcheck(run, (x, z, *own), fast_mode=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_many_channels_in_each_memory_format(
    layout: torch.memory_format,
) -> None:
    torch.manual_seed(0)
    wide = 16
    layer = nn.Conv2d(wide, 2, 3, padding=1).double().to(memory_format=layout)
    x, z = double(5, wide, 6, 4, grad=False).contiguous(memory_format=layout), double(5, wide, 1, 1)
    x.requires_grad_()
    drawn = units.Units(torch.tensor(0.4, dtype=torch.float64), torch.tensor([5, 77, 123456, 8, 9]))
    factors = 1 + 0.4 * units.windows(drawn.words, 24 * wide).view(x.shape).double()
    found, expected = convolved(layer, x, z, drawn), layer(x * z * factors)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    wanted, gradient = [x, z, *layer.parameters()], torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted, gradient), torch.autograd.grad(expected, wanted, gradient)
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("draws", ["channel", "both"])
def test_what_follows_may_change_the_output_in_place(draws: Any, layout: torch.memory_format) -> None:
    """Autograd refuses that for a view that an operation of ours returns."""
    x, y = torch.randn(6, 8, 5, 5).contiguous(memory_format=layout), torch.randint(2, (6,))
    losses = []
    for inplace in (True, False):
        torch.manual_seed(0)
        layers = [nn.Conv2d(8, 8, 3), nn.ReLU(inplace), nn.Conv2d(8, 8, 3), nn.ReLU(inplace), nn.Flatten()]
        net = nn.Sequential(*layers, nn.Linear(8, 8), nn.ReLU(inplace), nn.Linear(8, 2)).to(memory_format=layout)
        model = ibnn.convert(net, components=2, draws=draws, seed=0).train()
        loss = model.elbo(x, y, n_data=6).loss
        loss.backward()
        losses.append([loss.detach(), *(p.grad for p in model.net.parameters())])
    torch.testing.assert_close(*losses)


def layer_of(layer: Any, x: Tensor, own: list[Tensor]) -> Tensor:
    found: Tensor = torch.func.functional_call(layer, dict(zip(("weight", "bias"), own, strict=False)), (x,))
    return found


class Several(nn.Module):
    """Convolutions and linear layers on inputs of two, three and four axes; the batch is first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.everywhere, self.tokens, self.head = nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 2, H, W) to scores (B, 3)."""
        x = self.second(self.first(x).relu()).relu().permute(0, 2, 3, 1).contiguous()
        return self.head(self.tokens(self.everywhere(x).flatten(1, 2)).tanh().mean(1))


def outcome(model: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    model.reseed(3)
    model.zero_grad()
    loss = model.elbo(x, y, n_data=15, samples=2).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("frozen", [False, True])
def test_networks_train_as_by_products(
    layout: torch.memory_format, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = converted(Several().double()).to(memory_format=layout).train()
    x, y = torch.randn(5, 2, 8, 8, dtype=torch.float64).contiguous(memory_format=layout), torch.randn(5, 3).double()
    if frozen:
        for name, p in model.net.named_parameters():
            p.requires_grad_("latent" in name)
    calls: list[str] = []
    for kind, run in list(kernels.KERNELS.items()):

        def counted(layer: Any, *args: Any, run: kernels.Kernel = run) -> Tensor | None:
            made = run(layer, *args)
            calls.extend([] if made is None else [type(layer).__name__])
            return made

        monkeypatch.setitem(kernels.KERNELS, kind, counted)
    found = outcome(model, x, y)
    assert calls == ["Conv2d", "Conv2d", "Linear", "Linear", "Linear"]
    with torch.no_grad():
        without_graph = model.elbo(x, y, n_data=15, samples=2).loss
    monkeypatch.setattr(kernels, "run", lambda *_: None)
    torch.testing.assert_close(found, outcome(model, x, y))
    assert len(calls) == 10
    model.examples.zero_().add_(5)
    torch.testing.assert_close(without_graph, model.elbo(x, y, n_data=15, samples=2).loss.detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.second, "padding_mode", "circular"),
        lambda net: net.double(),  # the input stays float32
    ],
    ids=["padding", "dtype"],
)
def test_what_does_not_suit_is_multiplied_first(
    change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(Several()).train()
    change(model.net)
    monkeypatch.setattr(convolution._Convolution, "forward", lambda *_: pytest.fail("kernel"))
    x = model.net.first(torch.randn(4, 2, 8, 8).to(model.net.first.weight)).detach().float()
    latent = model.latents["second"]
    give(latent, torch.randn(4, 4).to(latent.mean))
    found = model.net.second(x)
    z = latent.current()[0]
    give(latent, None)
    torch.testing.assert_close(found, model.net.second(x.to(z) * z[:, :, None, None]))
