"""A plain network, the base class of the other baselines; temperature scaling."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ibnn import check, objective
from ibnn.batches import as_source
from ibnn.errors import complaint
from ibnn.files.saving import save_pretrained
from ibnn.inputs import Inputs, batch_length, call_arguments, check_rows, evaluating
from ibnn.layers.explain import explaining_shapes
from ibnn.likelihood import Categorical, Likelihood, Terms
from ibnn.likelihood.temperature import supported_temperature
from ibnn.network import make_room
from ibnn.normal import numbered_seed
from ibnn.prediction import HeldOut, draws, predict
from ibnn.threads import Lock, deepcopy, one_at_a_time
from ibnn.training.trainable import Trainable

if TYPE_CHECKING:
    from ibnn.novelty.reference import Reference


class Baseline(nn.Module):
    """What all baselines share. Threads may share one, as they may an `IBNN`."""

    prior_std = 0.0
    kl_kind: Any = None  # there is no choice
    reference: "Reference | None"
    held_out: HeldOut | None
    saved_options: tuple[str, ...] = ()  # attributes that are constructor options besides network and likelihood
    each_draw: Any

    evaluating, __deepcopy__ = evaluating, deepcopy
    train = one_at_a_time(nn.Module.train)
    state_dict = one_at_a_time(nn.Module.state_dict)
    load_state_dict = one_at_a_time(nn.Module.load_state_dict)

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self.register_module("reference", None)
        self.register_module("held_out", None)

    predict, save_pretrained = predict, save_pretrained

    @one_at_a_time  # passes put drawn weights into their places
    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`."""
        return iter(list(super().named_parameters(*args, **options)))

    @property
    def options(self) -> dict[str, Any]:
        """Constructor options from which `ibnn.load` makes the method again."""
        return {name: getattr(self, name) for name in self.saved_options}

    def draw_logits(
        self, x: Inputs, samples: int = 5, seed: int = 0, *, first: int = 0, batch_size: int | None = None
    ) -> Tensor:
        """Returns draws of the network's output, (J, B, …), in eval mode; draw j of a seed is one function of x.

        Arguments as of `IBNN.draw_logits`; a baseline computes draw by draw, whatever the `batch_size`.
        """
        return torch.cat(list(self.each_draw(x, samples, seed, first=first, batch_size=batch_size)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        make_room(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Plain(Baseline):
    """One deterministic network; with weight decay it is the MAP estimate.

    `net` is trained in place, and its weights keep their names. `likelihood` (default `Categorical`) says what the
    output means for a target, and `random` whether draws differ.
    """

    components, nodes, random = 1, 0, False
    examples: Tensor  #: Number of training examples seen so far (a buffer).

    def __init__(self, net: nn.Module, likelihood: Likelihood | None = None) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(complaint("net", "an nn.Module", type(net).__name__, "Pass the network itself."))
        self.net, self.likelihood = net, likelihood or Categorical()
        device = next(net.parameters()).device
        self.likelihood.to(device)
        self.register_buffer("examples", torch.zeros((), dtype=torch.int64, device=device))
        self.training = net.training

    def reseed(self, seed: int) -> None:
        """Sets the count of examples to 0; the noise of training comes from torch's generator, which `fit` seeds."""
        check.seed(seed)
        self.examples.zero_()

    @one_at_a_time
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Train mode: the network's output, with the method's noise. Eval mode: the output of one fixed draw."""
        if self.training:
            self.reference = self.held_out = None
            return self._noisy(args, kwargs)
        return self.likelihood.combine(torch.stack(list(self._draws(args, kwargs, range(1), 0))))

    @one_at_a_time
    def elbo(
        self,
        x: Inputs,
        y: Any,
        *,
        n_data: int,
        samples: int = 1,
        beta: float = 1.0,
        gamma: float = 0.0,
        spread: bool = False,
        part: tuple[int, int] | None = None,
    ) -> objective.ELBO:
        """Returns the loss on a batch and its terms; arguments as of `IBNN.elbo`, those of latents without effect."""
        self.reference = self.held_out = None
        y = self.likelihood.pack(y)
        objective.check_weights(n_data=n_data, data=self.likelihood.count(y), samples=samples, beta=beta, gamma=0.0)
        terms, kl = self._terms(x, y, samples), self.kl()
        if part is None:
            self.examples.add_(batch_length(x))
        return objective.ELBO(terms.loss + beta * kl / n_data, terms.nll, kl, torch.zeros_like(kl))

    def kl(self) -> Tensor:
        """Returns the KL of the posterior to the prior in nats; 0 where there is no posterior."""
        return torch.zeros((), device=self.examples.device)

    @one_at_a_time
    def parameter_groups(
        self, lr: float, latent_lr: float | None = None, weight_decay: float = 0.0, *, undo_k: bool = True
    ) -> list[dict[str, Any]]:
        """Returns groups for any torch optimiser, as `IBNN.parameter_groups` does."""
        groups = [
            {"name": "weights", "params": list(self.net.parameters()), "lr": lr, "weight_decay": weight_decay},
            {"name": "likelihood", "params": list(self.likelihood.parameters()), "lr": lr, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def each_draw(
        self, x: Inputs, samples: int = 5, seed: int = 0, *, first: int = 0, batch_size: int | None = None
    ) -> Iterator[Tensor]:
        """Yields what `draw_logits` returns, draw by draw, (1, B, …)."""
        with self.evaluating():
            yield from (output[None] for output in self._draws(*call_arguments(x), range(first, first + samples), seed))

    @one_at_a_time
    def mean_output(self, x: Inputs) -> Tensor:
        """Returns the output of the network in the present mode, without noise."""
        args, kwargs = call_arguments(x)
        return self.likelihood.read(self.net(*args, **kwargs))

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        """Yields the outputs of the draws of these numbers, or the only output there is."""
        for number in numbers if self.random else numbers[:1]:
            source = torch.Generator().manual_seed(numbered_seed(seed, number))  # on the CPU: alike on every device
            yield self.likelihood.read(self._noisy(args, kwargs, source))

    # Other methods override what follows.

    def _noisy(self, args: tuple[Any, ...], kwargs: dict[str, Any], source: torch.Generator | None = None) -> Any:
        """Runs one pass: with the noise of training, or with that of a draw if its generator is given."""
        return self.net(*args, **kwargs)

    def _terms(self, x: Inputs, y: Tensor, samples: int) -> Terms:
        """Returns mean losses over the rows, each once: without noise, copies would be equal."""
        with explaining_shapes(self.net, x):
            output = self.likelihood.read(self._noisy(*call_arguments(x)))
            check_rows(output, batch_length(x))
        self.likelihood.check(output, y)
        return self.likelihood.terms(output, y)


def scale_temperature(method: Trainable, valid: Any, *, samples: int = 5) -> float:
    """Sets the temperature of a method's likelihood by held-out labels (Guo et al., 2017); returns it.

    It is that of the lowest NLL, shrunk towards the present one: a factor of e must save 5 nats over all labels. So a
    few labels leave the method as it is, and a thousand find the lowest NLL to some 0.1 %.

    Args:
        method: A trained baseline or iBNN; its draws are tempered, then averaged.
        valid: Held-out data: a Dataset, a DataLoader or a pair (inputs, targets).
        samples: Draws per component.
    """
    temperature = find_temperature(method, valid, samples=samples)
    method.likelihood.set_temperature(temperature)
    return temperature


def find_temperature(method: Trainable, valid: Any, *, samples: int = 5) -> float:
    """Returns the temperature that held-out labels support, and leaves the method alone; see `scale_temperature`."""
    pack = method.likelihood.pack
    inputs, targets = as_source(valid, batch_size=256, name="valid", shuffled=False, pack=pack).inputs()
    outputs = draws(method, inputs, samples=samples)
    return supported_temperature(method.likelihood, outputs, torch.cat(targets).to(outputs.device))
