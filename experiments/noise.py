"""Do antithetic or stratified draws answer better than independent ones, at equal numbers?

    IBNN_DATA=FOLDER python experiments/noise.py

An MLP (one component and 4; 20 epochs) and LeNet (one component and 8, with factors of channels and units; 60 epochs)
on 2,000 Fashion-MNIST images; 500 held-out training images. For S draws per component: the NLL to that of many draws,
with its standard error over repetitions, and how far the mean epistemic part and the predicted class's probability are
off, in root mean square over repetitions. Every kind meets the same components. Writes results/noise.json.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from common import Data, Results, images, parts
from torch import Tensor, nn

import ibnn
from ibnn import metrics
from ibnn.draws import Draws
from ibnn.nets import LeNet
from ibnn.units import MIRRORED

REPEATS, SAMPLES, REFERENCE = 16, (1, 2, 5), 400  # the last: draws of all components together
Signs = Tensor  # of each draw's noise, (K, S)


def independent(components: int, samples: int) -> tuple[Tensor, Signs]:
    """Every draw has noise of its own: its number, and signs of 1, (K, S) each."""
    return torch.arange(components * samples).view(components, samples), torch.ones(components, samples)


def within(components: int, samples: int) -> tuple[Tensor, Signs]:
    """Every second draw of a component is the mirror image of the one before."""
    number, sign = independent(components, samples)
    draw = torch.arange(samples)
    return number - draw % 2, sign - 2 * (draw % 2)


def across(components: int, samples: int) -> tuple[Tensor, Signs]:
    """Every second component has the mirror images of the draws of the one before it."""
    number, sign = independent(components, samples)
    odd = torch.arange(components)[:, None] % 2
    return number - odd * samples, sign - 2 * odd


class Drawn:
    """Draws of a model's latents, and of its units, by numbers of noises and their signs."""

    def __init__(self, model: ibnn.IBNN, seed: int) -> None:
        self.model, self.seed, self.shape = model, torch.Generator().manual_seed(seed), (model.components, SAMPLES[-1])

    def mirrored(self, kind: Callable[[int, int], tuple[Tensor, Signs]], *, units: bool = True) -> Draws:
        """Draws of one kind; without `units` these have noise of their own."""
        number, sign = (values.flatten() for values in kind(*self.shape))
        noise = torch.randn(len(number), self.model.nodes, generator=self.seed)
        at = torch.randint(2**32, (len(number), len(self.model.latents)), generator=self.seed)
        if units:
            at = at[number] + MIRRORED * (sign < 0)[:, None]
        return self.draws(noise[number] * sign[:, None], at)

    def stratified(self) -> Draws:
        """For each node, one draw of a round of all components in each stratum of equal probability."""
        components, samples = self.shape
        uniform = torch.rand(samples, 2, components, self.model.nodes, generator=self.seed)
        noise = torch.special.ndtri(((uniform[:, 0].argsort(1) + uniform[:, 1]) / components).clamp(1e-6, 1 - 1e-6))
        at = torch.randint(2**32, (components * samples, len(self.model.latents)), generator=self.seed)
        return self.draws(noise.transpose(0, 1).flatten(0, 1), at)

    def draws(self, noise: Tensor, at: Tensor) -> Draws:
        """Latents of noise (K·S, nodes), and words of units."""
        z = self.model.posterior().draw(torch.arange(self.shape[0]).repeat_interleave(self.shape[1]), noise)
        return Draws(z, None if self.model.draws == "channel" else at)


KINDS: dict[str, Callable[[Drawn], Draws]] = {
    "independent": lambda drawn: drawn.mirrored(independent),
    "antithetic within a component": lambda drawn: drawn.mirrored(within),
    "antithetic across components": lambda drawn: drawn.mirrored(across),
    "antithetic across components, units independent": lambda drawn: drawn.mirrored(across, units=False),
    "stratified across components": lambda drawn: drawn.stratified(),
}


@torch.no_grad()
def answers(model: ibnn.IBNN, data: Data, draws: Draws) -> Tensor:
    """Outputs of draws, (K, S, B, C)."""
    return model.outputs(data.x, draws).unflatten(0, (model.components, -1))


def compared(model: ibnn.IBNN, data: Data) -> dict[str, Any]:
    """How near the answers of few draws are to those of many, by kind and number of draws."""
    model.eval()
    many = answers(model, data, model.draw_each(REFERENCE // model.components, seed=99))
    whole = model.likelihood.summarise(many)
    labels, epistemic = whole.labels[:, None], whole.epistemic.mean()
    nll = metrics.nll(whole.log_probs, data.y)
    found: dict[str, Any] = {"nll": round(nll, 4), "epistemic": round(epistemic.item(), 4)}
    for kind, make in KINDS.items():
        if model.components == 1 and "across" in kind:
            continue
        drawn = [answers(model, data, make(Drawn(model, repeat))) for repeat in range(REPEATS)]
        for samples in SAMPLES:
            few = [model.likelihood.summarise(part[:, :samples]) for part in drawn]
            ratio = torch.tensor([metrics.nll(p.log_probs, data.y) / nll for p in few])
            gap = torch.stack([(p.probs - whole.probs).gather(1, labels) for p in few])
            own = torch.stack([p.epistemic.mean() for p in few])
            found[f"{kind}, S = {samples}"] = {
                "nll": [round(ratio.mean().item(), 4), round(ratio.std().item() / math.sqrt(REPEATS), 4)],
                "probability": round(gap.square().mean().sqrt().item(), 4),
                "epistemic": round((own - epistemic).square().mean().sqrt().item(), 4),
            }
    return found


def trained(net: nn.Module, components: int, epochs: int) -> tuple[ibnn.IBNN, Data]:
    """An iBNN by the default recipe, and images that it has not seen."""
    train, valid = parts(images("fashion-mnist", train=True), [2000, 500], seed=0)
    model = ibnn.convert(net, components=components, seed=0)
    ibnn.fit(model, train, epochs=epochs, seed=0, quiet=True, novelty=False, evaluate_every=epochs)
    return model, valid


def mlp() -> nn.Module:
    """784-100-100-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def main() -> None:
    """Writes the results."""
    results = Results("noise", "answers of few draws to those of 400: NLL, and root mean squared gaps")
    for name, make, k, epochs in (
        ("mlp", mlp, 4, 20),
        ("mlp", mlp, 1, 20),
        ("lenet", LeNet, 8, 60),
        ("lenet", LeNet, 1, 60),
    ):
        torch.manual_seed(0)
        net = make()  # LeNet learns slowly: until it overfits, there is hardly any noise
        results.run(f"{name}, K = {k}", lambda net=net, k=k, epochs=epochs: compared(*trained(net, k, epochs)))


if __name__ == "__main__":
    main()
