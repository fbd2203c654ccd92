"""A base class that holds a model's reference data."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ibnn.inputs import Inputs, evaluating
from ibnn.novelty.reference import Reference

if TYPE_CHECKING:
    from ibnn.likelihood import Likelihood


class Observer(nn.Module):
    """A model that can hold the reference data of `ibnn.fit_novelty`.

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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Holds the model in eval mode within a block."""
        with evaluating(self):
            yield

    def mean_output(self, x: Inputs) -> Tensor:
        """Returns the output of one deterministic pass in the present mode."""
        raise NotImplementedError

    def forget(self, *, answers_alone: bool = False) -> None:
        """Drops the reference: the weights are about to change. Or drops what it knows of answers alone."""
        if self.reference is not None and answers_alone:
            self.reference.errors = self.reference.errors[:0]
        elif self.reference is not None:  # else nothing is set: that is slow in a module
            self.reference = None

    def expect_reference(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Makes room for the reference in a state; a state without one leaves none, for its weights have none."""
        loaded = Reference.like(state_dict, f"{prefix}reference.")
        self.reference = loaded if loaded is None else loaded.to(next(self.net.parameters()).device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.expect_reference(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
