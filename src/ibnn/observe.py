"""WATCH: finds what a latent cannot serve: weights read outside their layer's call, layers that see no batch first."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from ibnn.errors import complaint
from ibnn.inputs import batch_length, evaluating, tensors, tree_map


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
def input_shapes(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[torch.Size]]]:
    """Collects the shapes of the inputs that layers are called with."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in layers}

    def note(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        shapes[name] += [tensor.shape for tensor in tensors((args, kwargs))][:1]

    handles = [
        layer.register_forward_pre_hook(partial(note, name), with_kwargs=True, prepend=True)
        for name, layer in layers.items()
    ]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


def check_batch_first(
    net: nn.Module, layers: Mapping[str, nn.Module], seen: Mapping[str, list[torch.Size]], args: Any, kwargs: Any
) -> None:
    """Raises if the leading dimension of a layer's input does not grow with the batch.

    Where the two agree only by chance (a sequence as long as the batch, put first), rows would get each other's z. If
    the shapes `seen` leave that open, runs the network twice without gradients, in eval mode and without latents, on
    batches of two lengths.
    """
    rows = batch_length((args, kwargs))
    if all(shape[0] == rows and rows not in shape[1:-1] for shapes in seen.values() for shape in shapes):
        return
    longer = tree_map(lambda t: torch.cat([t, t[:1]]) if t.dim() and len(t) == rows else t, (args, kwargs))
    met: list[dict[str, list[torch.Size]]] = []
    for positional, named in ((args, kwargs), longer):
        try:
            with input_shapes(layers) as shapes, evaluating(net), torch.no_grad():
                net(*positional, **named)
        except Exception:
            return  # a network of one batch size only: nothing to compare
        met.append(shapes)
    for name in layers:
        for short, long in zip(met[0][name], met[1][name], strict=False):
            if short[0] * (rows + 1) != long[0] * rows:
                raise ValueError(
                    complaint(
                        f"input of layer {name!r}",
                        "of a leading dimension that is the batch or a multiple of it",
                        f"shape {tuple(short)} for {rows} rows and {tuple(long)} for {rows + 1}",
                        f"If this layer does not see the batch first, leave it out: exclude=[{name!r}].",
                    )
                )
