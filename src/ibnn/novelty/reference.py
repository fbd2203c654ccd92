"""The reference: what known inputs look like to the layers of a network, and how novel another input is.

For every layer it holds the mean (of each class, where labels were given) and the covariance of the summaries of its
input (see `nodes`). An input's distance from them is Mahalanobis's, to the nearest mean. The distances' p-values among
held-out inputs are combined as Fisher does. Their sum is combined once more with the p-value of how unsure the
network's answer is. The result is an input's score, which is ranked among the scores of held-out inputs. So an input is
novel if its activations differ from all known ones, or if the network has no answer to it.

All held-out inputs are ranked, in groups: those of one group are scored with statistics and ranks of other inputs. A
new input is scored in the same way for each group, and the numbers of held-out scores at or above its own are added up
(cross-conformal prediction; Vovk, 2015): p = (1 + that number) / (n + 1). `ibnn.fit_novelty` says what it promises.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.normal import Space, address, words
from ibnn.novelty.nodes import observable
from ibnn.prediction.conformal import Statistics

WIDEST = 256  # numbers that describe a layer: wider summaries are projected to so many
MEMORY = 2**24  # bytes that all covariances may take, and as many all class means
_ROUNDING = 1e-5  # share of a score that counts as a tie
_TAIL = 0.1  # share of the highest scores that tells how fast the tail falls


class Novelty(NamedTuple):
    """How novel inputs are."""

    p_value: Tensor  #: Conformal p-value of "like those known", (B,): small for novel inputs.
    score: Tensor  #: The score behind it, (B,), the mean over groups: it still rises where no p-value can be smaller.


class Reference(Statistics):
    """Statistics of known inputs, all of them buffers; made by `ibnn.fit_novelty`.

    There are F folds of statistics: one if they come from other data than the held-out inputs, else two, each made of
    one half of the inputs and used for the other. The held-out inputs of a fold form two groups of m inputs; the inputs
    of one group rank the distances of the other's.
    """

    layers: Tensor  #: Numbers of the layers that are observed, among those of the network that could be, (L,).
    axes: Tensor  #: The batch axis of their inputs, (L,).
    widths: Tensor  #: Width of the summary of each layer, and how many numbers describe it, (L, 2).
    shift: Tensor  #: Where each number of the summaries is centred, one layer after the other.
    scale: Tensor  #: What it is multiplied by after that.
    whiten: Tensor  #: W of each layer, with W Wᵀ the inverse of its covariance, one after the other, (F, …).
    centres: Tensor  #: Whitened means (M, P) of each layer, of all inputs or of every class, one by one, (F, …).
    #: For each group, of the other group's inputs: sorted distances, their sorted sums of −log p, and, where the
    #: likelihood tells, how unsure the answers are, (2F, L + 1 or L + 2, m).
    ranks: Tensor
    scores: Tensor  #: Sorted scores of each group, (2F, m).
    base: Tensor  #: The base rates, as the likelihood makes them; empty without labels.

    def __init__(self, **statistics: Tensor) -> None:
        """Takes the buffers by name; those left out are empty."""
        super().__init__()
        for name in Reference.__annotations__:
            self.register_buffer(name, statistics.get(name, torch.zeros(0)))
        self._parts: list[_Part] = []  # found when they are needed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._parts = []  # on the former device
        return super()._apply(fn, recurse)

    @property
    def parts(self) -> "list[_Part]":
        """How the summary of each layer is reduced; found once, so that `forward` can be traced."""
        if not self._parts:
            parts, start = [], 0
            for layer, (raw, width) in zip(self.layers.tolist(), self.widths.tolist(), strict=True):
                projection = _projection(layer, raw, width, self.shift.device) if width < raw else None
                parts.append(_Part(slice(start, start + raw), width, projection))
                start += raw
            self._parts = parts
        return self._parts

    @property
    def ranked(self) -> int:
        """How many held-out inputs are ranked, n: no p-value is below 1 / (n + 1)."""
        return self.scores.numel()

    @property
    def means(self) -> int:
        """How many means a layer has: 1, or the number of classes."""
        return self.centres.shape[1] // sum(part.width for part in self.parts)

    def layers_of(self, net: nn.Module) -> dict[str, nn.Module]:
        """Returns the observed layers of a network by name."""
        layers, numbers = list(observable(net).items()), self.layers.tolist()
        if max(numbers) >= len(layers):
            raise ValueError(foreign(f"{len(layers)} layers that can be observed"))
        return dict(layers[number] for number in numbers)

    def reduce(self, number: int, summary: Tensor) -> Tensor:
        """Returns the numbers that describe a layer's input, (B, P): centred, scaled, and projected if many."""
        part = self.parts[number]
        if summary.shape[1] != (wide := part.raw.stop - part.raw.start):
            raise ValueError(foreign(f"a layer of {summary.shape[1]} numbers where the reference has {wide}"))
        scaled = (summary.to(self.shift) - self.shift[part.raw]) * self.scale[part.raw]
        if part.projection is None:
            return scaled
        entries, signs = part.projection
        grouped: Tensor = (scaled[:, entries] * signs).unflatten(1, (-1, part.width))
        return grouped.sum(1)

    def distances(self, fold: int, reduced: Sequence[Tensor]) -> Tensor:
        """Returns the squared distances of inputs from the known ones of a fold, layer by layer, (L, B)."""
        means, widths, found = self.means, [part.width for part in self.parts], []
        whitening = self.whiten[fold].split([width**2 for width in widths])
        centring = self.centres[fold].split([means * width for width in widths])
        for width, whiten, centres, x in zip(widths, whitening, centring, reduced, strict=True):
            whiten, centres = whiten.view(width, width), centres.view(means, width)
            if torch.compiler.is_exporting():  # other runtimes know no cdist
                found.append((x @ whiten - centres[:, None]).square().sum(2).amin(0))
            else:
                apart = torch.cdist(x @ whiten, centres, compute_mode="donot_use_mm_for_euclid_dist")
                found.append(apart.amin(1).square())
        return torch.stack(found).nan_to_num(nan=math.inf, posinf=math.inf)

    def forward(self, summaries: Sequence[Tensor], surprise: Tensor | None) -> Novelty:
        """Returns how novel inputs are, from the summaries of layers' inputs, and how unsure their answers are."""
        reduced = [self.reduce(number, summary) for number, summary in enumerate(summaries)]
        higher, scores = torch.zeros((), dtype=torch.int64, device=self.scores.device), []
        for fold in range(self.whiten.shape[0]):
            distances = self.distances(fold, reduced)
            for group in (2 * fold, 2 * fold + 1):
                scores.append(score(self.ranks[group], distances, surprise))
                higher = higher + at_or_above(self.scores[group], scores[-1])
        return Novelty((1 + higher) / (self.ranked + 1), torch.stack(scores).mean(0))

    def held_out_p_values(self) -> Tensor:
        """Returns the p-values of the held-out inputs, each among the others of its group, (n,).

        They are the calibration scores of a shift monitor that watches the p-values of new inputs.
        """
        number = self.scores.shape[1]
        return torch.cat([(p_values(group, group).cpu().double() * (number + 1) - 1) / number for group in self.scores])


