"""The scan of recurrent layers with a z for each row against operations that autograd knows."""

import copy
from typing import Any

import pytest
import torch
from reference import close, converted, give
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ibnn.kernels import scan
from ibnn.layers import recurrent

B, H, D = 3, 2, 2
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU}


def case(kind: str, reverse: bool, bias: bool = True, steps: int = 4) -> tuple[scan.Plan, list[Tensor | None]]:
    """A plan, and the tensors it is run on."""
    torch.manual_seed(0)
    layer = LAYERS[kind](D, H, bias=bias).double()
    x, z_in, z = torch.randn(steps, B, D).double(), *(torch.rand(B, n).double() + 0.5 for n in (D, H))
    state = [torch.randn(B, H).double() for _ in range(1 + (kind == "lstm"))]
    weights = [getattr(layer, f"{name}_l0", None) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    weights = [None if w is None else torch.randn_like(w) * 0.7 for w in weights]
    tensors = [None if t is None else t.requires_grad_() for t in (x, z_in, z, *weights, *state)]

    def slow(*given: Any) -> tuple[Tensor, ...]:
        return recurrent._slow(recurrent._step(layer), reverse, *given)

    return scan.Plan(kind, reverse, slow), tensors


def run(plan: scan.Plan, *tensors: Any) -> tuple[Tensor, ...]:
    output, last = scan.scan(plan, *tensors[:3], tensors[3:7], tensors[7:])
    return output, *last


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("steps", [4, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_derivatives(kind: str, steps: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for bias, at_once in ((True, 40), (False, 1), (True, 2**20)):  # chunks of some steps, of one, of all
        monkeypatch.setattr(scan, "_AT_ONCE", at_once)
        plan, tensors = case(kind, reverse, bias, steps)
        found, expected = run(plan, *tensors), plan.slow(*tensors)
        assert all(close(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.autograd.gradcheck(lambda *given, plan=plan: run(plan, *given), tensors, fast_mode=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_second_derivatives(kind: str) -> None:
    plan, tensors = case(kind, reverse=False)
    assert torch.autograd.gradgradcheck(lambda *given: run(plan, *given), tensors, fast_mode=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_each_output_alone_has_its_gradient(kind: str) -> None:
    plan, tensors = case(kind, reverse=False)
    given = [t for t in tensors if t is not None]
    for number in range(2 + (kind == "lstm")):
        found = torch.autograd.grad(run(plan, *tensors)[number].square().sum(), given, allow_unused=True)
        expected = torch.autograd.grad(plan.slow(*tensors)[number].square().sum(), given, allow_unused=True)
        for a, b in zip(found, expected, strict=True):
            assert close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_kept_graph_gives_the_same_gradients_again(kind: str) -> None:
    """The gates' memory is reused only by the last backward pass."""
    plan, tensors = case(kind, reverse=True)
    loss = sum(part.square().sum() for part in run(plan, *tensors))
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)


def test_inputs_need_not_be_contiguous() -> None:
    plan, (x, *more) = case("gru", reverse=False)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1)  # a batch first, read in time
    found = run(plan, turned.requires_grad_(), *more)
    assert all(close(a, b) for a, b in zip(found, plan.slow(x, *more), strict=True))
    (gradient,) = torch.autograd.grad(found[0].square().sum(), turned)
    (expected,) = torch.autograd.grad(plan.slow(x, *more)[0].square().sum(), x)
    assert close(gradient, expected)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_transforms_take_the_slow_path_and_agree(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, kind)(D, H, batch_first=True, bidirectional=True).double()
    model = converted(nn.Sequential(layer), copy=False, logits="0").train()
    x, z = torch.randn(B, 4, D).double(), torch.rand(2, B, model.nodes).double() + 0.5
    ran: list[str] = []
    fast = scan.scan
    monkeypatch.setattr(scan, "scan", lambda plan, *more: ran.append(plan.kind) or fast(plan, *more))

    def output(z: Tensor) -> Tensor:
        give(model.latents["0"], z)
        try:
            return layer(x)[0]
        finally:
            give(model.latents["0"], None)

    expected = torch.stack([output(part) for part in z])
    assert len(ran) == 4
    assert close(torch.func.vmap(output)(z), expected)
    found = torch.func.grad(lambda part: output(part).square().sum())(z[0])
    assert len(ran) == 4
    first = z[0].clone().requires_grad_()
    assert close(found, *torch.autograd.grad(output(first).square().sum(), first))
    assert len(ran) == 6


def test_checkpointing_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(D, H, num_layers=2).double()
    model = converted(nn.Sequential(layer), copy=False, logits="0").train()
    x = torch.randn(4, B, D).double().requires_grad_()
    z = torch.rand(B, model.nodes).double() + 0.5
    found = []
    for run_layer in (lambda x: layer(x)[0], lambda x: checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)):
        give(model.latents["0"], z)
        output = run_layer(x)
        found.append(torch.autograd.grad(output.square().sum(), [x, *layer.parameters(recurse=False)]))
        give(model.latents["0"], None)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_that_of_the_slow_path(dtype: torch.dtype) -> None:
    """Both are as far from the exact result, small values included."""
    torch.manual_seed(0)
    layer = nn.LSTM(16, 16).to(dtype)
    model = converted(nn.Sequential(copy.deepcopy(layer)), copy=False, logits="0")
    x, z = torch.randn(20, 8, 16, dtype=dtype) * 1e-2, torch.rand(8, model.nodes, dtype=dtype) + 0.5
    exact = converted(nn.Sequential(copy.deepcopy(layer).double()), copy=False, logits="0")
    outputs = []
    for one, precision in ((model, dtype), (exact, torch.float64)):
        give(one.latents["0"], z.to(precision))
        with torch.no_grad():
            outputs.append(one.net[0](x.to(precision))[0])
        give(one.latents["0"], None)
    assert (outputs[0].double() - outputs[1]).abs().max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", LAYERS)
def test_the_product_of_inputs_is_not_kept(kind: str) -> None:
    plan, (x, z_in, *more) = case(kind, reverse=False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(plan, x, z_in, *more)
    assert not any(t.shape == x.shape and close(t, x * z_in) for t in kept)
