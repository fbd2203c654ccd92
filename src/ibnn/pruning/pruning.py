"""PRUNING: a thinner network, without the channels that the loss needs least."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ibnn.batches import Source, as_source
from ibnn.convert import revert
from ibnn.errors import complaint, nearest
from ibnn.inputs import Inputs, as_tensors, batch_length, evaluating, slice_rows, tree_map
from ibnn.network import IBNN
from ibnn.normal import Space, address, check_seed, generators_restored, numbered_seed, numbered_words, words
from ibnn.prediction import refuse_nan
from ibnn.pruning.channels import Channels, find_channels
from ibnn.pruning.cutting import Size, choose, costs, size, why_whole, without
from ibnn.pruning.scores import sensitivities, signal_to_noise

BATCH, TRACED = 128, 2  # rows whose gradients are taken at once, and rows that channels are found with
ROUNDS = 5  # in which the sensitivity is found anew
NAMES = ("sensitivity", "posterior")
By = Literal["sensitivity", "posterior"] | Mapping[str, Tensor]


@dataclass(frozen=True)
class PrunedLayer:
    """What pruning did to a layer."""

    name: str
    outputs: tuple[int, int]  # before and after
    whole: str  # why none could be cut; empty if some could


@dataclass(frozen=True)
class Pruned:
    """A thinner network; `print` it.

    Attributes:
        model: The thinner model. Its latents are those of the nodes that stayed.
        before: Size of the model that was given.
        after: Size of the thinner one.
        layers: What happened to each linear layer and convolution.
        history: Of the training that followed; None without.
    """

    model: IBNN
    before: Size
    after: Size
    layers: tuple[PrunedLayer, ...]
    history: Any = None

    @property
    def net(self) -> nn.Module:
        """A plain network: that of the thinner model, with its weights U, without latents."""
        return revert(copy.deepcopy(self.model))

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [
            f"{layer.name:<{width}}  {layer.outputs[0]:>5} -> {layer.outputs[1]:>5}  {layer.whole}".rstrip()
            for layer in self.layers
        ]
        for name, before, after in zip(Size._fields, self.before, self.after, strict=True):
            lines.append(f"{name}: {before:,} -> {after:,} ({after / before:.0%})")
        return "\n".join(lines)


def prune(
    model: IBNN,
    data: Any,
    keep: float = 0.5,
    *,
    by: By = "sensitivity",
    rows: int = 2000,
    epochs: int = 0,
    seed: int = 0,
    **options: Any,
) -> Pruned:
    """Returns a thinner network: the channels that the loss needs least are removed from all layers that have them.

    A node is an input of a layer, and so an output of another: cutting it shortens both, and BatchNorm between them.
    The thinner network computes what the given one does with z = 0 at the nodes that are gone, which is checked; the
    given one stays as it is. Novelty is forgotten: call `fit_novelty` again.

    Args:
        model: Made by `ibnn.convert`, and trained, or converted from a trained network.
        data: Training data: a Dataset, a DataLoader, or a pair (inputs, targets), as `fit` takes it.
        keep: The share of the multiply–adds of linear layers and convolutions that stays, in (0, 1].
        by: What channels are ranked by, for each multiply–add that they cost: "sensitivity" of the loss to z, or the
            signal-to-noise ratio in the "posterior". Or a score of each node, by layer; a channel has their mean.
        rows: How many rows of the data gradients are taken of, in each of five rounds.
        epochs: Trains the thinner network for so long, with `fit`, on the same data.
        seed: Decides the rows and the draws.
        **options: Of `fit`, such as `valid` and `lr`.

    >>> import ibnn
    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> found = prune(ibnn.convert(net), (torch.randn(50, 8), torch.randint(3, (50,))), keep=0.5)
    >>> found.net[2], found.before.products, found.after.products
    (Linear(in_features=8, out_features=3, bias=True), 176, 88)
    """
    _check(model, keep, by, rows, epochs, seed, options)
    with generators_restored():
        source = as_source(data, batch_size=BATCH, name="data", pack=model.likelihood.pack)
        found = _pruned(model, source, keep, by, rows, seed)
    if not epochs:
        return found
    from ibnn.training import fit  # which needs more than torch

    history = fit(found.model, data, epochs=epochs, **{"seed": seed, **options})
    return replace(found, history=history)


def _pruned(model: IBNN, source: Source, keep: float, by: By, rows: int, seed: int) -> Pruned:
    """Cuts channels, in rounds where each cut changes what the others are worth."""
    x = _few(model, source, seed)
    channels = after = _channels(model, x)
    before, thin = size(model, channels), copy.deepcopy(model)
    reasons = {name: why_whole(channels, layer) for name, layer in channels.layers.items()}
    rounds = 0 if keep == 1 else ROUNDS if by == "sensitivity" else 1
    for number in range(rounds):
        ranking = _Ranking(thin, after, source, rows, numbered_seed(seed, number))
        share = keep ** ((number + 1) / rounds)
        thin = _thin(thin, after, ranking.by(by, share), x, share * before.products)
        reasons = {name: reason or why_whole(after, after.layers[name]) for name, reason in reasons.items()}
        after = _channels(thin, x)
    outputs = {name: (len(layer.outs), len(after.layers[name].outs)) for name, layer in channels.layers.items()}
    layers = tuple(PrunedLayer(name, both, reasons[name]) for name, both in outputs.items())
    return Pruned(thin, before, size(thin, after), layers)


def _check(model: Any, keep: Any, by: Any, rows: Any, epochs: Any, seed: int, options: Mapping[str, Any]) -> None:
    if not isinstance(model, IBNN):
        remedy = "Convert it first: ibnn.convert(net)."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(complaint("keep", "in (0, 1]", repr(keep), "Pass 0.5 for half of the multiply–adds."))
    if isinstance(by, str) and by not in NAMES:
        remedy = f"Did you mean {nearest(by, NAMES)!r}?"
        raise ValueError(complaint("by", f"one of {', '.join(NAMES)}, or scores of nodes", repr(by), remedy))
    if not isinstance(by, str):
        sizes = {name: latent.nodes for name, latent in model.latents.items()}
        got = {name: len(scores) for name, scores in by.items()}
        if got != sizes:
            remedy = "Pass a score for every node of every layer: see model.latents."
            raise ValueError(complaint("by", f"scores of {model.nodes} nodes by layer", got, remedy))
    for name, value, least in (("rows", rows, 1), ("epochs", epochs, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(complaint(name, f"an integer of at least {least}", repr(value), f"Leave {name} out."))
    if options and not epochs:
        remedy = "Pass epochs, too, or leave them out."
        raise TypeError(complaint("epochs", "given with options of `fit`", f"{sorted(options)} alone", remedy))
    check_seed(seed)


def _placed(model: IBNN, x: Inputs) -> Inputs:
    """Returns inputs in the network's dtype and on its device."""
    like = next(model.net.parameters())
    return tree_map(lambda t: t.to(like.device), as_tensors(x, like.dtype))


