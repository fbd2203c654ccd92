"""Products of inputs, z and weights in one operation, against operations that autograd knows."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import close, converted
from torch import Tensor, nn

from ibnn.kernels.linear import project
from ibnn.layers import attention
from ibnn.layers.registry import stand_in

B, L, E, H = 3, 4, 6, 2


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", [(B, E), (B, L, E), (L, B, E), (B, 2, L, E)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_derivatives(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    axis = shape.index(B)
    x, z, weight, b = double(*shape), double(B, E), double(5, E), double(5) if bias else None

    def run(x: Tensor, z: Tensor, weight: Tensor, b: Tensor | None) -> Tensor:
        output = project(None, x, z, weight, b, axis)
        assert output is not None
        return output

    rows = z.view(*[1] * axis, B, *[1] * (len(shape) - axis - 2), E)
    assert close(run(x, z, weight, b), F.linear(x * rows, weight, b))
    assert torch.autograd.gradcheck(run, (x, z, weight, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, z, weight, b), fast_mode=True)
    frozen = run(x.detach(), z, weight.detach(), b)  # as of a first layer, or with frozen weights
    assert close(
        *torch.autograd.grad(frozen.square().sum(), z), *torch.autograd.grad(run(x, z, weight, b).square().sum(), z)
    )


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


class Identity(nn.Module):
    """Stands for an output projection, whose weight the layer reads; multiplying by an identity is exact."""

    bias = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.eye(E, dtype=torch.float64)


def through_identity(
    layer: nn.MultiheadAttention, latent: Any, z: dict[str, Tensor], *inputs: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Torch's own forward on inputs times z up to the output projection, which is then computed by hand."""
    axis = 0 if layer.batch_first else 1
    rows = {port: part.unsqueeze(1 - axis) for port, part in z.items()}
    query, key, value = (x * rows[port] for port, x in zip(("query", "key", "value"), inputs, strict=True))
    without = stand_in(layer, {})
    without._modules["out_proj"] = Identity()
    heads, attended = nn.MultiheadAttention.forward(without, query, key, value, **options)
    return F.linear(heads * rows["output"], layer.out_proj.weight, layer.out_proj.bias), attended


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
        for run in (attention._run, through_identity):
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
    kept: list[int] = []
    x, z, weight = torch.randn(8, 16, 32, requires_grad=True), torch.rand(8, 32), torch.randn(4, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        project(None, x, z, weight, None, 0)
    assert set(kept) == {x.data_ptr(), z.data_ptr(), weight.data_ptr()}
