"""WATCH: finds what a latent cannot serve: weights read outside their layer's call, layers that see no batch first."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ibnn.errors import complaint
from ibnn.inputs import Inputs, batch_length, call_arguments, evaluating, tensors, tree_map
from ibnn.layers.memory import out_of_memory
from ibnn.layers.registry import layer_type


class Placed(Protocol):
    """What `batch_axes` asks of a latent."""

    z: Tensor | None
    batch_axis: int


class _Reads(TorchFunctionMode):
    """Notes which watched tensors enter a torch function that returns a tensor, outside the calls of their owners."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self.watched, self.seen = watched, set[int]()
        self.open: list[set[int]] = []  # the weights of the owners that are being called
        self.computed: dict[int, tuple[Tensor, set[int]]] = {}  # parametrised weights, and what they are made of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if next(tensors(result), None) is not None:  # not the likes of weight.shape
            read = {id(tensor) for tensor in tensors((args, kwargs))}
            read |= set().union(*(self.computed[tensor][1] for tensor in read & self.computed.keys()))
            self.seen |= (read & self.watched).difference(*self.open)
        return result


@contextmanager
def bypassed(net: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Watches forward passes of `net`; on leaving, the set holds the names of `layers` read behind their backs.

    A weight may be read by any module that owns it while that module is called (tied weights).
    """
    own = {name: {id(p) for p in _weights(layer)} for name, layer in layers.items()}
    reads = _Reads(set().union(*own.values()))

    def enter(module: nn.Module, args: Any) -> None:
        reads.open.append({id(p) for p in _weights(module)})

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        weights = reads.open.pop()
        if isinstance(module, ParametrizationList):  # reading the weight that it computes is what counts
            reads.computed[id(output)] = output, weights

    owners = [module for module in net.modules() if reads.watched & {id(p) for p in _weights(module)}]
    handles = [owner.register_forward_pre_hook(enter, prepend=True) for owner in owners]
    handles += [owner.register_forward_hook(leave, always_call=True) for owner in owners]
    names: set[str] = set()
    try:
        with reads:
            yield names
        names |= {name for name, weights in own.items() if weights & reads.seen}
    finally:
        for handle in handles:
            handle.remove()


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """A module's own parameters, with those behind its parametrisations, without its latent's."""
    yield from module.parameters(recurse=False)
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        yield from parametrizations.parameters()


@contextmanager
def returned(net: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Notes, in a forward pass, every tensor that a module of `net` returns, in order."""
    made: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            made.append((module, output))

    handles = [module.register_forward_hook(note) for module in net.modules() if module is not net]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def returning(module: nn.Module, output: Tensor) -> Iterator[None]:
    """Lets a module return a given tensor for the length of a block."""
    handle = module.register_forward_hook(lambda *_: output)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def input_shapes(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[torch.Size]]]:
    """Collects the shapes of the inputs that layers are called with."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}
    with _before_calls(layers, lambda name, shape: shapes[name].append(shape)):
        yield shapes


@contextmanager
def _before_calls(layers: Mapping[str, nn.Module], look: Callable[[str, torch.Size], None]) -> Iterator[None]:
    """Shows names of layers and shapes of their inputs as they are called."""

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, PackedSequence):  # as it was before it was packed
                batch, steps = int(x.batch_sizes[0]), len(x.batch_sizes)
                first = (batch, steps) if getattr(layer, "batch_first", True) else (steps, batch)
                return look(name, torch.Size((*first, x.data.shape[-1])))
            for tensor in tensors(x):
                return look(name, tensor.shape)

    handles = [
        layer.register_forward_pre_hook(partial(note, name), with_kwargs=True, prepend=True)
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def explaining_shapes(net: Any, inputs: Inputs, argument: str = "x") -> Iterator[None]:
    """Words an error of the block by the layer that the inputs do not fit, if that is what it is about."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        words = None if out_of_memory(error) else _misfit(net, inputs, argument)
        if words is None:
            raise
        raise ValueError(words) from error


