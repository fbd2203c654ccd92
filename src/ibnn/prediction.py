"""ANSWERS: what a prediction holds, and the one `predict` that serves every method.

A method offers draws of its network's outputs, (K·S, B, …); its likelihood turns them into a `Prediction`. Uncertainty
splits exactly: total = aleatoric + epistemic, epistemic = between components + within components, every part ≥ 0.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import (
    Inputs,
    Modular,
    as_tensors,
    batch_length,
    call_arguments,
    check_rows,
    evaluating,
    slice_rows,
    split_inputs,
    tensors,
    tree_map,
)
from ibnn.layers.memory import Peak, out_of_memory
from ibnn.layers.observe import explaining_shapes
from ibnn.progress import track

TOLERANCE = 0.06  # of samples="auto": a quarter of the draws on held-out images, see docs/performance.md


@dataclass(frozen=True)
class Prediction:
    """Answers for a batch of inputs; the first axis of every field is the batch, unless its metadata says otherwise."""

    def __len__(self) -> int:
        """How many inputs were answered."""
        first = fields(self)[0]
        return int(getattr(self, first.name).shape[first.metadata.get("batch", 0)])

    def to(self, device: torch.device | str) -> Self:
        """The same answers on another device."""
        return self._map(lambda value, axis: value.to(device))

    def rows(self, numbers: Tensor) -> Self:
        """The answers for some of the inputs, in the order of their numbers."""
        return self._map(lambda value, axis: value.index_select(axis, numbers.to(value.device)))

    def _map(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        """Applies a function of value and batch axis to every field that is a tensor."""
        values = {f.name: (getattr(self, f.name), f.metadata.get("batch", 0)) for f in fields(self)}
        return type(self)(
            **{name: function(v, axis) if isinstance(v, Tensor) else v for name, (v, axis) in values.items()}
        )

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """Joins the answers for consecutive batches."""
        if len(parts) == 1:
            return parts[0]
        columns = {f.name: ([getattr(part, f.name) for part in parts], f.metadata.get("batch", 0)) for f in fields(cls)}
        return cls(
            **{name: torch.cat(v, axis) if isinstance(v[0], Tensor) else v[0] for name, (v, axis) in columns.items()}
        )


@dataclass(frozen=True)
class CategoricalPrediction(Prediction):
    """Class probabilities and the entropies behind them, in nats.

    Attributes:
        probs: Mean of the draws' probabilities, of the shape of the network's output: (B, C), (B, C, …) or (B, …, C).
        log_probs: Its logarithm, computed without underflow.
        aleatoric: Mean entropy of the draws, (B, …): what no more training data would take away.
        between: Mutual information of label and component: how much the components disagree.
        within: Mutual information of label and draw, given the component.
        standard_error: Monte Carlo standard error of `probs`; too large with a single draw per component, whose spread
            is then taken for that of the components; nan with a single draw.
        draws: How many draws each answer is made of, (B,), where `predict` was given a tolerance; else None.
        axis: The axis of the classes in `probs`, 1 or −1.
    """

    probs: Tensor
    log_probs: Tensor
    aleatoric: Tensor
    between: Tensor
    within: Tensor
    standard_error: Tensor
    draws: Tensor | None = field(default=None, kw_only=True)
    axis: int = field(default=1, kw_only=True)

    @property
    def epistemic(self) -> Tensor:
        """What the draws disagree about (mutual information), (B, …)."""
        return self.between + self.within

    @property
    def total(self) -> Tensor:
        """Entropy of `probs`, (B, …)."""
        return self.aleatoric + self.epistemic

    @property
    def labels(self) -> Tensor:
        """The most probable class, (B, …)."""
        return self.probs.argmax(self.axis)

    @property
    def answer_error(self) -> Tensor:
        """Standard error of the predicted class's probability, (B,); the largest of an input's if it has several."""
        return self.standard_error.gather(self.axis, self.labels.unsqueeze(self.axis)).flatten(1).amax(1)

    def settled(self, tolerance: float) -> Tensor:
        """Whether more draws would hardly change an answer, (B,).

        Its error is below the tolerance, and the predicted class is ahead of the next by more than a standard error.
        """
        probs, errors = (values.movedim(self.axis, 1) for values in (self.probs, self.standard_error))
        first = probs.topk(min(2, probs.shape[1]), 1)
        lead = first.values[:, :1] - first.values[:, 1:].sum(1, keepdim=True)
        error = errors.gather(1, first.indices).sum(1, keepdim=True)  # no less than that of the lead
        return (self.answer_error < tolerance) & (lead > error).flatten(1).all(1)


@dataclass(frozen=True)
class BernoulliPrediction(CategoricalPrediction):
    """As `CategoricalPrediction`, for independent yes/no labels: every field has the shape of the network's output.

    Attributes:
        log_complements: Log of the probability of no.
    """

    log_complements: Tensor

    @property
    def labels(self) -> Tensor:
        """Whether each label is more probable than not, (B, …)."""
        return self.probs > 0.5

    @property
    def answer_error(self) -> Tensor:
        """The largest standard error among an input's labels, (B,)."""
        return self.standard_error.reshape(len(self), -1).amax(1)

    def settled(self, tolerance: float) -> Tensor:
        """As for classes: all errors are below the tolerance, and no label is within its error of undecided."""
        clear = (self.probs - 0.5).abs() > self.standard_error
        return (self.answer_error < tolerance) & clear.reshape(len(self), -1).all(1)


