"""METHOD: the one `predict` and the one `draws` of every method.

A method offers draws of its network's outputs, (K·S, B, …); its likelihood turns them into a `Prediction`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import Inputs, batch_length, check_rows, slice_rows, tensors
from ibnn.layers.observe import explaining_shapes
from ibnn.prediction.answers import CategoricalPrediction, GaussianPrediction, JointPrediction, Prediction, Running
from ibnn.prediction.pieces import by_pieces

TOLERANCE = 0.1  # of samples="auto": a quarter of the draws on held-out images, see docs/performance.md


class Summary(Protocol):
    """What `predict` asks of a likelihood."""

    def summarise(self, draws: Tensor) -> Prediction:
        """Turns draws of a network's output, (K, S, B, …), into a prediction."""

    def running(self, components: int, samples: int) -> Running:
        """Does the same for draws that come a few at a time."""


class Method(Protocol):
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
        """Yields draws first … first + S − 1 of the network's output in eval mode, (J, B, …), component-major."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `nn.Module.parameters`."""

    def modules(self) -> Iterator[nn.Module]:
        """As `nn.Module.modules`."""


def predict(
    method: Method,
    inputs: Inputs | None = None,
    *,
    samples: int | Literal["auto"] = 5,
    tolerance: float | None = None,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
    **named: Any,
) -> Prediction:
    """Answers for a tensor, a tuple or mapping of inputs, or a loader of batches, in bounded memory.

    Workers (torch.distributed) must all pass the same loader: they share its batches, and each gets all answers.

    Args:
        method: A converted network or a baseline. It is evaluated in eval mode and left in the mode it was in.
        inputs: What one call of the network takes, or an iterable of such batches. Of a batch that is a tuple the last
            entry is the target, unless it is the only one; of a mapping all entries but "labels" are inputs.
        samples: Draws per component, S; with a tolerance the most there may be. "auto" is 5 with a tolerance of 0.1.
        tolerance: A classifier stops drawing for an input once the standard error of the predicted class's probability
            is below this and that class leads by more than a standard error. The prediction's `draws` tells how many
            it took. Stopping there favours draws that happen to agree: see docs/method.md.
        seed: Decides the draws.
        batch_size: Most rows that go through the network at once; changes nothing else. Where they do not fit, they
            are halved until they do. Draws for a few inputs pass together; those of large outputs (128 MB) are summed
            up as they come.
        progress: Shows a bar while it goes through a loader in a terminal.
        **named: `max_memory`, bytes that activations and draws may take beside weights and inputs (rows at once are
            chosen by what one and two rows take). `correct_bias=True` removes the bias of order 1/S from aleatoric,
            between and within, by the jackknife over the S draws: few draws show too little disagreement within
            components and too much between them; parts near 0 may come out below it. `novelty=False` leaves p-values
            of novelty out; `fallback` is the p-value below which answers fall back to the base rates (default: the
            model's own; 0: never). All others are inputs by keyword: `predict(model, input_ids=…, attention_mask=…)`.

    Returns:
        The prediction, on the inputs' device; on the CPU for a loader.
    """
    max_memory, correct_bias = named.pop("max_memory", None), named.pop("correct_bias", False)
    novelty, fallback = named.pop("novelty", True), named.pop("fallback", None)
    if samples == "auto":
        samples, tolerance = 5, TOLERANCE if tolerance is None else tolerance
    _check_counts(samples=samples, batch_size=batch_size, max_memory=max_memory)
    drawing = _Drawing(method, samples, seed, tolerance, correct_bias)
    observing = _Observing(method, drawing, novelty, fallback)
    _check_given_once(inputs, named)
    options: Any = {"batch_size": batch_size, "max_memory": max_memory, "progress": progress}
    parts = by_pieces(method, named or inputs, observing.answer, **options)
    return type(parts[0]).cat(parts)


