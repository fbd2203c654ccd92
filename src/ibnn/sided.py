"""SIDED: the latent of a layer that has factors on its output or its bias too; see `layers.sides`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ibnn.latent import Latent, attach
from ibnn.layers.registry import carried_type, folded_weights, replace_weights
from ibnn.layers.sides import Sides
from ibnn.layers.units import Units


class SidedLatent(Latent):
    """Mean and standard deviation of K Gaussians over the input nodes, output nodes and bias of one layer.

    z is in the order of `sides`. The hook before the layer multiplies the input, the one after it bias and output.

    >>> SidedLatent(components=2, nodes=4, axis=-1, sides=Sides(4, 3, 1), added="bias").mean.shape
    torch.Size([2, 8])
    """

    sides: Sides

    def __init__(self, components: int, nodes: int, axis: int, *, sides: Sides, added: str, **more: Any) -> None:
        """Takes what `Latent` takes, the numbers of latents on each side (`nodes` is not used), and the bias's name."""
        super().__init__(components, sides.nodes, axis, **more)
        self.sides, self.added = sides, added

    def _current(self) -> tuple[Tensor | None, Units | None]:
        """Returns what to multiply the input by; all factors where they go into weights."""
        z, units = super()._current()
        if z is None or self.folding:
            return z, units
        return z[..., : self.sides.inputs] if self.sides.inputs else None, units

    def _scaled(self, layer: nn.Module, x: Tensor, z: Tensor, units: Units | None) -> Tensor:
        """Returns the layer's new input, x ∘ z (∘ u), or x if z is in its weights or there is none for inputs."""
        if self._folds(layer):
            self.after.append(replace_weights(layer, folded_weights(layer, z, self.sides)))
        elif self.sides.inputs:
            return self.multiply(x, z[..., : self.sides.inputs], self.batch_axis, units)
        return self._cast(x, z)

    def release(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook of the layer: undoes what `hook` did, and returns r ∘ (output + (v − 1) ∘ b)."""
        super().release(layer, args, output)
        z, _ = super()._current()
        if z is None or output is None or self._folds(layer):  # a layer that raised has no output
            return None
        _, r, v = self.sides.split(z)
        if not torch.compiler.is_compiling():
            self.entries += output.numel()
        if v is not None:
            bias = getattr(layer, self.added)
            output = output + self.broadcast((v.to(bias.dtype) - 1) * bias, output, self.batch_axis)
        return output if r is None else output * self.broadcast(r, output, self.batch_axis)

    def _folds(self, layer: nn.Module) -> bool:
        """Whether factors go into weights: not if the bias is computed."""
        if not self.folding:
            return False
        return layer._parameters.get(self.added) is not None or getattr(layer, self.added, None) is None

    def extra_repr(self) -> str:
        """What `print` shows of the latent."""
        return f"{super().extra_repr()}, sides={str(self.sides)!r}"


def attach_at(layer: nn.Module, name: str, components: int, sides: Sides) -> None:
    """Gives a layer a latent on some of its sides."""
    output = carried_type(layer).output
    if output is None or not (sides.outputs or sides.biases):
        attach(layer, name, components)
    else:
        attach(layer, name, components, partial(SidedLatent, sides=sides, added=output.bias))
