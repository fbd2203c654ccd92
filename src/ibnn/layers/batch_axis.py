"""Finds the batch in the inputs of layers: which axis it is, and how rows are folded into it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ibnn.inputs import Call, batch_length, evaluating, tensors, tree_map
from ibnn.layers.registry import batchless, layer_type

if TYPE_CHECKING:
    from ibnn.latent import Latent

ADDED = (0, 0, 1)  # rows that are added to a batch to find it: not alike in number, nor all last where rows are sorted


class Place(NamedTuple):
    """Where a layer's input has the rows of the batch."""

    axis: int
    copied: bool = False  # whether what is folded into the batch comes as copies of it (i mod rows), not row by row
    folds: frozenset[int] = frozenset()  # entries of the axis for a row, in the calls seen


def find_batch(net: nn.Module, latents: Mapping[str, "Latent"], call: Call) -> None:
    """Sets which axis of each latent's input is the batch, and how rows are folded into it.

    The network is run twice without latents (see `places`), unless it is a sequence of torch's own layers, which keep
    the batch first: its first pass, in whatever thread, leaves torch's generator alone.
    """
    layers = {name: net.get_submodule(name) for name in latents}
    with ExitStack() as without_latents:
        for shared in {latent.current_pass for latent in latents.values()}:
            without_latents.enter_context(shared.absent())
        first = Place(0, folds=frozenset({1}))
        found = dict.fromkeys(layers, first) if _in_line(net) else places(net, layers, call)
    for name, latent in latents.items():
        axis, copied, folds = found[name]
        if folds or not latent.entries_per_row:  # it was called, or not before either
            latent.batch_axis, latent.copied, latent.entries_per_row = axis, copied, latent.entries_per_row | folds


def _in_line(net: nn.Module) -> bool:
    """Whether a network is a sequence of torch's own modules, and none of them moves the batch."""
    own = [m for name, m in net.named_modules() if name.rpartition(".")[2] != "latent"]
    chained = all(type(m) is nn.Sequential or not (m._modules.keys() - {"latent"}) for m in own)
    return chained and all(
        type(m).__module__.startswith("torch.nn.modules.")
        and getattr(m, "start_dim", 1) != 0  # of Flatten
        and not (isinstance(m, nn.Unflatten) and m.dim == 0)
        and _own_axis(m) is None
        for m in own
    )


def _own_axis(layer: nn.Module) -> int | None:
    """Returns the batch axis that a layer determines itself, or None."""
    kind = layer_type(layer)
    return kind.batch_axis(layer) if kind and kind.batch_axis else None


def places(net: nn.Module, layers: Mapping[str, nn.Module], call: Call, *, strict: bool = True) -> dict[str, Place]:
    """Returns where each layer's input has the batch: in axis 0, or its own, if none is found, as by a failing network.

    The network runs twice in eval mode on batches of two lengths. The axis that grows with the batch is the batch, and
    what it holds says in which order: rows that are added last move nothing that was before them if rows come one by
    one, and nothing in a copy of the batch if copies do. A layer that sees no batch, or its rows in another order, is
    an error if `strict`, and else left out. One that is not reached has it in axis 0, too.
    """
    own = {name: axis for name, layer in layers.items() if (axis := _own_axis(layer)) is not None}
    unknown = {name: Place(own.get(name, 0)) for name in layers}
    rows = batch_length(call)
    added = torch.tensor(ADDED) % rows
    longer = tree_map(lambda t: torch.cat([t, t[added.to(t.device)]]) if t.dim() and len(t) == rows else t, call)
    device = next(tensors(call)).device
    devices = [] if device.type == "cpu" else [device.index or 0]
    seen: list[dict[str, list[_Look]]] = []
    for (args, kwargs), length in ((call, rows), (longer, rows + len(ADDED))):
        looks: dict[str, list[_Look]] = {name: [] for name in layers}
        watch = before_calls(layers, lambda name, shape, x: looks[name].append(_Look.at(shape, x, length)))  # noqa: B023
        try:
            with watch, evaluating(net), torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
                net(*args, **kwargs)
        except Exception:
            return unknown
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
            place = f"a dimension {own[name]}" if name in own else "a dimension"
            expected = f"of {place} that is the batch ({rows} rows in their order) or copies of it, in all its calls"
            sizes = {tuple(short.shape): tuple(long.shape) for short, long in calls}.items()
            got = " and ".join(
                f"shape {short} for {rows} rows, {long} for {rows + len(ADDED)}" for short, long in sizes
            )
            raise ValueError(batchless(name, expected, got))
        axis = fit[0] if calls else own.get(name, 0)
        folds = frozenset(short.shape[axis] // rows for short, _ in calls)
        found[name] = Place(axis, "copies" in orders.get(axis, ()), folds)
    return found or unknown


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


_See = Callable[[str, torch.Size, Tensor | None], None]


@contextmanager
def before_calls(layers: Mapping[str, nn.Module], see: _See) -> Iterator[None]:
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
