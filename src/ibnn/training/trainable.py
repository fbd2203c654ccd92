"""What `fit` needs of a method: IBNN, the baselines, and any class of yours that has it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import Inputs
from ibnn.latent import Latent
from ibnn.likelihood import Likelihood
from ibnn.objective import ELBO
from ibnn.prediction import Method

# What `fit` changes before its first step.
_ATTRIBUTES = ("net", "kl_kind", "prior_std", "gradient_scale", "eval_samples", "eval_seed", "reference", "held_out")
_TENSORS = ("examples", "seed", "unit_std", "prior_factors", "likelihood.")


class _Module(Protocol):
    """The part of nn.Module that training uses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...
    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]: ...


class Trainable(_Module, Method, Protocol):
    """A module with draws for `predict`, an objective with named terms, and parameter groups.

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

    def reseed(self, seed: int) -> None:
        """Starts the noise of training, and the count of examples, anew."""

    def parameter_groups(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
        """Prepares gradients, and returns groups named "weights", "latents", "likelihood" (see `IBNN`)."""

    def elbo(self, *args: Any, **options: Any) -> ELBO:
        """Returns the loss of a batch, or of a part of one, and its terms (see `IBNN`)."""

    def draw_logits(self, x: Inputs, samples: int = 5, seed: int = 0, *, batch_size: int | None = None) -> Tensor:
        """Returns draws of the network's output in eval mode, (J, B, …), component-major."""


def as_trainable(model: Any) -> Trainable:
    """Returns a model, or what torch.compile wraps, if `fit` can train it; raises TypeError if not."""
    model = getattr(model, "_orig_mod", model)
    needed = ("elbo", "parameter_groups", "reseed", "each_draw")
    if not isinstance(model, nn.Module) or not all(hasattr(model, name) for name in needed):
        expected = "made by ibnn.convert, or one of ibnn.baselines"
        raise TypeError(complaint("model", expected, type(model).__name__, "Convert the network first."))
    return model  # type: ignore[return-value]


@contextmanager
def restored_on_error(model: Trainable) -> Iterator[list[Any]]:
    """Restores train and eval modes if the block fails, and all that `fit` changes before its first step.

    Yields a list to put the run in; if that has taken a step, only modes and the kind of KL are restored.
    """
    modes, runs = [(module, module.training) for module in model.modules()], list[Any]()
    attributes = {name: getattr(model, name) for name in _ATTRIBUTES if hasattr(model, name)}
    latents = [f"{name}." for name, module in model.named_modules() if isinstance(module, Latent)]
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: t.detach().clone() for name, t in named if name.startswith((*latents, *_TENSORS))}
    try:
        yield runs
    except BaseException as error:
        for module, training in modes:
            module.training = training
        steps = runs[0].state.progress.step if runs else 0
        if steps:
            model.kl_kind = attributes["kl_kind"]
            error.add_note(f"The model has the weights and the noise of step {steps}.")
            raise
        for name, value in attributes.items():
            setattr(model, name, value)
        with torch.no_grad():
            for name, t in (*model.named_parameters(), *model.named_buffers()):
                if name in tensors:
                    t.copy_(tensors[name])
        raise
