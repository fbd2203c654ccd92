"""What `fit` needs of a method: IBNN, the baselines, and any class of yours that has it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.likelihood import Likelihood
from ibnn.network import snapshot


class Trainable(Protocol):
    """An nn.Module with what `predict` needs, an objective with named terms, and parameter groups.

    As those of `IBNN`, `reseed(seed)` starts the noise of training and the count of examples anew, `parameter_groups`
    prepares gradients and returns groups named "weights", "latents", "likelihood", `each_draw` yields outputs of draws
    in eval mode, and `elbo` returns the loss of a batch, or of a part of one, and its terms.

    A method that averages weights in its own way, as SWAG does, also has `end_epoch(*, collect, last)`. It adds the
    weights to the average if `collect`, and puts the average in their place if `last`. False leaves averaging to `fit`.
    """

    net: Any  # the network that is trained
    examples: Tensor  # number of training examples seen so far, a buffer; `fit` counts whole batches
    prior_std: float  # of the prior, where there is one
    kl_kind: Any  # which KL the objective has, where there is a choice

    @property
    def likelihood(self) -> Likelihood:
        """What the network's output says about a target."""

    def __getattr__(self, name: str) -> Any:
        """Stands for the methods above and those of nn.Module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the network, as nn.Module does."""


def as_trainable(model: Any) -> Trainable:
    """Returns a model, or what torch.compile wraps, if `fit` can train it; raises TypeError if not."""
    model = getattr(model, "_orig_mod", model)
    needed = ("elbo", "parameter_groups", "reseed", "each_draw")
    if not isinstance(model, nn.Module) or not all(hasattr(model, name) for name in needed):
        expected, got = "made by ibnn.convert, or one of ibnn.baselines", type(model).__name__
        raise TypeError(complaint("model", expected, got, "Convert the network first."))
    return model  # type: ignore[return-value]


@contextmanager
def restored_on_error(model: Trainable) -> Iterator[None]:
    """Restores modes, noise and the count of examples if training fails; the network keeps its last weights.

    If the user interrupts it after its first step, the noise that fits the weights stays, too.
    """
    modes = [(module, module.training) for module in model.modules()]
    kl_kind, restore = model.kl_kind, snapshot(model)
    try:
        yield
    except BaseException as error:
        for module, training in modes:
            module.training = training
        model.kl_kind = kl_kind
        seen = int(model.examples)
        if seen and not isinstance(error, Exception):
            raise
        restore()
        if seen != int(model.examples):
            error.add_note("The network has the weights of the last step; noise and count of examples are as before.")
        raise
