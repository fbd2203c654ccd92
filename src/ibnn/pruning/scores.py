"""Scores channels: how much the loss needs each of them, for each multiply–add that it costs.

Cutting a node sets its z to 0. Near an optimum the loss then grows by ½ z² E[(∂L/∂z)²], with E over rows and draws
(the Fisher information in place of the second derivative). But many nodes go at once, and each matters more once others
are gone: E is also over random parts of the network. With a z for each row, every row has a part of its own, and one
backward pass gives ∂L/∂z of all of them.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.draws import Draw, Draws
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, batch_length, slice_rows, tree_map
from ibnn.network import IBNN
from ibnn.normal import Space, address, numbered_words, words
from ibnn.pruning.channels import Channels
from ibnn.pruning.cutting import costs
from ibnn.pruning.redundancy import Moments, second_moments, unexplained


class Ranking:
    """Ranks the channels of a model that can be cut, by the first `rows` of an epoch of the data."""

    def __init__(self, model: IBNN, channels: Channels, source: Source, rows: int, seed: int) -> None:
        self.model, self.channels, self.source, self.rows, self.seed = model, channels, source, rows, seed
        self.costs = costs(channels)
        number = {channel: place for place, channel in enumerate(self.costs)}
        groups = [number.get(channel, len(number)) for channel in channels.nodes(model.latents)]
        self.groups = torch.tensor(groups, device=model.examples.device)  # the channel of every node; the last: none

    @cached_property
    def moments(self) -> Moments:
        """Second moments of the nodes of each layer; none where nothing can be cut."""
        inputs = (x for _, x, _ in self._batches())
        return second_moments(self.model, self.channels, inputs) if self.costs else {}

    def scores(self, given: Mapping[str, Tensor] | None, share: float) -> dict[int, float]:
        """Returns the score of every channel: the mean of the given scores of its nodes, or by sensitivity and cost.

        `share` is the approximate share of the channels that is left after the cut.
        """
        if not self.costs:
            return {}
        if given is None:
            scores = self._sensitivity(share) / torch.tensor(list(self.costs.values())).clamp_min(1)
        else:
            nodes = torch.cat([given[name].to(self.groups.device) for name in self.model.latents])
            scores = self._summed(nodes) / self._summed(torch.ones_like(nodes)).clamp_min(1)
        if not bool(scores.isfinite().all()):
            remedy = "Check the model's outputs and latents, and the scores in `by`."
            raise ValueError(complaint("scores", "finite for every channel", "NaN or infinity", remedy))
        return dict(zip(self.costs, scores.tolist(), strict=True))

    def _summed(self, nodes: Tensor) -> Tensor:
        """Returns the sums over the nodes of each channel."""
        return nodes.new_zeros(len(self.costs) + 1).index_add_(0, self.groups, nodes)[:-1].cpu()

    def _sensitivity(self, share: float) -> Tensor:
        """Returns the sum over rows of the sensitivity of the loss to each channel; each row misses some others."""
        model, total, device = self.model, torch.zeros(len(self.costs)), self.groups.device
        lost = [
            unexplained(self.moments[name], latent.nodes) if name in self.moments else torch.ones(latent.nodes)
            for name, latent in model.latents.items()
        ]
        part = torch.cat([each.to(device, torch.float32) for each in lost]).sqrt()
        for done, x, y in self._batches():
            count = len(y)
            draw = model.draw_latents(-(-count // model.components), self.seed, first=done)[:count]  # row i has draw i
            at = words(address(self.seed, Space.PRUNE, torch.arange(done, done + count, device=device)))
            uniform = numbered_words(at, len(total) + 1) / 2**32
            mask = uniform[:, 1:] < share + (1 - share) * uniform[:, :1]  # from this share of them to all are left
            total += sensitivities(model, x, y, draw, self.groups, mask, part).sum(0).cpu()
        return total

    def _batches(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        """Yields how many rows came before, and the next inputs and targets, while the model is in eval mode."""
        done = 0
        with self.model.evaluating():
            for batch in self.source.epoch(self.seed, 0):
                whole = batch_length(batch.x)
                count = min(whole, self.rows - done)
                x = to_device_of(self.model, slice_rows(batch.x, slice(count), whole))
                yield done, x, batch.y[:count].to(self.groups.device)
                done += count
                if done >= self.rows:
                    break


def sensitivities(model: IBNN, x: Inputs, y: Tensor, draw: Draw, groups: Tensor, mask: Tensor, part: Tensor) -> Tensor:
    """Returns (∂L/∂m)² / 2 of every row and channel, (B, channels): m multiplies z of all nodes of a channel.

    The draw has a z for each row. `groups` has the channel of every node, (nodes,), their number for none; `mask` m of
    each row, (B, channels); `part` a factor on the gradient of each node, (nodes,): what other nodes do not explain.
    """
    z, groups = draw.z.detach(), groups.to(draw.z.device)
    factors = torch.cat([mask.to(z), z.new_ones(len(z), 1)], 1)
    masked = (z * factors[:, groups]).requires_grad_()
    rows = Draws(masked[None], None if draw.words is None else draw.words[None], draw.unit_std)
    with torch.enable_grad():
        output = model.outputs(x, rows)[0]
        model.likelihood.check(output, y)
        terms = model.likelihood.terms(output, y)
        loss = (terms.loss * terms.weight.to(output)).sum()
    each = z * torch.autograd.grad(loss, masked)[0] * part.to(z)
    return torch.zeros_like(factors).index_add_(1, groups, each)[:, :-1].square() / 2


def to_device_of(model: IBNN, x: Inputs) -> Inputs:
    """Returns inputs in the network's dtype and on its device."""
    like = next(model.net.parameters())
    return tree_map(lambda t: t.to(like.device), as_tensors(x, like.dtype))
