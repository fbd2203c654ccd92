"""How few draws suffice? Answers that stop when settled, and answers without draws, against 5 draws per component.

    IBNN_DATA=FOLDER python experiments/draws.py

LeNet on 5,000 Fashion-MNIST images, trained as in `make reproduce NAME=benchmark`, into the folder runs: the default
with 8 components, and, for ways without draws, which know nothing of units, 16 components with factors of channels.
Both are compared on the 1,000 held-out images; the smallest tolerance that needs a quarter of the draws, or less, is
then measured once on the test images. Writes results/draws.json.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import Data, Results, data_folder
from reproduce import read
from torch import Tensor

import ibnn
from ibnn import metrics
from ibnn.data import Images
from ibnn.lab.job import Job
from ibnn.lab.parts import prepare
from ibnn.nets import LeNet

SETTING, METHOD, CHANNELS, SEEDS = "LeNet, 5,000 Fashion-MNIST", "iBNN-8", "iBNN-16, channels", (0, 1, 2)
TOLERANCES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
SAMPLES = 5


@cache
def trained(method: str, seed: int) -> tuple[ibnn.IBNN, Data, Data]:
    """A network of the benchmark, its held-out images and the test images."""
    (cell,) = (c for c in read("benchmark").cells() if c.name == f"{SETTING} / {method} / seed {seed}")
    job = Job(**cell.fields)
    splits, model = prepare(job, data_folder())
    assert isinstance(model, ibnn.IBNN)
    assert splits.valid is not None
    options: Any = {"run_dir": f"runs/{job.key}", "quiet": True, "novelty": False}
    ibnn.fit(model, splits.train, splits.valid, recipe=job.full_recipe(), **options)
    test = Images(splits.whole.test, mean=splits.whole.mean, std=splits.whole.std)
    return model, *(Data(*part.__getitems__(torch.arange(len(part)))) for part in (splits.valid, test))


def settled(model: ibnn.IBNN, data: Data, tolerances: tuple[float, ...]) -> dict[str, Any]:
    """Draws, NLL and labels to those of 5 draws per component, by tolerance."""
    whole = model.predict(data.x, samples=SAMPLES)
    answers = {str(tolerance): model.predict(data.x, samples=SAMPLES, tolerance=tolerance) for tolerance in tolerances}
    if len(tolerances) > 1:
        answers |= {f"samples={number}": model.predict(data.x, samples=number) for number in (1, 2)}
    found: dict[str, Any] = {}
    for name, p in answers.items():
        used = int(name[-1]) if p.draws is None else p.draws.double().mean().item() / model.components
        found[name] = {
            "draws": round(used / SAMPLES, 4),
            "nll": round(metrics.nll(p.log_probs, data.y) / metrics.nll(whole.log_probs, data.y), 4),
            "equal_labels": round((p.labels == whole.labels).double().mean().item(), 4),
        }
    return found


# ----------------------------------------------------------------------------------------------------- without draws


class Moments(NamedTuple):
    """Mean and variance of every entry."""

    mean: Tensor
    variance: Tensor


def times(x: Moments, z: Moments) -> Moments:
    """Of x ∘ z, independent of each other."""
    return Moments(x.mean * z.mean, x.variance * (z.mean.square() + z.variance) + x.mean.square() * z.variance)


def relu(x: Moments) -> Moments:
    """Of max(x, 0) for Gaussian x."""
    std = x.variance.clamp_min(1e-12).sqrt()
    ratio = x.mean / std
    cdf, pdf = torch.special.ndtr(ratio), (-0.5 * ratio.square()).exp() / (2 * torch.pi) ** 0.5
    mean = x.mean * cdf + std * pdf
    second = (x.mean.square() + x.variance) * cdf + x.mean * std * pdf
    return Moments(mean, (second - mean.square()).clamp_min(0))


def pool(x: Moments) -> Moments:
    """Of the entry with the largest mean of every 2 × 2."""
    mean, place = F.max_pool2d(x.mean, 2, return_indices=True)
    return Moments(mean, x.variance.flatten(2).gather(2, place.flatten(2)).view_as(mean))


def convolution(layer: torch.nn.Conv2d, x: Moments, z: Moments, coherent: bool) -> Moments:
    """`coherent` knows that a channel's z is the same all over the image, at as many products again."""
    z = Moments(*(t[:, None, None] for t in z))
    weight = layer.weight
    if not coherent:
        scaled = times(x, z)
        return Moments(layer(scaled.mean), F.conv2d(scaled.variance, weight.square()))
    apart = F.conv2d(x.mean, weight.transpose(0, 1).flatten(0, 1)[:, None], groups=weight.shape[1])
    apart = apart.unflatten(1, (weight.shape[1], -1))  # (B, D, out, …)
    mean = (apart * z.mean[..., None]).sum(1) + layer.bias[:, None, None]
    own = F.conv2d(x.variance * (z.mean.square() + z.variance), weight.square())
    return Moments(mean, own + (apart.square() * z.variance[..., None]).sum(1))


