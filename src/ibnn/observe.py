"""WATCH: finds layers whose weight is read outside their own call, where a latent would have no effect."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode


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


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order.

    >>> import torch
    >>> [len(t) for t in tensors({"a": torch.zeros(2), "b": (torch.zeros(3), None)})]
    [2, 3]
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors(value)


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
