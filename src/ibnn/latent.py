"""STATE: one layer's variational parameters, and how the layer's input x is multiplied by z.

A `Latent` is a child of its layer. Its `hook` runs before the layer's own forward and multiplies the input by z, so the
layer keeps its class, its parameters' names and its own hooks. While z is None the hook does nothing. `release` runs
after the layer and ends what `hook` began: see `recompute`. For layers of several ports (see `layers.registry`), `call`
replaces the layer's forward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from ibnn.errors import complaint
from ibnn.layers.direct import DIRECT, goes_direct
from ibnn.layers.product import product
from ibnn.layers.recompute import Recomputation
from ibnn.layers.registry import batchless, carried_type, folded_weights, replace_weights, weights_are_parameters
from ibnn.layers.sides import Sides
from ibnn.layers.units import Units

NARROW = 5  # fewer channels are narrow: an image's colours


def inverse_softplus(y: Tensor) -> Tensor:
    """Returns ρ with softplus(ρ) = y ≥ 0.

    >>> torch.allclose(F.softplus(inverse_softplus(torch.tensor([0.05, 3.0]))), torch.tensor([0.05, 3.0]))
    True
    """
    return y + torch.log(-torch.expm1(-y))


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])  # what changes with x is not scaled, only what is learnt from it


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Returns x; the gradient that comes back through it is multiplied by `scale`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_gradient(x, 3.0).sum().backward()
    >>> x.grad
    tensor([3., 3.])
    """
    scaled: Tensor = x if scale == 1.0 or not torch.is_grad_enabled() else _ScaleGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled


class Latent(nn.Module):
    """Mean and standard deviation of K Gaussians over the D input nodes of one layer.

    Attributes:
        mean: μ, (K, D).
        rho: ρ, (K, D); the standard deviation is σ = softplus(ρ).
        z: What the layer's input is multiplied by: None (nothing), (D,) for the whole batch, or (R, D), a row each.
            Set by the network during one forward pass.
        units: Factors of the single units of the input, which multiply it with z; None for none. Set with z.
        placed: Whether the nodes of the input have places, as a convolution's do, and units can have factors.
        narrow: Whether they have places but are few (an image's colours): such z multiply all that follows, and nothing
            averages out, so that units have no factors, and where other units have, nodes hardly any noise.
        recall: The backward pass in progress and the z and units of its forward pass, for a layer that is run again in
            it (gradient checkpointing).
        sides: Where the layer has latents, if not on its input alone: see `SidedLatent`.
        folding: Whether the layer computes with W = U diag(z) and an unchanged input instead of x ∘ z.
        batch_axis: The batch axis of the input, used where a layer of one port has a z for each row.
        copied: Whether what is folded into that axis comes as copies of the batch, and not row by row.
        folds: How many entries of that axis a row may have: see `settle`.
        settle: Called before an input with a z for each row that has another number; set with z.
        entries: How many input entries were multiplied by z in the last forward pass.
        after: What to do when the layer's calls in progress end, the innermost first.

    >>> latent = Latent(components=2, nodes=3, axis=-1)
    >>> latent.mean.shape, latent.std.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    sides: Sides | None = None
    z: Tensor | None
    units: Units | None
    recall: tuple[int, Tensor, Units | None] | None
    settle: "Callable[[Latent, int], None] | None"
    after: list[Callable[[], None]]

    def __init__(
        self,
        components: int,
        nodes: int,
        axis: int,
        *,
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Makes the parameters at μ = 1, σ = 0.05.

        Args:
            components: K.
            nodes: D.
            axis: The input's node axis, counted from its end: −1 for a linear layer, −3 for a 2-d convolution.
            name: The layer's name in its network, for messages.
            dtype: The layer's.
            device: The layer's.
        """
        super().__init__()
        self.components, self.nodes, self.axis, self.name = components, nodes, axis, name
        self.mean = nn.Parameter(torch.ones(components, nodes, dtype=dtype, device=device))
        self.rho = nn.Parameter(torch.empty(components, nodes, dtype=dtype, device=device))
        self.set(std=torch.tensor(0.05))
        self.z = self.units = self.recall = self.settle = None
        self.folding, self.entries, self.batch_axis, self.copied = False, 0, 0, False
        self.folds: frozenset[int] = frozenset()
        self.after = []
        self.without_graph = False  # whether the last z needed a gradient that was not recorded

    @property
    def std(self) -> Tensor:
        """σ = softplus(ρ), (K, D)."""
        return F.softplus(self.rho)

    @property
    def inputs(self) -> int:
        """Number of latents on the input."""
        return self.nodes if self.sides is None else self.sides.inputs

    @property
    def narrow(self) -> bool:
        """Whether the nodes of the input have places but are few."""
        return self.axis < -1 and 0 < self.inputs < NARROW

    @property
    def placed(self) -> bool:
        """Whether the nodes of the input have places, and units can have factors."""
        return self.axis < -1 and self.inputs >= NARROW

    def keep(self, nodes: Tensor) -> None:
        """Leaves out all other nodes."""
        self.nodes = len(nodes)
        for name, parameter in list(self.named_parameters()):
            kept = parameter.detach().index_select(1, nodes.to(parameter.device))
            setattr(self, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))

    def set(self, mean: Tensor | None = None, std: Tensor | None = None) -> None:
        """Overwrites μ and/or σ with what broadcasts to (K, D)."""
        with torch.no_grad():
            if mean is not None:
                self.mean.copy_(mean)
            if std is not None:
                self.rho.copy_(inverse_softplus(std.double()))

    def take(
        self, z: Tensor | None, units: Units | None, settle: "Callable[[Latent, int], None] | None" = None
    ) -> None:
        """Takes what multiplies the layer's input in one forward pass, or nothing after it."""
        if torch.compiler.is_compiling():
            self.z, self.units = z, units
            return
        own = self.__dict__  # a module's setattr is slow
        own["z"], own["units"], own["settle"] = z, units, settle
        if z is not None:
            own["entries"] = 0

    def hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the layer: its first argument x becomes x ∘ z."""
        z, units = self._current()
        if z is None:
            return None
        if self.settle is not None and z.dim() == 2:
            self._settled(args[0] if args else next(iter(kwargs.values())), z, self.batch_axis)
        if (units is None or not units.std.requires_grad) and self._goes_direct(layer, args, kwargs, z, units):
            self.__dict__["direct"] = z, units  # for `forward_of`, which follows; not by setattr, which is slow
            return None
        if args:
            return (self._scaled(layer, args[0], z, units), *args[1:]), kwargs
        name = "input" if "input" in kwargs else next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: self._scaled(layer, kwargs[name], z, units)}

    def _settled(self, x: Any, z: Tensor, axis: int) -> None:
        """Asks where the batch is in an input that has more or fewer entries for a row than those before."""
        if isinstance(x, Tensor) and x.dim() > axis and x.shape[axis] // z.shape[0] not in self.folds:
            assert self.settle is not None
            self.settle(self, x.shape[axis] // z.shape[0])

    def _goes_direct(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor, units: Units | None
    ) -> bool:
        """Whether the layer's `forward_of` multiplies its input, because nothing else sees it in between."""
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs or self.folding:
            return False
        if getattr(getattr(layer.__dict__.get("forward"), "func", None), "__self__", None) is not self:
            return False  # it has no such forward, or one that was assigned later
        last = next(reversed(layer._forward_pre_hooks.values()))
        alone = getattr(last, "__self__", None) is self and not layer._backward_hooks
        shared = units is not None and not torch.is_grad_enabled()
        return alone and goes_direct(layer, args[0], z, self.batch_axis, shared)

    def forward_of(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Forward of a layer of one port: its own, or one that takes x and z."""
        found = None if torch.compiler.is_compiling() else self.__dict__.pop("direct", None)
        if found is None:
            return type(layer).forward(layer, *args, **kwargs)
        (z, units), (x,) = found, args
        self.__dict__["entries"] += x.numel()
        placed = None if units is None else units.placed(x.shape, self.axis, self.batch_axis)
        return DIRECT[type(layer)](layer, x, z, self.batch_axis, placed)

    def _scaled(self, layer: nn.Module, x: Tensor, z: Tensor, units: Units | None) -> Tensor:
        """Returns the layer's new input: x ∘ z (∘ u), or x if its weights are multiplied instead."""
        if not self.folding:
            return self.multiply(x, z, self.batch_axis, units)
        self.after.append(replace_weights(layer, folded_weights(layer, z)))
        return self._cast(x, z)

    def _cast(self, x: Tensor, z: Tensor) -> Tensor:
        """Returns an input in the layer's dtype (an integer one would round z); autocast handles lower precisions."""
        dtype = getattr(self, "mean", z).dtype  # an exported latent has z alone
        narrow = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        autocast = narrow and torch.is_autocast_enabled(x.device.type)
        return x if x.dtype == dtype or autocast else x.to(dtype)

    def release(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook of the layer, called even if it raises: undoes what `hook` did."""
        if self.after:
            self.after.pop()()

    def call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Forward of a layer of several ports: its own with z in its weights, or its type's `run`."""
        (z, _), kind = self._current(), carried_type(layer)
        assert kind.run is not None
        if z is None:
            return type(layer).forward(layer, *args, **kwargs)
        if z.dim() == 1 and kind.fused and weights_are_parameters(layer, kind):
            restore = replace_weights(layer, folded_weights(layer, z))
            try:
                return type(layer).forward(layer, *args, **kwargs)
            finally:
                restore()
        if self.settle is not None and z.dim() == 2:
            first = args[0] if args else next(iter(kwargs.values()), None)
            self._settled(first, z, kind.batch_axis(layer) if kind.batch_axis else self.batch_axis)
        begun = len(self.after)
        try:
            return kind.run(layer, self, kind.split(layer, z.reshape(-1, self.nodes)), *args, **kwargs)
        finally:
            while len(self.after) > begun:
                self.after.pop()()

    def _current(self) -> tuple[Tensor | None, Units | None]:
        """Returns what to multiply by: z and units of this forward pass, or of the one that a backward pass repeats."""
        if self.z is not None:
            if self.z.requires_grad:  # predictions in between need none
                self.without_graph = not torch.is_grad_enabled()
            return self.z, self.units
        if self.recall is None or self.recall[0] != backward_pass():
            return None, None
        if self.without_graph:
            remedy = "Pass use_reentrant=False to checkpoint: the other kind loses the latents' gradient."
            raise RuntimeError(complaint("use_reentrant", "False in gradient checkpointing", True, remedy))
        return self.recall[1:]

    def multiply(self, x: Tensor, z: Tensor, batch_axis: int = 0, units: Units | None = None) -> Tensor:
        """Returns x ∘ z, and times the units' factors; it is recomputed in the backward pass instead of kept for it."""
        x = self._cast(x, z)
        held = getattr(self, "unit_factors", None)  # an exported latent has them beside z
        z = self.broadcast(z, x, batch_axis) if held is None else self._with_places(z, held, x, batch_axis)
        placed = None if units is None else units.placed(x.shape, self.axis, batch_axis, self.copied)
        transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        if torch.compiler.is_compiling() or transformed:
            return x * (z if placed is None else z * placed.factors(x))
        made = product(x, z, placed)
        self.entries += x.numel()
        if Recomputation.possible(made):
            self.after.append(Recomputation(x, z, made, placed).open().close)
        return made

    def broadcast(self, z: Tensor, x: Tensor, batch_axis: int = 0) -> Tensor:
        """Returns z in a shape that multiplies the node axis of x."""
        if x.dim() < -self.axis or x.shape[self.axis] != z.shape[-1]:  # one node would be broadcast to all
            wanted, got = f"of {z.shape[-1]} nodes in dimension {self.axis}", f"shape {tuple(x.shape)}"
            remedy = "Pass inputs of the size it was built for."
            raise ValueError(complaint(f"input of layer {self.name!r}", wanted, got, remedy))
        shape = [1] * x.dim()
        shape[self.axis] = z.shape[-1]
        if z.dim() == 2:
            z = self.rows(z, x.shape, batch_axis)
            shape[batch_axis] = x.shape[batch_axis]
        return z.to(dtype=x.dtype, device=x.device).reshape(shape)

    def _with_places(self, z: Tensor, held: Tensor, x: Tensor, batch_axis: int) -> Tensor:
        """Returns factors z ∘ u of rows of draws, from z (J, D) and u (J, D, …)."""
        factors = (z.reshape(*z.shape, *[1] * (held.dim() - 2)) * held)[:, None]
        factors = factors.expand(-1, x.shape[batch_axis] // z.shape[0], *[-1] * (held.dim() - 1))
        return factors.flatten(0, 1).to(x.dtype)

    def rows(self, z: Tensor, shape: Sequence[int], batch_axis: int) -> Tensor:
        """Returns the z of every entry of an input's batch axis; windows or copies of an example share its z."""
        rows = z.shape[0]  # not len: torch.export would fix it
        if len(shape) + self.axis <= batch_axis or shape[batch_axis] % rows:
            place = f"a dimension {batch_axis}" if batch_axis else "a leading dimension"
            expected = f"of {place} that is the batch ({rows} rows) or a multiple of it"
            raise ValueError(batchless(self.name, expected, f"shape {tuple(shape)}"))
        if shape[batch_axis] == rows:
            return z
        times = shape[batch_axis] // rows
        if self.copied:
            return z[None].expand(times, -1, -1).flatten(0, 1)
        return z[:, None].expand(-1, times, -1).flatten(0, 1)  # as repeat_interleave, which ONNX does not have

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what belongs to one forward pass."""
        return {**self.__dict__, "z": None, "units": None, "recall": None, "settle": None, "after": []}

    def extra_repr(self) -> str:
        """What `print` shows of the latent."""
        return f"components={self.components}, nodes={self.nodes}"


def backward_pass() -> int:
    """Returns the number of the backward pass that runs in this thread, −1 if none does."""
    return torch._C._current_graph_task_id()  # the same question torch.utils.checkpoint asks


def attach(layer: nn.Module, name: str, components: int, make: Callable[..., Latent] = Latent) -> None:
    """Gives a layer its latent and the hooks that multiply its input."""
    kind, like = carried_type(layer), next(layer.parameters())  # its weight may be computed, with side effects
    latent = make(components, kind.nodes(layer), kind.axis, name=name, dtype=like.dtype, device=like.device)
    layer.add_module("latent", latent.train(layer.training))
    if kind.run is None:
        layer.register_forward_pre_hook(latent.hook, with_kwargs=True)
        if type(layer) in DIRECT and "forward" not in vars(layer):
            layer.forward = partial(latent.forward_of, layer)
    else:
        layer.forward = partial(latent.call, layer)
    # its presence also keeps torch's fast path away
    layer.register_forward_hook(latent.release, always_call=True, prepend=latent.sides is not None)


def strip(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Removes every latent and its hooks from a network, in place; returns the layers that had one, by name."""
    # Not getattr: wrappers (peft's) forward attributes of the module they wrap.
    layers = [(name, m) for name, m in net.named_modules() if isinstance(m._modules.get("latent"), Latent)]
    for _, layer in layers:
        for hooks, options in (
            (layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs),
            (layer._forward_hooks, layer._forward_hooks_always_called),
        ):
            for number, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is layer.latent:
                    del hooks[number]
                    options.pop(number, None)
        if getattr(getattr(vars(layer).get("forward"), "func", None), "__self__", None) is layer.latent:
            del layer.forward
        del layer.latent
    return layers