def draws(
    method: Method,
    inputs: Inputs,
    *,
    samples: int = 1,
    seed: int = 0,
    components: Sequence[int] | None = None,
    batch_size: int = 256,
    max_memory: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Returns raw outputs of the draws that `predict` makes for the same inputs, (K, S, N, …); S is 1 without noise.

    Arguments and their meaning are those of `predict`: inputs go through the network in pieces, and workers share the
    batches of a loader. All draws are held in memory. `components` chooses among those of a converted network.

    >>> import ibnn
    >>> model, x = ibnn.convert(nn.Linear(4, 3), components=2, seed=0), torch.randn(5, 4)
    >>> draws(model, x, samples=6).shape
    torch.Size([2, 6, 5, 3])
    """
    _check_counts(samples=samples, batch_size=batch_size, max_memory=max_memory)
    drawing = _Drawing(method, samples, seed, components=components)
    parts = by_pieces(method, inputs, drawing.draws, batch_size=batch_size, max_memory=max_memory, progress=progress)
    return torch.cat(parts, 2)


def _check_given_once(inputs: Inputs | None, named: dict[str, Any]) -> None:
    if (inputs is None) != bool(named):
        got = f"inputs and also {sorted(named)}" if named else "none"
        remedy = "Pass x, or all inputs by keyword; if one is meant as an option, check its spelling."
        raise TypeError(complaint("inputs", "given in one way, as an argument or by keyword", got, remedy))


def _check_counts(**counts: int | None) -> None:
    """Raises unless each number that is given is an integer of at least 1."""
    remedies = {"samples": "Pass samples=5.", "batch_size": "Pass batch_size=256."}
    for name, value in counts.items():
        if value is None and name == "max_memory":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            remedy = remedies.get(name, "Pass a number of bytes, or leave it out.")
            raise ValueError(complaint(name, "an integer of at least 1", repr(value), remedy))


@dataclass(frozen=True)
class _Drawing:
    """Draws for pieces of the inputs, and makes answers of them."""

    method: Method
    samples: int
    seed: int
    tolerance: float | None = None
    correct_bias: bool = False
    components: Sequence[int] | None = None  # default all

    def __post_init__(self) -> None:
        samples, tolerance = self.samples, self.tolerance
        if tolerance is not None and not (tolerance > 0 and samples > 1):
            got = f"{tolerance} with samples={samples}"
            raise ValueError(complaint("tolerance", "positive, with two samples or more", got, "Pass tolerance=0.05."))
        if self.correct_bias and (samples == 1 or tolerance is not None):
            got, remedy = f"True with samples={samples} and tolerance={tolerance}", "Pass samples=5 and no tolerance."
            expected = "False, or with two samples or more for all inputs"
            raise ValueError(complaint("correct_bias", expected, got, remedy))

    def answer(self, piece: Inputs, row: int, size: int) -> Prediction:
        """Returns the prediction for a piece whose first row has this number, at most so many rows at once."""
        if self.tolerance is not None:
            return self._settled(piece, row, size, self.tolerance)
        if self.correct_bias:
            drawn = self.draws(piece, row, size)
            return self._jackknifed(self.method.likelihood.summarise(drawn), drawn)
        numbers = row + torch.arange(batch_length(piece))
        running = self.method.likelihood.running(self.method.components, self.samples if self.method.random else 1)
        for drawn in self._each(piece, size, self.samples):
            _refuse_not_finite(self.method, drawn, numbers)
            running.add(drawn)
        answer = running.result()
        _refuse_not_finite(self.method, answer, numbers)
        return answer

    def draws(self, piece: Inputs, row: int, size: int) -> Tensor:
        """Returns draws of every component, (K, S, b, …)."""
        drawn = self._joined(piece, size, self.samples)
        _refuse_not_finite(self.method, drawn.flatten(0, 1), row + torch.arange(batch_length(piece)))
        return drawn

    def _joined(self, piece: Inputs, size: int, samples: int, first: int = 0) -> Tensor:
        """Returns draws first … first + S − 1 of every component, (K, S, b, …)."""
        drawn = torch.cat(list(self._each(piece, size, samples, first)))
        chosen = self.method.components if self.components is None else len(self.components)
        return drawn.unflatten(0, (chosen, -1))  # type: ignore[no-any-return]

    def _each(self, piece: Inputs, size: int, samples: int, first: int = 0) -> Iterator[Tensor]:
        """Yields draws of the network's output, (J, b, …) at a time."""
        rows, net = batch_length(piece), getattr(self.method, "net", nn.Identity())
        only: dict[str, Any] = {} if self.components is None else {"components": self.components}
        each = self.method.each_draw(piece, samples, self.seed, first=first, batch_size=size, **only)
        with explaining_shapes(net, piece), closing(each) as drawn:  # type: ignore[type-var]
            for part in drawn:
                check_rows(part[0], rows)
                yield part

    def _jackknifed(self, answer: Prediction, drawn: Tensor) -> Prediction:
        """Returns the answer with uncertainties S·θ − (S − 1)·mean of θ without one draw of every component."""
        if isinstance(answer, JointPrediction):
            remedy = 'Leave it out, or predict one head: convert with logits="its name".'
            raise TypeError(complaint("correct_bias", "False for several heads", True, remedy))
        rest = self.samples - 1
        less = dict.fromkeys(("aleatoric", "between", "within"), torch.zeros(()))
        for left_out in range(self.samples):
            kept = [number for number in range(self.samples) if number != left_out]
            without = self.method.likelihood.summarise(drawn[:, kept])
            less = {name: mean + getattr(without, name) / self.samples for name, mean in less.items()}
        return replace(
            answer, **{name: self.samples * getattr(answer, name) - rest * mean for name, mean in less.items()}
        )

    def _settled(self, piece: Inputs, row: int, size: int, tolerance: float) -> Prediction:
        """Takes one draw of every component after the other; inputs leave when their answers have settled."""
        rows = batch_length(piece)
        left = torch.arange(rows, device=next(tensors(piece)).device)
        rounds: list[Tensor] = []  # (K, 1, rows left, …) each
        found: list[tuple[Tensor, CategoricalPrediction]] = []
        for number in range(self.samples):
            some = piece if len(left) == rows else slice_rows(piece, left, rows)
            rounds.append(self._joined(some, size, 1, first=number))
            answer = self.method.likelihood.summarise(torch.cat(rounds, 1))
            _refuse_not_finite(self.method, rounds[-1].flatten(0, 1), row + left)
            _refuse_not_finite(self.method, answer, row + left)
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


@dataclass(frozen=True)
class _Observing:
    """Adds to answers how novel their inputs are, and lets those for novel inputs fall back to the base rates."""

    method: Method
    drawing: _Drawing
    novelty: bool
    fallback: float | None

    def __post_init__(self) -> None:
        fallback, reference = self.fallback, getattr(self.method, "reference", None)
        if fallback is None:
            return
        if isinstance(fallback, bool) or not isinstance(fallback, float | int) or not 0 <= fallback < 1:
            remedy = "Pass 0.01, 0 for never, or leave it out."
            raise ValueError(complaint("fallback", "in [0, 1)", repr(fallback), remedy))
        if fallback and (reference is None or not len(reference.base) or not self.novelty):
            remedy = "Call ibnn.fit_novelty(model, train, valid) with labels before you predict."
            raise ValueError(complaint("fallback", "0 for a model that knows no base rates", fallback, remedy))

    def answer(self, piece: Inputs, row: int, size: int) -> Prediction:
        """Returns the prediction for a piece whose first row has this number, at most so many rows at once."""
        answer, method = self.drawing.answer(piece, row, size), cast(Any, self.method)
        reference = getattr(method, "reference", None)
        if reference is None or not self.novelty:
            return answer
        found = method.novelty(piece)
        fallback = float(reference.fallback) if self.fallback is None else self.fallback
        if fallback:
            answer = fallen_back(method.likelihood, answer, found.log_tail, fallback, reference.base)
        if isinstance(answer, JointPrediction):
            heads = {name: replace(head, novelty=found.p_value) for name, head in answer.heads.items()}
            return JointPrediction(heads, novelty=found.p_value)
        return replace(answer, novelty=found.p_value, conformal=method.conformal)


def fallen_back(likelihood: Any, answer: Any, log_p: Tensor, fallback: float, base: Tensor) -> Any:
    """Returns an answer that knows how novel its inputs are, from the logarithms of their p-values, (B,).

    Below the p-value `fallback` it becomes a mixture with the base rates. Of its aleatoric part only the share counts
    that can be believed at this p-value; the rest is epistemic (and counted in `between`). The total is that of the
    answer in either case.
    """
    answer = likelihood.fall_back(answer, fallback_weight(log_p, fallback), base)
    if isinstance(answer, JointPrediction):
        return replace(answer, heads={name: _believed(head, log_p) for name, head in answer.heads.items()})
    return _believed(answer, log_p)


def _believed(answer: Any, log_p: Tensor) -> Any:
    """Returns an answer whose aleatoric part is epistemic as far as its inputs are novel."""
    if not isinstance(answer, CategoricalPrediction | GaussianPrediction):
        return answer  # of a likelihood of the user's own
    own = answer.aleatoric
    share = known_share(log_p).to(own).reshape(-1, *[1] * (own.dim() - 1))
    return replace(answer, aleatoric=share * own, between=answer.between + (1 - share) * own)


def fallback_weight(log_p: Tensor, fallback: float) -> Tensor:
    """Returns the weight of an answer against the base rates: 1 from the p-value `fallback` on, in proportion below it.

    >>> fallback_weight(torch.tensor([0.001, 0.005, 0.5]).log(), 0.01)
    tensor([0.1000, 0.5000, 1.0000])
    """
    return (log_p - math.log(fallback)).clamp_max(0).exp()


def known_share(log_p: Tensor) -> Tensor:
    """Returns −e · p · log p, 1 from p = 1/e on: the least Bayes factor for "known" against "novel" at a p-value.

    No distribution of the p-values of novel inputs that favours small ones makes it smaller (Sellke, Bayarri and
    Berger, 2001).

    >>> known_share(torch.tensor([0.001, 0.01, 0.05, 0.5]).log())
    tensor([0.0188, 0.1252, 0.4072, 1.0000])
    """
    log_p = log_p.clamp_min(-80.0)  # minus infinity times zero is NaN
    return torch.where(log_p < -1, -log_p * (log_p + 1).exp(), 1.0)


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
