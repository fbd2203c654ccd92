"""Chooses channels to cut until a share of the multiply–adds is left, and cuts them out of a network."""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.latent import Latent
from ibnn.layers.registry import duplicate
from ibnn.network import IBNN
from ibnn.noise import has_units
from ibnn.pruning.channels import LAYERS, Channels, Layer, is_depthwise

LEAST = 0.1  # of a layer's outputs always stay, and at least one
BLOCK = 8  # numbers of outputs of which processors compute multiples fast


class Size(NamedTuple):
    """How large a network is."""

    weights: int  # number of parameters, without latents
    products: int  # multiply–adds of its linear layers and convolutions for one row of input
    nodes: int  # number of latent variables


def size(model: IBNN, channels: Channels) -> Size:
    """Returns the size of a network whose channels are known."""
    latents = {id(p) for latent in model.latents.values() for p in latent.parameters()}
    weights = sum(p.numel() for p in model.net.parameters() if id(p) not in latents)
    return Size(weights, sum(layer.products for layer in channels.layers.values()), model.nodes)


class _Count:
    """How many inputs and outputs the layers have while channels are cut one by one."""

    def __init__(self, channels: Channels) -> None:
        self.layers = list(channels.layers.values())
        self.ins, self.outs = [len(layer.ins) for layer in self.layers], [len(layer.outs) for layer in self.layers]
        self.uses: dict[int, list[tuple[int, int, int]]] = {}  # of a channel: layer, inputs, outputs
        for number, layer in enumerate(self.layers):
            ins, outs = Counter(layer.ins.tolist()), Counter(layer.outs.tolist())
            for channel in {*ins, *outs} - {-1}:
                self.uses.setdefault(channel, []).append((number, ins[channel], outs[channel]))

    def _products(self, number: int) -> int:
        layer, ins, outs = self.layers[number], self.ins[number], self.outs[number]
        outs, all_outs = (1, 1) if is_depthwise(layer.module) else (outs, len(layer.outs))
        return layer.products * ins * outs // (len(layer.ins) * all_outs)

    def change(self, channels: Iterable[int], sign: int) -> int:
        """Cuts channels (−1) or puts them back (+1); returns by how much the multiply–adds change."""
        total = 0
        for channel in channels:
            before = sum(self._products(number) for number, _, _ in self.uses[channel])
            for number, ins, outs in self.uses[channel]:
                self.ins[number] += sign * ins
                self.outs[number] += sign * outs
            total += sum(self._products(number) for number, _, _ in self.uses[channel]) - before
        return total

    def cut(self, lot: Sequence[int]) -> int:
        """Cuts channels and returns what this saves; 0, and none is cut, if a layer would be left without others."""
        saved = -self.change(lot, -1)
        makers = {number for channel in lot for number, _, outs in self.uses[channel] if outs}
        if all(self.outs[n] >= max(1, ceil(LEAST * len(self.layers[n].outs))) for n in makers):
            return saved
        self.change(lot, 1)
        return 0


def costs(channels: Channels) -> dict[int, int]:
    """Returns the multiply–adds that each channel which can be cut would save alone."""
    count, found = _Count(channels), dict[int, int]()
    for channel in channels.cuttable:
        count.change([channel], -1)
        found[channel] = count.change([channel], 1)
    return found


def choose(channels: Channels, scores: Mapping[int, float], products: float, block: int = 1) -> set[int]:
    """Returns the channels to cut: those of the lowest scores, until at most `products` multiply–adds are left.

    Layers that are cut keep multiples of `block` outputs, if that is possible.
    """
    count, gone = _Count(channels), list[list[int]]()
    left = sum(layer.products for layer in channels.layers.values())
    for lot in _lots(count, scores, block):
        if left <= products:
            break
        if saved := count.cut(lot):
            left -= saved
            gone.append(lot)
    if left > products:
        if block > 1:
            return choose(channels, scores, products)
        layers = channels.layers.items()
        stay = [f"{name} ({reason})" for name, layer in layers if (reason := why_whole(channels, layer))]
        got = f"{int(products):,} of them, with layers that cannot be cut: {'; '.join(stay[:6])}"
        least = f"enough for {left:,} multiply–adds, the least for this network"
        raise ValueError(complaint("keep", least, got, "Keep more of the network."))
    for lot in [lot for lot in reversed(gone) if len(lot) == block]:  # the last may have saved more than was needed
        if left + (back := count.change(lot, 1)) <= products:
            left += back
            gone.remove(lot)
        else:
            count.cut(lot)
    return {channel for lot in gone for channel in lot}


def _lots(count: _Count, scores: Mapping[int, float], block: int) -> list[list[int]]:
    """Returns the channels of each layer in lots that leave a multiple of `block`, those of the lowest scores first."""
    made: dict[tuple[int, ...], list[int]] = {}  # by the layers that make them
    for channel in sorted(scores, key=scores.__getitem__):
        made.setdefault(tuple(number for number, _, outs in count.uses[channel] if outs), []).append(channel)
    lots: list[list[int]] = []
    for makers, each in made.items():
        ends = [0, *range(count.outs[makers[0]] % block or block, len(each), block), len(each)]
        lots += [each[start:end] for start, end in pairwise(ends)]
    return sorted(lots, key=lambda lot: sum(scores[channel] for channel in lot) / len(lot))


