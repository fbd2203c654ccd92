"""Rows of other libraries: IVON (ivon-opt), last-layer Laplace approximation (laplace-torch), ABNN (torch-uncertainty).

None is a dependency of ours: `pip install ivon-opt laplace-torch torch-uncertainty` before `reproduce.py benchmark`.
Settings are those of their own pages. IVON: one sample for each step, ess = the number of training images, learning
rate 0.1 with warm-up and cosine, beta2 0.99995, weight decay 2e-4, the other settings at its defaults. BatchNorm has
the statistics of training. Laplace: Kronecker factors, the prior precision by marginal likelihood, the probit
approximation. ABNN: noise after the BatchNorm of the run's network, then 5 epochs of theirs (SGD with Nesterov
momentum, weight decay 1e-4, the rate a tenth after the first epoch and again after the fourth, loss weights of 5 for
three random classes of ten), three networks beside the one it begins with, 6 passes of each. Their class demands the
rate and the amount of noise: 0.005, and the best of three on held-out images. The layer is loaded from its file, since
the package as a whole needs torchvision and Lightning.
"""

import copy
import math
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
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


def abnn(models: Sequence[Any], splits: Splits, samples: int) -> Any:
    """Returns the run's network and three that went on from it, all with noise, each `samples` times."""
    x, y = splits.train.__getitems__(list(range(len(splits.train))))
    x_valid, y_valid = splits.valid.__getitems__(list(range(len(splits.valid))))
    classes = int(y.max()) + 1

    def tuned(alpha: float, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net, weights = _noisy(copy.deepcopy(models[0].net), alpha), torch.ones(classes)
        weights[torch.randperm(classes)[: int(classes**0.5)]] = 5.0
        optimiser = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [1, 4])
        for _ in range(5):
            for rows in torch.randperm(len(y)).split(BATCH):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net.train()(x[rows]), y[rows], weights).backward()
                optimiser.step()
            schedule.step()
        return net.eval()

    def nll(alpha: float) -> float:
        net = tuned(alpha, 0)
        with torch.no_grad():
            probs = sum(net(x_valid).softmax(1) for _ in range(6)) / 6
        return float(nn.functional.nll_loss(probs.log(), y_valid))

    with torch.random.fork_rng(), torch.enable_grad():
        alpha = min((0.03, 0.1, 0.3), key=nll)
        nets = [_noisy(copy.deepcopy(models[0].net), alpha).eval(), *(tuned(alpha, seed) for seed in (1, 2, 3))]
    return ibnn.Ensemble([Plain(copy.deepcopy(net)).eval() for net in nets for _ in range(samples)])


def _noisy(net: nn.Module, alpha: float) -> nn.Module:
    """Replaces the BatchNorm of images by the library's layer, with its weights and statistics."""
    (folder,) = find_spec("torch_uncertainty").submodule_search_locations
    spec = spec_from_file_location("abnn", Path(folder, "layers", "bayesian", "abnn.py"))
    layers = module_from_spec(spec)
    spec.loader.exec_module(layers)
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            new = layers.BatchNormAdapter2d(module.num_features, alpha=alpha)
            new.load_state_dict(module.state_dict())
            net.set_submodule(name, new)
    return net