def moments(net: LeNet, x: Tensor, z: list[Moments], *, coherent: bool, noise: Tensor) -> Tensor:
    """Probabilities of one component by moments; the last layer's softmax over fixed draws of its input."""
    h = Moments(x, torch.zeros_like(x))
    for layer, own in zip((net.conv1, net.conv2), z[:2], strict=True):
        h = pool(relu(convolution(layer, h, own, coherent)))
    h = Moments(*(t.flatten(1) for t in relu(convolution(net.conv3, h, z[2], coherent))))
    h = times(h, z[3])
    h = times(relu(Moments(net.fc1(h.mean), F.linear(h.variance, net.fc1.weight.square()))), z[4])
    drawn = h.mean + h.variance.sqrt() * noise[:, None]  # (draws, B, D)
    probs: Tensor = net.fc2(drawn).softmax(-1)
    return probs.mean(0)


@torch.no_grad()
def without_draws(model: ibnn.IBNN, data: Data) -> dict[str, float]:
    """NLL to that of 5 draws per component; "moments" take two plain forward passes a component, in products."""
    assert float(model.likelihood.temperature) == 1
    net, latents = model.net, list(model.latents.values())  # without z its layers are plain
    assert isinstance(net, LeNet)
    noise = torch.randn(32, latents[-1].nodes, generator=torch.Generator().manual_seed(0))
    probs: dict[str, list[Tensor]] = {}
    for k in range(model.components):
        z = [Moments(latent.mean[k], latent.std[k].square()) for latent in latents]
        still = [Moments(own.mean, torch.zeros_like(own.mean)) for own in z[:-1]]
        for name, values in (
            ("means", model.component(k)(data.x).softmax(-1)),
            ("means, last layer's noise", moments(net, data.x, [*still, z[-1]], coherent=False, noise=noise)),
            ("moments", moments(net, data.x, z, coherent=False, noise=noise)),
            ("moments, channels whole", moments(net, data.x, z, coherent=True, noise=noise)),
        ):
            probs.setdefault(name, []).append(values)
    found = {name: torch.stack(values).mean(0) for name, values in probs.items()}
    found |= {f"samples={samples}": model.predict(data.x, samples=samples).probs for samples in (1, 2)}
    whole = metrics.nll(model.predict(data.x, samples=SAMPLES).log_probs, data.y)
    return {name: round(metrics.nll(values.log(), data.y) / whole, 4) for name, values in found.items()}


def chosen(results: Results) -> float:
    """The smallest tolerance that needs a quarter of the draws, or less, on average over the seeds' held-out images."""
    cells = [results.cells[f"held out / seed {seed}"] for seed in SEEDS]
    return min(t for t in TOLERANCES if sum(cell[str(t)]["draws"] for cell in cells) <= 0.25 * len(SEEDS))


def main() -> None:
    """Writes the results."""
    results = Results("draws", "answers from fewer draws, to those of 5 per component: draws, NLL and equal labels")
    for seed in SEEDS:
        model, valid, _ = trained(METHOD, seed)
        results.run(f"held out / seed {seed}", lambda model=model, valid=valid: settled(model, valid, TOLERANCES))
        results.run(f"without draws / seed {seed}", lambda at=seed: without_draws(*trained(CHANNELS, at)[:2]))
    tolerance = chosen(results)
    for seed in SEEDS:
        model, _, test = trained(METHOD, seed)
        results.run(f"test / seed {seed}", lambda model=model, test=test: settled(model, test, (tolerance,)))


if __name__ == "__main__":
    main()
