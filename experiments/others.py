"""Rows of other libraries in the benchmark: IVON (ivon-opt) and the last-layer Laplace approximation (laplace-torch).

Neither package is a dependency of ours: `pip install ivon-opt laplace-torch` before `reproduce.py benchmark`. Settings
are those of their own pages. IVON: one sample for each step, ess = the number of training images, learning rate 0.1
with warm-up and cosine, beta2 0.99995, weight decay 2e-4, the other settings at its defaults. BatchNorm has the
statistics of training. Laplace: Kronecker factors, the prior precision by marginal likelihood, the probit
approximation. ABNN is part of torch-uncertainty, which needs torchvision: it was not run.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ibnn
from ibnn.baselines import Plain
from ibnn.lab.parts import Splits

LR, WARMUP, BATCH, EPOCHS = 0.1, 0.05, 128, 20  # WARMUP: share of the steps in which the rate rises


def ivon(models: Sequence[Any], splits: Splits, samples: int) -> Any:
    """Trains the network of a run anew by IVON; returns an ensemble of networks drawn from its posterior."""
    import ivon as package

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = copy.deepcopy(models[0].net)
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        x, y = splits.train.__getitems__(list(range(len(splits.train))))
        optimiser = package.IVON(net.parameters(), lr=LR, ess=len(y), beta2=0.99995, weight_decay=2e-4)
        order = [rows for _ in range(EPOCHS) for rows in torch.randperm(len(y)).split(BATCH)]
        for step, rows in enumerate(order, 1):
            rise, fall = step / (WARMUP * len(order)), 0.5 * (1 + math.cos(math.pi * step / len(order)))
            optimiser.param_groups[0]["lr"] = LR * min(rise, 1.0) * fall
            with optimiser.sampled_params(train=True):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net.train()(x[rows]), y[rows]).backward()
            optimiser.step()
        members = []
        for _ in range(samples):
            with optimiser.sampled_params():
                members.append(Plain(copy.deepcopy(net)).eval())
    return ibnn.Ensemble(members)


class _Laplace(nn.Module):
    """Log-probabilities of a Laplace approximation, as outputs."""

    def __init__(self, net: nn.Module, found: Any) -> None:
        super().__init__()
        self.net, self.found = net, [found]

    def forward(self, x: Tensor) -> Tensor:
        """Returns log p (B, classes) by the probit approximation."""
        probs: Tensor = self.found[0](x)
        return probs.clamp_min(1e-12).log()


def laplace(models: Sequence[Any], splits: Splits, samples: int) -> Any:
    """Fits the posterior of a run's last layer."""
    from laplace import Laplace

    net = copy.deepcopy(models[0].net).eval().to(memory_format=torch.contiguous_format)  # laplace-torch flattens it
    x, y = splits.train.__getitems__(list(range(len(splits.train))))
    found = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    with torch.enable_grad():
        found.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=250))
        found.optimize_prior_precision(method="marglik")
    return Plain(_Laplace(net, found)).eval()
