"""One layer's variational parameters, and how the layer's input x is multiplied by z.

A `Latent` is a child of its layer and replaces the layer's forward by `Latent.run`: the layer's own forward on x ∘ z,
or a kernel that computes the same with less time and memory (`ibnn.kernels`). Outside of ibnn's own passes z is the
mean of the component means, or absent if the posterior is that of conversion. The layer keeps its class, its
parameters' names and its hooks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.layers.registry import batchless, carried_type, foldable, stand_in, weights_are_parameters
from ibnn.units import Units

NARROW = 5  # spatial inputs of fewer channels are narrow: an image's colours
Search = Callable[["Latent", int], None]


class Recall(NamedTuple):
    """A backward pass, and z and units of its forward pass."""

    task: int
    z: Sequence[Tensor]
    units: Sequence[Units | None]


class Pass:
    """What multiplies the layers' inputs in the forward pass in progress; the latents of a network share one."""

    def __init__(self, at_mean: bool = False) -> None:
        self.at_mean = at_mean  # whether layers called outside of passes are multiplied by the mean of all means
        self.z: Sequence[Tensor] | None = None  # of each layer, (D,) or (R, D), a row each; None outside of passes
        self.units: Sequence[Units | None] = ()  # of each layer
        self.search_again: Search | None = None  # called by a layer that meets a batch folded in a new way
        self.entries = 0  # of inputs that were multiplied in the last pass
        self.recall: Recall | None = None  # the forward pass of the backward pass in progress
        self.without_graph: set[int] = set()  # layers whose z needed a gradient that was not recorded

    def __reduce__(self) -> Any:
        """Copies and pickles of a network have no pass in progress."""
        return Pass, (self.at_mean,)

    @contextmanager
    def multiplying(
        self, z: Sequence[Tensor], units: Sequence[Units | None], search_again: Search | None = None
    ) -> Iterator[None]:
        """Gives the layers their z and units within a block."""
        self.z, self.units, self.search_again, self.entries = z, units, search_again, 0
        try:
            yield
        finally:
            self.z = self.search_again = None

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Lets layers run their own forward, without z, within a block."""
        before = self.z, self.at_mean
        self.z, self.at_mean = None, False
        try:
            yield
        finally:
            self.z, self.at_mean = before

    def remember(self, z: Sequence[Tensor], units: Sequence[Units | None], gradient: Tensor) -> None:
        """Keeps z and units for layers that checkpointing runs again in the backward pass in progress."""
        self.recall = Recall(torch._C._current_graph_task_id(), z, units)  # as torch.utils.checkpoint asks


def _no_fast_path(latent: nn.Module, args: Any) -> None:
    """Does nothing: torch's fused Transformer layer, which reads weights past their layers, gives way to any hook."""


