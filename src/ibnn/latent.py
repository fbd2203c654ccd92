"""STATE: one layer's variational parameters, and how its latent z meets the layer's input x.

A `Latent` is a child of the layer it serves. Its `hook` runs before the layer's own forward and multiplies the input by
z, so layers keep their class, their parameters' names and their own hooks. While z is None the hook does nothing. Its
`release` runs after the layer and ends what `hook` began: see `recompute`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.layers import folded_weight
from ibnn.recompute import Recomputation


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


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Returns x; the gradient that comes back through it is multiplied by `scale`.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scale_gradient(x, 3.0).sum().backward()
    >>> x.grad
    tensor([3., 3.])
    """
    scaled: Tensor = x if scale == 1.0 else _ScaleGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled


class Latent(nn.Module):
    """Mean and standard deviation of K Gaussians over the D input nodes of one layer.

    Attributes:
        mean: μ, (K, D).
        rho: ρ, (K, D); the standard deviation is σ = softplus(ρ).
        z: What the layer's input is multiplied by: None (nothing), (D,) for the whole batch, or (R, D), a row each.
            Set by the network for the length of one forward pass.
        recall: The backward pass in progress and the z of its forward pass, for a layer that is run again in it
            (gradient checkpointing).
        folding: Whether the layer computes with W = U diag(z) and an unchanged input, and not with x ∘ z.
        met: Entries of the inputs that z met in the last forward pass.
        after: What is to be done when the calls of the layer that are in progress end, the last to begin first.

    >>> latent = Latent(components=2, nodes=3, axis=-1)
    >>> latent.mean.shape, latent.std.shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    z: Tensor | None
    recall: tuple[int, Tensor] | None
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
        self.z = None
        self.recall = None
        self.folding, self.met = False, 0
        self.after = []
        self.without_graph = False  # whether the layer last met a z that it could not send a gradient to

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
                self.rho.copy_(inverse_softplus(std.double()))

    def hook(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the layer: its first argument x becomes x ∘ z."""
        z = self.z
        if z is not None:
            self.without_graph = z.requires_grad and not torch.is_grad_enabled()
        elif self.recall is not None and self.recall[0] == backward_pass():
            z = self.recall[1]
            if self.without_graph:
                remedy = "Pass use_reentrant=False to checkpoint: the other kind loses the latents' gradient."
                raise RuntimeError(complaint("use_reentrant", "False in gradient checkpointing", True, remedy))
        if z is None:
            return None
        if self.folding:
            name, weight = folded_weight(layer, z)
            self.after.append(partial(layer._parameters.__setitem__, name, layer._parameters[name]))
            layer._parameters[name] = weight  # type: ignore[assignment]
            return None
        if args:
            return (self._multiply(args[0], z), *args[1:]), kwargs
        name = "input" if "input" in kwargs else next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: self._multiply(kwargs[name], z)}

    def release(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the layer, called even after an error."""
        if self.after:
            self.after.pop()()

    def _multiply(self, x: Tensor, z: Tensor) -> Tensor:
        """x ∘ z, which the layer's backward pass will not keep but compute again."""
        z = self.broadcast(z, x)
        product = x * z
        if not torch.compiler.is_compiling():
            self.met += x.numel()
            if Recomputation.possible(product):
                self.after.append(Recomputation(x, z, product).open().close)
        return product

    def broadcast(self, z: Tensor, x: Tensor) -> Tensor:
        """z along the node axis of x; rows of x that fold several windows or tokens share their row's z."""
        shape = [1] * x.dim()
        shape[self.axis] = self.nodes
        if z.dim() == 2:
            rows, batch = z.shape[0], x.shape[0]  # not len: torch.export would fix it
            if x.dim() + self.axis < 1 or batch % rows:
                raise ValueError(
                    complaint(
                        f"input of layer {self.name!r}",
                        f"of a leading dimension that is the batch ({rows} rows) or a multiple of it",
                        f"shape {tuple(x.shape)}",
                        f"If this layer does not see the batch first, leave it out: exclude=[{self.name!r}].",
                    )
                )
            if batch != rows:
                z = z[:, None].expand(-1, batch // rows, -1).flatten(0, 1)  # repeat_interleave, which ONNX has not
            shape[0] = batch
        return z.to(dtype=x.dtype, device=x.device).reshape(shape)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what belongs to one forward pass."""
        return {**self.__dict__, "z": None, "recall": None, "after": []}

    def extra_repr(self) -> str:
        """What `print` shows of the latent."""
        return f"components={self.components}, nodes={self.nodes}"


def backward_pass() -> int:
    """Number of the backward pass that autograd is running in this thread, −1 if none."""
    return torch._C._current_graph_task_id()  # the same question torch.utils.checkpoint asks
