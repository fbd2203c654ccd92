"""Sets of classes and intervals that cover the target with a stated probability.

Held-out examples show how far targets are from answers. If a new example is exchangeable with n of them, its own
distance is at most the ⌈(n + 1) · level⌉-th smallest of theirs with a probability of at least `level` (split conformal
prediction; Vovk et al., 2005). If an example has P places, such as tokens or pixels, each distance counts 1/P, and
`level` is the expected share of its places within the limit (conformal risk control; Angelopoulos et al., 2022).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ibnn import check

PLACES = 32  # places of a held-out example that are stored at most, chosen at random
Kind = Literal["smallest", "adaptive"]


class Conformal(NamedTuple):
    """What N held-out examples show about one output of a network, with a limit for each of its O numbers or labels."""

    #: How far targets were from answers, (N, O, P, D) for up to P places. For numbers D is 1: the distance from the
    #: mean in standard deviations. For classes D is 3: the true class's probability, that of all classes before it in
    #: the order of probability, and the number of those. NaN where there is no target.
    distances: Tensor
    classes: Tensor  #: The true classes, (N, O, P); 0 for numbers.
    groups: Tensor = torch.zeros(0, dtype=torch.int64)  #: Groups of the examples, (N,); empty if none were given.

    def limits(self, scores: Tensor, level: float, *, classes: int | None = None, groups: Any = None) -> Tensor:
        """Returns the scores that new examples stay within at a level, (1 or rows, 1 or classes, O).

        They come from scores (N, O, P) of all held-out examples, or of those of each class or of each of `groups`,
        (rows,). A limit is infinite where too few were held out for the level.

        >>> nine = Conformal(torch.arange(1.0, 10.0).view(9, 1, 1, 1), torch.zeros(9, 1, 1))
        >>> nine.limits(nine.distances[..., 0], 0.9)  # the 9th of 9
        tensor([[[9.]]])
        """
        check.number("level", level, least=0, most=1, remedy="Pass level=0.9.")
        scores, held, known = scores.cpu(), self.groups.cpu(), self.classes.cpu()  # some devices have no float64
        every = torch.ones_like(scores, dtype=torch.bool)
        of_class = [every] if classes is None else [known == label for label in range(classes)]
        members, number = [every], torch.zeros(1, dtype=torch.int64)
        if groups is not None:
            if not len(held):
                raise RuntimeError("groups= needs those of held-out rows: ibnn.conformalize(model, valid, groups=…).")
            asked, number = groups.cpu().unique(return_inverse=True)
            members = [(held == group)[:, None, None] for group in asked]
        found = [torch.stack([_limit(scores, level, member & part) for part in of_class]) for member in members]
        return torch.stack(found)[number]


def _limit(scores: Tensor, level: float, part: Tensor) -> Tensor:
    """Returns the limit of each output, (O,), by the scores (N, O, P) of some entries."""
    if level == 0:
        return scores.new_full(scores.shape[1:2], -math.inf)
    present = part & ~scores.isnan()
    places = present.sum(2, keepdim=True)
    examples = (places > 0).sum((0, 2))  # of each output
    weight = (present.double() / places.clamp_min(1)).movedim(1, 0).flatten(1)
    ordered = scores.masked_fill(~present, math.inf).movedim(1, 0).flatten(1).sort(1)
    reached = weight.gather(1, ordered.indices).cumsum(1)
    needed = (examples + 1) * level - 1e-9
    at = torch.searchsorted(reached, needed[:, None]).clamp_max(reached.shape[1] - 1)
    return ordered.values.gather(1, at)[:, 0].masked_fill(needed > examples, math.inf)


def more_probable(probs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the probability and the number of all classes before each class in the order of probability, (…, C)."""
    order = probs.argsort(stable=True, dim=-1, descending=True)
    ordered = probs.gather(-1, order)
    before = torch.cat([torch.zeros_like(ordered[..., :1]), ordered[..., :-1].cumsum(-1)], -1)
    number = torch.arange(probs.shape[-1], device=probs.device).to(probs).expand_as(probs)
    return torch.zeros_like(probs).scatter(-1, order, before), torch.zeros_like(probs).scatter(-1, order, number)


def class_distances(probs: Tensor, target: Tensor, present: Tensor, *, by_output: bool) -> Conformal:
    """Returns the distances of true classes (B, …) from probabilities (B, …, C), where a target is present.

    With `by_output` the outputs (B, O) have limits of their own; all others are places.
    """
    probs = probs.flatten(1, -2) if probs.dim() > 2 else probs[:, None]
    target, present = (part.reshape(len(part), -1) for part in (target.long() * present, present))
    if not by_output and target.shape[1] > PLACES:
        some = _some(present)
        target, present = target.gather(1, some), present.gather(1, some)
        probs = probs.gather(1, some[..., None].expand(-1, -1, probs.shape[-1]))
    columns = [part.gather(-1, target[..., None])[..., 0] for part in (probs, *more_probable(probs))]
    distances = torch.stack(columns, -1).masked_fill(~present[..., None], math.nan)
    axis = 2 if by_output else 1
    return Conformal(distances.unsqueeze(axis), target.unsqueeze(axis))