@dataclass(frozen=True)
class GaussianPrediction(Prediction):
    """A mixture of Gaussians, one for each draw; variances in squared units of the target.

    Attributes:
        mean: Predictive mean, (B, …).
        aleatoric: Mean of the draws' noise variances.
        between: Variance of the components' means.
        within: Mean variance of a component's draws.
        standard_error: Monte Carlo standard error of `mean`; see `CategoricalPrediction`.
        draw_means: Mean of each draw, (K·S, B, …).
        draw_stds: Noise of each draw, (K·S, B, …).
    """

    mean: Tensor
    aleatoric: Tensor
    between: Tensor
    within: Tensor
    standard_error: Tensor
    draw_means: Tensor = field(metadata={"batch": 1}, repr=False)
    draw_stds: Tensor = field(metadata={"batch": 1}, repr=False)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the draws' means."""
        return self.between + self.within

    @property
    def variance(self) -> Tensor:
        """Predictive variance: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def total(self) -> Tensor:
        """Another name of `variance`, as for classification."""
        return self.variance

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation."""
        return self.variance.sqrt()

    def log_prob(self, target: Tensor) -> Tensor:
        """Log density of the mixture at a target of the mean's shape."""
        if target.shape != self.mean.shape:
            got = f"shape {tuple(target.shape)}"
            remedy = f"Pass target.reshape({tuple(self.mean.shape)})."
            raise ValueError(complaint("target", f"of shape {tuple(self.mean.shape)}", got, remedy))
        log_normal = torch.distributions.Normal(self.draw_means, self.draw_stds).log_prob(target)
        return torch.logsumexp(log_normal, 0) - math.log(len(log_normal))

    def quantile(self, level: float) -> Tensor:
        """The value that the target stays below with probability `level`, by bisection of the mixture's CDF."""
        if not 0 < level < 1:
            raise ValueError(complaint("level", "between 0 and 1", level, "Pass 0.5 for the median."))
        means, stds = self.draw_means, self.draw_stds
        reach: Tensor = stds * abs(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()) * 1.001
        low, high = (means - reach).amin(0), (means + reach).amax(0)  # every draw's own quantile lies between
        for _ in range(60):
            middle = (low + high) / 2
            below: Tensor = torch.special.ndtr((middle - means) / stds).mean(0) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds the target with probability `level`, exact for the mixture."""
        if not 0 < level < 1:
            raise ValueError(complaint("level", "between 0 and 1", level, "Pass 0.9 for a 90 % interval."))
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)


@dataclass(frozen=True)
class JointPrediction(Prediction):
    """A prediction for each of several outputs of a network, by name: `p["age"].mean`.

    Attributes:
        heads: The predictions by name.
    """

    heads: dict[str, Prediction]

    def __getitem__(self, name: str) -> Any:
        """The prediction for one output."""
        return self.heads[name]

    def __len__(self) -> int:
        """How many inputs were answered."""
        return len(next(iter(self.heads.values())))

    def _map(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        return type(self)({name: head._map(function) for name, head in self.heads.items()})

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """Joins the answers for consecutive batches."""
        first = parts[0].heads
        return cls({name: type(head).cat([part[name] for part in parts]) for name, head in first.items()})


class Running(Protocol):
    """What makes a prediction of draws that come a few at a time."""

    def add(self, draws: Tensor) -> None:
        """Takes the next draws of a network's output, (J, B, …), component-major."""

    def result(self) -> Prediction:
        """The prediction made of all draws."""


