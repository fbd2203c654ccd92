"""Prunes a network: removes the channels that the loss needs least."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.batches import as_source
from ibnn.convert import revert
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.inputs import Inputs, batch_length, slice_rows
from ibnn.network import IBNN, mean_latents, require_mixture
from ibnn.normal import numbered_seed
from ibnn.prediction import refuse_nan
from ibnn.progress import Bar
from ibnn.pruning.channels import Channels, find_channels
from ibnn.pruning.cutting import BLOCK, Size, choose, size, why_whole, without
from ibnn.pruning.redundancy import compensate
from ibnn.pruning.scores import Ranking, to_device_of

BATCH, TRACED = 128, 2  # rows whose gradients are taken at once, and rows that channels are found with
ROUNDS, ROWS = 5, 1000  # in which the sensitivity is found anew, and rows of the data that each takes
Scores = Mapping[str, Tensor]


@dataclass(frozen=True)
class PrunedLayer:
    """What pruning did to a layer."""

    name: str
    outputs: tuple[int, int]  # before and after
    whole: str  # why none could be cut; empty if some could


@dataclass(frozen=True)
class Pruned:
    """A thinner network; `print` it."""

    model: IBNN  #: The thinner model. Its latents are those of the nodes that stayed.
    before: Size  #: Size of the model that was given.
    after: Size  #: Size of the thinner one.
    layers: tuple[PrunedLayer, ...]  #: What happened to each linear layer and convolution.

    @property
    def net(self) -> nn.Module:
        """A plain network: that of the thinner model, with its weights U, without latents."""
        return revert(copy.deepcopy(self.model))

    def __str__(self) -> str:
        width, lines = max(len(layer.name) for layer in self.layers), []
        for layer in self.layers:
            before, after = layer.outputs
            lines.append(f"{layer.name:<{width}}  {before:>5} -> {after:>5}  {layer.whole}".rstrip())
        for name, before, after in zip(Size._fields, self.before, self.after, strict=True):
            lines.append(f"{name}: {before:,} -> {after:,} ({after / before:.0%})")
        return "\n".join(lines)


def prune(
    model: IBNN, data: Any, keep: float = 0.5, *, by: Scores | None = None, seed: int = 0, quiet: bool = False
) -> Pruned:
    """Returns a thinner network: the channels that the loss needs least are removed from all layers that have them.

    A node is an input of one layer and an output of another: cutting it shortens both, and BatchNorm between them. The
    thinner network computes what the given one does with z = 0 at the nodes that are gone, which is checked. Then the
    weights of the other nodes compensate for them as well as they can. The given model stays as it is. Train the
    thinner one on with `fit`; it has no novelty reference until then (see `fit_novelty`).

    Args:
        model: Made by `ibnn.convert`, and trained, or converted from a trained network.
        data: Training data: a Dataset, a DataLoader, or a pair (inputs, targets), as `fit` takes it.
        keep: The share of the multiply–adds of linear layers and convolutions that stays, in (0, 1].
        by: Scores of your own, one for each node by layer; the channels of the lowest mean go. Default: the sensitivity
            of the loss to z, for each multiply–add that a channel costs.
        seed: Decides the rows and the draws.
        quiet: Shows no progress.

    >>> import ibnn
    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> found = prune(ibnn.convert(net), (torch.randn(50, 8), torch.randint(3, (50,))), keep=0.5)
    >>> found.net[2], found.before.products, found.after.products
    (Linear(in_features=8, out_features=3, bias=True), 176, 88)
    """
    _check(model, keep, by, seed)
    with generators_restored(), Bar("pruning", shown=not quiet) as bar:
        source = as_source(data, batch_size=BATCH, name="data", pack=model.likelihood.pack)
        first = next(iter(source.epoch(seed, 0))).x
        refuse_nan(first, argument="data")
        rows = batch_length(first)
        x = to_device_of(model, slice_rows(first, torch.arange(TRACED) % rows, rows))
        channels = after = _channels(model, x)
        before, thin = size(model, channels), copy.deepcopy(model)
        reasons = {name: why_whole(channels, layer) for name, layer in channels.layers.items()}
        rounds = 0 if keep == 1 else ROUNDS if by is None else 1
        for number in range(rounds):  # each cut changes what the other channels are worth
            share = keep ** ((number + 1) / rounds)
            ranking = Ranking(thin, after, source, ROWS, numbered_seed(seed, number))
            block = BLOCK if number == rounds - 1 else 1
            thin = _thin(ranking, ranking.scores(by, share), x, share * before.products, block)
            reasons = {name: reason or why_whole(after, after.layers[name]) for name, reason in reasons.items()}
            after = _channels(thin, x)
            bar.update(done=number + 1, total=rounds)
    outputs = {name: (len(layer.outs), len(after.layers[name].outs)) for name, layer in channels.layers.items()}
    layers = tuple(PrunedLayer(name, both, reasons[name]) for name, both in outputs.items())
    return Pruned(thin, before, size(thin, after), layers)


def _check(model: Any, keep: Any, by: Any, seed: int) -> None:
    if not isinstance(model, IBNN):
        remedy = "Convert it first: ibnn.convert(net)."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    check.number("keep", keep, above=0, most=1, remedy="Pass 0.5 for half of the multiply–adds.")
    if (model.where, model.bias_latents) != ("input", "none"):
        where = f"where={model.where!r}, bias_latents={model.bias_latents!r}"
        remedy = "Convert with the defaults: a node is an input that can be cut."
        raise ValueError(complaint("model", "one with latents on inputs alone", where, remedy))
    require_mixture(model)
    if by is not None:
        sizes = {name: latent.nodes for name, latent in model.latents.items()}
        got = {name: len(scores) for name, scores in by.items()} if isinstance(by, Mapping) else repr(by)
        if got != sizes:
            remedy = "Pass a score for every node of every layer: see model.latents."
            raise ValueError(complaint("by", f"scores of {model.nodes} nodes by layer", got, remedy))
    check.seed(seed)


def _channels(model: IBNN, x: Inputs) -> Channels:
    """Returns the channels of a network; those that a layer without latents takes are fixed."""
    with model._pass.absent():
        channels = find_channels(model.net, x)
    for name, layer in channels.layers.items():
        if name not in model.latents:
            channels.fix(layer.ins, f"is taken by {name!r}, which has no latents")
    return channels


def _thin(ranking: Ranking, scores: dict[int, float], x: Inputs, products: float, block: int) -> IBNN:
    """Cuts channels; fixes those without which the network does not compute what it should, and tries again."""
    model, channels = ranking.model, ranking.channels
    makers: dict[int, tuple[str, ...]] = {}
    for name, layer in channels.layers.items():
        makers |= {channel: (*makers.get(channel, ()), name) for channel in set(layer.outs.tolist())}
    while True:
        gone = choose(channels, scores, products, block)
        thin = without(model, channels, gone)
        if not (wrong := _difference(model, thin, channels, gone, x)):
            compensate(thin, model, channels, gone, ranking.moments)
            return thin
        for same in {makers[channel] for channel in gone}:  # channels that the same layers make
            lot = {channel for channel in gone if makers[channel] == same}
            if alone := _difference(model, without(model, channels, lot), channels, lot, x):
                all_same = [channel for channel, names in makers.items() if names == same]
                channels.fix(torch.tensor(all_same), f"cut, the network fails: {alone}")
        if not any(channel in channels.fixed for channel in gone):
            remedy = "Leave it as it is, or report the network."
            raise RuntimeError(complaint("model", "a network that can be cut", wrong, remedy))
        scores = {channel: score for channel, score in scores.items() if channel not in channels.fixed}


def _difference(model: IBNN, thin: IBNN, channels: Channels, gone: set[int], x: Inputs) -> str:
    """Returns how a thinner network differs from the given one at z = 0 where nodes are gone; empty if it does not."""
    stay = torch.tensor([c not in gone for c in channels.nodes(model.latents)], device=model.examples.device)
    z = mean_latents(model).detach()
    try:
        with torch.no_grad(), model.evaluating(), thin.evaluating():
            expected, found = model.outputs(x, (z * stay)[None]), thin.outputs(x, z[stay][None])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found.shape != expected.shape:
        return f"an output of shape {tuple(found.shape[1:])}"
    gap, most = float((found - expected).abs().max()), float(expected.abs().max())
    return "" if gap <= torch.finfo(expected.dtype).eps ** 0.5 * max(most, 1e-6) else f"outputs differ by {gap:.2g}"
