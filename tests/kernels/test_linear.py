"""Products of inputs, z and weights a few rows at a time, against operations that autograd knows."""

from typing import Any

import pytest
import torch
from reference import close, converted
from torch import Tensor, nn

from ibnn.kernels import linear as fused
from ibnn.layers import attention

B, L, E, H = 3, 4, 6, 2


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("at_once", [1, 40, 2**18])
def test_values_and_derivatives(axis: int, count: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(fused, "_AT_ONCE", at_once)
    x = double(*((B, L) if axis == 0 else (L, B)), E)
    products = [(double(B, E), double(5 - n, E), double(5 - n) if n else None) for n in range(count)]
    flat = [tensor for part in products for tensor in part]

    def run(x: Tensor, *flat: Any) -> tuple[Tensor, ...]:
        return fused.linears(x, axis, [tuple(flat[n : n + 3]) for n in range(0, len(flat), 3)])

    for found, (z, w, b) in zip(run(x, *flat), products, strict=True):
        rows = z[:, None] if axis == 0 else z
        assert close(found, (x * rows) @ w.T + (0 if b is None else b))
    assert torch.autograd.gradcheck(run, (x, *flat), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *flat), fast_mode=True)
    z = products[0][0]
    only = torch.autograd.grad(run(x, *flat)[0].square().sum(), z)  # other outputs have no gradient
    assert close(*only, *torch.autograd.grad(fused._slow(axis, x, *flat)[0].square().sum(), z))


BANNED = torch.ones(L, L, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False, False, True, True], [False] * 4, [False, True, False, False]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "Boolean mask": {"attn_mask": BANNED},
    "mask for each head": {"attn_mask": torch.linspace(-1, 1, B * H * L * L).double().view(B * H, L, L)},
    "padding": {"key_padding_mask": PADDED},
    "padding of floats": {"key_padding_mask": torch.linspace(-1, 1, B * L).double().view(B, L)},
    "both": {"attn_mask": BANNED, "key_padding_mask": PADDED},
    "causal": {"attn_mask": BANNED, "is_causal": True},
    "causal, padding": {"attn_mask": BANNED, "is_causal": True, "key_padding_mask": PADDED},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "weights", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=["no", "mean", "all"]
)
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "sequence first"])
def test_attention_is_that_of_the_layers_own_forward(call: str, weights: dict[str, bool], first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(E, H, batch_first=first).double()
    nn.init.normal_(layer.in_proj_bias)
    model = converted(nn.Sequential(layer), copy=False)
    latent, x = model.latents["0"], double(*((B, L) if first else (L, B)), E)
    z = double(B, model.nodes)
    parameters = [p for name, p in layer.named_parameters() if "latent" not in name]
    found = []
    for inputs in ((x, x, x), (x, x.clone(), x.clone())):
        for run in (attention._run, attention._through_identity):
            output, attended = run(
                layer, latent, attention.ATTENTION.split(layer, z), *inputs, **CALLS[call], **weights
            )
            gradients = torch.autograd.grad(output.square().sum(), [x, z, *parameters])
            found.append([output, *([] if attended is None else [attended]), *gradients])
    assert len(found[0]) == len(found[1])
    for other in found[1:]:
        assert all(close(a, b) for a, b in zip(found[0], other, strict=True))


def test_positional_arguments_keep_their_order() -> None:
    layer = nn.MultiheadAttention(E, H, batch_first=True).double()
    model, x = converted(nn.Sequential(layer), copy=False), double(B, L, E)
    z = attention.ATTENTION.split(layer, double(B, model.nodes))
    found = attention._run(layer, model.latents["0"], z, x, x, x, PADDED, True, BANNED, False)
    expected = attention._run(
        layer, model.latents["0"], z, x, x, x, key_padding_mask=PADDED, attn_mask=BANNED, average_attn_weights=False
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[1].shape == (B, H, L, L)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"attn_mask": BANNED[:2]}, "`attn_mask`"),
        ({"key_padding_mask": PADDED[:2]}, "`key_padding_mask`"),
        ({"is_causal": True}, "`is_causal`"),
    ],
)
def test_masks_of_other_shapes_are_refused(call: dict[str, Any], named: str) -> None:
    layer = nn.MultiheadAttention(E, H, batch_first=True).double()
    model, x = converted(nn.Sequential(layer), copy=False), double(B, L, E)
    z = attention.ATTENTION.split(layer, double(B, model.nodes))
    with pytest.raises(RuntimeError, match=named):
        attention._run(layer, model.latents["0"], z, x, x, x, **call)


def test_the_product_is_not_kept_for_the_backward_pass() -> None:
    """Three inputs times z of self-attention would be; of the plain layer's tensors only the same input is."""
    kept: list[int] = []
    x, products = torch.randn(8, 16, 32, requires_grad=True), [(torch.rand(8, 32), torch.randn(4, 32), None)] * 3
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        fused.linears(x, 0, products)
    assert set(kept) == {x.data_ptr(), *(t.data_ptr() for part in products for t in part[:2])}