def why_whole(channels: Channels, layer: Layer) -> str:
    """Returns why none of a layer's outputs can be cut; empty if some can."""
    outs = layer.outs.tolist()
    if any(channel >= 0 and channel not in channels.fixed for channel in outs):
        return ""
    return next((channels.fixed[channel] for channel in outs if channel >= 0), "depends on the network's input")


@torch.no_grad()
def without(model: IBNN, channels: Channels, gone: Collection[int]) -> IBNN:
    """Returns a copy of a model without some channels; latents of the nodes that stay are carried over."""
    thin = copy.deepcopy(model)
    thin.reference = None  # of the wider network
    for name, layer in channels.layers.items():
        _cut_layer(thin.net.get_submodule(name), staying(layer.ins, gone), staying(layer.outs, gone))
    for name, ids in channels.norms.items():
        _cut_norm(thin.net.get_submodule(name), staying(ids, gone))
    thin.unit_std.mul_(has_units(thin))
    return thin


def rebuild(net: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of a network with the layers' sizes and the values of a state: a thinner network from a file.

    Args:
        net: A network as it was before pruning; its weights do not matter.
        state: Of the thinner network, or of a model that has it.

    >>> thin = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> rebuild(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), thin.state_dict())[2]
    Linear(in_features=2, out_features=1, bias=True)
    """
    net, names = duplicate(net), set(net.state_dict())
    if not names <= set(state):  # of a model
        state = {name.removeprefix("net."): value for name, value in state.items()}
    if missing := sorted(names - set(state)):
        got, remedy = f"one without {missing[:3]}", "Pass the network that was pruned."
        raise ValueError(complaint("state", "of a network with the same layers", got, remedy))
    resize(net, state)
    net.load_state_dict({name: state[name] for name in names})
    return net


@torch.no_grad()
def resize(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Cuts the layers of a network or model, in place, to the sizes that they have in a thinner one's state."""
    for name, layer in module.named_modules():
        weight = state.get(f"{name}.weight".lstrip("."))
        if isinstance(layer, LAYERS) and weight is not None:
            outs, ins = weight.shape[:2]
            if is_depthwise(layer):
                _cut_layer(layer, torch.arange(outs), torch.arange(outs))
            elif getattr(layer, "groups", 1) == 1:  # others are never cut
                _cut_layer(layer, torch.arange(ins), torch.arange(outs))
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
            _cut_norm(layer, torch.arange(len(state[f"{name}.running_mean".lstrip(".")])))


def staying(ids: Tensor, gone: Collection[int]) -> Tensor:
    """Returns the numbers of the places whose channels stay."""
    return torch.tensor([place for place, channel in enumerate(ids.tolist()) if channel not in gone])


def _cut_layer(layer: Any, ins: Tensor, outs: Tensor) -> None:
    """Leaves out all other inputs and outputs of a layer."""
    latent = layer._modules.get("latent")
    if isinstance(latent, Latent) and latent.nodes > len(ins):
        _pick(latent, "mean", {1: ins})
        _pick(latent, "rho", {1: ins})
        latent.nodes = len(ins)
        latent.set_inputs(len(ins))
    into, out_of = ("in_features", "out_features") if isinstance(layer, nn.Linear) else ("in_channels", "out_channels")
    if (getattr(layer, into), getattr(layer, out_of)) == (len(ins), len(outs)):
        return
    if is_depthwise(layer):
        layer.groups = len(ins)
    _pick(layer, "weight", {0: outs} if getattr(layer, "groups", 1) > 1 else {0: outs, 1: ins})
    _pick(layer, "bias", {0: outs})
    setattr(layer, into, len(ins))
    setattr(layer, out_of, len(outs))


def _cut_norm(norm: Any, stay: Tensor) -> None:
    """Leaves out all other channels of a BatchNorm."""
    if norm.num_features == len(stay):
        return
    for name in ("weight", "bias", "running_mean", "running_var"):
        _pick(norm, name, {0: stay})
    norm.num_features = len(stay)


def _pick(module: nn.Module, name: str, axes: Mapping[int, Tensor]) -> None:
    """Replaces a parameter or buffer by a part of it."""
    before = getattr(module, name)
    if before is None:
        return
    value = before.detach()
    for axis, places in axes.items():
        value = value.index_select(axis, places.to(value.device))
    if value.dim() == 4 and before.is_contiguous(memory_format=torch.channels_last):
        value = value.contiguous(memory_format=torch.channels_last)
    if isinstance(before, nn.Parameter):
        value = nn.Parameter(value, requires_grad=before.requires_grad)
    setattr(module, name, value)
