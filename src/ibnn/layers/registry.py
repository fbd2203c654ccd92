"""REGISTRY: which layer types can carry a latent, where their nodes are, and how z folds into their weights.

Most layers have one input and multiply it by one weight: z multiplies the input before the layer's own forward. Others
have several *ports*, places where nodes meet a weight: an attention layer those of queries, keys, values and output, a
recurrent one an input and a state for each layer and direction. Their latent covers all ports, one after the other; a
z for all rows goes into the weights, for a z each row the type says how the layer `run`s.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ibnn.errors import complaint


class Multiplier(Protocol):
    """What a `run` asks of the latent."""

    batch_axis: int

    def multiply(self, x: Tensor, z: Tensor, batch_axis: int) -> Tensor:
        """x ∘ z, the nodes last in x, for z (R, D) and a batch of R rows, or of a multiple of them."""

    def rows(self, z: Tensor, shape: Sequence[int], batch_axis: int) -> Tensor:
        """z (R, D) for every row of an input of a shape; rows that fold several windows share their row's z."""


@dataclass(frozen=True)
class LayerType:
    """What the library must know of a layer type.

    Attributes:
        ports: Numbers of nodes of a layer by the names of its ports.
        axis: The node axis of the layer's input, counted from its end.
        fold: W = U diag(z): the layer's weights with z (D,) multiplied in, by their names.
        weights: Names of the parameters that `fold` replaces.
        run: For several ports: what the layer returns, from the layer, its latent, z by port (R, D), and its arguments.
        batch_axis: Which axis of a layer's input is the batch, where the layer itself says so.
        fused: Whether a call with one z for all rows had better fold than run.
        optional: Why layers of this type get no latent unless asked for by name or class; empty if they do.
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
        """Number of input nodes D of a layer."""
        return sum(self.ports(layer).values())

    def split(self, layer: nn.Module, z: Tensor) -> dict[str, Tensor]:
        """Parts of z (…, D) by port."""
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
        raise TypeError(
            complaint("layer", "an nn.Module class or its dotted name", repr(layer), "Pass the class itself.")
        )
    if axis >= 0:
        raise ValueError(
            complaint("axis", "negative (counted from the input's end)", axis, "Pass axis=-1 if nodes are last.")
        )
    attribute = nodes
    count = (lambda module: int(getattr(module, attribute))) if isinstance(attribute, str) else attribute
    register_type(
        layer,
        LayerType(
            ports=lambda module: {"input": count(module)},
            axis=axis,
            fold=lambda module, z: {weight: fold(module, z)},
            weights=lambda module: (weight,),
        ),
    )


def register_type(layer: type[nn.Module] | str, kind: LayerType) -> None:
    """As `register_layer`, for types of several ports."""
    _REGISTRY[layer] = kind


def layer_type(layer: nn.Module) -> LayerType | None:
    """The nearest registered type of a layer, or None."""
    return next(filter(None, map(_lookup, type(layer).__mro__)), None)


def _lookup(cls: type) -> LayerType | None:
    return _REGISTRY.get(cls) or _REGISTRY.get(f"{cls.__module__}.{cls.__qualname__}")


def layer_parameter(layer: nn.Module) -> nn.Parameter:
    """Any parameter of a layer, for its dtype and device; its weight may be computed, and with side effects."""
    return next(layer.parameters())


def foldable(layer: nn.Module) -> bool:
    """Whether a call of the layer may do with W = U diag(z), its input as it is, and nobody but its latent sees it."""
    kind = layer_type(layer)
    return (
        kind is not None
        and kind.run is None
        and weights_are_parameters(layer, kind)
        and has_forward_of_its_type(layer)
        and len(layer._forward_pre_hooks) == 1
    )


def weights_are_parameters(layer: nn.Module, kind: LayerType) -> bool:
    """Whether the weights that fold are there as they are, not computed by parametrisations or hooks."""
    places = (_place(layer, name) for name in kind.weights(layer))
    return all(owner._parameters.get(name) is not None for owner, name in places)


def folded_weights(layer: nn.Module, z: Tensor) -> dict[str, Tensor]:
    """Weights U diag(z) of a layer by their names, of its dtype."""
    kind = layer_type(layer)
    assert kind is not None, "only converted layers are folded"
    owner, name = _place(layer, kind.weights(layer)[0])
    like = getattr(owner, name)
    return kind.fold(layer, z.to(dtype=like.dtype, device=like.device))


def replace_weights(layer: nn.Module, weights: dict[str, Tensor]) -> Callable[[], None]:
    """Lets tensors stand in for parameters of a layer; returns what ends it."""
    before = []
    for name, weight in weights.items():
        owner, key = _place(layer, name)
        before.append((owner._parameters, key, owner._parameters[key]))
        owner._parameters[key] = weight  # type: ignore[assignment]

    def restore() -> None:
        for parameters, key, weight in before:
            parameters[key] = weight

    return restore


@contextmanager
def replaced(layer: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """`replace_weights` for the length of a block."""
    restore = replace_weights(layer, weights)
    try:
        yield
    finally:
        restore()


def _place(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of a layer that has a parameter, and the parameter's name there."""
    path, _, key = name.rpartition(".")
    return layer.get_submodule(path), key


