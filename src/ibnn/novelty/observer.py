"""OBSERVER: a method whose layers' inputs are compared with reference data."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn.inputs import Inputs, batch_length, call_arguments, evaluating
from ibnn.novelty.nodes import observable, padding, watched
from ibnn.novelty.reference import Novelty, Reference, foreign, no_reference
from ibnn.prediction import Conformal

if TYPE_CHECKING:
    from ibnn.likelihood import Likelihood


class Seen(NamedTuple):
    """What is seen of inputs."""

    summaries: dict[str, Tensor]  # of the layers' inputs, (B, D), by layer
    surprise: Tensor | None  # how unsure the network's answers are, (B,)
    output: Tensor  # of the network


class Observer(nn.Module):
    """A method that can tell how novel an input is, once `ibnn.fit_novelty` (or `ibnn.fit`) has given it a reference.

    Attributes:
        net: The network.
        likelihood: What its output says about a target.
        reference: Statistics of known inputs; None without them, and once the network is trained further.
    """

    net: nn.Module
    likelihood: "Likelihood"
    reference: Reference | None

    def __init__(self) -> None:
        super().__init__()
        self.register_module("reference", None)
        self._known_layers: tuple[Reference, dict[str, nn.Module], dict[str, int]] | None = None

    def mean_output(self, x: Inputs) -> Tensor:
        """Returns the output of one deterministic pass in the present mode."""
        raise NotImplementedError

    def see(self, x: Inputs, layers: Mapping[str, nn.Module], axes: Mapping[str, int]) -> Seen:
        """Passes inputs through the network once, in eval mode, and returns what some layers see of them."""
        call, rows = call_arguments(x), batch_length(x)
        with evaluating(self), torch.no_grad():
            with watched(layers, axes, rows, padding(self.net, call)) as found:
                output = self.mean_output(x)
            return Seen(found, self.likelihood.surprise(output), output)

    def novelty(self, x: Inputs) -> Novelty:
        """Returns how novel the inputs of one call are; `predict` puts the p-values into its answers."""
        reference = self.reference
        if reference is None:
            raise RuntimeError(no_reference())
        layers, axes = self._layers_of(reference)
        seen = self.see(x, layers, axes)
        if len(seen.summaries) < len(layers):  # a layer was put in another's place, or is not always called
            self._known_layers = None
            layers, axes = self._layers_of(reference)
            seen = self.see(x, layers, axes)
        if unseen := [name for name in layers if name not in seen.summaries]:
            raise ValueError(foreign(f"layers {unseen} that this call does not reach"))
        found: Novelty = reference([seen.summaries[name] for name in layers], seen.surprise)
        return found

    def _layers_of(self, reference: Reference) -> tuple[dict[str, nn.Module], dict[str, int]]:
        """Returns the layers that a reference is of, and the batch axes of their inputs; found out once."""
        if self._known_layers is None or self._known_layers[0] is not reference:
            all_layers = list(observable(self.net).items())
            if int(reference.layers.max()) >= len(all_layers):
                raise ValueError(foreign(f"{len(all_layers)} layers that can be observed"))
            layers = dict(all_layers[number] for number in reference.layers.tolist())
            self._known_layers = reference, layers, dict(zip(layers, reference.axes.tolist(), strict=True))
        return self._known_layers[1:]

    def forget(self, *, answers_alone: bool = False) -> None:
        """Drops the reference: the weights are about to change. Or drops what it knows of answers alone."""
        if self.reference is not None and answers_alone:
            self.reference.errors = self.reference.errors[:0]
        elif self.reference is not None:  # else nothing is set: that is slow in a module
            self.reference = None

    @property
    def conformal(self) -> Conformal | None:
        """Scores of held-out examples, if answers are still made as theirs were."""
        reference = self.reference
        if reference is None or not len(reference.errors):
            return None
        same = torch.equal(reference.temperature, self.likelihood.temperature.to(reference.temperature))
        return Conformal(reference.errors, reference.classes) if same else None

    def expect_reference(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Makes room for the reference in a state; a state without one leaves none, for its weights have none."""
        loaded = Reference.like(state_dict, f"{prefix}reference.")
        self.reference = loaded if loaded is None else loaded.to(next(self.net.parameters()).device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.expect_reference(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
