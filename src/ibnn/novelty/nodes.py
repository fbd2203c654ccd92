"""What every layer of a network sees of an input, as one vector.

A layer's input is summed up by the mean and the standard deviation of every node over its places (the pixels of a
convolution, the steps of a sequence without padding); a layer with one place has its nodes themselves.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ibnn.inputs import Call, batch_length
from ibnn.layers.registry import layer_type

AT_ONCE = 2**20  # entries that are summed up at once: their copies stay in the cache
# 1 where a sequence is for the first, 1 where it is padded for the others
_MASKS = ("attention_mask", "src_key_padding_mask", "key_padding_mask", "padding_mask")


def observable(net: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers of a network whose inputs can be summed up, by name: those that `ibnn.convert` converts."""
    return {name: m for name, m in net.named_modules() if (kind := layer_type(m)) is not None and not kind.optional}


def padding(net: nn.Module, call: Call) -> Tensor | None:
    """Returns the mask (B, T) of a batch of sequences, true where a sequence is; None without one."""
    args, kwargs = call
    if len(args) + len(kwargs) < 2:  # nothing beside the inputs
        return None
    given = dict(kwargs)
    with suppress(TypeError):
        given |= inspect.signature(net.forward).bind_partial(*args, **kwargs).arguments
    for name in _MASKS:
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == batch_length(call):
            return mask.bool() if name == "attention_mask" else ~mask.bool()
    return None


@contextmanager
def watched(
    layers: Mapping[str, nn.Module], axes: Mapping[str, int], rows: int, mask: Tensor | None, copies: int = 1
) -> Iterator[Any]:
    """Collects, within a block with one forward pass, the summaries (B, D) of the layers' inputs, by name.

    If the pass is of several copies of the batch, one after the other, those of the last copy.
    """
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    found: dict[str, Tensor] = {}
    thread = get_ident()

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any = None) -> None:
        if get_ident() != thread:  # another one's pass, perhaps while the hook is only half registered
            return
        x = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor | PackedSequence)), None)
        if isinstance(x, Tensor) and copies > 1:
            length = x.shape[axes[name]] // copies
            x = x.narrow(axes[name], (copies - 1) * length, length)
        if x is not None:
            seen[name].append(_summary(layer, x, axes[name], rows, mask))

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = partial(note, name)
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        yield found
    for name, calls in seen.items():
        if calls:  # the mean over the calls of a layer that is called several times
            found[name] = calls[0] if len(calls) == 1 else torch.stack(calls).mean(0)


def _summary(layer: nn.Module, x: Tensor | PackedSequence, axis: int, rows: int, mask: Tensor | None) -> Tensor:
    """Returns mean and standard deviation over the places of a layer's input, (B, 2·D), or the input (B, D) itself."""
    if isinstance(x, PackedSequence):
        x, lengths = pad_packed_sequence(x, batch_first=True)
        axis, mask = 0, torch.arange(x.shape[1]) < lengths[:, None]
    kind: Any = layer_type(layer)
    x = x.detach() if x.dtype == torch.float64 else x.detach().float()
    batch, node = axis % x.dim(), kind.axis % x.dim()
    places = [number for number in range(x.dim()) if number not in (batch, node)]
    windows = x.shape[batch] // rows
    if not places and windows == 1:
        return x if batch < node else x.T
    by_row = x.movedim((batch, node), (0, -1)).reshape(rows, -1, x.shape[node])
    if mask is not None and windows == len(places) == 1 and mask.shape == by_row.shape[:2]:
        weight = mask.to(x)[..., None]
        count = weight.sum(1).clamp_min(1)
        mean = (by_row * weight).sum(1) / count
        std = ((by_row - mean[:, None]).square() * weight).sum(1).div(count).sqrt()
    elif windows == 1:
        mean, std = (part if batch < node else part.T for part in _moments(x, batch, places))
    else:
        mean, std = by_row.mean(1), by_row.std(1, correction=0)
    return torch.cat([mean, std], 1)


def _moments(x: Tensor, batch: int, places: list[int]) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation over places, of the other two axes; a few rows at a time."""
    rows = x.shape[batch]
    if not torch.compiler.is_exporting() and rows > (each := max(1, AT_ONCE * rows // max(1, x.numel()))):
        parts = [_moments(part, batch, places) for part in x.split(each, batch)]
        axis = sum(number < batch for number in range(x.dim()) if number not in places)
        return torch.cat([mean for mean, _ in parts], axis), torch.cat([std for _, std in parts], axis)
    mean = x.mean(places, keepdim=True)  # torch.var_mean takes 5 to 15 times as long on a CPU
    std = (x - mean).square_().mean(places).sqrt_()
    return mean.view(std.shape), std