def _misfit(net: Any, inputs: Inputs, argument: str) -> str | None:
    """Says which layer gets inputs of the wrong width, or inputs without a batch; runs the network once to see."""
    net = net[0] if isinstance(net, nn.ModuleList) else net  # of an ensemble
    layers = {name: m for name, m in net.named_modules() if (kind := layer_type(m)) and not kind.optional}
    met: list[tuple[str, torch.Size]] = []
    args, kwargs = call_arguments(inputs)
    watch = _before_calls(layers, lambda name, shape: met.append((name, shape)))
    with watch, evaluating(net), torch.no_grad(), suppress(Exception):  # the error that is to be explained
        net(*args, **kwargs)
    came = next(tensors(inputs)).shape
    for name, shape in met:
        kind, layer = layer_type(layers[name]), layers[name]
        assert kind is not None, "chosen so"
        width, inner = next(iter(kind.ports(layer).values())), -kind.axis
        alone = len(shape) <= inner  # without a batch, which is no harm to layers that do not read the inputs
        if shape != came if alone else shape[kind.axis] == width:
            continue
        wanted = ", ".join(["rows" if len(shape) <= inner + 1 else "…", str(width), *["…"] * (inner - 1)])
        got = f"shape {tuple(came)}" + ("" if shape == came else f", which gives it {tuple(shape)}")
        remedy = "Pass a batch, x[None] for one row." if alone else "Pass inputs of the size it was built for."
        return complaint(
            argument,
            f"such that layer {name or '(net)'!r} ({type(layer).__name__}) gets an input of shape ({wanted})",
            got,
            remedy,
        )
    return None


@contextmanager
def batch_axes(net: nn.Module, latents: Mapping[str, Placed], args: Any, kwargs: Any) -> Iterator[None]:
    """Watches a forward pass with a z for each row and tells each latent which axis of its layer's input is the batch.

    The batch is expected first, or where a layer says it is. At the first input whose shape leaves that open (steps
    before the batch, or as many as the batch has rows; windows folded into the batch), the network is run twice without
    gradients, in eval mode and without latents, on batches of two lengths: what grows with them is the batch.

    Raises:
        ValueError: If a layer sees no batch, or not always in the same place.
    """
    rows, layers = batch_length((args, kwargs)), {name: net.get_submodule(name) for name in latents}
    kinds = {name: layer_type(layer) for name, layer in layers.items()}
    own = {name: kind.batch_axis(layers[name]) for name, kind in kinds.items() if kind and kind.batch_axis}
    axes = dict.fromkeys(layers, 0) | own
    clear = False  # whether the network has been run for it

    def look(name: str, shape: torch.Size) -> None:
        nonlocal clear
        if not clear and [axis for axis, n in enumerate(shape[: max(1, len(shape) - 1)]) if n == rows] != [axes[name]]:
            clear = True
            held = [latent.z for latent in latents.values()]
            for latent in latents.values():
                latent.z = None
            axes.update(_grown(net, layers, own, args, kwargs))
            for latent, z, axis in zip(latents.values(), held, axes.values(), strict=True):
                latent.z, latent.batch_axis = z, axis
        latents[name].batch_axis = axes[name]

    with _before_calls(layers, look):
        yield


def _grown(
    net: nn.Module, layers: Mapping[str, nn.Module], own: Mapping[str, int], args: Any, kwargs: Any
) -> dict[str, int]:
    """The axis of each layer's input that grows with the batch; nothing if the network takes no other batch length."""
    rows = batch_length((args, kwargs))
    longer = tree_map(lambda t: torch.cat([t, t[:1]]) if t.dim() and len(t) == rows else t, (args, kwargs))
    met: list[dict[str, list[torch.Size]]] = []
    for positional, named in ((args, kwargs), longer):
        try:
            with input_shapes(layers) as shapes, evaluating(net), torch.no_grad():
                net(*positional, **named)
        except Exception:
            return {}
        met.append(shapes)
    axes: dict[str, int] = {}
    for name in layers:
        calls = list(zip(met[0][name], met[1][name], strict=False))
        grown = [
            {axis for axis, (n, m) in enumerate(zip(*c, strict=False)) if n * (rows + 1) == m * rows} for c in calls
        ]
        allowed = {own[name]} if name in own else set().union(*grown)
        if calls and not allowed.intersection(*grown):
            place = f"a dimension {own[name]}" if name in own else "a dimension"
            short, long = min(zip(grown, calls, strict=True), key=lambda pair: len(pair[0]))[1]
            raise ValueError(
                complaint(
                    f"input of layer {name!r}",
                    f"of {place} that is the batch ({rows} rows) or a multiple of it, the same in all its calls",
                    f"shape {tuple(short)} for {rows} rows and {tuple(long)} for {rows + 1}",
                    f"If this layer does not see the batch there, leave it out: exclude=[{name!r}].",
                )
            )
        axes[name] = min(allowed.intersection(*grown), default=own.get(name, 0))
    return axes
