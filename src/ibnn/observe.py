"""WATCH: finds layers whose weight is read although they are not called, where a latent would have no effect."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Reads(TorchFunctionMode):
    """Notes which of the watched tensors enter a torch function that returns a tensor."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self.watched, self.seen = watched, set[int]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if next(tensors(result), None) is not None:  # not the likes of weight.shape
            self.seen |= {id(tensor) for tensor in tensors((args, kwargs))} & self.watched
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
    """Watches forward passes of `net`; on leaving, the set holds the names of `layers` read but not called.

    A weight that a called module owns too (tied weights) does not count as read behind its layer's back.
    """
    own = {name: {id(p) for p in _weights(layer)} for name, layer in layers.items()}
    watched: set[int] = set().union(*own.values())
    called: set[int] = set()  # weights that a module of their own was called with

    def note(module: nn.Module, args: Any) -> None:
        called.update(id(p) for p in _weights(module))

    owners = [m for m in net.modules() if watched & {id(p) for p in _weights(m)}]
    handles = [owner.register_forward_pre_hook(note) for owner in owners]
    names: set[str] = set()
    try:
        with _Reads(watched) as reads:
            yield names
        names |= {name for name, weights in own.items() if weights & reads.seen and not weights & called}
    finally:
        for handle in handles:
            handle.remove()


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """A module's own parameters, with those behind its parametrisations, without its latent's."""
    yield from module.parameters(recurse=False)
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        yield from parametrizations.parameters()
