"""Compensates for cut nodes by the weights of the other nodes of their layer.

A layer computes U a + b, with a = z ∘ x. The linear least-squares prediction of a cut node from the others, over rows,
places and draws, is added to their weights and to the bias. The layer loses only what they do not explain. Noise
counts: a node with a noisy z explains less.
"""

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.inputs import Inputs
from ibnn.network import IBNN
from ibnn.pruning.channels import Channels, is_depthwise
from ibnn.pruning.cutting import staying

MOST = 2048  # nodes of a layer whose second moments are held; larger layers are not compensated
RIDGE = 1e-4  # of the mean second moment, added to all, so that there is an inverse
Moments = dict[str, Tensor]


def second_moments(model: IBNN, channels: Channels, batches: Iterable[Inputs]) -> Moments:
    """Returns E[a aᵀ] of the nodes of each layer, over rows, places and draws; a layer with a bias has a last node 1.

    It leaves out layers with too many nodes, depthwise convolutions, and layers without latents.
    """
    layers = {name: layer for name, layer in channels.layers.items() if not is_depthwise(layer.module)}
    own = {name: latent for name, latent in model.latents.items() if name in layers and latent.nodes <= MOST}
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(own, 0)

    def add(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].detach().movedim(own[name].axis, -1).flatten(0, -2)
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        sums[name] = sums.get(name, 0) + (x.T @ x).cpu().double()
        counts[name] += len(x)

    with ExitStack() as hooks, torch.no_grad():
        for name in own:
            layer = model.net.get_submodule(name)
            hooks.enter_context(layer.register_forward_pre_hook(partial(add, name), prepend=True))
        for x in batches:
            model.mean_output(x)
    unit_std = dict(zip(model.latents, model.unit_std.tolist(), strict=True))
    found = {}
    for name in sums:
        latent = own[name]
        mean, second = latent.mean.mean(0), (latent.mean**2 + latent.std**2).mean(0) * (1 + unit_std[name] ** 2)
        mean, second = (F.pad(part.detach().cpu().double(), (0, 1), value=1.0) for part in (mean, second))
        whole = sums[name] / counts[name]
        moments = whole * mean.outer(mean)
        moments.diagonal().copy_(whole.diagonal() * second)
        moments.diagonal().add_(RIDGE * moments.diagonal()[:-1].mean().clamp_min(1e-12))
        found[name] = moments if layers[name].module.bias is not None else moments[:-1, :-1]
    return found


def unexplained(moments: Tensor, nodes: int) -> Tensor:
    """Returns the share of each node's second moment that the others do not explain, in (0, 1]."""
    share: Tensor = 1 / (moments.diagonal() * torch.linalg.inv(moments).diagonal())
    return share[:nodes]


@torch.no_grad()
def compensate(thin: IBNN, model: IBNN, channels: Channels, gone: Collection[int], moments: Moments) -> None:
    """Adds the predictions of cut nodes to the weights and biases of a thinner model."""
    for name, second in moments.items():
        layer = channels.layers[name]
        lost = torch.tensor([channel in gone for channel in layer.ins.tolist()], device=second.device)
        stays, cut = torch.cat([~lost, lost.new_ones(len(second) - len(lost))]).nonzero()[:, 0], lost.nonzero()[:, 0]
        if not len(cut):
            continue
        guess = torch.linalg.solve(second[stays][:, stays], second[stays][:, cut]).T  # (cut, staying)
        weight = model.net.get_submodule(name).weight.detach().cpu().double()  # type: ignore[operator]
        old = weight[staying(layer.outs, gone)][:, cut]
        more = torch.tensordot(old, guess, dims=([1], [0])).movedim(-1, 1)
        small: Any = thin.net.get_submodule(name)
        ins = small.weight.shape[1]
        small.weight += more[:, :ins].to(small.weight)
        if more.shape[1] > ins:
            small.bias += more[:, ins].reshape(len(more), -1).sum(1).to(small.bias)
