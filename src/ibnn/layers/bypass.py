"""Finds weights that a network reads outside the calls of their layers, past the latents."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from ibnn.inputs import tensors


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