class _Part(NamedTuple):
    """How the summary of a layer is reduced."""

    raw: slice  # of shift and scale
    width: int  # how many numbers describe the layer
    projection: tuple[Tensor, Tensor] | None


def at_or_above(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns how many of the sorted scores are no lower than each score, up to rounding: that depends on the batch."""
    least = scores * (1 - _ROUNDING * scores.sign())  # not a difference: infinity stays what it is
    if torch.compiler.is_exporting():  # other runtimes know no searchsorted
        return (sorted_scores.unsqueeze(-2) >= least.unsqueeze(-1)).sum(-1)
    return sorted_scores.shape[-1] - torch.searchsorted(sorted_scores, least.contiguous())


def p_values(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns the conformal p-values of scores, of their shape; ties count against an input."""
    return (1 + at_or_above(sorted_scores, scores)) / (sorted_scores.shape[-1] + 1)


def log_tail(sorted_scores: Tensor, scores: Tensor) -> Tensor:
    """Returns log p, continued beyond the highest score by an exponential tail, so that far inputs still differ.

    The tail falls by e for every mean excess of the highest tenth of the scores over the lowest of them.
    """
    p_value = p_values(sorted_scores, scores)
    top = sorted_scores[..., -max(int(sorted_scores.shape[-1] * _TAIL), 2) :]
    highest = top[..., -1:]
    excess = (top - top[..., :1]).sum(-1, keepdim=True) / (top.shape[-1] - 1)
    excess = excess.clamp_min(torch.finfo(scores.dtype).tiny ** 0.5).maximum(1e-6 * highest.abs())
    beyond = torch.where(scores > highest + _ROUNDING * highest.abs(), scores - highest, 0.0)  # not by rounding
    return p_value.log() - beyond / excess


def ranks_of(distances: Tensor, surprise: Tensor | None) -> Tensor:
    """Returns sorted rows to rank others by, (L + 1 or L + 2, n), from distances (L, n) and how unsure answers are."""
    by_layer = distances.sort(1).values
    return torch.cat([by_layer, _combined(by_layer, distances, surprise).sort(1).values])


def score(ranks: Tensor, distances: Tensor, surprise: Tensor | None) -> Tensor:
    """Returns the score of novelty, (B,), from distances (L, B) and how unsure the answers are."""
    layers = len(distances)
    return -log_tail(ranks[layers:], _combined(ranks[:layers], distances, surprise)).sum(0)


def _combined(by_layer: Tensor, distances: Tensor, surprise: Tensor | None) -> Tensor:
    """Returns Fisher's sums over layers and, where it is known, how unsure the answers are, (1 or 2, B)."""
    sums = -log_tail(by_layer, distances).sum(0)
    return sums[None] if surprise is None else torch.stack([sums, surprise.to(sums)])


def _projection(layer: int, width: int, narrow: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns entries in P random groups of (nearly) equal size, one of each group in turn, and their random signs."""
    # An addressed hash and not a stored matrix: the same in every process, and no bytes in the state dict.
    word = words(address(0, Space.PROJECTION, layer, torch.arange(width)))
    entries = torch.cat([word.argsort().argsort(), torch.zeros(-width % narrow, dtype=torch.int64)])
    signs = (word[entries] % 2 * 2 - 1).float()
    signs[width:] = 0  # fills up the last of the groups
    return entries.to(device), signs.to(device)


def shrunk_covariance(rows: Tensor) -> Tensor:
    """Returns the covariance of centred rows (N, P), shrunk to a multiple of the identity (Ledoit and Wolf, 2004)."""
    number, width = rows.shape
    covariance = rows.T @ rows / number
    scale = covariance.diagonal().mean()
    target = scale * torch.eye(width, dtype=rows.dtype, device=rows.device)
    apart = (covariance - target).square().sum()
    error = (rows.square().sum(1).square().mean() - covariance.square().sum()) / number
    share = float((error / apart).clamp(0, 1)) if apart > 0 else 1.0
    return (1 - share) * covariance + share * target


def fit_layers(summaries: Iterable[Tensor], labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns W and whitened means of all layers, flat, from reduced summaries (N, P), and labels, if they count."""
    whiten, centres = [], []
    for rows in summaries:
        x = rows.double()
        own = torch.zeros(len(x), dtype=torch.int64) if labels is None else labels
        counts = torch.bincount(own)
        means = torch.zeros(len(counts), x.shape[1], dtype=x.dtype).index_add_(0, own, x) / counts[:, None]
        covariance = shrunk_covariance(x - means[own])
        floor = 1e-6 * covariance.diagonal().mean() + 1e-12  # constant nodes
        unit = torch.eye(len(covariance), dtype=x.dtype)
        factor = torch.linalg.cholesky(covariance + floor * unit)
        matrix = torch.linalg.solve_triangular(factor, unit, upper=False).T  # W Wᵀ is the inverse of the covariance
        whiten.append(matrix.flatten().float())
        centres.append((means @ matrix).flatten().float())
    return torch.cat(whiten), torch.cat(centres)


def foreign(got: str) -> str:
    """Says that a reference was made with another network."""
    remedy = "Make its own: ibnn.fit_novelty(model, train, valid)."
    return complaint("model.reference", "made with this network", got, remedy)
