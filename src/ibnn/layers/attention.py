"""Latents of nn.MultiheadAttention, on the inputs of its query, key, value and output projections."""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.layers.registry import REGISTRY, LayerType, batch_axis

if TYPE_CHECKING:
    from ibnn.latent import Latent

Ports = dict[str, Tensor]  # z by port

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
    z: Ports,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes the layer's forward with a z for each row."""
    axis, projected = batch_axis(layer), partial(_projected, latent, batch_axis(layer))
    packed, bias = layer._qkv_same_embed_dim, layer.in_proj_bias
    weights = layer.in_proj_weight.chunk(3) if packed else [getattr(layer, name) for name in _APART.values()]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    parts = zip((query, key, value), _APART, weights, biases, strict=True)
    q, k, v = (projected(x, z[port], w, b) for x, port, w, b in parts)
    q, k, v = (x if axis == 0 else x.transpose(0, 1) for x in (q, k, v))  # (B, L, E)
    q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, L, E / H)
    dropout, attention = layer.dropout if layer.training else 0.0, None
    mask = _mask(q, k, attn_mask, key_padding_mask, is_causal)
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        attention = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        heads = attention @ v
        attention = attention.mean(1) if average_attn_weights else attention
    else:
        causal = is_causal and key_padding_mask is None  # only a hint: the mask says the same
        heads = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, is_causal=causal)
    heads = heads.transpose(1, 2).flatten(2)  # (B, L, E)
    heads = heads if axis == 0 else heads.transpose(0, 1)
    return projected(heads, z["output"], layer.out_proj.weight, layer.out_proj.bias), attention


def _projected(latent: "Latent", axis: int, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns (x ∘ z) Wᵀ + b."""
    from ibnn.kernels import lowered, runs_here
    from ibnn.kernels.linear import project

    if x.shape[axis] == z.shape[0] and runs_here(x, z, weight, bias):
        latent.current_pass.entries += x.numel()
        x, z, weight, bias = lowered(x, z, weight, bias)
        if (output := project(None, x, z, weight, bias, axis)) is not None:
            return output
    return F.linear(latent.multiply(x, z, axis), weight, bias)


def _mask(q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool) -> Tensor | None:
    """Returns what is added to the scores, (B or 1, H or 1, L or 1, S); shapes are checked as in torch."""
    (rows, count, length), steps = q.shape[:3], k.shape[2]
    if is_causal and mask is None:
        remedy = "Pass the mask too: nn.Transformer.generate_square_subsequent_mask(length)."
        raise RuntimeError(complaint("is_causal", "given with attn_mask, as a hint about it", "no attn_mask", remedy))
    shapes = [(length, steps), (rows * count, length, steps)]
    for name, given, fit in (("attn_mask", mask, shapes), ("key_padding_mask", padding, [(rows, steps)])):
        if given is not None and given.shape not in fit:
            expected = f"of shape {' or '.join(map(str, fit))}"
            raise RuntimeError(complaint(name, expected, tuple(given.shape), "Pass a mask of that shape."))
    found = None if mask is None else _added(mask, q.dtype).view(-1, count if mask.dim() == 3 else 1, length, steps)
    if padding is None:
        return found
    padded = _added(padding, q.dtype)[:, None, None]
    return padded if found is None else found + padded


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask of floats to add: −∞ where a Boolean one is True."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.bool(), -torch.inf)


ATTENTION = LayerType(ports=_ports, axis=-1, fold=_fold, weights=_weights, run=_run, batch_axis=batch_axis, fused=True)
REGISTRY[nn.MultiheadAttention] = ATTENTION
