"""Which layer types can carry a latent, where their nodes are, and how z folds into their weights.

Most layers multiply one input by one weight: z multiplies the input before the layer's own forward. Others have several
*ports*, places where nodes are multiplied by a weight: attention those of queries, keys, values and output, a recurrent
layer an input and a state for each layer and direction. Their latent covers all ports, one after the other. One z for
all rows goes into the weights; where each row has its own z, the type's `run` computes the layer.
"""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ibnn.errors import complaint

if TYPE_CHECKING:
    from ibnn.latent import Latent


@dataclass(frozen=True)
class LayerType:
    """What the library must know about a layer type."""

    ports: Callable[[Any], dict[str, int]]  # number of nodes at each port of a layer, by name
    axis: int  # the node axis of the layer's input, counted from its end
    fold: Callable[[Any, Tensor], dict[str, Tensor]]  # W = U diag(z): the weights with z (D,) multiplied in, by name
    #: Names of the parameters that `fold` replaces.
    weights: Callable[[Any], tuple[str, ...]] = lambda layer: ("weight",)
    run: Callable[..., Any] | None = None  # of several ports: from layer, latent, z by port (R, D) and arguments
    batch_axis: Callable[[Any], int] | None = None  # of a layer's input, if the layer itself determines it
    fused: bool = False  # whether folding is faster than `run` where one z serves all rows
    optional: str = ""  # why layers of this type get no latent unless included by name or class; empty if they do

    def nodes(self, layer: nn.Module) -> int:
        """Returns the number of input nodes D of a layer."""
        return sum(self.ports(layer).values())

    def split(self, layer: nn.Module, z: Tensor) -> dict[str, Tensor]:
        """Splits z (…, D) by port."""
        ports = self.ports(layer)
        return dict(zip(ports, z.split(list(ports.values()), -1), strict=True))


REGISTRY: dict[type[nn.Module] | str, LayerType] = {}


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
        raise TypeError(complaint("layer", "an nn.Module class or its dotted name", repr(layer), "Pass the class."))
    if axis >= 0:
        raise ValueError(complaint("axis", "negative (from the input's end)", axis, "Pass axis=-1 if nodes are last."))
    count = operator.attrgetter(nodes) if isinstance(nodes, str) else nodes
    REGISTRY[layer] = LayerType(
        ports=lambda module: {"input": int(count(module))},
        axis=axis,
        fold=lambda module, z: {weight: fold(module, z)},
        weights=lambda module: (weight,),
    )


def layer_type(layer: nn.Module) -> LayerType | None:
    """Returns the nearest registered type of a layer, or None."""
    return REGISTRY.get(type(layer)) or next(filter(None, map(_lookup, type(layer).__mro__)), None)


def carried_type(layer: nn.Module) -> LayerType:
    """Returns the type of a layer that carries a latent."""
    kind = layer_type(layer)
    assert kind is not None, "only layers of registered types carry latents"
    return kind


def _lookup(cls: type) -> LayerType | None:
    return REGISTRY.get(cls) or REGISTRY.get(f"{cls.__module__}.{cls.__qualname__}")


def batchless(name: str, expected: str, got: str) -> str:
    """Words an error about a layer whose input has no batch where one is expected."""
    remedy = f"If this layer does not see the batch there, leave it out: exclude=[{name!r}]."
    return complaint(f"input of layer {name!r}", expected, got, remedy)


def batch_axis(layer: nn.Module) -> int:
    """Returns the batch axis of a layer that has an option `batch_first`, or could have it."""
    return 0 if getattr(layer, "batch_first", True) else 1


def has_forward_of_its_type(layer: nn.Module) -> bool:
    """Whether a layer uses the forward of its registered type, not its own."""
    registered = next(cls for cls in type(layer).__mro__ if _lookup(cls) is not None)
    return type(layer).forward is vars(registered).get("forward", type(layer).forward)


# --------------------------------------------------------------------- W = U diag(z), for one call or for good


def duplicate(net: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """Returns a deep copy of a network but for tensors `shared` by id; it may keep a graph, as old weight_norm does."""
    for module in net.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())
    return copy.deepcopy(net, shared)


def foldable(layer: nn.Module) -> bool:
    """Whether W = U diag(z) on an unchanged input gives what x ∘ z does."""
    kind = carried_type(layer)
    return kind.run is None and weights_are_parameters(layer, kind) and has_forward_of_its_type(layer)


