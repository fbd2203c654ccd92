"""Can components be set apart, and does it pay? K = 8 in several forms against K = 1, with as many draws.

    IBNN_DATA=FOLDER python experiments/apart.py [--tiny] [--variants "K = 1" "K = 8" …] [--seeds 0]

As experiments/form.py: LeNet of twice the width, 5,000 Fashion-MNIST images, but 30 epochs; or a tiny network on 1,000
images of half the side, 60 epochs. All data are training images: one part is trained on, one held out for steering and
temperatures, and a third, unseen, is scored, as it is and corrupted. Beside the scores: how often the networks at two
components' means give an image different labels, and the share of the epistemic uncertainty that is between components
(bias of few draws corrected). Some tiny networks have BatchNorm, for all components or for each, or a last layer for
each. Writes results/apart.json.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import Results
from form import CELLS, Cell, run
from torch import Tensor, nn

import ibnn

MEAN = {"kl": "mean", "prior_std": 0.3 / math.sqrt(8)}  # σ tends to √K s
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of convert and of fit
    "K = 1": ({"components": 1}, {}),
    "K = 8": ({}, {}),
    "K = 8, KL mean, init_std .5": (MEAN | {"init_std": 0.5}, {}),
    "K = 8, init_std .5, means fixed": ({"init_std": 0.5, "fixed": True}, {}),
    "K = 8, KL mean, init_std .5, latent_lr .03": (MEAN | {"init_std": 0.5}, {"latent_lr": 0.03}),
    "K = 8, gamma 10": ({"init_std": 0.5}, {"gamma": 10.0}),
    "K = 8, S = 2 to other components (twice the cost)": ({}, {"samples": 2, "spread": True}),
    "K = 8, inputs and outputs": ({"where": "both"}, {}),
}
LENET = CELLS["lenet"]._replace(epochs=30)


def tiny() -> nn.Module:
    """Two convolutions and two linear layers, for a run of seconds."""
    halved = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3))
    return nn.Sequential(*halved, nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


class Which(nn.Module):
    """Says which component a row belongs to, (B, K) of zeros and ones: its latents are means of another height each."""

    def __init__(self, components: int) -> None:
        super().__init__()
        self.pick = nn.Linear(components, components, bias=False)
        self.pick.weight = nn.Parameter(torch.eye(components), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.pick(x.new_ones(len(x), self.pick.in_features))
        return F.one_hot(seen.argmax(1), self.pick.in_features).to(x.dtype)

    def mark(self, latent: Any) -> None:
        """Gives component k a mean of 10 at node k; other nodes have 0."""
        latent.set(mean=10 * torch.eye(self.pick.in_features))


class NormEach(nn.Module):
    """BatchNorm whose statistics, scale and shift are of each component."""

    def __init__(self, components: int, channels: int) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.full((components, channels), v)) for v in (1.0, 0.0))
        self.register_buffer(
            "running", torch.stack([torch.zeros(components, channels), torch.ones(components, channels)])
        )

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        mean, variance = self.running
        if self.training:
            share = which / which.sum(0).clamp_min(1)  # of each row in its component
            mean = share.t() @ x.mean((2, 3))
            variance = (share.t() @ x.square().mean((2, 3)) - mean.square()).clamp_min(0)
            present = which.sum(0)[:, None] > 0
            found = torch.stack([mean, variance]).detach()
            self.running = torch.where(present, 0.9 * self.running + 0.1 * found, self.running)
        parts = (which @ part for part in (mean, variance, self.scale, self.shift))
        m, v, scale, shift = (part[:, :, None, None] for part in parts)
        return (x - m) / (v + 1e-5).sqrt() * scale + shift


class Apart(nn.Module):
    """`tiny` with BatchNorm for all ("shared") or each component ("each"), and a last layer for all or each."""

    def __init__(self, components: int = 8, norm: str = "", heads: int = 1) -> None:
        super().__init__()
        self.which, self.heads = Which(components), heads
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)])
        make = {"": lambda c: nn.Identity(), "shared": nn.BatchNorm2d, "each": partial(NormEach, components)}[norm]
        self.norms = nn.ModuleList([make(8), make(16)])
        self.hidden, self.head = nn.Linear(256, 64), nn.Linear(64, 10 * heads)

    def forward(self, x: Tensor) -> Tensor:
        which, x = self.which(x), F.avg_pool2d(x, 2)
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            made = conv(x)
            x = (norm(made, which) if isinstance(norm, NormEach) else norm(made)).relu()
            x = x if number else F.max_pool2d(x, 2)
        scores = self.head(self.hidden(x.flatten(1)).relu())
        return scores if self.heads == 1 else (scores.unflatten(1, (self.heads, 10)) * which[:, :, None]).sum(1)


TINY = Cell(tiny, "fashion-mnist", (1000, 500, 1000), 60)
OWN: dict[str, tuple[dict[str, Any], Callable[[], nn.Module]]] = {  # of tiny networks: options of convert, and the net
    "K = 8, a last layer each": ({}, partial(Apart, heads=8)),
    "K = 1, BatchNorm": ({"components": 1}, partial(Apart, 1, "shared")),
    "K = 8, BatchNorm": ({}, partial(Apart, 8, "shared")),
    "K = 8, BatchNorm each": ({}, partial(Apart, 8, "each")),
    "K = 8, BatchNorm and a last layer each": ({}, partial(Apart, 8, "each", 8)),
}


def converted(options: dict[str, Any], net: nn.Module, seed: int) -> ibnn.IBNN:
    """A network with latents; "fixed" keeps their means where they start."""
    own = {"components": 8, "seed": seed} | options
    fixed = own.pop("fixed", False)
    model = ibnn.convert(net, **own)
    for name, latent in model.latents.items():
        marks = name == "which.pick"
        latent.mean.requires_grad_(not (fixed or marks))
        if marks:
            net.get_submodule("which").mark(latent)  # type: ignore[operator]
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS | OWN, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tiny", action="store_true", help="the tiny network")
    chosen = parser.parse_args()
    results = Results("apart", str(__doc__))
    for seed in chosen.seeds:
        for name in chosen.variants:
            options, recipe = VARIANTS.get(name) or (OWN[name][0], {})
            label, cell = (f"tiny: {name}", TINY) if chosen.tiny else (name, LENET)
            cell = cell._replace(make=OWN[name][1]) if name in OWN else cell
            results.run(f"{label} {seed}", partial(run, cell, partial(converted, options), seed, **recipe))
