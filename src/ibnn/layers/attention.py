"""ATTENTION: latents of nn.MultiheadAttention, on the inputs of its query, key, value and output projections."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.layers.registry import REGISTRY, LayerType, batch_axis

if TYPE_CHECKING:
    from ibnn.latent import Latent

_APART = {"query": "q_proj_weight", "key": "k_proj_weight", "value": "v_proj_weight"}


def _ports(layer: nn.MultiheadAttention) -> dict[str, int]:
    return {"query": layer.embed_dim, "key": layer.kdim, "value": layer.vdim, "output": layer.embed_dim}


def _weights(layer: nn.MultiheadAttention) -> tuple[str, ...]:
    packed = layer._qkv_same_embed_dim
    return ("in_proj_weight", "out_proj.weight") if packed else (*_APART.values(), "out_proj.weight")


def _fold(layer: nn.MultiheadAttention, z: Tensor) -> dict[str, Tensor]:
    ports = ATTENTION.split(layer, z)
    output = {"out_proj.weight": layer.out_proj.weight * ports.pop("output")}
    if layer._qkv_same_embed_dim:
        blocks = layer.in_proj_weight.unflatten(0, (3, -1))  # (3, E, E)
        return {"in_proj_weight": (blocks * torch.stack(list(ports.values()))[:, None]).flatten(0, 1)} | output
    return {_APART[port]: getattr(layer, _APART[port]) * part for port, part in ports.items()} | output


def _run(
    layer: nn.MultiheadAttention,
    latent: "Latent",
    z: dict[str, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs the layer's own forward on inputs times z up to its output projection, then multiplies by z and projects."""
    axis, output = batch_axis(layer), z.pop("output")
    query, key, value = (latent.multiply(x, z[port], axis) for port, x in zip(z, (query, key, value), strict=True))
    projection = layer.out_proj
    layer._modules["out_proj"] = _Identity(projection.weight)
    try:
        heads, attention = type(layer).forward(layer, query, key, value, *args, **kwargs)
    finally:
        layer._modules["out_proj"] = projection
    return F.linear(latent.multiply(heads, output, axis), projection.weight, projection.bias), attention


class _Identity(nn.Module):
    """Replaces the output projection, whose weight the layer reads; multiplying by an identity is exact."""

    bias = None

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.weight = torch.eye(len(like), dtype=like.dtype, device=like.device)


ATTENTION = LayerType(ports=_ports, axis=-1, fold=_fold, weights=_weights, run=_run, batch_axis=batch_axis, fused=True)
REGISTRY[nn.MultiheadAttention] = ATTENTION


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Disables torch's fused attention, which reads weights past their layers, within a block."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
