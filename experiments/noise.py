"""Do antithetic or stratified draws answer better than independent ones, at equal numbers?

    IBNN_DATA=FOLDER python experiments/noise.py

LeNet with 16 components on 5,000 Fashion-MNIST images, an MLP with 4 on 2,000; 500 held-out training images. NLL of S
draws per component to that of 50 independent ones, the mean and its standard error over repetitions with other noise.
Every kind meets the same components. Writes results/noise.json.
"""

import statistics
from typing import Any

import torch
from common import Data, Results, images, parts
from torch import Tensor, nn

import ibnn
from ibnn import metrics
from ibnn.nets import LeNet

REPEATS, SAMPLES, REFERENCE = 6, (1, 2, 4), 50


def independent(components: int, samples: int, nodes: int, seed: torch.Generator) -> Tensor:
    """Standard normals, (K, S, nodes)."""
    return torch.randn(components, samples, nodes, generator=seed)


def within(components: int, samples: int, nodes: int, seed: torch.Generator) -> Tensor:
    """Every second draw of a component is the first one's mirror image; one draw is independent."""
    half = torch.randn(components, -(-samples // 2), nodes, generator=seed)
    return torch.stack([half, -half], 2).flatten(1, 2)[:, :samples]


def across(components: int, samples: int, nodes: int, seed: torch.Generator) -> Tensor:
    """Every second component has the mirror images of the draws of the one before it."""
    half = torch.randn(components // 2, samples, nodes, generator=seed)
    return torch.stack([half, -half], 1).flatten(0, 1)


def stratified(components: int, samples: int, nodes: int, seed: torch.Generator) -> Tensor:
    """For each node, one draw of all in each stratum of equal probability (Latin hypercube)."""
    count = components * samples
    places = torch.rand(count, nodes, generator=seed).argsort(0)
    uniform = (places + torch.rand(count, nodes, generator=seed)) / count
    return torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)).view(components, samples, nodes)


def orthogonal(components: int, samples: int, nodes: int, seed: torch.Generator) -> Tensor:
    """Draws of all components at right angles, as long as independent ones."""
    noise = torch.randn(components * samples, nodes, generator=seed)
    q = torch.linalg.qr(noise.T)[0].T if len(noise) <= nodes else noise / noise.norm(dim=1, keepdim=True)
    lengths = torch.randn(len(noise), nodes, generator=seed).norm(dim=1, keepdim=True)
    return (q * lengths).view(components, samples, nodes)


KINDS = {
    "independent": independent,
    "antithetic within a component": within,
    "antithetic across components": across,
    "stratified": stratified,
    "orthogonal": orthogonal,
}


@torch.no_grad()
def nll(model: ibnn.IBNN, data: Data, noise: Tensor) -> float:
    """NLL of the mean probability over draws with given noise, (K, S, nodes)."""
    q = model.posterior()
    z = (q.mean[:, None] + q.std[:, None] * noise).flatten(0, 1)
    return metrics.nll(model.likelihood.combine(model.outputs(data.x, z)), data.y)


def compared(model: ibnn.IBNN, data: Data) -> dict[str, Any]:
    """NLL to that of many draws: mean and standard error, by kind and number of draws."""
    model.eval()
    shape = (model.components, model.nodes)
    many = nll(model, data, independent(shape[0], REFERENCE, shape[1], torch.Generator().manual_seed(99)))
    found: dict[str, Any] = {"nll": round(many, 4)}
    for samples in SAMPLES:
        for kind, make in KINDS.items():
            ratios = []
            for repeat in range(REPEATS):
                noise = make(shape[0], samples, shape[1], torch.Generator().manual_seed(repeat))
                ratios.append(nll(model, data, noise) / many)
            error = statistics.stdev(ratios) / REPEATS**0.5
            found[f"{kind}, S = {samples}"] = [round(statistics.mean(ratios), 4), round(error, 4)]
    return found


def trained(net: nn.Module, components: int, rows: int, epochs: int) -> tuple[ibnn.IBNN, Data]:
    """An iBNN by the default recipe, and images that it has not seen."""
    train, valid = parts(images("fashion-mnist", train=True), [rows, 500], seed=0)
    model = ibnn.convert(net, components=components, seed=0)
    ibnn.fit(model, train, epochs=epochs, seed=0, quiet=True, novelty=False, evaluate_every=epochs)
    return model, valid


def main() -> None:
    """Writes the results."""
    results = Results("noise", "NLL of few draws to that of 50 per component: mean and standard error over noises")
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    for name, net, given in (("mlp, K = 4", mlp, (4, 2000, 20)), ("lenet, K = 16", LeNet(), (16, 5000, 15))):
        results.run(name, lambda net=net, given=given: compared(*trained(net, *given)))


if __name__ == "__main__":
    main()
