"""A probe: Laplace's approximation over all nodes of a trained network, beside what is there.

    IBNN_DATA=FOLDER python experiments/laplace.py [--nets lenet4 resnet20-half] [--seeds 0] [--library PYTHON]

With z a row each, a backward pass for each class gives the Jacobians of a whole batch, and the Gauss–Newton matrix over
nodes, H = Σ Jᵀ (diag p − p pᵀ) J, can be full. *linearised*: logits f + J (z − 1); *sampled*: z ~ N(1, Σ)
through the network; Σ = (H + 1/s²)⁻¹. *last layer*: the same for the weights of the last linear layer, linearised.
s, and a temperature where it says so, have the least NLL on held-out labels (2,000; of the ResNet 1,000); everything
else is scored once, on the test set (of the ResNet: its first 1,000 images, 10 draws in place of 20, and H from 2,500
training images). AUROC: of the entropy, test images against MNIST (of CIFAR-10: Fashion-MNIST in gray and noise), 1,000
of each (of the ResNet 300).
Writes results/laplace.json.

*laplace-torch*: its `Laplace(net, "classification", "last_layer", "kron")` with the probit predictive, and the prior
precision that its grid search takes by held-out NLL. It needs an environment of its own, whose Python is `--library`.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Data, Results, scores
from torch import Tensor, nn
from trained import data, trained

import ibnn
from ibnn import metrics
from ibnn.draws import Draws
from ibnn.inputs import evaluating
from ibnn.likelihood import Categorical
from ibnn.likelihood.temperature import best_temperature
from ibnn.pruning.scores import row_gradients

LOGITS, BATCH = 64, 250
Linear = Callable[[Tensor], tuple[Tensor, Tensor]]  # logits (B, C), and their Jacobians (B, C, D)
Seen = list[tuple[Tensor, Tensor]]  # the same of several batches


class Sizes(NamedTuple):
    """How much is computed."""

    scales: tuple[float, ...] = (0.003, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # s
    fit: int = 10_000  # training images that the Gauss–Newton matrix is made of, scaled to all
    valid: int = 2_000
    test: int = 10_000
    few: int = 1_000
    draws: int = 20


SIZES = {"lenet4": Sizes(), "resnet20-half": Sizes((0.01, 0.03, 0.07, 0.15, 0.4), 2_500, 1_000, 1_000, 300, 10)}


def nodes_of(model: ibnn.IBNN) -> Linear:
    """Logits and Jacobians with respect to z, at z = 1."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = []
        jacobians = row_gradients(
            model, x, Draws(torch.ones(len(x), model.nodes)), lambda out: kept.append(out.detach()) or out.sum(0)
        )
        return kept[0], jacobians.transpose(0, 1)

    return both


def last_of(net: nn.Module) -> Linear:
    """Logits and Jacobians with respect to the weights and biases of the last linear layer."""
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        with torch.no_grad(), last.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            logits = net(x)
        features = torch.cat([seen[0], torch.ones(len(x), 1)], 1)
        eye = torch.eye(logits.shape[1])
        return logits, torch.einsum("cd,bf->bcdf", eye, features).flatten(2)

    return both


def matrix(both: Linear, x: Tensor) -> Tensor:
    """The Gauss–Newton matrix."""
    total: Any = 0.0
    for part in x.split(BATCH):
        logits, jacobians = both(part)
        p = logits.softmax(1)
        root = p.sqrt()[:, :, None] * (jacobians - (p[:, :, None] * jacobians).sum(1, keepdim=True))
        total = total + (root.flatten(0, 1).T @ root.flatten(0, 1)).double()
    return total


class Posterior:
    """N(·, (H + 1/s²)⁻¹) for any s, from the eigenvectors of H."""

    def __init__(self, both: Linear, x: Tensor, rows: int) -> None:
        self.both = both
        values, self.vectors = torch.linalg.eigh(matrix(both, x[:rows]) * (len(x) / len(x[:rows])))
        self.values = values.clamp_min(0)

    def seen(self, x: Tensor) -> Seen:
        """Logits and Jacobians of batches, which serve every s."""
        return [self.both(part) for part in x.split(BATCH)]

    def root(self, s: float) -> Tensor:
        """A matrix R with R Rᵀ = Σ."""
        return (self.vectors * (self.values + 1 / s**2).rsqrt()).float()

    def linearised(self, seen: Seen, s: float) -> Tensor:
        """Log-probabilities of linearised logits."""
        generator, root, found = torch.Generator().manual_seed(0), self.root(s), []
        for logits, jacobians in seen:
            half = jacobians @ root
            covariance = half @ half.mT + 1e-6 * torch.eye(logits.shape[1])
            noise = torch.randn(LOGITS, *logits.shape, 1, generator=generator)
            drawn = logits + (torch.linalg.cholesky(covariance) @ noise)[..., 0]
            found.append(drawn.softmax(-1).mean(0).log())
        return torch.cat(found)

    def sampled(self, model: ibnn.IBNN, draws: int, x: Tensor, s: float) -> Tensor:
        """Log-probabilities of draws of z."""
        noise = torch.randn(draws, model.nodes, generator=torch.Generator().manual_seed(0))
        z = 1 + noise @ self.root(s).T
        with torch.no_grad(), evaluating(model):
            parts = [model.outputs(part, z).softmax(-1).mean(0).log() for part in x.split(BATCH)]
        return torch.cat(parts)


