"""A second device without hardware: it computes on the CPU, refuses the CPU's tensors, and counts talk with the host.

`Sim` wraps a tensor of the CPU. Its operations run on what it wraps. They raise where a tensor of the CPU with axes
meets one of the device, as a GPU would, and at float64, which some devices do not have. `count()` counts what would
make a GPU wait: values read by the host (`.item()`, `bool(t)`), copies to the host, and copies to the device.

A device stays registered for the life of a process, so tests run it in one of their own (`device_contract.py`).
"""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from ibnn.units import PLAIN


class _Backend(_DummyBackendModule):
    """The device's module: its generator is that of the CPU."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


DEVICE = "sim:0"
TALK: Counter[str] = Counter()
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default,
         torch.ops.aten.is_nonzero.default}  # fmt: skip
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}  # every device takes indices of the CPU


class Sim(Tensor):
    """A tensor of the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Sim":
        if inner.dtype == torch.float64:
            raise TypeError("the simulated device has no float64, as some devices have none")
        made: Sim = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})

    def tolist(self) -> Any:
        TALK["reads"] += 1
        return self.inner.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert a sim:0 tensor to numpy; copy it to the CPU first")

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def __repr__(self, **options: Any) -> str:
        return f"Sim({self.inner!r})"


@functools.cache
def register() -> None:
    """Makes the device known to torch, and to the library's kernels."""
    _setup_privateuseone_for_python_backend("sim", backend_module=_Backend())
    PLAIN.add(Sim)


def on_sim(device: Any) -> bool:
    return device is not None and torch.device(device).type == "sim"


def _gru_cell(x: Tensor, h: Tensor, hx: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor]:
    """What devices other than the CPU have as a fused operator, for an evaluation without gradients."""
    x, h = (x + biases[0], h + biases[1]) if biases and biases[0] is not None else (x, h)
    (r, u, n), (r_h, u_h, n_h) = x.chunk(3, -1), h.chunk(3, -1)
    u, n = (u + u_h).sigmoid(), (n + (r + r_h).sigmoid() * n_h).tanh()
    return n + u * (hx - n), x.new_zeros(0)


def _lstm_cell(x: Tensor, h: Tensor, c: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    both = x + h + (sum(biases) if biases and biases[0] is not None else 0)
    i, f, g, o = both.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, x.new_zeros(0)


CELLS: dict[Any, Any] = {
    torch.ops.aten._thnn_fused_gru_cell.default: _gru_cell,
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm_cell,
}


def dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator on what the device's tensors wrap."""
    flat = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    mixed = any(isinstance(t, Sim) for t in flat)
    target = kwargs.get("device")
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if mixed and not copies:
        moved = [t for t in args[1] if isinstance(t, Tensor) and not isinstance(t, Sim)] if func in INDEXING else []
        TALK["to device"] += len(moved)
        for t in flat:
            if not isinstance(t, Sim) and t.device.type == "cpu" and t.dim() > 0 and not any(t is m for m in moved):
                raise RuntimeError(f"Expected all tensors on one device, but {func} got sim:0 and cpu {tuple(t.shape)}")
    if func in READS and mixed:
        TALK["reads"] += 1
    inner_args, inner_kwargs = pytree.tree_map(lambda t: t.inner if isinstance(t, Sim) else t, (args, kwargs))
    if target is not None:
        inner_kwargs["device"] = "cpu"
    stays = on_sim(target) if target is not None else mixed
    if func is torch.ops.aten._to_copy.default and target is not None and on_sim(target) != mixed:
        TALK["to device" if on_sim(target) else "to host"] += 1
    if func is torch.ops.aten.copy_.default:
        stays = isinstance(args[0], Sim)
        if stays != isinstance(args[1], Sim) and args[1].dim() > 0:
            TALK["to device" if stays else "to host"] += 1
    found = CELLS.get(func, func)(*inner_args, **inner_kwargs)
    if func is torch.ops.aten.equal.default or not stays:
        return found
    wrapped = pytree.tree_map(lambda t: Sim(t) if isinstance(t, Tensor) else t, found)
    if not mixed:
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class _Factories(TorchDispatchMode):
    """Makes tensors on the device where `device="sim"` is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = any(isinstance(t, Sim) for t in pytree.tree_leaves((args, kwargs)))
        if given or on_sim(kwargs.get("device")):
            return dispatched(func, args, kwargs)
        return func(*args, **kwargs)


class _Constructors(TorchFunctionMode):
    """`torch.tensor` and the like copy below dispatch modes: made on the CPU first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and on_sim(kwargs.get("device")):
            device = kwargs.pop("device")
            if args and isinstance(args[0], Sim):
                return args[0]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextmanager
def simulated() -> Iterator[None]:
    """Lets `device="sim"` work within a block."""
    register()
    with _Factories(), _Constructors():
        yield


@contextmanager
def count() -> Iterator[Counter[str]]:
    """Counts talk with the host within a block."""
    before, found = Counter(TALK), Counter[str]()
    yield found
    found.update({name: TALK[name] - before[name] for name in ("reads", "to host", "to device")})
