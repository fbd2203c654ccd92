"""TRAINABLE: what `fit` asks of a method. Whatever has this is trained by the one loop, which names no method."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Self

from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import Inputs
from ibnn.likelihood import Likelihood
from ibnn.mixture import Mixture
from ibnn.objective import ELBO
from ibnn.prediction import Method


class _Module(Protocol):
    """The part of nn.Module that training uses."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...
    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]: ...


class Trainable(_Module, Method, Protocol):
    """A module with draws for `predict`, an objective with named terms, and parameter groups."""

    net: Any  # the network that is trained
    examples: Tensor  # number of training examples seen so far, a buffer; `fit` counts whole batches
    prior_std: float  # of the prior, where there is one
    kl_kind: Any  # which KL the objective has, where there is a choice

    @property
    def likelihood(self) -> Likelihood:
        """What the network's output says about a target."""

    @property
    def nodes(self) -> int:
        """Number of latent variables, which `fit` examines at the end; 0 for a method without."""

    def reseed(self, seed: int) -> None:
        """Starts the noise of training, and the count of examples, anew."""

    def adapt_recipe(self, recipe: Any) -> Any:
        """Returns the recipe that this method follows when it is given one; raises if it cannot follow it."""

    def parameter_groups(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
        """Prepares gradients, and returns groups named "weights", "latents", "likelihood" (see `IBNN`)."""

    def elbo(self, *args: Any, **options: Any) -> ELBO:
        """Returns the loss of a batch, or of a part of one, and its terms (see `IBNN`)."""

    def end_epoch(self, *, collect: bool, last: bool) -> bool:
        """Averages weights in the method's own way at an epoch's end; returns False to leave averaging to `fit`.

        `collect` puts the weights into the average; at the `last` epoch's end the average takes their place.
        """

    def draw_logits(self, x: Inputs, samples: int = 5, seed: int = 0, *, batch_size: int | None = None) -> Tensor:
        """Returns draws of the network's output in eval mode, (J, B, …), component-major."""


class Steerable(Trainable, Protocol):
    """A method whose noise can be steered: a mixture of Gaussians around 1, and a prior of that kind."""

    unit_std: Tensor  # standard deviation of the factors of single units, of each layer

    @property
    def depth_factor(self) -> float:
        """By what the noise of a layer differs from the prior's, for the number of layers."""

    @property
    def prior_stds(self) -> Tensor | float:
        """Standard deviation of the prior of every node, or of all."""

    def divide_noise(self) -> Tensor:
        """Divides the prior's noise among layers, channels and units; returns the `unit_std` that goes with it."""

    def posterior(self) -> Mixture:
        """The mixture over all nodes."""

    def set_posterior(
        self,
        *,
        mean: Tensor | float | None = None,
        std: Tensor | float | None = None,
        unit_std: Tensor | float | None = None,
    ) -> None:
        """Overwrites means and standard deviations."""


def as_trainable(model: Any) -> Trainable:
    """Returns a model, or what torch.compile wraps, if `fit` can train it; raises TypeError if not."""
    model = getattr(model, "_orig_mod", model)
    needed = ("elbo", "parameter_groups", "adapt_recipe", "end_epoch", "reseed", "each_draw")
    if not isinstance(model, nn.Module) or not all(hasattr(model, name) for name in needed):
        expected = "made by ibnn.convert, or one of ibnn.baselines"
        raise TypeError(complaint("model", expected, type(model).__name__, "Convert the network first."))
    return model  # type: ignore[return-value]


@contextmanager
def restored_on_error(model: Trainable) -> Iterator[None]:
    """Restores train and eval modes, and the kind of KL, if the block fails."""
    modes, kl_kind = [(module, module.training) for module in model.modules()], model.kl_kind
    try:
        yield
    except BaseException:
        for module, training in modes:
            module.training = training
        model.kl_kind = kl_kind
        raise