class Judged(NamedTuple):
    """What methods are judged by: held-out and test images, and those from outside."""

    valid: Data
    test: Data
    outside: dict[str, Tensor]

    def scores(self, answer: Callable[[Tensor], Tensor], temperature: float | None = None) -> list[dict[str, float]]:
        """Scores, and AUROC by the entropy; then those at a temperature, if there is one.

        `answer` gives log-probabilities, which need not be normalised.
        """
        raw = {name: answer(x) for name, x in ({"test": self.test.x} | self.outside).items()}
        found = []
        for t in (1.0, *([temperature] if temperature else [])):
            logs = {name: (of / t).log_softmax(-1) for name, of in raw.items()}
            entropies = {name: _entropy(of) for name, of in logs.items()}
            known = entropies.pop("test")
            aurocs = {name: metrics.auroc(known[: len(of)], of) for name, of in entropies.items()}
            first, *more = aurocs
            found.append(scores(logs["test"], self.test.y) | {"auroc": aurocs[first]})
            found[-1] |= {f"auroc {name}": aurocs[name] for name in more}
        return found

    def chosen(self, answer: Callable[[float], Tensor], scales: tuple[float, ...]) -> tuple[float, float]:
        """The s of the least held-out NLL, and the temperature of the mean probabilities at it."""
        logs = {s: answer(s) for s in scales}
        best = min(scales, key=lambda s: metrics.nll(logs[s], self.valid.y))
        return best, best_temperature(Categorical(), logs[best][None, None], self.valid.y)


def _entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(1)


def methods(name: str, seed: int, judged: Judged, library: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method and what it costs, one after the other."""
    net, _ = trained(name, seed)
    train, plain = data(name, seed).train, partial(_plain, net.requires_grad_(False))
    temperature = best_temperature(Categorical(), plain(judged.valid.x)[None, None], judged.valid.y)
    yield from zip(("plain", "temperature scaling"), judged.scores(plain, temperature), strict=True)
    model = ibnn.convert(net, components=1, init_std=0.0, seed=seed).eval()
    for what, both in (("nodes", nodes_of(model)), ("last layer", last_of(net))):
        yield from laplace(what, both, train.x, judged, SIZES[name], model if what == "nodes" else None)
    if library:
        yield "laplace-torch, last layer", of_library(library, net, train, judged)
    model = ibnn.convert(net, components=4, seed=seed)
    began = time.process_time()
    ibnn.calibrate(model, judged.valid, progress=False)
    facts = {"fit seconds": time.process_time() - began}
    (found,) = judged.scores(lambda x: model.predict(x, progress=False, novelty=False).log_probs)
    yield "calibrate", facts | found


def laplace(
    what: str, both: Linear, x: Tensor, judged: Judged, sizes: Sizes, model: ibnn.IBNN | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Scores of linearised logits, and of draws of z if there is a model for them; each as it is and tempered."""
    began = time.process_time()
    posterior = Posterior(both, x, sizes.fit)
    facts = {"fit seconds": time.process_time() - began, "bytes": 8 * len(posterior.values) ** 2}
    seen = posterior.seen(judged.valid.x)
    ways = {
        "linearised": (lambda s: posterior.linearised(seen, s), lambda x, s: posterior.linearised(posterior.seen(x), s))
    }
    if model is not None:
        sampled = partial(posterior.sampled, model, sizes.draws)
        ways["sampled"] = (partial(sampled, judged.valid.x), sampled)
    for way, (held_out, answer) in ways.items():
        s, temperature = judged.chosen(held_out, sizes.scales)
        began = time.process_time()
        first, second = judged.scores(lambda x, a=answer, s=s: a(x, s), temperature)  # type: ignore[misc]
        own = {"s": s, "answer seconds": time.process_time() - began}
        yield f"{what}, {way}", first | facts | own
        yield f"{what}, {way} + T", second


def of_library(python: str, net: nn.Module, train: Data, judged: Judged) -> dict[str, Any]:
    """Scores of laplace-torch, which answers in another environment from features of the last layer."""
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]

    def features(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with torch.no_grad(), last.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            for part in x.split(BATCH):
                net(part)
        return torch.cat(seen)

    inputs = {"train": train.x, "valid": judged.valid.x, "test": judged.test.x} | judged.outside
    given = {"features": {key: features(x) for key, x in inputs.items()}, "weight": last.weight, "bias": last.bias}
    given |= {"labels": {"train": train.y, "valid": judged.valid.y}}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(given, Path(folder) / "given.pt")
        script = Path(__file__).parent / "laplace_library.py"
        subprocess.run([python, "-P", str(script), folder], check=True)  # not this folder's laplace.py
        found = torch.load(Path(folder) / "found.pt", weights_only=True)
    logs = {id(inputs[key]): value for key, value in found["logs"].items()}
    (own,) = judged.scores(lambda x: logs[id(x)])
    return own | found["facts"]


def _plain(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([net(part) for part in x.split(BATCH)]).log_softmax(-1)


def cell(name: str, seed: int, library: str | None) -> dict[str, Any]:
    """All methods on one network."""
    from calibrate import evaluation

    sizes, (_, valid, test) = SIZES[name], data(name, seed)
    outside = {key: x[: sizes.few] for key, x in evaluation(name, seed, dev=False)[2].items()}
    few = [Data(part.x[:rows], part.y[:rows]) for part, rows in ((valid, sizes.valid), (test, sizes.test))]
    return {"net": name, "methods": dict(methods(name, seed, Judged(*few, outside), library))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--library", help="Python of an environment with laplace-torch")
    options = parser.parse_args()
    results = Results("laplace", str(__doc__))
    for seed in options.seeds:
        for name in options.nets:
            results.run(f"{name} {seed}", partial(cell, name, seed, options.library))
