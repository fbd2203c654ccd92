"""The likelihood of a network with several outputs: a likelihood for each of them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import pick
from ibnn.likelihood.base import Likelihood, Temperature, Terms
from ibnn.likelihood.categorical import Categorical
from ibnn.prediction import Conformal, JointPrediction, Prediction

MOST_WIDTHS = 1024  # sizes of outputs whose shapes are remembered


class Heads(Likelihood):
    """Several outputs of one network, each with a likelihood of its own, by name.

    The network returns a mapping (or an object with attributes) of these names; so does the network in eval mode, and
    `predict` answers with a `JointPrediction`. Targets are a dict of tensors. Heads are independent given the output,
    and a datum is a target of any of them: losses are means over all, and N counts all.

    >>> import ibnn
    >>> likelihood = Heads({"age": ibnn.Gaussian(), "sex": ibnn.Bernoulli()})
    >>> y = {"age": torch.zeros(2, 1), "sex": torch.ones(2, 1)}
    >>> output = likelihood.read({"age": torch.zeros(2, 1), "sex": torch.zeros(2, 1)})
    >>> round(likelihood.terms(output, likelihood.pack(y)).nll.item(), 4)  # the mean of ½ log 2π and log 2
    0.806
    """

    masks = True
    relative: Tensor  #: Each head's temperature over the common one (a buffer); `calibrate` and `fit` set it.

    def __init__(self, heads: Mapping[str, Likelihood]) -> None:
        """Takes the likelihoods by the names of the outputs."""
        super().__init__()
        if not heads or not all(isinstance(head, Likelihood) for head in heads.values()):
            got, remedy = f"{dict(heads)}", 'Pass {"age": ibnn.Gaussian(), "sex": ibnn.Bernoulli()}.'
            raise TypeError(complaint("heads", "a Likelihood for every name", got, remedy))
        self.names, self.heads = tuple(heads), nn.ModuleList(heads.values())
        self.discrete = all(head.discrete for head in heads.values())
        self.register_buffer("relative", torch.ones(len(heads)))
        self._shapes: dict[str, dict[int, dict[str, torch.Size]]] = {"output": {}, "y": {}}  # by width when joined

    def set_temperature(self, value: float | Tensor, relative: Tensor | None = None) -> None:
        """Sets the common temperature, and each head's over it if they are given."""
        super().set_temperature(value)
        if relative is not None:
            self.relative.copy_(relative)

    def each(self) -> Iterator[tuple[str, Likelihood]]:
        """Yields copies of the heads, each at its temperature."""
        yield from ((name, head.at(temperature)) for name, head, temperature in self._tempered(None))

    def _each(self) -> Iterator[tuple[str, Likelihood]]:
        """Yields the heads themselves."""
        yield from zip(self.names, self.heads, strict=True)

    def _tempered(self, temperature: Temperature) -> Iterator[tuple[str, Likelihood, Tensor]]:
        """Yields the heads with their temperatures, where the common one is as given."""
        yield from zip(self.names, self.heads, self._resolve(temperature) * self.relative, strict=True)

    def read(self, output: Any) -> Tensor:
        """Returns the outputs of all heads side by side, (B, …)."""
        return self._join({name: head.read(pick(output, name)) for name, head in self._each()}, "output")

    def pack(self, target: Any) -> Tensor:
        """Returns the targets of all heads side by side, (B, …), as floats."""
        if isinstance(target, Tensor):
            return target
        if not isinstance(target, Mapping) or set(target) != set(self.names):
            got = f"{sorted(target)}" if isinstance(target, Mapping) else type(target).__name__
            expected, remedy = f"a dict with {sorted(self.names)}", "Pass a tensor for each of them."
            raise ValueError(complaint("y", expected, got, remedy))
        parts = {}
        for name, head in self._each():
            with _of_head(name):
                own = head.pack(torch.as_tensor(target[name]))
                head.check_dtype(own)
            parts[name] = own.float()
        return self._join(parts, "y")

    def _join(self, parts: dict[str, Tensor], what: str) -> Tensor:
        rows = [part.shape[:1] for part in parts.values()]
        if not torch.compiler.is_compiling() and (set(rows) != {rows[0]} or not rows[0]):
            found = {name: tuple(part.shape) for name, part in parts.items()}
            raise ValueError(complaint(what, "of as many rows in every head", found, "Put the batch first in each."))
        joined = torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts.values()], 1)
        shapes, width = {name: part.shape[1:] for name, part in parts.items()}, joined.shape[1]
        if what == "y" and self._shapes[what].get(width, shapes) != shapes:  # targets of another shape are in use
            got = f"{shapes} after {self._shapes[what][width]}"
            raise ValueError(complaint("y", "of one shape where sizes are alike", got, "Pad the targets alike."))
        self._shapes[what][width] = shapes
        if len(self._shapes[what]) > MOST_WIDTHS:
            self._shapes[what].pop(next(iter(self._shapes[what])), None)
        return joined

    def _parts(self, joined: Tensor, what: str, leading: int = 0) -> dict[str, Tensor]:
        """What `_join` has joined, with so many axes before the batch's."""
        shapes = self._shapes[what][joined.shape[leading + 1]]
        parts = joined.split([shape.numel() for shape in shapes.values()], leading + 1)
        named = zip(shapes.items(), parts, strict=True)
        return {name: part.reshape(*part.shape[: leading + 1], *shape) for (name, shape), part in named}

    def split(self, target: Any) -> dict[str, Tensor]:
        """Returns targets by head, class indices as integers."""
        parts = self._parts(self.pack(target), "y")
        return {name: parts[name].long() if isinstance(h, Categorical) else parts[name] for name, h in self._each()}

    def balance(self, draws: Tensor, target: Any, best: Callable[[Likelihood, Tensor, Tensor], float]) -> None:
        """Sets every head's temperature to what is best for its own part of draws (K, S, B, …), the common one to 1."""
        outputs, targets = self._parts(draws, "output", 2), self.split(target)
        found = [best(head.at(own), outputs[name], targets[name]) for name, head, own in self._tempered(1.0)]
        self.set_temperature(1.0, torch.tensor(found))

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises as the first head does that complains."""
        outputs, targets = self._parts(output, "output"), self.split(target)
        for name, head in self._each():
            with _of_head(name):
                head.check(outputs[name], targets[name])

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns means over the targets of all heads."""
        outputs, targets = self._parts(output, "output"), self.split(target)
        heads = [head.terms(outputs[name], targets[name], own) for name, head, own in self._tempered(temperature)]
        loss, nll, count, weight = (torch.stack([t.to(output) for t in part]) for part in zip(*heads, strict=True))
        mean_loss = (loss * weight).sum() / weight.sum().clamp_min(1e-12)
        return Terms(mean_loss, (nll * count).sum() / count.sum().clamp_min(1e-12), count.sum(), weight.sum())

    def count(self, target: Tensor) -> int:
        """Returns how many targets all heads have."""
        targets = self.split(target)
        return sum(head.count(targets[name]) for name, head in self._each())

    def standardise(self, output: Tensor, target: Tensor) -> None:
        """Chooses the units of every head's outputs."""
        outputs, targets = self._parts(output, "output"), self.split(target)
        for name, head in self._each():
            head.standardise(outputs[name], targets[name])

    def total_weight(self, target: Tensor) -> Tensor:
        """Returns the sum over heads."""
        targets = self.split(target)
        return torch.stack([head.total_weight(targets[name]).cpu() for name, head in self._each()]).sum()

    def combine(self, draws: Tensor, temperature: Temperature = None) -> dict[str, Tensor]:
        """Returns one output for each head."""
        outputs = self._parts(draws, "output", 1)
        return {name: head.combine(outputs[name], own) for name, head, own in self._tempered(temperature)}

    def of_combined(self) -> Self:
        """Returns a copy whose heads all have the common temperature."""
        other = copy.copy(self)
        other._buffers = self._buffers | {"relative": torch.ones_like(self.relative)}
        return other

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns a prediction for each head."""
        outputs = self._parts(draws, "output", 2)
        heads = {name: head.summarise(outputs[name], own) for name, head, own in self._tempered(temperature)}
        return JointPrediction(heads)

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the sums over heads; by blocks of rows if a head has them by blocks."""
        outputs, targets = self._parts(draws, "output", 2), self.split(target)
        parts = [head.losses(outputs[name], targets[name], own) for name, head, own in self._tempered(temperature)]
        if any(len(losses) != len(target) for losses, _ in parts):
            return super().losses(draws, target, temperature)
        losses, counts = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        return losses, counts

    def score(self, prediction: JointPrediction, target: Any) -> dict[str, float]:
        """NLL over the targets of all heads; then all scores of each head, "age.nll" and so on."""
        targets = self.split(target)
        own = {name: head.score(prediction[name], targets[name]) for name, head in self._each()}
        counts = {name: head.count(targets[name]) for name, head in self._each()}
        nll = sum(own[name]["nll"] * counts[name] for name in own) / max(sum(counts.values()), 1)
        return {"nll": nll} | {f"{name}.{score}": value for name in own for score, value in own[name].items()}

    def distances(self, prediction: JointPrediction, target: Tensor) -> list[Conformal | None]:
        """Returns the distances of every head."""
        targets = self.split(target)
        return [found for name, head in self._each() for found in head.distances(prediction[name], targets[name])]

    def base_rates(self, target: Tensor) -> Tensor:
        """Returns the heads' base rates, each after its length."""
        targets = self.split(target)
        own = [head.base_rates(targets[name]).cpu().double() for name, head in self._each()]
        return torch.cat([torch.cat([rates.new_tensor([len(rates)]), rates]) for rates in own])

    def rates_by_head(self, base: Tensor) -> dict[str, Tensor]:
        """Returns the base rates of each head."""
        found = {}
        for name in self.names:
            found[name], base = base[1 : 1 + int(base[0])], base[1 + int(base[0]) :]
        return found

    def fall_back(self, prediction: JointPrediction, weight: Tensor, base: Any) -> JointPrediction:
        """Lets every head fall back to its own base rates, a tensor of all or one for each head by name."""
        heads, rates = dict(prediction.heads), self.rates_by_head(base) if isinstance(base, Tensor) else base
        for name, head in self._each():
            heads[name] = head.fall_back(heads[name], weight, rates[name]) if len(rates[name]) else heads[name]
        return JointPrediction(heads)


@contextmanager
def _of_head(name: str) -> Iterator[None]:
    """Names the head in what the block complains of."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"Head {name!r}: {error}") from error