def fold(layer: nn.Module, z: Tensor, name: str) -> None:
    """Replaces the layer's weights U by U diag(z), in place; ties and parametrisations of these weights end."""
    kind = layer_type(layer)
    assert kind is not None, "only converted layers are folded"
    for weight in kind.weights(layer):
        _materialise(*_place(layer, weight))
    folded = folded_weights(layer, z)
    probe = _probe(layer, kind, z.to(next(iter(folded.values()))))
    for key, value in folded.items():
        owner, weight = _place(layer, key)
        setattr(owner, weight, nn.Parameter(value.detach(), requires_grad=getattr(owner, weight).requires_grad))
    if probe is not None and not _agrees(layer, *probe):
        raise RuntimeError(
            complaint(
                f"layer {name!r}",
                "linear in its input through its weight",
                f"a {type(layer).__name__}, whose forward is not",
                "Register it with a fold of its own (ibnn.register_layer), or exclude it.",
            )
        )


def _materialise(layer: nn.Module, weight: str) -> None:
    """Makes computed weights plain parameters again. The class of a parametrised layer is shared with its copies."""
    if parametrize.is_parametrized(layer):
        assert isinstance(layer.parametrizations, nn.ModuleDict)
        values = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
        layer.__class__ = type(layer).__bases__[0]
        del layer.parametrizations
        for name, value in values.items():
            layer.register_parameter(name, nn.Parameter(value))
    for number, hook in list(layer._forward_pre_hooks.items()):  # torch's older weight_norm and spectral_norm
        if getattr(hook, "name", None) == weight and hasattr(hook, "remove"):
            hook.remove(layer)
            del layer._forward_pre_hooks[number]


def _probe(layer: nn.Module, kind: LayerType, z: Tensor) -> tuple[Tensor, Tensor] | None:
    """For a class with a forward of its own: inputs x, and what the layer makes of x ∘ z, to hold the folded one to."""
    if has_forward_of_its_type(layer):
        return None
    shape = [1] * -kind.axis
    shape[0] = -1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, len(z), *[33] * (-kind.axis - 1), generator=generator).to(z)
    with torch.no_grad():
        return x, layer(x * z.view(shape))


def has_forward_of_its_type(layer: nn.Module) -> bool:
    """Whether a layer computes as its registered type does, not with a forward of its own."""
    registered = next(cls for cls in type(layer).__mro__ if _lookup(cls) is not None)
    return type(layer).forward is vars(registered).get("forward", type(layer).forward)


def _agrees(layer: nn.Module, x: Tensor, expected: Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(layer(x), expected, rtol=1e-3, atol=1e-4)


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
