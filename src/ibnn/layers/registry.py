"""REGISTRY: which layer types can carry a latent, where their nodes are, and how z folds into their weights.

Most layers multiply one input by one weight: z multiplies the input before the layer's own forward. Others have several
*ports*, places where nodes are multiplied by a weight: attention those of queries, keys, values and output, a recurrent
layer an input and a state for each layer and direction. Their latent covers all ports, one after the other. One z for
all rows goes into the weights; where each row has its own z, the type's `run` computes the layer.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ibnn.errors import complaint


class Multiplier(Protocol):
    """What a `run` needs of the latent."""

    batch_axis: int

    def multiply(self, x: Tensor, z: Tensor, batch_axis: int) -> Tensor:
        """Returns x ∘ z, the nodes last in x, for z (R, D) and a batch of R rows or a multiple of R."""

    def rows(self, z: Tensor, shape: Sequence[int], batch_axis: int) -> Tensor:
        """Returns the z of every row of an input; rows that hold several windows of an example share its z."""


@dataclass(frozen=True)
class LayerType:
    """What the library must know about a layer type.

    Attributes:
        ports: Number of nodes at each port of a layer, by name.
        axis: The node axis of the layer's input, counted from its end.
        fold: W = U diag(z): the layer's weights with z (D,) multiplied in, by name.
        weights: Names of the parameters that `fold` replaces.
        run: For several ports: computes the layer's output from the layer, its latent, z by port (R, D), and the
            arguments of the call.
        batch_axis: The batch axis of a layer's input, if the layer itself determines it.
        fused: Whether folding is faster than `run` where one z serves all rows.
        optional: Why layers of this type get no latent unless included by name or class; empty if they do.
    """

    ports: Callable[[Any], dict[str, int]]
    axis: int
    fold: Callable[[Any, Tensor], dict[str, Tensor]]
    weights: Callable[[Any], tuple[str, ...]]
    run: Callable[..., Any] | None = None
    batch_axis: Callable[[Any], int] | None = None
    fused: bool = False
    optional: str = ""

    def nodes(self, layer: nn.Module) -> int:
        """Returns the number of input nodes D of a layer."""
        return sum(self.ports(layer).values())

    def split(self, layer: nn.Module, z: Tensor) -> dict[str, Tensor]:
        """Splits z (…, D) by port."""
        ports = self.ports(layer)
        return dict(zip(ports, z.split(list(ports.values()), -1), strict=True))


_REGISTRY: dict[type[nn.Module] | str, LayerType] = {}


def register_layer(
    layer: type[nn.Module] | str,
    *,
    nodes: Callable[[nn.Module], int] | str,
    fold: Callable[[nn.Module, Tensor], Tensor],
    axis: int = -1,
    weight: str = "weight",
) -> None:
    """Lets `convert` put latents on a layer type of your own, and on its subclasses.

    The layer must take its input as the first argument of `forward` and be linear in it.

    Args:
        layer: The class, or its dotted name, which need not be importable yet ("package.module.Class").
        nodes: Number of input nodes of a layer, as a function of it or the name of its attribute.
        fold: Returns the layer's weight with z (D,) multiplied in.
        axis: The node axis of the input, counted from its end (negative).
        weight: Name of the parameter that `fold` replaces.

    >>> class Scale(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.gain = nn.Parameter(torch.ones(3))
    ...     def forward(self, x: Tensor) -> Tensor:
    ...         return x * self.gain
    >>> register_layer(Scale, nodes=lambda layer: len(layer.gain), fold=lambda layer, z: layer.gain * z, weight="gain")
    >>> layer_type(Scale()).nodes(Scale())
    3
    """
    if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        expected = "an nn.Module class or its dotted name"
        raise TypeError(complaint("layer", expected, repr(layer), "Pass the class itself."))
    if axis >= 0:
        expected = "negative (counted from the input's end)"
        raise ValueError(complaint("axis", expected, axis, "Pass axis=-1 if nodes are last."))
    count = operator.attrgetter(nodes) if isinstance(nodes, str) else nodes
    kind = LayerType(
        ports=lambda module: {"input": int(count(module))},
        axis=axis,
        fold=lambda module, z: {weight: fold(module, z)},
        weights=lambda module: (weight,),
    )
    register_type(layer, kind)


def register_type(layer: type[nn.Module] | str, kind: LayerType) -> None:
    """Registers a layer type of several ports."""
    _REGISTRY[layer] = kind


def layer_type(layer: nn.Module) -> LayerType | None:
    """Returns the nearest registered type of a layer, or None."""
    return next(filter(None, map(_lookup, type(layer).__mro__)), None)


def carried_type(layer: nn.Module) -> LayerType:
    """Returns the type of a layer that carries a latent."""
    kind = layer_type(layer)
    assert kind is not None, "only layers of registered types carry latents"
    return kind


def _lookup(cls: type) -> LayerType | None:
    return _REGISTRY.get(cls) or _REGISTRY.get(f"{cls.__module__}.{cls.__qualname__}")


def batchless(name: str, expected: str, got: str) -> str:
    """Words an error about a layer whose input has no batch where one is expected."""
    remedy = f"If this layer does not see the batch there, leave it out: exclude=[{name!r}]."
    return complaint(f"input of layer {name!r}", expected, got, remedy)


def has_forward_of_its_type(layer: nn.Module) -> bool:
    """Whether a layer uses the forward of its registered type, not its own."""
    registered = next(cls for cls in type(layer).__mro__ if _lookup(cls) is not None)
    return type(layer).forward is vars(registered).get("forward", type(layer).forward)


def layer_parameter(layer: nn.Module) -> nn.Parameter:
    """Returns any parameter of a layer, for dtype and device; its weight may be computed, with side effects."""
    return next(layer.parameters())


def _fold_linear(layer: nn.Module, z: Tensor) -> Tensor:
    return layer.weight * z  # type: ignore[operator]  # (out, D)


def _fold_convolution(layer: nn.Module, z: Tensor) -> Tensor:
    weight, groups = layer.weight, layer.groups
    assert isinstance(weight, Tensor)  # (out, D / groups, …)
    assert isinstance(groups, int)
    z = z.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)  # a group's filters see the group's own nodes
    return weight * z.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))


def _fold_transposed(layer: nn.Module, z: Tensor) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)  # (D, out / groups, …)
    return weight * z.view(-1, *[1] * (weight.dim() - 1))


register_layer(nn.Linear, nodes="in_features", fold=_fold_linear)
register_layer(nn.Conv1d, nodes="in_channels", fold=_fold_convolution, axis=-2)
register_layer(nn.Conv2d, nodes="in_channels", fold=_fold_convolution, axis=-3)
register_layer(nn.Conv3d, nodes="in_channels", fold=_fold_convolution, axis=-4)
register_layer(nn.ConvTranspose1d, nodes="in_channels", fold=_fold_transposed, axis=-2)
register_layer(nn.ConvTranspose2d, nodes="in_channels", fold=_fold_transposed, axis=-3)
register_layer(nn.ConvTranspose3d, nodes="in_channels", fold=_fold_transposed, axis=-4)
register_layer("transformers.pytorch_utils.Conv1D", nodes="nx", fold=_fold_transposed)  # GPT-2's linear layer, (D, out)


def _run_bilinear(
    layer: nn.Bilinear, latent: Multiplier, z: dict[str, Tensor], input1: Tensor, input2: Tensor
) -> Tensor:
    axis = latent.batch_axis
    return nn.Bilinear.forward(
        layer, latent.multiply(input1, z["input1"], axis), latent.multiply(input2, z["input2"], axis)
    )


register_type(
    nn.Bilinear,
    LayerType(
        ports=lambda layer: {"input1": layer.in1_features, "input2": layer.in2_features},
        axis=-1,
        fold=lambda layer, z: {"weight": layer.weight * z[: layer.in1_features, None] * z[layer.in1_features :]},
        weights=lambda layer: ("weight",),
        run=_run_bilinear,
    ),
)


def _run_embedding(layer: nn.Embedding, latent: Multiplier, z: dict[str, Tensor], input: Tensor) -> Tensor:
    return latent.multiply(nn.Embedding.forward(layer, input), z["output"], latent.batch_axis)


register_type(
    nn.Embedding,
    LayerType(
        ports=lambda layer: {"output": layer.embedding_dim},
        axis=-1,
        fold=lambda layer, z: {"weight": layer.weight * z},
        weights=lambda layer: ("weight",),
        run=_run_embedding,
        optional="looks rows up: has no inputs to multiply (for a latent on its output: include it by name or class)",
    ),
)
