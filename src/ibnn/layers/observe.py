"""WATCH: what forward passes do: weights read outside their layer's call, batch axes, bytes kept for backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ibnn.errors import complaint
from ibnn.inputs import Call, Inputs, batch_length, call_arguments, evaluating, tensors, tree_map
from ibnn.layers.registry import batchless, carried_type, layer_type

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
    with _before_calls(layers, lambda name, shape, x: shapes[name].append(shape)):
        yield shapes


_See = Callable[[str, torch.Size, Tensor | None], None]


@contextmanager
def _before_calls(layers: Mapping[str, nn.Module], see: _See) -> Iterator[None]:
    """Calls a function with a layer's name, its input's shape and its input, unless packed, before each call."""

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, PackedSequence):  # as it was before it was packed
                batch, steps = int(x.batch_sizes[0]), len(x.batch_sizes)
                first = (batch, steps) if getattr(layer, "batch_first", True) else (steps, batch)
                return see(name, torch.Size((*first, x.data.shape[-1])), None)
            for tensor in tensors(x):
                return see(name, tensor.shape, tensor)

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
    watch = _before_calls(layers, lambda name, shape, x: calls.append((name, shape)))
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


# ------------------------------------------------------------------------------------------------------- batch axes


ADDED = (0, 0, 1)  # rows that are added to a batch to find it: not alike in number, nor all last where rows are sorted


class Place(NamedTuple):
    """Where a layer's input has the rows of the batch."""

    axis: int
    copied: bool = False  # whether what is folded into the batch comes as copies of it (i mod rows), not row by row
    folds: frozenset[int] = frozenset()  # entries of the axis for a row, in the calls seen


def find_batch(net: nn.Module, latents: Mapping[str, "Latent"], call: Call) -> None:
    """Tells each latent which axis of its layer's input is the batch, and how rows are folded into it.

    The network is run twice, without latents: see `places`; not if it is a sequence of torch's own layers, which keep
    the batch first. Layers that are not called then expect it first, or where they say it is, as all do in a network
    that takes no other batch length.

    Raises:
        ValueError: If a layer sees no batch, not always in the same place, or its rows in another order.
    """
    layers = {name: net.get_submodule(name) for name in latents}
    kinds = {name: layer_type(layer) for name, layer in layers.items()}
    own = {name: kind.batch_axis(layers[name]) for name, kind in kinds.items() if kind and kind.batch_axis}
    held = [latent.z for latent in latents.values()]
    try:
        for latent in latents.values():
            latent.z = None
        found = {} if not own and _in_line(net) else places(net, layers, own, call)
    finally:
        for latent, z in zip(latents.values(), held, strict=True):
            latent.z = z
    for name, latent in latents.items():
        axis, copied, folds = found.get(name, Place(own.get(name, 0)))
        if folds or not latent.folds:  # it was called, or not before either
            latent.batch_axis, latent.copied, latent.folds = axis, copied, latent.folds | folds


def _in_line(net: nn.Module) -> bool:
    """Whether a network is a sequence of torch's own modules, and none of them moves the batch."""
    own = [m for name, m in net.named_modules() if not name.endswith("latent")]
    chained = all(type(m) is nn.Sequential or not (m._modules.keys() - {"latent"}) for m in own)
    return chained and all(
        type(m).__module__.startswith("torch.nn.modules.")
        and getattr(m, "start_dim", 1) != 0  # of Flatten
        and not (isinstance(m, nn.Unflatten) and m.dim == 0)
        for m in own
    )


