"""The same network as other libraries make it Bayesian, for bench.py; none of them is a dependency."""

import copy
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.baselines import MCDropout

N_DATA = 50_000  # training examples that the KL is divided by


class Rival(NamedTuple):
    """What is timed of a method."""

    parameters: list[nn.Parameter]  # that are trained
    loss: Callable[[Tensor, Tensor], Tensor]  # of a batch
    predict: Callable[[Tensor], Tensor]  # class probabilities for a batch, from so many draws:
    draws: int


def _mean(outputs: Iterable[Tensor]) -> Tensor:
    """Averages the softmax of outputs."""
    return torch.stack([output.softmax(-1) for output in outputs]).mean(0)


def plain(net: nn.Module, draws: int = 1, kl: Callable[[nn.Module], Tensor] | None = None) -> Rival:
    """A network, and as many forward passes of it, one after the other; its KL, if it has one, is part of the loss."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        nll = F.cross_entropy(net(x), y)
        return nll + kl(net) / N_DATA if kl else nll

    return Rival(list(net.parameters()), loss, lambda x: _mean(net(x) for _ in range(draws)), draws)


def converted(model: Any, draws: int = 1) -> Rival:
    """An iBNN, a step of Algorithm 1, and its own `predict`."""

    def predict(x: Tensor) -> Tensor:
        return model.predict(x, samples=draws // model.components).probs

    return Rival(list(model.parameters()), lambda x, y: model.elbo(x, y, n_data=N_DATA).loss, predict, draws)


def dropout(net: nn.Module, draws: int) -> Rival:
    """MC-dropout before every layer but the first."""
    made = MCDropout(copy.deepcopy(net), rate=0.1)

    def predict(x: Tensor) -> Tensor:
        return made.eval().draw_logits(x, draws).softmax(-1).mean(0)

    return Rival(list(made.parameters()), lambda x, y: made.train().elbo(x, y, n_data=N_DATA).loss, predict, draws)


def ensemble(net: nn.Module, draws: int) -> Rival:
    """A deep ensemble of 4: one answer per member, whatever the number of draws; a step trains all members."""
    nets = nn.ModuleList(copy.deepcopy(net) for _ in range(4))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(member(x), y) for member in nets]).sum()

    return Rival(list(nets.parameters()), loss, lambda x: _mean(member(x) for member in nets), len(nets))


def bayesian_torch(net: nn.Module, draws: int) -> Rival:
    """bayesian-torch's `dnn_to_bnn`: a Gaussian over every weight, drawn once per forward pass."""
    library: Any = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
    made = copy.deepcopy(net)
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    library.dnn_to_bnn(made, prior | {"type": "Reparameterization", "moped_enable": False})
    return plain(made, draws, library.get_kl_loss)


def torchbnn(net: nn.Module, draws: int) -> Rival:
    """torchbnn's layers in place of the network's."""
    library: Any = importlib.import_module("torchbnn")
    made = copy.deepcopy(net)
    for module in list(made.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Conv2d):
                form = layer.kernel_size, layer.stride, layer.padding
                setattr(module, name, library.BayesConv2d(0.0, 0.1, layer.in_channels, layer.out_channels, *form))
            elif isinstance(layer, nn.Linear):
                setattr(module, name, library.BayesLinear(0.0, 0.1, layer.in_features, layer.out_features))
    return plain(made, draws, library.BKLLoss(reduction="sum"))


RIVALS: dict[str, Callable[[nn.Module, int], Rival]] = {
    "MC-dropout": dropout,
    "deep ensemble of 4": ensemble,
    "bayesian-torch": bayesian_torch,
    "torchbnn": torchbnn,
}
