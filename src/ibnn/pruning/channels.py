"""Finds which outputs of which layers are which nodes of others, so that all of a channel can be cut at once.

A network is run once on a few rows. Every tensor on the way knows which channel each place along one of its axes is: a
layer makes new ones, additions join them, reshapes carry them along. An operation that is not known to keep channels
apart fixes those that go into it: they are never cut. So what is not understood costs size, not correctness.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ibnn.inputs import Inputs, batch_length, call_arguments, evaluating, tensors
from ibnn.latent import Latent

LAYERS: dict[str, type[nn.Module]] = {
    "linear": nn.Linear,
    **{f"conv{d}d": getattr(nn, f"Conv{d}d") for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": getattr(nn, f"ConvTranspose{d}d") for d in (1, 2, 3)},
}
_ELEMENTWISE = {
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "hardsigmoid",
    "hardswish", "hardtanh", "tanh", "softplus", "softsign", "logsigmoid", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "alpha_dropout", "feature_alpha_dropout", "threshold", "add", "radd", "iadd", "sub", "rsub",
    "isub", "subtract", "mul", "rmul", "imul", "multiply", "div", "rdiv", "idiv", "truediv", "rtruediv", "itruediv",
    "true_divide", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "square", "pow", "rpow", "sin", "cos", "clamp",
    "clip", "clamp_min", "clamp_max", "maximum", "minimum", "where", "clone", "contiguous", "detach", "to", "float",
    "double", "half", "bfloat16", "type", "nan_to_num", "type_as",
}  # fmt: skip
_POOLS = {f"{name}_pool{d}d" for name in ("max", "avg", "lp", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)}
_MOVES = {
    "view", "reshape", "flatten", "permute", "transpose", "swapaxes", "swapdims", "unsqueeze", "squeeze", "movedim",
    "moveaxis", "unflatten", "expand", "repeat", "cat", "concat", "concatenate", "getitem", "select", "narrow",
    "chunk", "split", "unbind",
}  # fmt: skip
_READS = {"item", "tolist", "numpy", "bool", "float", "int", "equal", "allclose", "setitem"}


class Flow(NamedTuple):
    """The channels along an axis of a tensor."""

    axis: int
    ids: Tensor  # −1 where there is none that could be cut


class _Call(NamedTuple):
    """A call of a torch function, with the channels of the tensors among its arguments."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[tuple[Tensor, Flow | None]]
    out: Any

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


@dataclass
class Layer:
    """A linear layer or convolution: the channels that are its nodes and those that it makes, and what it costs."""

    module: nn.Module
    ins: Tensor
    outs: Tensor
    products: int = 0  # multiply–adds for one row of input, over all its calls

    @property
    def depthwise(self) -> bool:
        """Whether each output is made of one node alone."""
        return getattr(self.module, "groups", 1) > 1


@dataclass
class Channels:
    """All channels of a network."""

    layers: dict[str, Layer] = field(default_factory=dict)  # by name, in the order of their calls
    norms: dict[str, Tensor] = field(default_factory=dict)  # the channels that BatchNorm layers see
    fixed: dict[int, str] = field(default_factory=dict)  # why channels cannot be cut
    _parent: list[int] = field(default_factory=list)

    def new(self, count: int) -> Tensor:
        """Returns so many new channels."""
        first = len(self._parent)
        self._parent += range(first, first + count)
        return torch.arange(first, first + count)

    def root(self, channel: int) -> int:
        """Returns the channel that stands for one and all that were joined with it."""
        while self._parent[channel] != channel:
            self._parent[channel] = channel = self._parent[self._parent[channel]]
        return channel

    def fix(self, ids: Tensor, reason: str) -> None:
        """Keeps channels from being cut."""
        for channel in set(ids.tolist()) - {-1}:
            self.fixed.setdefault(self.root(channel), reason)

    def join(self, one: Tensor, other: Tensor, reason: str) -> None:
        """Makes pairs of channels one channel; what is joined with none is fixed."""
        for a, b in zip(one.tolist(), other.tolist(), strict=True):
            if min(a, b) < 0:
                self.fix(torch.tensor([a, b]), reason)
            elif (a := self.root(a)) != (b := self.root(b)):
                self._parent[b] = a
                if b in self.fixed:
                    self.fixed.setdefault(a, self.fixed.pop(b))

    def settle(self) -> None:
        """Replaces all channels by those that stand for them."""

        def roots(ids: Tensor) -> Tensor:
            return torch.tensor([channel if channel < 0 else self.root(channel) for channel in ids.tolist()])

        for layer in self.layers.values():
            layer.ins, layer.outs = roots(layer.ins), roots(layer.outs)
        self.norms = {name: roots(ids) for name, ids in self.norms.items()}

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
    """Runs a network on at least two rows, in eval mode, and returns its channels.

    >>> found = find_channels(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3))
    >>> found.cuttable, found.layers["2"].ins.tolist()
    ([0, 1, 2, 3], [0, 1, 2, 3])
    """
    args, kwargs = call_arguments(x)
    tracer = _Tracer(net, batch_length(x))
    with evaluating(net), torch.no_grad(), tracer:
        output = net(*args, **kwargs)
    found = tracer.found
    for tensor in tensors(output):
        if flow := tracer.flows.get(id(tensor)):
            found.fix(flow.ids, "is the network's output")
    for name, reason in tracer.spoilt.items():  # read by others than the layer itself
        if layer := found.layers.get(name):
            found.fix(torch.cat([layer.ins, layer.outs]), f"{name!r}: {reason}")
        if name in found.norms:
            found.fix(found.norms[name], f"{name!r}: {reason}")
    found.settle()
    return found