class Summary(Protocol):
    """What `predict` asks of a likelihood."""

    def summarise(self, draws: Tensor) -> Prediction:
        """Turns draws of a network's output, (K, S, B, …), into a prediction."""

    def running(self, components: int, samples: int) -> Running:
        """Does the same for draws that come a few at a time."""


class Collected:
    """Holds all draws and summarises them at the end."""

    def __init__(self, likelihood: Summary, components: int) -> None:
        self.likelihood, self.components = likelihood, components
        self.parts: list[Tensor] = []

    def add(self, draws: Tensor) -> None:
        """Takes the next draws, (J, B, …), component-major."""
        self.parts.append(draws)

    def result(self) -> Prediction:
        """The prediction made of all draws."""
        return self.likelihood.summarise(torch.cat(self.parts).unflatten(0, (self.components, -1)))


class Method(Modular, Protocol):
    """What `predict` asks of a method."""

    components: int

    @property
    def random(self) -> bool:
        """Whether a component has more than one draw."""

    @property
    def likelihood(self) -> Summary:
        """Turns the draws into a prediction."""

    def each_draw(
        self, inputs: Inputs, samples: int, seed: int, /, *, first: int = 0, batch_size: int | None = None
    ) -> Iterator[Tensor]:
        """Draws first … first + S − 1 of the network's output, (J, B, …) at a time, component-major."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `nn.Module.parameters`."""


