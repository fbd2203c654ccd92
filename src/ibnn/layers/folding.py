"""FOLDING: puts z into a layer's weights, W = U diag(z), for one call or for good."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ibnn.errors import complaint
from ibnn.layers.registry import LayerType, carried_type, has_forward_of_its_type, layer_type


def duplicate(net: nn.Module) -> nn.Module:
    """Returns a deep copy of a network, even of one that keeps tensors of a graph (torch's older weight_norm does)."""
    for module in net.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())
    return copy.deepcopy(net)


def foldable(layer: nn.Module) -> bool:
    """Whether W = U diag(z) on an unchanged input gives what x ∘ z does, and no other hook sees the input."""
    kind = layer_type(layer)
    return (
        kind is not None
        and kind.run is None
        and weights_are_parameters(layer, kind)
        and has_forward_of_its_type(layer)
        and len(layer._forward_pre_hooks) == 1
    )


def weights_are_parameters(layer: nn.Module, kind: LayerType) -> bool:
    """Whether the weights that are folded are parameters, not computed by parametrisations or hooks."""
    places = (_place(layer, name) for name in kind.weights(layer))
    return all(owner._parameters.get(name) is not None for owner, name in places)


def folded_weights(layer: nn.Module, z: Tensor) -> dict[str, Tensor]:
    """Returns the weights U diag(z) of a layer by name, in its dtype."""
    kind = carried_type(layer)
    owner, name = _place(layer, kind.weights(layer)[0])
    like = getattr(owner, name)
    return kind.fold(layer, z.to(dtype=like.dtype, device=like.device))


def replace_weights(layer: nn.Module, weights: dict[str, Tensor]) -> Callable[[], None]:
    """Substitutes tensors for parameters of a layer; returns a function that restores them."""
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
    """Substitutes tensors for parameters of a layer within a block."""
    restore = replace_weights(layer, weights)
    try:
        yield
    finally:
        restore()


def _place(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module in a layer that has a parameter, and the parameter's name there."""
    path, _, key = name.rpartition(".")
    return layer.get_submodule(path), key


def fold(layer: nn.Module, z: Tensor, name: str) -> None:
    """Replaces the layer's weights U by U diag(z), in place; ties and parametrisations of these weights end."""
    kind = carried_type(layer)
    for weight in kind.weights(layer):
        _materialise(*_place(layer, weight))
    folded = folded_weights(layer, z)
    probe = _probe(layer, kind, z.to(next(iter(folded.values()))))
    for key, value in folded.items():
        owner, weight = _place(layer, key)
        setattr(owner, weight, nn.Parameter(value.detach(), requires_grad=getattr(owner, weight).requires_grad))
    if probe is not None and not _agrees(layer, *probe):
        expected, got = "linear in its input through its weight", f"a {type(layer).__name__}, whose forward is not"
        remedy = "Register it with a fold of its own (ibnn.register_layer), or exclude it."
        raise RuntimeError(complaint(f"layer {name!r}", expected, got, remedy))


def _materialise(layer: nn.Module, weight: str) -> None:
    """Makes computed weights plain parameters; the class of a parametrised layer is shared with its copies."""
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
    """Returns inputs x and the output for x ∘ z, to check the fold of a class with a forward of its own against."""
    if has_forward_of_its_type(layer):
        return None
    shape = [1] * -kind.axis
    shape[0] = -1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, len(z), *[33] * (-kind.axis - 1), generator=generator).to(z)
    with torch.no_grad():
        return x, layer(x * z.view(shape))


def _agrees(layer: nn.Module, x: Tensor, expected: Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(layer(x), expected, rtol=1e-3, atol=1e-4)
