"""Finds which outputs of which layers are which nodes of others, so that all of a channel can be cut at once.

A network is run once for each layer, with NaN in some of the layer's outputs. Where NaN arrives at other layers, or at
BatchNorm, are the nodes that these outputs make; a layer passes no NaN on. Each output has a code: for each bit of its
number it is NaN in one of two rows. A node that is NaN in both depends on several outputs, and none of them is cut.
What a run with NaN does not show, such as a size written into the code, shows when a cut is tried (`pruning`).
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ibnn.inputs import Inputs, batch_length, call_arguments, evaluating, slice_rows, tensors
from ibnn.latent import Latent

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Layer:
    """A linear layer or convolution: the channels that are its nodes and those that it makes, and what it costs."""

    module: Any
    ins: Tensor  # −1 where no layer makes them
    outs: Tensor
    products: int  # multiply–adds for one row of input, over all its calls


@dataclass
class Channels:
    """All channels of a network."""

    layers: dict[str, Layer]  # by name, in the order of their calls
    norms: dict[str, Tensor]  # the channels that BatchNorm layers see
    fixed: dict[int, str]  # why channels cannot be cut

    def fix(self, ids: Tensor, reason: str) -> None:
        """Keeps channels from being cut."""
        for channel in ids.tolist():
            self.fixed.setdefault(channel, reason)

    def nodes(self, latents: Mapping[str, Latent]) -> list[int]:
        """Returns the channel of every node of layers with latents, −1 where there is none."""
        layers = ((self.layers.get(name), latent.nodes) for name, latent in latents.items())
        return [channel for layer, n in layers for channel in (layer.ins.tolist() if layer else [-1] * n)]

    @property
    def cuttable(self) -> list[int]:
        """The channels that can be cut, in the order of their layers."""
        made = dict.fromkeys(c for layer in self.layers.values() for c in layer.outs.tolist() if c >= 0)
        return [channel for channel in made if channel not in self.fixed]


def find_channels(net: nn.Module, x: Inputs) -> Channels:
    """Runs a network in eval mode and returns its channels."""
    reasons: list[tuple[Tensor, str]] = []
    with _Probe(net, x) as probe:
        probe.run()
        nodes = {name: torch.full(nan.shape[1:], -1) for name, nan in probe.arrived.items()}
        widths = {name: n for name, n in probe.outs.items() if not is_depthwise(probe.modules[name])}
        root = torch.arange(sum(widths.values()))  # the channel that stands for one and all that were joined with it
        made = dict(zip(widths, root.clone().split(list(widths.values())), strict=True))
        for name, outs in made.items():
            if probe.run(name):
                reasons.append((outs, "is the network's output"))
            for place, nan in probe.arrived.items():
                zero, one = nan.unflatten(0, (-1, 2)).unbind(1)  # of each bit, (bits, nodes)
                single, number = (zero ^ one).all(0), (one.long() << torch.arange(len(one))[:, None]).sum(0)
                if bool((nan.any(0) & ~single).any()):
                    reasons.append((outs, f"is mixed with others before {place!r}"))
                for node in single.nonzero()[:, 0].tolist():
                    old, new = int(nodes[place][node]), int(outs[number[node]])
                    nodes[place][node] = new
                    if old >= 0:
                        root[root == root[new]] = int(root[old])
    nodes, made = ({n: ids.where(ids < 0, root[ids]) for n, ids in each.items()} for each in (nodes, made))
    layers = {n: Layer(probe.modules[n], nodes[n], made.get(n, nodes[n]), probe.products[n]) for n in probe.outs}
    found = Channels(layers, {name: ids for name, ids in nodes.items() if name not in layers}, {})
    for outs, reason in reasons:
        found.fix(root[outs], reason)
    owners = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))
    for name, layer in layers.items():
        if getattr(layer.module, "groups", 1) > 1 and not is_depthwise(layer.module):
            found.fix(torch.cat([layer.ins, layer.outs]), f"{name!r} is a grouped convolution")
        if owners[id(layer.module.weight)] > 1:
            found.fix(torch.cat([layer.ins, layer.outs]), f"{name!r} shares its weight")
    return found


def is_depthwise(module: nn.Module) -> bool:
    """Whether a layer is a convolution of each channel by itself."""
    groups = getattr(module, "groups", 1)
    return groups > 1 and groups == module.in_channels == module.out_channels


class _Probe(ExitStack):
    """Runs a network with NaN in the outputs of a layer."""

    def __init__(self, net: nn.Module, x: Inputs) -> None:
        super().__init__()
        self.net, self.source = net, ""
        self.arrived: dict[str, Tensor] = {}  # where NaN arrived in the last run, (rows, nodes), in the order of calls
        self.outs: dict[str, int] = {}  # how many outputs each layer has
        self.products = Counter[str]()  # multiply–adds of each layer for one row of input
        self.modules: dict[str, Any] = {
            name: module
            for name, module in net.named_modules()
            if isinstance(module, _BatchNorm) or (isinstance(module, LAYERS) and "weight" in module._parameters)
        }
        most = max((len(m.weight) for m in self.modules.values() if isinstance(m, LAYERS)), default=1)
        number, bits = torch.arange(most), torch.arange(max(1, (most - 1).bit_length()))[:, None]
        self.code = torch.stack([number >> bits & 1 == 0, number >> bits & 1 == 1], 1).flatten(0, 1)  # (rows, outputs)
        self.rows, have, device = len(self.code), batch_length(x), next(tensors(x)).device
        self.x = slice_rows(x, torch.arange(self.rows, device=device) % have, have)

    def __enter__(self) -> "_Probe":
        self.enter_context(evaluating(self.net))
        for name, module in self.modules.items():
            self.callback(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True).remove)
            if isinstance(module, LAYERS):
                self.callback(module.register_forward_hook(partial(self._after, name)).remove)
        return self

    def run(self, source: str = "") -> bool:
        """Runs the network with NaN in the outputs of a layer, or in none; returns whether NaN is in the answer."""
        self.source, self.arrived, self.outs, self.products = source, {}, {}, Counter()
        args, kwargs = call_arguments(self.x)
        with torch.no_grad():
            output = self.net(*args, **kwargs)
        return any(bool(tensor.isnan().any()) for tensor in tensors(output))

    def _before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        x = [*args, *kwargs.values()][0]
        nan = x.isnan()
        each = nan.movedim(_axis(module), -1).reshape(-1, x.shape[_axis(module)])
        if len(each) % self.rows:  # rows are mixed
            each = each.any(0).expand(self.rows, -1)
        arrived = each.unflatten(0, (self.rows, -1)).any(1).cpu()
        self.arrived[name] = arrived | self.arrived.get(name, torch.tensor(False))
        passes = isinstance(module, _BatchNorm) or is_depthwise(module)
        return (x if passes else x.masked_fill(nan, 0.0),), {}

    def _after(self, name: str, module: Any, args: Any, out: Tensor) -> Tensor:
        moved = out.movedim(_axis(module), -1)
        self.outs[name] = moved.shape[-1]
        self.products[name] += out.numel() // self.rows * prod(module.weight.shape[1:])
        if name != self.source:
            return out
        count = moved[..., 0].numel()
        code = self.code[:, : moved.shape[-1]].to(out.device)
        nan = code.repeat_interleave(count // self.rows, 0) if count % self.rows == 0 else code.any(0).expand(count, -1)
        return moved.masked_fill(nan.reshape(moved.shape), torch.nan).movedim(-1, _axis(module))


def _axis(module: Any) -> int:
    """Returns the axis of the channels, in what a module takes and makes."""
    return 1 if isinstance(module, _BatchNorm) else -1 if isinstance(module, nn.Linear) else 1 - module.weight.dim()
