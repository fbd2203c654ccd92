"""Latents on the output and the bias of a layer, besides those on its input.

A layer f = U x + b becomes f = r ∘ (U (z ∘ x) + v ∘ b): z multiplies its input nodes, r its output nodes, their
bias included, and v the bias, as one factor for all of it or one for each entry. So the weights are diag(r) U diag(z),
and the bias is r ∘ v ∘ b.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.latent import Latent, attach
from ibnn.layers.registry import carried_type, has_forward_of_its_type, stand_in

if TYPE_CHECKING:
    from ibnn.convert import BiasLatents, Plan, Where


SIDED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers whose output and bias can have latents


class Sides(NamedTuple):
    """How many latents a layer has on its input, its output and its bias; z of a layer is in this order.

    >>> Sides(4, 3, 1).nodes, str(Sides(4, 0, 1))
    (8, 'input + bias')
    """

    inputs: int
    outputs: int = 0
    biases: int = 0

    @property
    def nodes(self) -> int:
        """Number of all of them."""
        return sum(self)

    def __str__(self) -> str:
        return " + ".join(name for name, count in zip(("input", "output", "bias"), self, strict=True) if count)

    def split(self, z: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Splits z (…, nodes) into the factors of inputs, outputs and bias; None for those that there are not."""
        parts = z.split(list(self), -1)
        z_in, r, v = (part if count else None for part, count in zip(parts, self, strict=True))
        return z_in, r, v


def sides_of(layer: nn.Module, where: "Where", bias_latents: "BiasLatents") -> Sides:
    """Returns where a layer has latents; on its input alone if its type has no output side, or its forward is its own.

    >>> sides_of(nn.Linear(4, 3), "both", "layer"), sides_of(nn.LSTM(4, 3), "both", "layer").outputs
    (Sides(inputs=4, outputs=3, biases=1), 0)
    """
    inputs: int = carried_type(layer).nodes(layer)
    if not isinstance(layer, SIDED) or (where, bias_latents) == ("input", "none") or not has_forward_of_its_type(layer):
        return Sides(inputs)
    outputs = layer.weight.shape[0]
    has_bias = bias_latents != "none" and layer.bias is not None
    biases = 0 if not has_bias else 1 if bias_latents == "layer" else outputs
    return Sides(0 if where == "output" else inputs, 0 if where == "input" else outputs, biases)


class SidedLatent(Latent):
    """Mean and standard deviation of K Gaussians over the input nodes, output nodes and bias of one layer.

    z is in the order of `sides`.

    >>> SidedLatent(components=2, nodes=4, axis=-1, sides=Sides(4, 3, 1)).mean.shape
    torch.Size([2, 8])
    """

    def __init__(self, components: int, nodes: int, axis: int, *, sides: Sides, **more: Any) -> None:
        """Takes what `Latent` takes, and the numbers of latents on each side; `nodes` is not used."""
        super().__init__(components, sides.nodes, axis, **more)
        self.sides = sides
        self.set_inputs(sides.inputs)

    def run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Forward of the layer: r ∘ (U (z ∘ x) + v ∘ b)."""
        z, units = self.current()
        if z is None:
            return self.own_forward(layer, *args, **kwargs)
        inputs, r, v = self.sides.split(z)
        x = args[0] if args else kwargs["input"]
        if z.dim() == 1 and units is None and self._folding_pays(layer, x):
            return type(layer).forward(stand_in(layer, self.folded(layer, z)), self._cast(x, z))
        output = self.run_input(layer, inputs, units, *args, **kwargs)
        if v is not None:
            bias: Any = layer.bias
            output = output + self.broadcast((v.to(bias.dtype) - 1) * bias, output, self.batch_axis)
        return output if r is None else output * self.broadcast(r, output, self.batch_axis)

    def folded(self, layer: Any, z: Tensor) -> dict[str, Tensor]:
        """Returns the weights diag(r) U diag(z) and the bias r ∘ v ∘ b of a layer by name."""
        inputs, r, v = self.sides.split(z.to(layer.weight))
        folded = {"weight": layer.weight} if inputs is None else carried_type(layer).fold(layer, inputs)
        if r is not None:
            weight = folded["weight"]
            folded["weight"] = torch.mul(weight, r.view(-1, *[1] * (weight.dim() - 1)))  # (out, D, …)
        if layer.bias is not None and (factors := [factor for factor in (v, r) if factor is not None]):
            folded["bias"] = layer.bias * math.prod(factors)
        return folded

    def _folding_pays(self, layer: nn.Module, x: Tensor) -> bool:
        computed = layer._parameters.get("bias") is None and layer.bias is not None  # it cannot be replaced
        return not computed and super()._folding_pays(layer, x)

    def extra_repr(self) -> str:
        """What `print` shows of the latent."""
        return f"{super().extra_repr()}, sides={str(self.sides)!r}"


def attach_at(layer: nn.Module, name: str, components: int, where: "Where", bias_latents: "BiasLatents") -> None:
    """Gives a layer a latent on some of its sides."""
    sides = sides_of(layer, where, bias_latents)
    sided = [partial(SidedLatent, sides=sides)] if sides.outputs or sides.biases else []
    attach(layer, name, components, *sided)


_NO_OUTPUT = 'has no output side (where="output"): several inputs or weights, or a forward of its own'


def planned(
    net: nn.Module,
    modules: Mapping[str, nn.Module],
    why_not: Mapping[str, str | None],
    where: "Where",
    bias_latents: "BiasLatents",
) -> "Plan":
    """Returns the plan of a network with latents on outputs or biases; raises if no layer can have them."""
    from ibnn.convert import planned

    at = {name: sides_of(modules[name], where, bias_latents) for name, reason in why_not.items() if reason is None}
    if where == "output":
        looked_up = {name for name in at if set(carried_type(modules[name]).ports(modules[name])) == {"output"}}
        left_out = {name for name, sides in at.items() if str(sides) == "input"} - looked_up  # embeddings have no input
        why_not = {**why_not, **dict.fromkeys(left_out, _NO_OUTPUT)}
    plan = planned(net, modules, why_not)
    layers = [
        entry if entry.where == "output" else replace(entry, nodes=at[entry.name].nodes, where=str(at[entry.name]))
        for entry in plan.layers
    ]
    for name, value, wanted, side in (
        ("where", where, where == "both", "output"),
        ("bias_latents", bias_latents, bias_latents != "none", "bias"),
    ):
        if wanted and not any(side in layer.where for layer in layers):
            found = ", ".join(f"{layer.name or '(net)'} ({layer.type})" for layer in layers[:3])
            expected = f"of a network with a layer whose {side} can have latents"
            remedy = f"Leave it out: {found} and the like have latents on their inputs alone."
            raise ValueError(complaint(name, expected, repr(value), remedy))
    return replace(plan, layers=tuple(layers))
