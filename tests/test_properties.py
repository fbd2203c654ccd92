"""Random networks out of the supported layers, and what holds for every one of them."""

import copy
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_split, close, entropy_split
from torch import Tensor, nn

import ibnn

B = 3


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Twice(nn.Module):
    """Uses one module at two places."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.tanh(self.body(x)))


class Folded(nn.Module):
    """Runs the positions of (B, T, D) as a batch of B·T rows."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


Draw = Callable[[st.SearchStrategy[int]], int]


def _convolution(draw: Draw, dims: int, nodes: int, out: int) -> nn.Module:
    groups = draw(st.sampled_from([g for g in (1, 2, 4) if nodes % g == 0 and out % g == 0]))
    kernel, stride = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2]) if out != nodes else st.just(1))
    if draw(st.booleans()):
        family = getattr(nn, f"ConvTranspose{dims}d")
        return family(nodes, out, kernel, padding=kernel // 2, groups=groups, bias=draw(st.booleans()))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    family = getattr(nn, f"Conv{dims}d")
    return family(nodes, out, kernel, stride, kernel // 2, groups=groups, padding_mode=mode, bias=draw(st.booleans()))


def _layer(draw: Draw, dims: int, nodes: int, out: int) -> nn.Module:
    return _convolution(draw, dims, nodes, out) if dims else nn.Linear(nodes, out, bias=draw(st.booleans()))


@st.composite
def networks(draw: Draw) -> tuple[nn.Module, Tensor]:
    """A net of one to four random blocks with a linear head, in float64, and a batch for it."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dims, nodes = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    leading = (draw(st.integers(2, 3)),) if not dims and draw(st.booleans()) else ()  # (B, D) or (B, T, D)
    x = torch.randn(B, *leading, nodes, *[4] * dims, dtype=torch.float64)
    blocks: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["layer", "layer", "residual", "twice", "norm", "folded"]))
        if kind == "layer":
            out = draw(st.integers(1, 4))
            blocks += [_layer(draw, dims, nodes, out), nn.Tanh()]
            nodes = out
        elif kind == "residual":
            blocks.append(Residual(nn.Sequential(_layer(draw, dims, nodes, nodes), nn.Tanh())))
        elif kind == "twice":
            blocks.append(Twice(_layer(draw, dims, nodes, nodes)))
        elif kind == "norm" and not leading:
            blocks.append(getattr(nn, f"BatchNorm{max(dims, 1)}d")(nodes))
        elif kind == "folded" and leading:
            blocks.append(Folded(_layer(draw, 0, nodes, nodes)))
    body = nn.Sequential(*blocks, nn.Flatten()).double()
    with torch.no_grad():
        width = copy.deepcopy(body)(x).shape[1]
    return nn.Sequential(body, nn.Linear(width, 3).double()), x


random_networks = given(case=networks(), seed=st.integers(0, 2**31), components=st.integers(1, 3))
thrifty = settings(max_examples=40, deadline=None)


def _state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@random_networks
@thrifty
def test_z_of_one_is_the_net_bit_for_bit(case: tuple[nn.Module, Tensor], seed: int, components: int) -> None:
    net, x = case
    model = ibnn.convert(net, components=components, seed=seed).train()
    model.set_posterior(mean=1.0, std=0.0)
    assert torch.equal(model(x), net(x))
    assert torch.equal(model.net(x), net(x))
    assert all(torch.equal(value, model.net.state_dict()[name]) for name, value in net.state_dict().items())
    plain = net.eval()(x)
    assert all(torch.equal(row, plain) for row in model.draw_logits(x, samples=2, seed=seed))


@random_networks
@thrifty
def test_revert_leaves_no_trace(case: tuple[nn.Module, Tensor], seed: int, components: int) -> None:
    net, x = case
    net.eval()
    before, plain, text = _state(net), net(x), str(net)
    model = ibnn.convert(net, components=components, seed=seed, copy=False)
    assert not _equal(_state(net), before)
    model(x)
    assert ibnn.revert(model) is net
    assert str(net) == text
    assert _equal(_state(net), before)
    assert torch.equal(net(x), plain)


@random_networks
@thrifty
def test_draws_and_components_are_plain_networks(case: tuple[nn.Module, Tensor], seed: int, components: int) -> None:
    net, x = case
    model = ibnn.convert(net, components=components, init_std=0.3, seed=seed).train()
    model(x)  # statistics have moved
    rows = model.draw_logits(x, samples=2, seed=seed)
    for j, row in enumerate(rows):
        assert close(model.draw(component=j // 2, index=j % 2, seed=seed)(x), row)
    model.set_posterior(std=0.0)
    rows = model.draw_logits(x, samples=1)
    for k, row in enumerate(rows):
        component = model.component(k)
        assert component.state_dict().keys() == net.state_dict().keys()
        assert close(component(x), row)


@random_networks
@thrifty
def test_predict_does_not_depend_on_the_batch_size(case: tuple[nn.Module, Tensor], seed: int, components: int) -> None:
    net, x = case
    model = ibnn.convert(net, components=components, init_std=0.3, seed=seed).train()
    whole = model.predict(x, samples=2, seed=seed)
    assert model.training
    for batch_size in (1, 2):
        parts = model.predict(x, samples=2, seed=seed, batch_size=batch_size)
        assert whole.draws is parts.draws is None
        for name in ("probs", "log_probs", "aleatoric", "between", "within", "standard_error"):
            value, other = getattr(whole, name), getattr(parts, name)
            assert torch.allclose(other, value, rtol=1e-7, atol=1e-9), name
    draws = model.draw_logits(x, samples=2, seed=seed).unflatten(0, (components, 2))
    check_split(whole, entropy_split(draws), rtol=1e-7, atol=1e-12)
