"""Planned costs against what the converted networks are measured to cost."""

from collections.abc import Callable

import pytest
import torch
from networks import Encoder
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ibnn
from ibnn.budget import saved_bytes
from ibnn.nets import VGG16, LeNet, WideResNet, mlp

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LeNet": (LeNet, (1, 28, 28)),
    "VGG16-small": (VGG16, (3, 32, 32)),
    "small VGG": (lambda: VGG16(width=0.125), (3, 32, 32)),
    "WideResNet-16-4": (lambda: WideResNet(depth=16, width=4), (3, 32, 32)),
    "mlp": (lambda: mlp(20, 10, hidden=64), (20,)),
    "Transformer": (Encoder, (12, 256)),
}


SLOW = {"VGG16-small"}  # as the small one, 64 times the weights


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_costs_are_as_measured(name: str) -> None:
    make, shape = CASES[name]
    net, rows, components = make(), 8, 3
    x, y = torch.randn(rows, *shape), torch.randint(10, (rows,))
    state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in net.buffers()]
    found = ibnn.cost(net, x, components=components, samples=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(buffers, net.buffers(), strict=True))

    model = ibnn.convert(net, components=components, seed=0).train()
    model(x)  # the first pass is watched
    with FlopCounterMode(display=False) as flops:
        with saved_bytes([*model.parameters(), *model.buffers()]) as saved:
            loss = model.elbo(x, y, n_data=100).loss
        loss.backward()
    assert found.step_bytes == pytest.approx(saved.bytes, rel=0.05)
    assert found.step_products == pytest.approx(flops.get_total_flops() / 2, rel=0.05)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        draws = model.draw_logits(x, samples=2)
    assert found.predict_products == pytest.approx(flops.get_total_flops() / 2, rel=0.05)
    assert found.predict_bytes == draws.nbytes
    latents = sum(p.numel() for latent in model.latents.values() for p in latent.parameters())
    assert (found.weights, found.latents) == (sum(p.numel() for p in net.parameters()), latents)
    with saved_bytes([*net.parameters(), *net.buffers()]) as saved:
        net.train()(x)
    assert found.plain_bytes == saved.bytes


@pytest.mark.parametrize("argument", ["components", "samples"])
def test_bad_sizes(argument: str) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` to be an integer of at least 1, but got 0"):
        ibnn.cost(nn.Linear(2, 2), torch.zeros(1, 2), **{argument: 0})


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_costs_of_recurrent_layers(kind: type[nn.RNNBase], gates: int) -> None:
    rows, steps, wide, units = 20, 6, 8, 16
    found = ibnn.cost(
        Last(kind(wide, units, batch_first=True)), torch.zeros(rows, steps, wide), components=4, samples=5
    )
    products = rows * steps * gates * units * (wide + units)
    assert found.latents == 2 * 4 * (wide + units)
    assert (found.step_products, found.predict_products) == (3 * products, 20 * products)


def test_costs_of_attention() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0][:, 0]

    rows, steps = 20, 6
    found = ibnn.cost(Attends(), torch.zeros(rows, steps, 8), components=4)
    assert found.latents == 2 * 4 * 4 * 8
    assert found.step_products == 3 * (rows * steps * 4 * 8 * 8 + 2 * rows * steps * steps * 8)
