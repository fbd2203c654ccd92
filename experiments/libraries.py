"""Other libraries on the benchmark's LeNet: the same data, epochs, optimiser and evaluation; their layers and losses.

    IBNN_DATA=FOLDER PYTHON experiments/libraries.py [--seeds 3] [--methods "Packed-Ensembles" …] [--documented]

PYTHON is that of an environment with ibnn, torch-uncertainty, bayesian-torch and laplace-torch. Each method is a
subclass of `Plain`, so that `fit` and the benchmark's evaluation serve it. What has to be chosen is chosen by the
held-out NLL of seed 0, beginning with the documentation's value. Seconds: CPU time. Writes results/libraries.json.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from common import Results
from provenance import provenance
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ibnn.baselines import Plain
from ibnn.inputs import Inputs, logits_of
from ibnn.lab.evaluation import evaluate
from ibnn.lab.job import Job
from ibnn.lab.parts import Splits, make_data
from ibnn.likelihood import Terms
from ibnn.nets import LeNet
from ibnn.normal import numbered_seed
from ibnn.training.loop import fit

operators = torch.library.Library("torchvision", "DEF")  # torchvision asks for them when it is imported; none is called
for _name in ("nms", "qnms"):
    operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

folder = sys.path.pop(0)  # it has a laplace.py, too

from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss  # noqa: E402
from laplace import Laplace  # noqa: E402
from torch_uncertainty.layers import MaskedConv2d, MaskedLinear, PackedConv2d, PackedLinear  # noqa: E402
from torch_uncertainty.methods import BatchEnsemble  # noqa: E402

sys.path.insert(0, folder)

ESTIMATORS, DRAWS = 4, 20
TRAIN = {"epochs": 60, "evaluate_every": 60, "eval_samples": 20}
JOB = Job(net="lenet", data="fashion-mnist", examples=6000, valid=1000, train=TRAIN)
KEPT = ("scores", "temperature", "outsiders")


class Estimators(Plain):
    """Networks in one: for B rows it answers with those of all estimators, one after the other, (M · B, C)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.components = ESTIMATORS

    def _terms(self, x: Inputs, y: Tensor, samples: int) -> Terms:
        """Returns mean losses; some networks give each row to one estimator in training, others to all."""
        output = logits_of(self.net(x))
        return self.likelihood.terms(output, y.repeat(len(output) // len(y)))

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        yield from logits_of(self.net(*args, **kwargs)).unflatten(0, (ESTIMATORS, -1))


class Repeated(nn.Module):
    """Repeats the rows for every estimator in prediction, as torch-uncertainty's masked networks do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x if self.training else x.repeat(ESTIMATORS, 1, 1, 1))
        return output


class Variational(Plain):
    """bayesian-torch's layers, with the loss of its documentation: cross-entropy + KL / batch size, times a weight."""

    random = True

    def __init__(self, net: nn.Module, weight: float) -> None:
        super().__init__(net)
        self.weight = weight

    def kl(self) -> Tensor:
        """Returns what becomes the library's term when `fit` divides it by the number of examples."""
        kl: Tensor = get_kl_loss(self.net)  # the layers' means over weights
        return self.weight * kl * (5000 / 128)

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        for number in numbers:
            with torch.random.fork_rng():
                torch.manual_seed(numbered_seed(seed, number))
                yield logits_of(self.net(*args, **kwargs))


class LastLayer(Plain):
    """laplace-torch on the last layer of a trained network; answers by the probit approximation."""

    def __init__(self, plain: Plain, splits: Splits) -> None:
        super().__init__(plain.net.to(memory_format=torch.contiguous_format))  # the library flattens weights by view
        both = (part.__getitems__(list(range(len(part)))) for part in (splits.train, splits.valid) if part)
        train, valid = (DataLoader(TensorDataset(*part), batch_size=250) for part in both)
        found = Laplace(self.net, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        found.fit(train)
        found.optimize_prior_precision(method="gridsearch", pred_type="glm", link_approx="probit", val_loader=valid)
        self.found = [found]  # not a module of this one

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: range, seed: int) -> Iterator[Tensor]:
        yield self.found[0](*args, pred_type="glm", link_approx="probit").log()


def packed(alpha: float) -> Plain:
    """torch-uncertainty's Packed-Ensembles of the LeNet: estimators are groups of channels."""
    net, form = LeNet(), {"alpha": alpha, "num_estimators": ESTIMATORS}
    net.conv1 = PackedConv2d(1, 6, 5, first=True, **form)
    net.conv2, net.conv3 = PackedConv2d(6, 16, 5, **form), PackedConv2d(16, 120, 4, **form)
    net.fc1, net.fc2 = PackedLinear(120, 64, **form), PackedLinear(64, 10, last=True, **form)
    return Estimators(net)


def masked(scale: float) -> Plain:
    """torch-uncertainty's Masksembles: masks on the inputs of the layers with ten channels or more, as it demands."""
    net = LeNet()
    net.conv3 = MaskedConv2d(16, 120, 4, num_estimators=ESTIMATORS, scale=scale)
    net.fc1 = MaskedLinear(120, 64, num_estimators=ESTIMATORS, scale=scale)
    net.fc2 = MaskedLinear(64, 10, num_estimators=ESTIMATORS, scale=scale)
    return Estimators(Repeated(net))


def variational(weight: float) -> Plain:
    """bayesian-torch's `dnn_to_bnn` of the LeNet, with the prior and the start of its documentation."""
    net = LeNet()
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    dnn_to_bnn(net, prior | {"type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    return Variational(net, weight)


METHODS: dict[str, Callable[..., Plain]] = {
    "SGD": lambda: Plain(LeNet()),
    "Packed-Ensembles": packed,
    "Masksembles": masked,
    "BatchEnsemble": lambda: Estimators(BatchEnsemble(LeNet(), ESTIMATORS, convert_layers=True)),
    "bayesian-torch": variational,
}
GRIDS: dict[str, tuple[float, ...]] = {  # what is chosen, the documentation's value first
    "Packed-Ensembles": (2.0,),  # α; 4 is a deep ensemble, and LeNet's six channels allow no other
    "Masksembles": (2.0, 1.5, 3.0),  # scale
    "bayesian-torch": (1.0, 10.0, 100.0),  # of the KL
}


@cache
def splits() -> Splits:
    """The benchmark's data."""
    return make_data(JOB)


def trained(method: str, seed: int, option: float | None) -> tuple[Plain, dict[str, Any]]:
    """A method trained as the benchmark's, and what that took."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (Masksembles draws its masks so)
    model = METHODS[method](*([] if option is None else [option])).to(memory_format=torch.channels_last)
    job, began = JOB.but(seed=seed), time.process_time()
    history = fit(model, splits().train, splits().valid, recipe=job.full_recipe(), novelty=False, quiet=True)
    facts = {"train seconds": round(time.process_time() - began, 1), "option": option}
    facts["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return model, facts | {key: value for key, value in history.rows[-1].items() if key.startswith("valid_")}


def measure(model: Plain) -> dict[str, Any]:
    """What the benchmark measures of a method."""
    found = evaluate(model, splits().whole, splits().valid, samples=DRAWS).result
    result = {
        part: {key: of[key] for key in KEPT} | {"corrupted": of["corrupted"]["all"]}
        for part, of in (("own", found), ("tempered", found["tempered"]))
    }
    return result | {"forwards": model.components * (DRAWS if model.random else 1)}


def run(method: str, seed: int, option: float | None, least: float) -> dict[str, Any]:
    """Trains a method, and evaluates it if its held-out NLL is the least so far; with SGD laplace-torch on top, too."""
    model, result = trained(method, seed, option)
    result |= {"recipe": JOB.but(seed=seed).full_recipe().model_dump()}
    result |= {"libraries": provenance("torch-uncertainty", "bayesian-torch", "laplace-torch", "torchvision")}
    if result["valid_nll"] < least:
        result |= measure(model)
    if method == "SGD":
        began = time.process_time()
        laplace = LastLayer(model, splits())
        precision = float(laplace.found[0].prior_precision)
        more = {"fit seconds": round(time.process_time() - began, 1), "prior precision": precision}
        result["laplace-torch"] = measure(laplace) | more
    return result


def search(results: Results, method: str, seed: int, options: tuple[float | None, ...]) -> float | None:
    """Runs a method with each option; returns the one of the least held-out NLL."""
    found: dict[float | None, float] = {}
    for option in options:
        least = min(found.values(), default=math.inf)
        name = " ".join(str(part) for part in (method, option, seed) if part is not None)
        found[option] = results.run(name, partial(run, method, seed, option, least))["valid_nll"]
    return min(found, key=lambda option: found[option])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--documented", action="store_true", help="no search: the values of the documentation")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("libraries", str(__doc__))
    for method in given.methods:
        grid = GRIDS.get(method, (None,))
        chosen = search(results, method, 0, grid[:1] if given.documented else grid)
        for seed in range(1, given.seeds):
            search(results, method, seed, (chosen,))
