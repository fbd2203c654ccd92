"""RANKING: what each channel is worth to the loss, for each multiply–add that it costs."""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, batch_length, evaluating, slice_rows, tree_map
from ibnn.network import IBNN
from ibnn.normal import Space, address, numbered_words, words
from ibnn.pruning.channels import Channels
from ibnn.pruning.cutting import costs
from ibnn.pruning.redundancy import Moments, second_moments, untold
from ibnn.pruning.scores import sensitivities


class Ranking:
    """Ranks the channels of a model that can be cut, by some rows of data."""

    def __init__(self, model: IBNN, channels: Channels, source: Source, rows: int, seed: int) -> None:
        self.model, self.channels, self.source, self.rows, self.seed = model, channels, source, rows, seed
        self.costs = costs(channels)
        number = {channel: place for place, channel in enumerate(self.costs)}
        groups: list[int] = []
        for name, latent in model.latents.items():
            known = channels.layers[name].ins.tolist() if name in channels.layers else [-1] * latent.nodes
            groups += [number.get(channel, -1) for channel in known]
        self.groups = torch.tensor(groups, device=model.examples.device)  # the channel of every node

    @cached_property
    def moments(self) -> Moments:
        """Second moments of the nodes of each layer; none where nothing can be cut."""
        inputs = (x for _, x, _ in self._batches())
        return second_moments(self.model, self.channels, inputs) if self.costs else {}

    def scores(self, given: Mapping[str, Tensor] | None, share: float) -> dict[int, float]:
        """Returns the score of every channel: the mean of the given ones of its nodes, or by sensitivity and cost.

        Args:
            given: Scores of all nodes by layer.
            share: Of the channels, about how many will be left after the cut.
        """
        if not self.costs:
            return {}
        if given is None:
            scores = self._sensitivity(share) / torch.tensor(list(self.costs.values())).clamp_min(1)
        else:
            nodes = torch.cat([given[name].to(self.groups.device) for name in self.model.latents])
            scores = self._summed(nodes) / self._summed(torch.ones_like(nodes)).clamp_min(1)
        if not bool(scores.isfinite().all()):
            remedy = "Check the model: its outputs or latents may be infinite."
            raise ValueError(complaint("model", "one whose nodes have finite scores", "NaN or infinity", remedy))
        return dict(zip(self.costs, scores.tolist(), strict=True))

    def _summed(self, nodes: Tensor) -> Tensor:
        """Returns the sums over the nodes of each channel."""
        total = nodes.new_zeros(len(self.costs) + 1)
        return total.index_add_(0, self.groups.where(self.groups >= 0, torch.tensor(len(self.costs))), nodes)[:-1].cpu()

    def _sensitivity(self, share: float) -> Tensor:
        """Returns the sum over rows of the sensitivity of the loss to each channel; each row misses some others."""
        model, total, device = self.model, torch.zeros(len(self.costs)), self.groups.device
        lost = [
            untold(self.moments[name], latent.nodes) if name in self.moments else torch.ones(latent.nodes)
            for name, latent in model.latents.items()
        ]
        part = torch.cat([each.to(device, torch.float32) for each in lost]).sqrt()
        for done, x, y in self._batches():
            count = len(y)
            z = model.draw_each(-(-count // model.components), self.seed, first=done)[:count]
            at = words(address(self.seed, Space.PRUNE, torch.arange(done, done + count, device=device)))
            uniform = numbered_words(at, len(total) + 1) / 2**32
            mask = uniform[:, 1:] < share + (1 - share) * uniform[:, :1]  # from this share of them to all are left
            total += sensitivities(model, x, y, z, self.groups, mask, part).sum(0).cpu()
        return total

    def _batches(self) -> Iterator[tuple[int, Inputs, Tensor]]:
        """Yields how many rows came before, and the next inputs and targets, while the model is in eval mode."""
        done = 0
        with self.model._lock, evaluating(self.model):
            for batch in self.source.epoch(self.seed, 0):
                whole = batch_length(batch.x)
                count = min(whole, self.rows - done)
                x = placed(self.model, slice_rows(batch.x, slice(count), whole))
                yield done, x, batch.y[:count].to(self.groups.device)
                done += count
                if done >= self.rows:
                    break


def placed(model: IBNN, x: Inputs) -> Inputs:
    """Returns inputs in the network's dtype and on its device."""
    like = next(model.net.parameters())
    return tree_map(lambda t: t.to(like.device), as_tensors(x, like.dtype))