def weights_are_parameters(layer: nn.Module, kind: LayerType) -> bool:
    """Whether the weights that are folded are parameters, not computed by parametrisations or hooks."""
    places = (_place(layer, name) for name in kind.weights(layer))
    return all(owner._parameters.get(name) is not None for owner, name in places)


def stand_in(layer: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Returns a shallow copy of a layer with other weights, to run its forward once; the layer itself is unchanged."""
    copied = object.__new__(type(layer))
    copied.__dict__.update(layer.__dict__, _parameters=dict(layer._parameters), _modules=dict(layer._modules))
    for name, weight in weights.items():
        child, _, key = name.partition(".")
        if key:  # of a module in the layer
            copied._modules[child] = stand_in(layer.get_submodule(child), {key: weight})
        else:
            copied._parameters[name] = weight  # type: ignore[assignment]
    return copied


def _place(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module in a layer that has a parameter, and the parameter's name there."""
    path, _, key = name.rpartition(".")
    return layer.get_submodule(path), key


@torch.no_grad()
def fold(layer: nn.Module, z: Tensor, name: str, folded_of: Callable[[nn.Module, Tensor], dict[str, Tensor]]) -> None:
    """Replaces the layer's weights U by U diag(z), in place; ties and parametrisations of these weights end."""
    kind = carried_type(layer)
    for weight in kind.weights(layer):
        _materialise(*_place(layer, weight))
    folded, own, inner = folded_of(layer, z), not has_forward_of_its_type(layer), -kind.axis - 1
    if own:  # is its forward linear, too?
        x = torch.randn(2, len(z), *[33] * inner, generator=torch.Generator().manual_seed(0))
        x, z = (tensor.to(next(iter(folded.values()))) for tensor in (x, z))
        expected_output = layer(x * z.view(-1, *[1] * inner))
    for key, value in folded.items():
        owner, weight = _place(layer, key)
        setattr(owner, weight, nn.Parameter(value, requires_grad=getattr(owner, weight).requires_grad))
    if own and not torch.allclose(layer(x), expected_output, rtol=1e-3, atol=1e-4):
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


# ------------------------------------------------------------------------------------------ torch's own layers


def _fold_convolution(layer: Any, z: Tensor) -> Tensor:
    weight, groups = layer.weight, layer.groups  # (out, D / groups, …)
    z = z.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)  # a group's filters see the group's own nodes
    return torch.mul(weight, z.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2)))


def _fold_transposed(layer: Any, z: Tensor) -> Tensor:
    return torch.mul(layer.weight, z.view(-1, *[1] * (layer.weight.dim() - 1)))  # (D, out / groups, …)


register_layer(
    nn.Linear,
    nodes="in_features",
    fold=lambda layer, z: torch.mul(layer.weight, z),  # type: ignore[arg-type]
)
for _axis, _conv in ((-2, nn.Conv1d), (-3, nn.Conv2d), (-4, nn.Conv3d)):
    register_layer(_conv, nodes="in_channels", fold=_fold_convolution, axis=_axis)
for _axis, _transposed in ((-2, nn.ConvTranspose1d), (-3, nn.ConvTranspose2d), (-4, nn.ConvTranspose3d)):
    register_layer(_transposed, nodes="in_channels", fold=_fold_transposed, axis=_axis)
register_layer("transformers.pytorch_utils.Conv1D", nodes="nx", fold=_fold_transposed)  # GPT-2's linear layer, (D, out)


def _run_bilinear(layer: nn.Bilinear, latent: "Latent", z: dict[str, Tensor], input1: Any, input2: Any) -> Tensor:
    pairs = ((input1, z["input1"]), (input2, z["input2"]))
    return nn.Bilinear.forward(layer, *(latent.multiply(x, part, latent.batch_axis) for x, part in pairs))


REGISTRY[nn.Bilinear] = LayerType(
    ports=lambda layer: {"input1": layer.in1_features, "input2": layer.in2_features},
    axis=-1,
    fold=lambda layer, z: {"weight": layer.weight * z[: layer.in1_features, None] * z[layer.in1_features :]},
    run=_run_bilinear,
)


def _run_embedding(layer: nn.Embedding, latent: "Latent", z: dict[str, Tensor], input: Tensor) -> Tensor:
    return latent.multiply(nn.Embedding.forward(layer, input), z["output"], latent.batch_axis)


REGISTRY[nn.Embedding] = LayerType(
    ports=lambda layer: {"output": layer.embedding_dim},
    axis=-1,
    fold=lambda layer, z: {"weight": layer.weight * z},
    run=_run_embedding,
    optional="looks rows up: has no inputs to multiply (for a latent on its output: include it by name or class)",
)
