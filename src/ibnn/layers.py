"""REGISTRY: which layer types can carry a latent, where their nodes are, and how z folds into their weight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ibnn.errors import complaint


@dataclass(frozen=True)
class LayerType:
    """What the library must know of a layer type.

    Attributes:
        nodes: Number of input nodes D of a layer.
        axis: The node axis of the layer's input, counted from its end.
        fold: W = U diag(z): the layer's weight with z (D,) multiplied in.
        weight: Name of the parameter that `fold` replaces.
    """

    nodes: Callable[[nn.Module], int]
    axis: int
    fold: Callable[[nn.Module, Tensor], Tensor]
    weight: str = "weight"


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
    _REGISTRY[layer] = LayerType(count, axis, fold, weight)


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
        and layer._parameters.get(kind.weight) is not None
        and _has_forward_of_its_type(layer)
        and len(layer._forward_pre_hooks) == 1
    )


def folded_weight(layer: nn.Module, z: Tensor) -> tuple[str, Tensor]:
    """Name and value of the weight U diag(z) of a layer."""
    kind = layer_type(layer)
    assert kind is not None, "only converted layers are folded"
    weight = getattr(layer, kind.weight)
    return kind.weight, kind.fold(layer, z.to(dtype=weight.dtype, device=weight.device))


def fold(layer: nn.Module, z: Tensor, name: str) -> None:
    """Replaces the layer's weight U by U diag(z), in place; ties and parametrisations of that weight end."""
    kind = layer_type(layer)
    assert kind is not None, "only converted layers are folded"
    _materialise(layer, kind.weight)
    weight = getattr(layer, kind.weight)
    z = z.to(dtype=weight.dtype, device=weight.device)
    folded = nn.Parameter(kind.fold(layer, z).detach(), requires_grad=weight.requires_grad)
    probe = _probe(layer, kind, z)
    setattr(layer, kind.weight, folded)
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
    if _has_forward_of_its_type(layer):
        return None
    shape = [1] * -kind.axis
    shape[0] = -1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, len(z), *[33] * (-kind.axis - 1), generator=generator).to(z)
    with torch.no_grad():
        return x, layer(x * z.view(shape))


def _has_forward_of_its_type(layer: nn.Module) -> bool:
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
