"""WATCH: what forward passes do: weights read outside their layer's call, the batch axis of inputs, memory."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ibnn.errors import complaint
from ibnn.inputs import Call, Inputs, batch_length, call_arguments, evaluating, tensors, tree_map
from ibnn.layers.convolution import kept_memory
from ibnn.layers.registry import batchless, carried_type, layer_type
from ibnn.layers.units import pools

if TYPE_CHECKING:
    from ibnn.latent import Latent


class _Reads(TorchFunctionMode):
    """Records which watched tensors enter a torch function that returns a tensor, outside the calls of their owners."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self.watched, self.seen = watched, set[int]()
        self.open: list[set[int]] = []  # the weights of the modules that are being called
        self.computed: dict[int, tuple[Tensor, set[int]]] = {}  # parametrised weights, and what they are made of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if next(tensors(result), None) is not None:  # unlike weight.shape
            read = {id(tensor) for tensor in tensors((args, kwargs))}
            read |= set().union(*(self.computed[tensor][1] for tensor in read & self.computed.keys()))
            self.seen |= (read & self.watched).difference(*self.open)
        return result


@contextmanager
def bypassed(net: nn.Module, layers: Iterable[str]) -> Iterator[set[str]]:
    """Watches forward passes of `net`; at the end the set names those layers whose weights were read outside a call.

    A weight may be read by any module that owns it while that module is called (tied weights).
    """
    own = {name: {id(p) for p in _weights(net.get_submodule(name))} for name in layers}
    reads = _Reads(set().union(*own.values()))

    def enter(module: nn.Module, args: Any) -> None:
        reads.open.append({id(p) for p in _weights(module)})

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        weights = reads.open.pop()
        if isinstance(module, ParametrizationList):  # what counts is who reads the weight that it computes
            reads.computed[id(output)] = output, weights

    owners = [module for module in net.modules() if reads.watched & {id(p) for p in _weights(module)}]
    names: set[str] = set()
    with ExitStack() as hooks:
        for owner in owners:
            hooks.enter_context(owner.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(owner.register_forward_hook(leave, always_call=True))
        with reads:
            yield names
        names |= {name for name, weights in own.items() if weights & reads.seen}


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields a module's own parameters and those behind its parametrisations, but not its latent's."""
    yield from module.parameters(recurse=False)
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        yield from parametrizations.parameters()


@contextmanager
def returned(net: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Records every tensor that a module in `net` returns in a forward pass, in order."""
    made: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            made.append((module, output))

    with ExitStack() as hooks:
        for module in net.modules():
            if module is not net:
                hooks.enter_context(module.register_forward_hook(note))
        yield made


@contextmanager
def input_shapes(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[torch.Size]]]:
    """Records the shapes of the inputs that layers are called with."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}
    with _before_calls(layers, lambda name, shape: shapes[name].append(shape)):
        yield shapes


@contextmanager
def _before_calls(layers: Mapping[str, nn.Module], see: Callable[[str, torch.Size], None]) -> Iterator[None]:
    """Calls a function with a layer's name and its input's shape before each call of the layer."""

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, PackedSequence):  # as it was before it was packed
                batch, steps = int(x.batch_sizes[0]), len(x.batch_sizes)
                first = (batch, steps) if getattr(layer, "batch_first", True) else (steps, batch)
                return see(name, torch.Size((*first, x.data.shape[-1])))
            for tensor in tensors(x):
                return see(name, tensor.shape)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = partial(note, name)
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        yield


@contextmanager
def explaining_shapes(net: Any, inputs: Inputs, argument: str = "x") -> Iterator[None]:
    """Rewords an error of the block, if its cause is that the inputs do not fit a layer, to name that layer."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        message = None if out_of_memory(error) else _misfit(net, inputs, argument)
        if message is None:
            raise
        raise ValueError(message) from error


def _misfit(net: Any, inputs: Inputs, argument: str) -> str | None:
    """Runs the network once and says which layer gets inputs of the wrong width, or inputs without a batch."""
    net = net[0] if isinstance(net, nn.ModuleList) else net  # an ensemble has several
    layers = {name: m for name, m in net.named_modules() if (kind := layer_type(m)) and not kind.optional}
    calls: list[tuple[str, torch.Size]] = []
    args, kwargs = call_arguments(inputs)
    watch = _before_calls(layers, lambda name, shape: calls.append((name, shape)))
    with watch, evaluating(net), torch.no_grad(), suppress(Exception):  # the error that is to be explained
        net(*args, **kwargs)
    given = next(tensors(inputs)).shape
    for name, shape in calls:
        kind, layer = carried_type(layers[name]), layers[name]
        width, inner = next(iter(kind.ports(layer).values())), -kind.axis
        alone = len(shape) <= inner  # without a batch, which only matters to layers that read the inputs
        if shape != given if alone else shape[kind.axis] == width:
            continue
        wanted = ", ".join(["rows" if len(shape) <= inner + 1 else "…", str(width), *["…"] * (inner - 1)])
        got = f"shape {tuple(given)}" + ("" if shape == given else f", which gives it {tuple(shape)}")
        remedy = "Pass a batch, x[None] for one row." if alone else "Pass inputs of the size it was built for."
        expected = f"such that layer {name or '(net)'!r} ({type(layer).__name__}) gets an input of shape ({wanted})"
        return complaint(argument, expected, got, remedy)
    return None


