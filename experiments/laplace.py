"""A probe: Laplace's approximation over all nodes of a trained network, beside what is there.

    IBNN_DATA=FOLDER python experiments/laplace.py [--nets lenet4 resnet20] [--seeds 0]

With z a row each, a backward pass for each class gives the Jacobians of a whole batch, and the Gauss–Newton matrix over
nodes, H = Σ Jᵀ (diag p − p pᵀ) J, can be full. *linearised*: logits f + J (z − 1); *sampled*: z ~ N(1, Σ)
through the network; Σ = (H + 1/s²)⁻¹. *last layer*: the same for the weights of the last linear layer, linearised.
s, and a temperature where it says so, have the least NLL on 2,000 held-out labels; everything else is scored once, on
the test set. AUROC: of the entropy, test images against MNIST (of CIFAR-10: against Fashion-MNIST), 1,000 of each.
Writes results/laplace.json.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import Data, Results, scores
from torch import Tensor, nn
from trained import NETS, data, trained

import ibnn
from ibnn import metrics
from ibnn.inputs import evaluating
from ibnn.likelihood import Categorical
from ibnn.likelihood.temperature import best_temperature
from ibnn.pruning.scores import row_gradients

SCALES = (0.003, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # s
DRAWS, LOGITS, FEW, BATCH = 20, 64, 1_000, 250
Linear = Callable[[Tensor], tuple[Tensor, Tensor]]  # logits (B, C), and their Jacobians (B, C, D)


def nodes_of(model: ibnn.IBNN) -> Linear:
    """Logits and Jacobians with respect to z, at z = 1."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = []
        jacobians = row_gradients(
            model, x, torch.ones(len(x), model.nodes), lambda out: kept.append(out.detach()) or out.sum(0)
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

    def __init__(self, both: Linear, x: Tensor) -> None:
        self.both = both
        values, self.vectors = torch.linalg.eigh(matrix(both, x))
        self.values = values.clamp_min(0)

    def root(self, s: float) -> Tensor:
        """A matrix R with R Rᵀ = Σ."""
        return (self.vectors * (self.values + 1 / s**2).rsqrt()).float()

    def linearised(self, x: Tensor, s: float) -> Tensor:
        """Log-probabilities of linearised logits."""
        generator, root, found = torch.Generator().manual_seed(0), self.root(s), []
        for part in x.split(BATCH):
            logits, jacobians = self.both(part)
            half = jacobians @ root
            covariance = half @ half.mT + 1e-6 * torch.eye(logits.shape[1])
            noise = torch.randn(LOGITS, *logits.shape, 1, generator=generator)
            drawn = logits + (torch.linalg.cholesky(covariance) @ noise)[..., 0]
            found.append(drawn.softmax(-1).mean(0).log())
        return torch.cat(found)

    def sampled(self, model: ibnn.IBNN, x: Tensor, s: float) -> Tensor:
        """Log-probabilities of draws of z."""
        noise = torch.randn(DRAWS, model.nodes, generator=torch.Generator().manual_seed(0))
        z = 1 + noise @ self.root(s).T
        with torch.no_grad(), evaluating(model):
            parts = [model.outputs(part, z).softmax(-1).mean(0).log() for part in x.split(BATCH)]
        return torch.cat(parts)


def chosen(answer: Callable[[Tensor, float], Tensor], valid: Data) -> tuple[float, float]:
    """The s of the least held-out NLL, and the temperature of the mean probabilities at it."""
    logs = {s: answer(valid.x, s) for s in SCALES}
    best = min(SCALES, key=lambda s: metrics.nll(logs[s], valid.y))
    return best, best_temperature(Categorical(), logs[best][None, None], valid.y)


def judged(answer: Callable[[Tensor], Tensor], test: Data, outside: Tensor) -> dict[str, float]:
    """Scores, and AUROC by the entropy."""
    logs = answer(test.x).log_softmax(-1)
    entropies = [-(part.exp() * part).sum(1) for part in (logs[:FEW], answer(outside).log_softmax(-1))]
    return scores(logs, test.y) | {"auroc": metrics.auroc(*entropies)}


def methods(name: str, seed: int, outside: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method and what it costs, one after the other."""
    net, _ = trained(name, seed)
    train, valid, test = data(name, seed)
    plain = partial(_plain, net)
    yield "plain", judged(plain, test, outside)
    temperature = best_temperature(Categorical(), plain(valid.x)[None, None], valid.y)
    yield "temperature scaling", judged(lambda x: plain(x) / temperature, test, outside)
    model = ibnn.convert(net, components=1, init_std=0.0, seed=seed).eval()
    for what, both in (("nodes", nodes_of(model)), ("last layer", last_of(net))):
        began = time.process_time()
        posterior = Posterior(both, train.x)
        facts = {"fit seconds": time.process_time() - began, "bytes": 8 * len(posterior.values) ** 2}
        ways = {"linearised": posterior.linearised}
        if what == "nodes":
            ways["sampled"] = partial(posterior.sampled, model)
        for way, answer in ways.items():
            s, temperature = chosen(answer, valid)
            began = time.process_time()
            found = judged(lambda x, a=answer, s=s: a(x, s), test, outside)  # type: ignore[misc]
            own = facts | {"s": s, "answer seconds": time.process_time() - began}
            yield f"{what}, {way}", found | own
            yield f"{what}, {way} + T", judged(lambda x, a=answer, s=s, t=temperature: a(x, s) / t, test, outside)  # type: ignore[misc]
    model = ibnn.convert(net, components=4, seed=seed)
    began = time.process_time()
    ibnn.calibrate(model, valid, progress=False)
    facts = {"fit seconds": time.process_time() - began}
    yield (
        "calibrate",
        facts | judged(lambda x: model.predict(x, progress=False, novelty=False).log_probs, test, outside),
    )


def _plain(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([net(part) for part in x.split(BATCH)]).log_softmax(-1)


def cell(name: str, seed: int) -> dict[str, Any]:
    """All methods on one network."""
    from calibrate import evaluation

    outside = next(iter(evaluation(name, seed, dev=False)[2].values()))
    return {"net": name, "methods": dict(methods(name, seed, outside))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=["lenet4", "resnet20"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    results = Results("laplace", str(__doc__))
    for seed in options.seeds:
        for name in options.nets:
            results.run(f"{name} {seed}", partial(cell, name, seed))