def _few(model: IBNN, source: Source, seed: int) -> Inputs:
    """Returns at least two rows of the data."""
    share = next(iter(source.epoch(seed, 0)))
    refuse_nan(share.x, argument="data")
    rows = batch_length(share.x)
    few = torch.arange(TRACED) % rows
    return _placed(model, slice_rows(share.x, few, rows))


def _channels(model: IBNN, x: Inputs) -> Channels:
    """Returns the channels of a network; those that a layer without latents takes are fixed."""
    channels = find_channels(model.net, x)
    for name, layer in channels.layers.items():
        if name not in model.latents:
            channels.fix(layer.ins, f"is taken by {name!r}, which has no latents")
    return channels


class _Ranking:
    """Ranks the channels that can be cut."""

    def __init__(self, model: IBNN, channels: Channels, source: Source, rows: int, seed: int) -> None:
        self.model, self.source, self.rows, self.seed = model, source, rows, seed
        self.costs = costs(channels)
        number = {channel: place for place, channel in enumerate(self.costs)}
        groups: list[int] = []
        for name, latent in model.latents.items():
            known = channels.layers[name].ins.tolist() if name in channels.layers else [-1] * latent.nodes
            groups += [number.get(channel, -1) for channel in known]
        self.groups = torch.tensor(groups, device=model.examples.device)  # the channel of every node

    def by(self, by: By, share: float) -> dict[int, float]:
        """Returns the score of every channel, for each multiply–add that it costs, or as given."""
        if not self.costs:
            return {}
        cost = torch.tensor(list(self.costs.values())).clamp_min(1)
        if isinstance(by, Mapping):
            nodes = torch.cat([by[name] for name in self.model.latents]).to(self.groups.device)
            scores = self._summed(nodes) / self._summed(torch.ones_like(nodes)).clamp_min(1)
        elif by == "posterior":
            scores = self._summed(signal_to_noise(self.model.posterior())) / cost
        else:
            scores = self._sensitivity(share) / cost
        if not bool(scores.isfinite().all()):
            remedy = "Check the model: its outputs or latents may be infinite."
            raise ValueError(complaint("model", "one whose nodes have finite scores", "NaN or infinity", remedy))
        return dict(zip(self.costs, scores.tolist(), strict=True))

    def _summed(self, nodes: Tensor) -> Tensor:
        """Returns the sums over the nodes of each channel."""
        total = nodes.new_zeros(len(self.costs) + 1)
        return total.index_add_(0, self.groups.where(self.groups >= 0, torch.tensor(len(self.costs))), nodes)[:-1].cpu()

    def _sensitivity(self, share: float) -> Tensor:
        """Returns the mean over rows of the sensitivity of the loss to each channel; each row misses some others."""
        model, total, done, device = self.model, torch.zeros(len(self.costs)), 0, self.groups.device
        with model._lock, evaluating(model):
            for batch in self.source.epoch(self.seed, 0):
                whole = batch_length(batch.x)
                count = min(whole, self.rows - done)
                x, y = _placed(model, slice_rows(batch.x, slice(count), whole)), batch.y[:count].to(device)
                z = model.draw_each(-(-count // model.components), self.seed, first=done)[:count]
                at = words(address(self.seed, Space.PRUNE, torch.arange(done, done + count, device=device)))
                uniform = numbered_words(at, len(total) + 1) / 2**32
                mask = uniform[:, 1:] < share + (1 - share) * uniform[:, :1]  # from this share of them to all are left
                total += sensitivities(model, x, y, z, self.groups, mask).sum(0).cpu()
                done += count
                if done >= self.rows:
                    break
        return total / done


def _thin(model: IBNN, channels: Channels, scores: dict[int, float], x: Inputs, products: float) -> IBNN:
    """Cuts channels; fixes layers without which the network does not compute what it should, and tries again."""
    while True:
        gone = choose(channels, scores, products)
        thin = without(model, channels, gone)
        if not (wrong := _difference(model, thin, channels, gone, x)):
            return thin
        for layer in channels.layers.values():
            one = next((c for c in layer.outs.tolist() if c in gone), None)
            if one is not None and (alone := _difference(model, without(model, channels, {one}), channels, {one}, x)):
                channels.fix(layer.outs, f"cut, the network fails: {alone}")
        if not any(channel in channels.fixed for channel in gone):
            remedy = "Leave it as it is, or report the network."
            raise RuntimeError(complaint("model", "a network that can be cut", wrong, remedy))
        scores = {channel: score for channel, score in scores.items() if channel not in channels.fixed}


def _difference(model: IBNN, thin: IBNN, channels: Channels, gone: set[int], x: Inputs) -> str:
    """Returns how a thinner network differs from the given one at z = 0 where nodes are gone; empty if it does not."""
    of = {name: channels.layers[name].ins.tolist() for name in model.latents if name in channels.layers}
    each = (of.get(name, [-1] * latent.nodes) for name, latent in model.latents.items())
    stay = torch.tensor([channel not in gone for ids in each for channel in ids], device=model.examples.device)
    z = model.mean_latents().detach()
    try:
        with torch.no_grad(), evaluating(model), evaluating(thin):
            expected, found = model.outputs(x, (z * stay)[None]), thin.outputs(x, z[stay][None])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found.shape != expected.shape:
        return f"an output of shape {tuple(found.shape[1:])}"
    gap, most = float((found - expected).abs().max()), float(expected.abs().max())
    return "" if gap <= torch.finfo(expected.dtype).eps ** 0.5 * max(most, 1e-6) else f"outputs differ by {gap:.2g}"