@contextmanager
def batch_axes(net: nn.Module, latents: Mapping[str, "Latent"], call: Call) -> Iterator[None]:
    """Tells each latent, in a forward pass with a z for each row, which axis of its layer's input is the batch.

    The batch is expected first, or where a layer says it is. At the first input whose shape is ambiguous (steps before
    the batch, as many steps as rows, windows folded into the batch), the network is run twice without gradients, in
    eval mode and without latents, on batches of two lengths: the axis that grows is the batch.

    Raises:
        ValueError: If a layer sees no batch, or not always in the same place.
    """
    rows, layers = batch_length(call), {name: net.get_submodule(name) for name in latents}
    kinds = {name: layer_type(layer) for name, layer in layers.items()}
    own = {name: kind.batch_axis(layers[name]) for name, kind in kinds.items() if kind and kind.batch_axis}
    axes = dict.fromkeys(layers, 0) | own
    settled = False  # whether the network has been run to find out

    def see(name: str, shape: torch.Size) -> None:
        nonlocal settled
        places = [axis for axis, n in enumerate(shape[: max(1, len(shape) - 1)]) if n == rows]
        if not settled and places != [axes[name]]:
            settled = True
            held = [latent.z for latent in latents.values()]
            for latent in latents.values():
                latent.z = None
            axes.update(grown_axes(net, layers, own, call))
            for latent, z, axis in zip(latents.values(), held, axes.values(), strict=True):
                latent.z, latent.batch_axis = z, axis
        latents[name].batch_axis = axes[name]

    with _before_calls(layers, see):
        yield


def grown_axes(
    net: nn.Module, layers: Mapping[str, nn.Module], own: Mapping[str, int], call: Call, *, strict: bool = True
) -> dict[str, int]:
    """Returns the axis of each layer's input that grows with the batch; {} if the network takes no other length.

    Args:
        net: The network, which is run twice, on batches of two lengths.
        layers: The layers, by name.
        own: Batch axes that layers determine themselves, by name.
        call: What one call of the network takes.
        strict: Whether a layer that sees no batch is an error; if not, it is left out.
    """
    rows = batch_length(call)
    longer = tree_map(lambda t: torch.cat([t, t[:1]]) if t.dim() and len(t) == rows else t, call)
    seen: list[dict[str, list[torch.Size]]] = []
    for args, kwargs in (call, longer):
        try:
            with input_shapes(layers) as shapes, evaluating(net), torch.no_grad():
                net(*args, **kwargs)
        except Exception:
            return {}
        seen.append(shapes)
    axes: dict[str, int] = {}
    for name in layers:
        calls = list(zip(seen[0][name], seen[1][name], strict=False))
        grown = [
            {axis for axis, (n, m) in enumerate(zip(*c, strict=False)) if n * (rows + 1) == m * rows} for c in calls
        ]
        allowed = {own[name]} if name in own else set().union(*grown)
        if calls and not allowed.intersection(*grown):
            if not strict:
                continue
            place = f"a dimension {own[name]}" if name in own else "a dimension"
            short, long = min(zip(grown, calls, strict=True), key=lambda pair: len(pair[0]))[1]
            expected = f"of {place} that is the batch ({rows} rows) or a multiple of it, the same in all its calls"
            got = f"shape {tuple(short)} for {rows} rows and {tuple(long)} for {rows + 1}"
            raise ValueError(batchless(name, expected, got))
        axes[name] = min(allowed.intersection(*grown), default=own.get(name, 0))
    return axes


# ---------------------------------------------------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """Measures the peak bytes of tensors made in a block, without the workspaces of kernels."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Takes tensors made before: views of them do not count, nor memory that `layers` keeps between passes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self._alive = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in (*known, *pools(), *kept_memory())}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._alive += storage.nbytes()
                self.bytes = max(self.bytes, self._alive)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


@contextmanager
def saved_bytes(known: Iterable[Tensor] = ()) -> Iterator[SimpleNamespace]:
    """Counts the bytes of distinct storages, but those of known tensors, that a block keeps for its backward pass."""
    own = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice
    saved = SimpleNamespace(bytes=0)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage
            saved.bytes += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    words = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error).lower() for w in words)