def predict(
    method: Method,
    inputs: Inputs | None = None,
    *,
    samples: int | Literal["auto"] = 5,
    tolerance: float | None = None,
    seed: int = 0,
    batch_size: int = 256,
    max_memory: int | None = None,
    correct_bias: bool = False,
    progress: bool = True,
    **named: Any,
) -> Prediction:
    """Answers for a tensor, a tuple or mapping of inputs, or a loader of batches, in bounded memory.

    Args:
        method: A converted network or a baseline. It is evaluated in eval mode and left in the mode it was in.
        inputs: What one call of the network takes, or an iterable of such batches. Of a batch that is a tuple the last
            entry is the target, unless it is the only one; of a mapping all entries but "labels" are inputs.
        samples: Draws per component, S; with a tolerance the most there may be. "auto" is 5 with a tolerance of 0.06.
        tolerance: An input of a classifier is done as soon as the standard error of its answer, the probability of the
            predicted class, is below this and that class is ahead by more than a standard error; all have one draw per
            component. The prediction's `draws` tells how many it took. Stopping there favours draws that happen to
            agree: see docs/method.md.
        seed: Decides the draws.
        batch_size: Most rows that go through the network at once; changes nothing else. Draws for a few inputs go
            through together. Outputs of draws are held in memory while they are small (128 MB), else summed up as they
            come. Where rows do not fit, they are halved until they do.
        max_memory: Bytes that activations and draws may take, beside weights and inputs; rows at once are chosen by
            what one and two rows take. None leaves it at `batch_size`.
        correct_bias: Takes out of aleatoric, between and within what is due to the number of draws alone (of the order
            1/S, by the jackknife over the S draws of all components): few draws show too little disagreement within
            components, and too much between them. Parts that are near 0 may then come out below it.
        progress: Shows a bar while it goes through a loader in a terminal.
        **named: The network's inputs by keyword, in place of `inputs`: `predict(input_ids=…, attention_mask=…)`.

    Where several workers run (torch.distributed), all must pass the same loader: they share its batches, and each gets
    the answers for all of them, in order.

    Returns:
        The prediction, on the inputs' device; on the CPU for a loader.
    """
    if samples == "auto":
        samples, tolerance = 5, TOLERANCE if tolerance is None else tolerance
    for name, value, remedy in (
        ("samples", samples, "Pass samples=5."),
        ("batch_size", batch_size, "Pass batch_size=256."),
        ("max_memory", 1 if max_memory is None else max_memory, "Pass a number of bytes, or leave it out."),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(complaint(name, "an integer of at least 1", repr(value), remedy))
    if tolerance is not None and not (tolerance > 0 and samples > 1):
        got = f"{tolerance} with samples={samples}"
        raise ValueError(complaint("tolerance", "positive, with two samples or more", got, "Pass tolerance=0.05."))
    if correct_bias and (samples == 1 or tolerance is not None):
        got = f"True with samples={samples} and tolerance={tolerance}"
        remedy = "Pass samples=5 and no tolerance."
        raise ValueError(complaint("correct_bias", "False, or with two samples or more for all inputs", got, remedy))
    if (inputs is None) != bool(named):
        got = f"inputs and also {sorted(named)}" if named else "none"
        remedy = "Pass x, or all inputs by keyword; if one is meant as an option, check its spelling."
        raise TypeError(complaint("inputs", "given in one way, as an argument or by keyword", got, remedy))
    inputs = as_tensors(named or inputs, _dtype(method))
    from_loader = not isinstance(inputs, Tensor | tuple | list | dict) and isinstance(inputs, Iterable)
    batches: Iterable[Inputs] = [inputs]
    if from_loader:
        batches = (
            as_tensors(split_inputs(b), _dtype(method)) for b in (track(inputs, "predict") if progress else inputs)
        )
    if not from_loader:
        batch_length(inputs)
    home = torch.device("cpu") if from_loader else next(tensors(inputs)).device
    rank, world = _worker() if from_loader else (0, 1)
    answers = _Answers(method, samples, seed, tolerance, batch_size, max_memory, correct_bias)
    parts: list[tuple[int, Prediction]] = []  # with the number of their batch
    rows = 0
    with evaluating(method), torch.no_grad():
        for number, batch in enumerate(batches):
            if number % world == rank:
                refuse_nan(batch, first=rows)
                parts += [(number, part.to(home)) for part in answers(batch, first=rows)]
            rows += batch_length(batch)
    if world > 1:
        parts = _gathered(parts, world)
    if not parts:
        raise ValueError(complaint("inputs", "at least one batch", "an empty loader", "Pass a loader with data."))
    return type(parts[0][1]).cat([part for _, part in parts])


@dataclass
class _Answers:
    """Answers batches piece by piece; a piece that did not fit into memory is halved, and so are those to come."""

    method: Method
    samples: int
    seed: int
    tolerance: float | None
    size: int  # rows of a piece
    max_memory: int | None
    correct_bias: bool
    first: int = 0  # number of the piece's first row among all inputs

    def __call__(self, batch: Inputs, first: int) -> Iterator[Prediction]:
        rows, start = batch_length(batch), 0
        device = next(self.method.parameters()).device
        while start < rows:
            part = slice(start, start + self.size)
            piece, self.first = batch if self.size >= rows else slice_rows(batch, part, rows), first + start
            piece = tree_map(lambda t: t.to(device), piece)
            try:
                if self.max_memory is not None:
                    self._fit(piece)
                    continue
                answer = self._answer(piece)
            except (MemoryError, RuntimeError) as error:
                if self.size == 1 or not out_of_memory(error):
                    raise
                self.size = -(-min(self.size, rows) // 2)
                continue
            yield answer
            start = part.stop

    def _fit(self, piece: Inputs) -> None:
        """Chooses the rows at once by the most memory that one and two rows take."""
        assert self.max_memory is not None
        rows, peaks = batch_length(piece), []
        for size in range(1, min(rows, 2) + 1):
            with Peak([*self.method.parameters(), *tensors(piece)]) as peak:
                replace(self, size=size)._answer(slice_rows(piece, slice(0, size), rows))
            peaks.append(peak.bytes)
        each = max(1, peaks[-1] - peaks[0] if len(peaks) == 2 else peaks[0])
        self.size = max(1, min(self.size, 1 + (self.max_memory - peaks[0]) // each))
        self.max_memory = None  # spent

    def _answer(self, piece: Inputs) -> Prediction:
        if self.tolerance is not None:
            return self._settled(piece, self.tolerance)
        numbers = self.first + torch.arange(batch_length(piece))
        if self.correct_bias:
            draws = self._draws(piece, self.samples)
            _refuse_not_finite(self.method, draws.flatten(0, 1), numbers)
            return self._jackknifed(self.method.likelihood.summarise(draws), draws)
        running = self.method.likelihood.running(self.method.components, self.samples if self.method.random else 1)
        for draws in self._each(piece, self.samples):
            _refuse_not_finite(self.method, draws, numbers)
            running.add(draws)
        answer = running.result()
        _refuse_not_finite(self.method, answer, numbers)
        return answer

    def _each(self, piece: Inputs, samples: int, first: int = 0) -> Iterator[Tensor]:
        """Draws of the network's output, (J, b, …) at a time."""
        rows = batch_length(piece)
        with explaining_shapes(getattr(self.method, "net", nn.Identity()), piece):
            for draws in self.method.each_draw(piece, samples, self.seed, first=first, batch_size=self.size):
                check_rows(draws[0], rows)
                yield draws

    def _draws(self, piece: Inputs, samples: int, first: int = 0) -> Tensor:
        """Draws of every component, (K, S, b, …)."""
        joined: Tensor = torch.cat(list(self._each(piece, samples, first))).unflatten(0, (self.method.components, -1))
        return joined

    def _jackknifed(self, answer: Prediction, draws: Tensor) -> Prediction:
        """The answer with uncertainties S·θ − (S − 1)·mean of θ without one draw of every component."""
        if isinstance(answer, JointPrediction):
            remedy = 'Leave it out, or predict one head: convert with logits="its name".'
            raise TypeError(complaint("correct_bias", "False for several heads", True, remedy))
        rest = self.samples - 1
        less = dict.fromkeys(("aleatoric", "between", "within"), torch.zeros(()))
        for left_out in range(self.samples):
            kept = [number for number in range(self.samples) if number != left_out]
            without = self.method.likelihood.summarise(draws[:, kept])
            less = {name: mean + getattr(without, name) / self.samples for name, mean in less.items()}
        return replace(
            answer, **{name: self.samples * getattr(answer, name) - rest * mean for name, mean in less.items()}
        )

    def _settled(self, piece: Inputs, tolerance: float) -> Prediction:
        """One draw of every component after the other; inputs leave when their answers have settled."""
        rows = batch_length(piece)
        left = torch.arange(rows, device=next(tensors(piece)).device)
        rounds: list[Tensor] = []  # (K, 1, rows left, …) each
        found: list[tuple[Tensor, CategoricalPrediction]] = []
        for number in range(self.samples):
            some = piece if len(left) == rows else slice_rows(piece, left, rows)
            rounds.append(self._draws(some, 1, first=number))
            answer = self.method.likelihood.summarise(torch.cat(rounds, 1))
            _refuse_not_finite(self.method, rounds[-1].flatten(0, 1), self.first + left)
            _refuse_not_finite(self.method, answer, self.first + left)
            if not isinstance(answer, CategoricalPrediction):
                got, remedy = type(answer).__name__, "Leave tolerance out."
                raise TypeError(complaint("tolerance", "given for a classifier only", got, remedy))
            last = number == self.samples - 1
            done = answer.settled(tolerance) | last
            used = torch.full_like(left, self.method.components * len(rounds))
            found.append((left[done], replace(answer, draws=used).rows(done.nonzero()[:, 0])))
            left, rounds = left[~done], [part[:, :, ~done] for part in rounds]
            if len(left) == 0:
                break
        order = torch.cat([numbers for numbers, _ in found]).argsort()
        answers = [answer for _, answer in found]
        return type(answers[0]).cat(answers).rows(order)


def _dtype(method: Method) -> torch.dtype:
    """Of the network's numbers."""
    return next((p.dtype for p in method.parameters() if p.is_floating_point()), torch.float32)


def _worker() -> tuple[int, int]:
    """Rank and number of workers."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _gathered(parts: list[tuple[int, Prediction]], world: int) -> list[tuple[int, Prediction]]:
    """All workers' parts in the order of their batches."""
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, parts)
    return sorted((part for theirs in everyone for part in theirs), key=lambda part: part[0])


def refuse_nan(inputs: Inputs, first: int = 0, argument: str = "", *, infinity: bool = False) -> None:
    """Raises for a batch with NaN, or infinity, not minus infinity, which masks.

    Args:
        inputs: The batch.
        first: The number of its first row.
        argument: What is named; by default the input with it.
        infinity: Whether that is refused, too.
    """
    rows = batch_length(inputs)
    named = (
        inputs if isinstance(inputs, Mapping) else {f"input {i}": t for i, t in enumerate(call_arguments(inputs)[0])}
    )
    for name, value in named.items():
        for tensor in tensors(value):
            if not tensor.is_floating_point() or not tensor.dim() or len(tensor) != rows:
                continue
            bad = ~(tensor < math.inf) if infinity else tensor.isnan()
            if bad.any():
                row = first + int(bad.reshape(rows, -1).any(1).nonzero()[0])
                what = "NaN" if tensor.isnan().any() else "infinity"
                got, remedy = f"{what} in row {row}", "Clean or drop that row."
                raise ValueError(complaint(argument or name, f"free of {what}", got, remedy))


def _refuse_not_finite(method: Method, found: Tensor | Prediction, numbers: Tensor) -> None:
    """Raises for outputs (J, b, …) of rows so numbered that are NaN or infinity, or for such answers.

    Minus infinity masks a class, and does no harm as long as another class is left.
    """
    if isinstance(found, JointPrediction):
        for head in found.heads.values():
            _refuse_not_finite(method, head, numbers)
        return
    if isinstance(found, Prediction):
        for name in ("probs", "mean", "aleatoric"):
            if isinstance(answer := getattr(found, name, None), Tensor):
                _refuse_not_finite(method, answer[None], numbers)
        return
    masks = getattr(method.likelihood, "masks", False)
    if found.amax() < math.inf and (masks or found.amin() > -math.inf):  # a NaN is not below infinity
        return
    root = next(method.modules())
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.is_floating_point() and not bool((tensor < math.inf).all()):
            remedy = "Go back to a checkpoint from before that, or load the weights again."
            raise ValueError(complaint("model", "of finite weights", f"NaN or infinity in {name!r}", remedy))
    by_row = found.movedim(1, 0).flatten(1)
    good = (by_row.amax(1) < math.inf) & (masks | (by_row.amin(1) > -math.inf))
    got = f"NaN or infinity for row {int(numbers.to(good.device)[~good][0])}"
    remedy = "Is that row finite, and scaled like the training data?"
    raise ValueError(complaint("x", "inputs that the network has finite outputs for", got, remedy))