class _Tracer(TorchFunctionMode):
    """Sees every torch function that a network calls."""

    def __init__(self, net: nn.Module, rows: int) -> None:
        super().__init__()
        self.found, self.rows = Channels(), rows
        self.flows: dict[int, Flow] = {}
        self.alive: list[Any] = []  # so that no tensor takes another's id
        self.spoilt: dict[str, str] = {}
        self.modules = dict(net.named_modules())
        self.owners: dict[int, list[tuple[str, str]]] = {}
        for name, module in self.modules.items():
            for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                self.owners.setdefault(id(tensor), []).append((name, key))
        self.rules = {
            "batch_norm": self._norm, "pad": self._padded, "interpolate": self._resized, "upsample": self._resized,
            **dict.fromkeys(LAYERS, self._layer), **dict.fromkeys(_ELEMENTWISE, self._elementwise),
            **dict.fromkeys(_POOLS, self._resized), **dict.fromkeys(_MOVES, self._moved),
            **dict.fromkeys(("mean", "sum", "amax", "amin"), self._reduced),
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [(t, self.flows.get(id(t))) for t in tensors((args, kwargs))]
        out = func(*args, **kwargs)
        self.alive.append((args, kwargs, out))
        call = _Call(func.__name__.strip("_"), func, args, kwargs, given, out)
        if any(flow or id(t) in self.owners for t, flow in given) and not self._follow(call):  # it may mix channels
            for tensor, flow in given:
                if flow is not None:
                    self.found.fix(flow.ids, f"goes through `{call.name}`, which may mix its channels")
                for owner, key in self.owners.get(id(tensor), ()):
                    self.spoilt.setdefault(owner, f"its {key} is read by `{call.name}`, outside its own call or tied")
            for tensor in tensors(out):
                self.flows.pop(id(tensor), None)
        return out

    def _follow(self, call: _Call) -> bool:
        """Finds the channels of what a function returns; False if it may mix them."""
        rule, returns, flowing = self.rules.get(call.name), list(tensors(call.out)), any(f for _, f in call.given)
        if call.name not in (*LAYERS, "batch_norm") and not (flowing and (returns or call.name in _READS)):
            return not returns or not any(id(t) in self.owners for t, _ in call.given)
        single = isinstance(call.out, Tensor) and isinstance(call.argument(0, ""), Tensor) and "out" not in call.kwargs
        return rule is not None and (single or rule == self._moved) and rule(call)

    def _set(self, out: Tensor, axis: int, ids: Tensor) -> bool:
        self.flows[id(out)] = Flow(axis % out.dim(), ids)
        return True

    def _layer(self, call: _Call) -> bool:
        """Ends the channels that a layer takes, and begins those that it makes."""
        kind, x, out = call.name, call.args[0], call.out
        weight, bias, flow = call.argument(1, "weight"), call.argument(2, "bias"), self.flows.get(id(x))
        owners = self.owners.get(id(weight), [])
        named = [(n, m) for n, key in owners if key == "weight" and isinstance(m := self.modules[n], LAYERS[kind])]
        name, module = next(((n, m) for n, m in named if m.bias is bias), ("", None))
        if module is None:
            return False
        axis = -1 if kind == "linear" else 1 - weight.dim()
        if flow is not None and flow.axis != x.dim() + axis:
            self.found.fix(flow.ids, f"is not the node axis of {name!r}")
            flow = None
        ins = torch.full((x.shape[axis],), -1) if flow is None else flow.ids
        transposed, groups, made = "transpose" in kind, getattr(module, "groups", 1), out.shape[axis]
        depthwise = groups > 1 and groups == len(ins) == made and not transposed
        if layer := self.found.layers.get(name):
            self.found.join(layer.ins, ins, f"is not always a node of {name!r}")
        else:
            layer = self.found.layers[name] = Layer(module, ins, ins if depthwise else self.found.new(made))
        both = torch.cat([layer.ins, layer.outs])
        if len(owners) > 1:
            self.found.fix(both, f"{' and '.join(repr(owner) for owner, _ in owners)} share a weight")
        if groups > 1 and not depthwise:
            self.found.fix(both, f"{name!r} is a grouped convolution")
        layer.products += (x if transposed else out).numel() // self.rows * prod(weight.shape[1:])
        return self._set(out, axis, layer.outs)

    def _norm(self, call: _Call) -> bool:
        """Keeps the channels of a BatchNorm, which treats each by itself."""
        (x, flow), *own = call.given
        owners = [owner for tensor, _ in own for owner in self.owners.get(id(tensor), ())]
        names = {name for name, _ in owners}
        if len(names) > 1 or len(owners) != len(own) or (flow is not None and flow.axis != 1):
            return False
        ids = flow.ids if flow is not None else torch.full((x.shape[1],), -1)
        for name in names:
            if (before := self.found.norms.setdefault(name, ids)) is not ids:
                self.found.join(before, ids, f"is not always seen by {name!r}")
        return flow is None or self._set(call.out, 1, ids)

    def _elementwise(self, call: _Call) -> bool:
        """Joins the channels of tensors that are added or multiplied."""
        flows = [(flow.axis - tensor.dim(), flow.ids) for tensor, flow in call.given if flow is not None]
        axis, ids = flows[0]
        if any(a != axis or len(i) != call.out.shape[axis] for a, i in flows):
            return False
        owned = any(id(t) in self.owners and t.numel() > 1 for t, _ in call.given)
        if owned or any(flow is None and t.dim() >= -axis and t.shape[axis] > 1 for t, flow in call.given):
            return False  # something else of each channel
        for _, other in flows[1:]:
            self.found.join(ids, other, "is added to what can not be cut")
        return self._set(call.out, axis, ids)

    def _resized(self, call: _Call) -> bool:
        """Keeps channels where places are pooled or interpolated."""
        (x, flow), *others = call.given
        places = int(call.name[-2]) if call.name in _POOLS else x.dim() - 2
        fits = not others and flow is not None and flow.axis == x.dim() - 1 - places
        return fits and self._set(call.out, flow.axis, flow.ids)  # type: ignore[union-attr]

    def _reduced(self, call: _Call) -> bool:
        """Keeps channels where places are averaged."""
        dim, keep = call.argument(1, "dim"), call.argument(2, "keepdim", False)
        x, flow = call.given[0]
        if flow is None or dim is None or dim == ():
            return False
        labels = _labels(x, flow)
        low = labels.amin(dim, keepdim=keep)
        return torch.equal(low, labels.amax(dim, keepdim=keep)) and self._carry(flow.ids, low, call.out)

    def _padded(self, call: _Call) -> bool:
        """Keeps channels beside which zeros are put, or whose places are padded with anything."""
        x, flow = call.given[0]
        if flow is None:
            return False
        last = 2 * (x.dim() - flow.axis)
        beside = list(call.argument(1, "pad"))[last - 2 : last]
        zeros = min(beside, default=0) >= 0 and call.argument(2, "mode", "constant") == "constant"
        return (zeros or not any(beside)) and self._set(call.out, flow.axis, F.pad(flow.ids, beside, value=-1))

    def _moved(self, call: _Call) -> bool:
        """Moves the channels' numbers as the function moves the entries."""
        first, *rest = call.args
        if list(tensors((rest, call.kwargs))):
            return False
        labels = [_labels(tensor, flow) for tensor, flow in call.given]
        moved = call.function(labels if isinstance(first, tuple | list) else labels[0], *rest, **call.kwargs)
        ids = torch.cat([flow.ids for _, flow in call.given if flow is not None])
        pairs = zip(tensors(call.out), tensors(moved), strict=True)
        return all(self._carry(ids, after, made) for made, after in pairs)

    def _carry(self, before: Tensor, labels: Tensor, out: Tensor) -> bool:
        """Finds the one axis along which the channels of a tensor lie; all that there were must still be there."""
        axes = [a for a in range(labels.dim()) if bool((labels != labels.narrow(a, 0, 1)).any())]
        if len(axes) != 1 or axes[0] == 0:
            return False
        ids = labels.movedim(axes[0], 0).flatten(1)[:, 0] if labels.dim() > 1 else labels
        return set(before.tolist()) <= {*ids.tolist(), -1} and self._set(out, axes[0], ids)


def _labels(tensor: Tensor, flow: Flow | None) -> Tensor:
    """Returns the number of each entry's channel, −1 where there is none."""
    if flow is None:
        return torch.full(tensor.shape, -1)
    shape = [-1 if axis == flow.axis else 1 for axis in range(tensor.dim())]
    return flow.ids.view(shape).expand(tensor.shape).clone()