def number_distances(distances: Tensor) -> Conformal:
    """Returns distances of numbers, (B,), (B, O) or with more axes, which are places."""
    rows = distances.reshape(len(distances), -1)
    if distances.dim() > 2 and rows.shape[1] > PLACES:
        rows = rows.gather(1, _some(torch.ones_like(rows, dtype=torch.bool)))
    rows = rows[:, None] if distances.dim() > 2 else rows[..., None]
    return Conformal(rows[..., None], torch.zeros_like(rows, dtype=torch.int64))


def _some(present: Tensor) -> Tensor:
    """Returns the numbers of the places that are stored, chosen at random among those present, (B, `PLACES`)."""
    order = torch.rand(present.shape, generator=torch.Generator().manual_seed(0)).to(present.device)
    return order.masked_fill(~present, 2.0).argsort(1)[:, :PLACES]


class Statistics(nn.Module):
    """What is known of some data, as buffers that the constructor takes by name."""

    @classmethod
    def like(cls, state: Mapping[str, Any], prefix: str) -> Self:
        """Returns one that a state dict with these entries can be loaded into."""
        names = (name.removeprefix(prefix) for name in state if name.startswith(prefix))
        return cls(**{name: torch.empty_like(state[prefix + name]) for name in names})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the buffers to another device; they keep their precision."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer.flatten()[:0]).device)
        return self


class HeldOut(Statistics):
    """Distances of held-out targets from a model's answers, as buffers; made by `ibnn.conformalize`.

    Head number h, or the only output, has buffers `distances{h}` and `classes{h}` (see `Conformal`); all share the
    `groups` and the likelihood's `temperature` when the answers were made.
    """

    groups: Tensor
    temperature: Tensor

    def __init__(self, **buffers: Tensor) -> None:
        """Takes the buffers by name."""
        super().__init__()
        for name, value in sorted(buffers.items()):  # in the same order when they are loaded
            self.register_buffer(name, value)

    @classmethod
    def of(cls, likelihood: Any, batches: list[list[Conformal | None]], groups: Tensor | None = None) -> Self | None:
        """Returns the distances of all heads, joined over batches; None if no likelihood has any."""
        buffers: dict[str, Tensor] = {}
        for head, parts in enumerate(zip(*batches, strict=True)):
            if found := [part for part in parts if part is not None]:
                most = max(part.classes.shape[2] for part in found)  # places; batches with fewer are filled up
                short = [(part, most - part.classes.shape[2]) for part in found]
                distances = [pad(part.distances, (0, 0, 0, n), value=math.nan) for part, n in short]
                buffers[f"distances{head}"] = torch.cat(distances)
                buffers[f"classes{head}"] = torch.cat([pad(part.classes, (0, n)) for part, n in short])
        if not buffers:
            return None
        none = torch.zeros(0, dtype=torch.int64)
        return cls(**buffers, groups=none if groups is None else groups, temperature=_temperature(likelihood))

    def head(self, number: int) -> Conformal | None:
        """Returns the distances of a head; None if its likelihood has none."""
        if f"distances{number}" not in self._buffers:
            return None
        return Conformal(getattr(self, f"distances{number}"), getattr(self, f"classes{number}"), self.groups)

    def fits(self, likelihood: Any) -> bool:
        """Whether answers are still made as those of the held-out examples were."""
        return torch.equal(self.temperature, _temperature(likelihood).to(self.temperature))


def _temperature(likelihood: Any) -> Tensor:
    """Returns the temperatures that decide answers: the likelihood's own, and each head's over it."""
    own = [likelihood.temperature.detach().reshape(1), getattr(likelihood, "relative", torch.zeros(0)).detach()]
    return torch.cat([part.float().cpu() for part in own])


def check_groups(groups: Any, rows: int) -> Tensor:
    """Returns the groups of rows, (rows,), as integers."""
    found = torch.as_tensor(groups)
    check.shape("groups", found, (rows,), remedy="Pass the group of every row.")
    return found.long()


def none_known(what: str) -> str:
    """Says what is missing where a conformal answer is asked for without held-out labels."""
    return (
        f"{what} needs held-out scores, and this model has none. Call ibnn.conformalize(model, valid) with held-out "
        "data, or ibnn.fit or ibnn.calibrate with enough of them, and do not change the noise or temperature after it."
    )