def places(
    net: nn.Module, layers: Mapping[str, nn.Module], own: Mapping[str, int], call: Call, *, strict: bool = True
) -> dict[str, Place]:
    """Returns where each layer's input has the batch; {} if the network takes no other batch length.

    The axis that grows with the batch is the batch, and what it holds says in which order: rows that are added last
    move nothing that was before them if rows come one by one, and nothing in a copy of the batch if copies do.

    Args:
        net: The network, which is run twice in eval mode without gradients, on batches of two lengths.
        layers: The layers, by name.
        own: Batch axes that layers determine themselves, by name.
        call: What one call of the network takes.
        strict: Whether a layer that sees no batch, or its rows in another order, is an error; if not, it is left out.
    """
    rows = batch_length(call)
    added = torch.tensor(ADDED) % rows
    longer = tree_map(lambda t: torch.cat([t, t[added.to(t.device)]]) if t.dim() and len(t) == rows else t, call)
    devices = {tensor.device.index for tensor in tensors(call) if tensor.is_cuda}
    seen: list[dict[str, list[_Look]]] = []
    for (args, kwargs), length in ((call, rows), (longer, rows + len(ADDED))):
        looks: dict[str, list[_Look]] = {name: [] for name in layers}
        watch = _before_calls(layers, lambda name, shape, x: looks[name].append(_Look.at(shape, x, length)))  # noqa: B023
        try:
            with watch, evaluating(net), torch.no_grad(), torch.random.fork_rng(list(devices)):
                net(*args, **kwargs)
        except Exception:
            return {}
        seen.append(looks)
    found: dict[str, Place] = {}
    for name in layers:
        calls = list(zip(seen[0][name], seen[1][name], strict=False))
        grown = [short.grown(long, rows) for short, long in calls]
        allowed = {own[name]} if name in own else set().union(*grown)
        axes = allowed.intersection(*grown)
        orders = {axis: {short.order(long, axis, rows) for short, long in calls} - {None} for axis in axes}
        fit = [axis for axis in sorted(axes) if len(orders[axis]) < 2 and "other" not in orders[axis]]
        if calls and not fit:
            if not strict:
                continue
            raise ValueError(_misplaced(name, own.get(name), rows, axes, list(zip(grown, calls, strict=True))))
        axis = fit[0] if calls else own.get(name, 0)
        folds = frozenset(short.shape[axis] // rows for short, _ in calls)
        found[name] = Place(axis, "copies" in orders.get(axis, ()), folds)
    return found


class _Look(NamedTuple):
    """What a layer's input looks like in one call."""

    shape: torch.Size
    prints: dict[int, Tensor]  # by axis that may hold the batch: a few numbers for each entry, (n, 8)
    eps: float  # of the input's dtype

    @staticmethod
    def at(shape: torch.Size, x: Tensor | None, rows: int) -> "_Look":
        """Looks at the input of a layer, if it is known, in a batch of so many rows."""
        if x is None or not x.numel():
            return _Look(shape, {}, 0.0)
        axes = [axis for axis, n in enumerate(shape) if n % rows == 0]
        eps = torch.finfo(x.dtype if x.is_floating_point() else torch.float32).eps
        return _Look(shape, {axis: _prints(x.movedim(axis, 0).reshape(shape[axis], -1)) for axis in axes}, eps)

    def grown(self, longer: "_Look", rows: int) -> set[int]:
        """Returns the axes that grow with the batch."""
        both = enumerate(zip(self.shape, longer.shape, strict=False))
        return {axis for axis, (n, m) in both if n * (rows + len(ADDED)) == m * rows}

    def order(self, longer: "_Look", axis: int, rows: int) -> str | None:
        """Returns whether entries come as "rows" or "copies" of the batch, in an "other" order, or None if unknown."""
        a, b = self.prints.get(axis), longer.prints.get(axis)
        if a is None or b is None:
            return None
        kept = {"rows": b[: len(a)], "copies": b.unflatten(0, (-1, rows + len(ADDED)))[:, :rows].flatten(0, 1)}
        apart = {order: (a - entries).abs().amax(1) for order, entries in kept.items()}
        spread = (a - a.mean(0)).abs().max()
        close = self.eps**0.5 * spread + 100 * self.eps * a.abs().max()  # rounding differs with the batch's length
        same = [order for order, gap in apart.items() if not gap.max() > close]
        if same:
            return same[0] if len(same) == 1 else None
        again = torch.cdist(a[apart["rows"] > close][:64], b, float("inf")).amin(1) <= close
        return "other" if again.all() else None  # else rows affect each other, and nothing can be said


def _prints(entries: Tensor) -> Tensor:
    """Returns eight numbers for each row that tell rows apart."""
    wide = torch.float64 if entries.dtype == torch.float64 else torch.float32
    places = torch.arange(1, entries.shape[1] + 1, device=entries.device, dtype=wide)[:, None]
    turns = torch.tensor([2.4, 1.1, 3.7, 0.7, 5.3, 1.9, 4.1, 2.9], device=entries.device, dtype=wide)
    prints: Tensor = entries.to(wide) @ torch.cos(places * turns) / entries.shape[1] ** 0.5
    return prints


def _misplaced(
    name: str, own: int | None, rows: int, axes: set[int], calls: list[tuple[set[int], tuple[_Look, _Look]]]
) -> str:
    """Words an error about a layer that does not see the batch as it should."""
    short, long = min(calls, key=lambda pair: len(pair[0]))[1]
    if axes:
        expected = f"of the batch's {rows} rows in their order, or of copies of the batch, the same in all its calls"
        return batchless(name, expected, f"shape {tuple(short.shape)}, with the rows in another order")
    place = "a dimension" if own is None else f"a dimension {own}"
    expected = f"of {place} that is the batch ({rows} rows) or a multiple of it, the same in all its calls"
    got = f"shape {tuple(short.shape)} for {rows} rows and {tuple(long.shape)} for {rows + len(ADDED)}"
    return batchless(name, expected, got)


# ---------------------------------------------------------------------------------------------------------- memory


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