class Latent(nn.Module):
    """Mean μ and standard deviation σ = softplus(ρ) of K Gaussians over the D input nodes of one layer, (K, D) each.

    Attributes:
        inputs: Number of latents on the layer's input; others are on its output or bias (`contrib.sides`).
        placed: Whether the nodes of the input have places, as a convolution's do, and units can have factors.
        narrow: Whether the input is an image with fewer than 5 channels, such as RGB. A factor on such a channel would
            rescale the whole image. So the input gets almost no noise if other layers have some.

    >>> latent = Latent(components=2, nodes=3, axis=-1)
    >>> latent.mean.shape, latent.std.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    held: Tensor | None
    unit_factors: Tensor | None

    def __init__(
        self,
        components: int,
        nodes: int,
        axis: int,
        *,
        name: str = "",
        own_run: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Makes the parameters at μ = 1, σ = 0.05.

        `axis` is the input's node axis from its end (−1 of a linear layer, −3 of a 2-d convolution), `name` the layer's
        in its network. With `own_run` its type's `run` multiplies, as where a layer has several inputs or weights.
        """
        super().__init__()
        self.register_forward_pre_hook(_no_fast_path)
        self.components, self.nodes, self.axis, self.name, self.own_run = components, nodes, axis, name, own_run
        self.set_inputs(nodes)
        self.mean = nn.Parameter(torch.ones(components, nodes, dtype=dtype, device=device))
        self.rho = nn.Parameter(torch.empty(components, nodes, dtype=dtype, device=device))
        self.set(std=torch.tensor(0.05))
        self.register_buffer("held", None)
        self.register_buffer("unit_factors", None)
        self.current_pass, self.number = Pass(), 0  # the pass in progress of the network, and the layer's place in it
        self.batch_axis, self.copied = 0, False  # of the input; whether it holds copies of the batch, or row by row
        self.entries_per_row: frozenset[int] = frozenset()  # how many entries of that axis a row may have
        self.before: Callable[..., Any] | None = None  # a forward that was assigned to the layer itself

    @property
    def std(self) -> Tensor:
        """σ = softplus(ρ), (K, D)."""
        return F.softplus(self.rho)

    def set(self, mean: Tensor | None = None, std: Tensor | None = None) -> None:
        """Overwrites μ and/or σ with what broadcasts to (K, D)."""
        with torch.no_grad():
            if mean is not None:
                self.mean.copy_(mean)
            if std is not None:
                self.rho.copy_(inverse_softplus(std.cpu().double()))

    def set_inputs(self, count: int) -> None:
        """Sets how many latents are on the layer's input, and what follows from that."""
        self.inputs = count
        self.narrow, self.placed = self.axis < -1 and 0 < count < NARROW, self.axis < -1 and count >= NARROW

    def hold(self, z: Tensor, unit_factors: Tensor | None = None) -> None:
        """Replaces the distribution by draws z (J, D), u (J, D, …) for an export, which runs J copies of a batch."""
        del self.mean, self.rho
        self.held, self.unit_factors = z, unit_factors

    # ----------------------------------------------------------------------------------------------- forward passes

    def current(self) -> tuple[Tensor | None, Units | None]:
        """Returns z and the units of the pass in progress, or of the one that a backward pass repeats."""
        if self.held is not None:
            return self.held, None
        current, number = self.current_pass, self.number
        if current.z is not None:
            z = current.z[number]
            if z.requires_grad and torch.is_grad_enabled():
                current.without_graph.discard(number)
            elif z.requires_grad:  # predictions in between need no gradient
                current.without_graph.add(number)
            return z, current.units[number]
        recall = current.recall
        if recall is None or recall.task != torch._C._current_graph_task_id():
            return (self.mean.mean(0) if current.at_mean else None), None
        if number in current.without_graph:
            remedy = "Pass use_reentrant=False to checkpoint: the other kind loses the latents' gradient."
            raise RuntimeError(complaint("use_reentrant", "False in gradient checkpointing", True, remedy))
        return recall.z[number], recall.units[number]

    def run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Forward of the layer: its own on x ∘ z, or a kernel that computes the same."""
        return self.run_input(layer, *self.current(), *args, **kwargs)

    def run_input(self, layer: nn.Module, z: Tensor | None, units: Units | None, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer on x ∘ z, and times the units' factors."""
        if z is None:
            return self.own_forward(layer, *args, **kwargs)
        if self.own_run:
            return self._run_of_type(layer, z, *args, **kwargs)
        if not args:  # the input came by keyword
            args = (kwargs.pop("input" if "input" in kwargs else next(iter(kwargs))),)
        x = args[0]
        self._check_fold(x, z, self.batch_axis)
        if not torch.compiler.is_compiling():
            self.current_pass.entries += x.numel()
            alone = len(args) + len(kwargs) == 1 and self.before is None
            if alone and z.dim() == 1 and units is None and self._folding_pays(layer, x):
                return type(layer).forward(stand_in(layer, self.folded(layer, z)), self._cast(x, z))
            if alone:
                from ibnn import kernels  # on first use

                if (output := kernels.run(layer, x, z, self.batch_axis, units)) is not None:
                    return output
        return self.own_forward(layer, self.multiply(x, z, self.batch_axis, units), *args[1:], **kwargs)

    def own_forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs what the layer would run without its latent."""
        return type(layer).forward(layer, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)

    def _run_of_type(self, layer: nn.Module, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Forward of a layer whose type has a `run`: that, or its own with W = U diag(z) for one z of all rows."""
        kind = carried_type(layer)
        assert kind.run is not None
        if z.dim() == 1 and kind.fused and not torch.compiler.is_compiling() and weights_are_parameters(layer, kind):
            return type(layer).forward(stand_in(layer, self.folded(layer, z)), *args, **kwargs)
        axis = kind.batch_axis(layer) if kind.batch_axis else self.batch_axis
        self._check_fold(args[0] if args else next(iter(kwargs.values()), None), z, axis)
        z = z.reshape(-1, self.nodes)  # one z for all rows becomes one row, which broadcasts
        return kind.run(layer, self, kind.split(layer, z), *args, **kwargs)

    def folded(self, layer: nn.Module, z: Tensor) -> dict[str, Tensor]:
        """Returns the layer's weights U diag(z) by name."""
        like = next(layer.parameters(recurse=False), self.mean)
        return carried_type(layer).fold(layer, z.to(dtype=like.dtype, device=like.device))

    def _folding_pays(self, layer: nn.Module, x: Tensor) -> bool:
        """Whether, without gradients, U diag(z) takes fewer products than x ∘ z."""
        entries = sum(p.numel() for p in layer.parameters(recurse=False))
        return not torch.is_grad_enabled() and x.numel() > entries and foldable(layer)

    def _check_fold(self, x: Any, z: Tensor, axis: int) -> None:
        """Has the batch searched for again if an input has more or fewer entries for a row than those before."""
        if self.current_pass.search_again is None or z.dim() != 2 or not isinstance(x, Tensor) or x.dim() <= axis:
            return
        if (times := x.shape[axis] // z.shape[0]) not in self.entries_per_row:
            self.current_pass.search_again(self, times)

    def multiply(self, x: Tensor, z: Tensor, batch_axis: int = 0, units: Units | None = None) -> Tensor:
        """Returns x ∘ z, and times the units' factors."""
        x = self._cast(x, z)
        if (held := self.unit_factors) is not None:  # z (J, D) and u (J, D, …), for the rows of J copies of a batch
            factors = (z.reshape(*z.shape, *[1] * (held.dim() - 2)) * held)[:, None]
            factors = factors.expand(-1, x.shape[batch_axis] // z.shape[0], *[-1] * (held.dim() - 1))
            return x * factors.flatten(0, 1).to(x.dtype)
        z = self.broadcast(z, x, batch_axis)
        return x * z if units is None else x * (z * units.factors(x, self.axis, batch_axis, self.copied))

    def _cast(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns an input in the latent's dtype (an integer one would round z); autocast handles lower precisions."""
        lower = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        autocast = lower and torch.is_autocast_enabled(x.device.type)
        return x if x.dtype == z.dtype or autocast else x.to(z.dtype)

    def broadcast(self, z: Tensor, x: Tensor, batch_axis: int = 0) -> Tensor:
        """Returns z in a shape that multiplies the node axis of x."""
        if x.dim() < -self.axis or x.shape[self.axis] != z.shape[-1]:  # one node would be broadcast to all
            wanted, got = f"of {z.shape[-1]} nodes in dimension {self.axis}", f"shape {tuple(x.shape)}"
            raise ValueError(complaint(f"input of layer {self.name!r}", wanted, got, "Pass inputs of that size."))
        shape = [1] * x.dim()
        shape[self.axis] = z.shape[-1]
        if z.dim() == 2:
            z = self.rows(z, x.shape, batch_axis)
            shape[batch_axis] = x.shape[batch_axis]
        return z.to(dtype=x.dtype, device=x.device).reshape(shape)

    def rows(self, z: Tensor, shape: Sequence[int], batch_axis: int) -> Tensor:
        """Returns the z of every entry of an input's batch axis; windows or copies of an example share its z."""
        rows = z.shape[0]  # not len: torch.export would fix it
        if len(shape) + self.axis <= batch_axis or shape[batch_axis] % rows:
            expected = f"of a dimension {batch_axis} that is the batch ({rows} rows) or a multiple of it"
            raise ValueError(batchless(self.name, expected, f"shape {tuple(shape)}"))
        if shape[batch_axis] == rows:
            return z
        times = shape[batch_axis] // rows
        if self.copied:
            return z[None].expand(times, -1, -1).flatten(0, 1)
        return z[:, None].expand(-1, times, -1).flatten(0, 1)  # as repeat_interleave, which ONNX does not have

    def extra_repr(self) -> str:
        """What `print` shows of the latent."""
        return f"components={self.components}, nodes={self.nodes}"


def inverse_softplus(y: Tensor) -> Tensor:
    """Returns ρ with softplus(ρ) = y ≥ 0."""
    return y + torch.log(-torch.expm1(-y))


def attach(layer: nn.Module, name: str, components: int, make: Callable[..., Latent] = Latent) -> Latent:
    """Gives a layer its latent, whose `run` becomes the layer's forward."""
    kind, like = carried_type(layer), next(layer.parameters())  # its weight may be computed, with side effects
    form: Any = {"name": name, "own_run": kind.run is not None, "dtype": like.dtype, "device": like.device}
    latent = make(components, kind.nodes(layer), kind.axis, **form)
    layer.add_module("latent", latent.train(layer.training))
    latent.before = vars(layer).get("forward")
    layer.forward = partial(latent.run, layer)
    return latent


def strip(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Removes every latent from a network, in place; returns the layers that had one, by name."""
    # Not getattr: wrappers (peft's) forward attributes of the module they wrap.
    layers = [(name, m) for name, m in net.named_modules() if isinstance(m._modules.get("latent"), Latent)]
    for _, layer in layers:
        latent: Any = layer._modules["latent"]
        if runs(layer, latent):
            del layer.forward
            if latent.before is not None:
                layer.forward = latent.before
        del layer.latent
    return layers


def runs(layer: nn.Module, latent: Latent) -> bool:
    """Whether the layer's forward is its latent's `run`."""
    return getattr(getattr(vars(layer).get("forward"), "func", None), "__self__", None) is latent
