"""`predict`, `draws`, `conformalize`: how a batch of inputs becomes an answer with uncertainty, for every method.

Inputs are cut into pieces of at most `batch_size` rows. The likelihood sums the draws of a piece up, (K·S, b, …), a
model with reference data adds p-values (`ibnn.novelty`), and the answers of all pieces are joined.

A method is an nn.Module with `components`, a `likelihood`, `random` (whether a component has more than one draw),
`evaluating()` and `each_draw(x, samples, seed, first=, batch_size=)`, which yields outputs (J, b, …), component-major.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ibnn import check
from ibnn.batches import as_source
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.inputs import Inputs, as_tensors, batch_length, check_rows, slice_rows, split_inputs, tensors, tree_map
from ibnn.layers.explain import explain, explaining_shapes
from ibnn.prediction.answers import CategoricalPrediction, JointPrediction, Prediction, check_level
from ibnn.prediction.conformal import Conformal, HeldOut, check_groups

log = logging.getLogger("ibnn")
T = TypeVar("T", Tensor, Prediction)  # the result for a piece
TOLERANCE = 0.1  # of samples="auto": a quarter of the draws on held-out images, see docs/performance.md


def predict(
    method: Any,
    x: Inputs,
    *,
    samples: int | Literal["auto"] = 5,
    tolerance: float | None = None,
    seed: int = 0,
    batch_size: int | None = 256,
    novelty: bool = True,
    fallback: float | None = None,
    progress: bool = True,
) -> Prediction:
    """Predicts for a tensor or table, a tuple or mapping of inputs, a Dataset, or a loader of batches.

    Memory use is bounded. Answers are on the inputs' device, or on the CPU for a loader. Workers (torch.distributed)
    must all pass the same loader: they share its batches, and each gets all answers.

    Args:
        method: A converted network or a baseline. It is evaluated in eval mode and left in the mode it was in.
        x: What one call of the network takes, or an iterable of such batches. A mapping holds inputs by keyword:
            `predict(model, {"input_ids": …, "attention_mask": …})`. In a loader's batch the last entry of a tuple is
            the target, unless it is the only one; in a mapping all entries but "labels" are inputs.
        samples: Draws per component, S; with a tolerance the most there may be. "auto" is 5 with a tolerance of 0.1.
        tolerance: Stops drawing for an input under two conditions: the standard error of the predicted class's
            probability is below `tolerance`, and that class leads by more than one standard error. `p.draws` says how
            many draws it took. Stopping there favours draws that happen to agree: see docs/method.md.
        seed: Decides the draws.
        batch_size: Most rows that go through the network at once; changes nothing else. Draws for a few inputs pass
            together. None never cuts a batch and never copies it: for networks whose rows depend on each other, such
            as the nodes of a graph.
        novelty: Whether to add p-values of novelty, if the model has reference data.
        fallback: p-value below which answers are mixed with the base rates, such as 0.01: at the smallest possible
            p-value the answer is the base rate. Default: answers are the network's, whatever the p-value.
        progress: Shows a bar while it goes through a loader in a terminal.
    """
    if not hasattr(method, "likelihood"):
        wrapped = hasattr(getattr(method, "module", None), "likelihood")
        remedy = "Pass what it wraps: model.module." if wrapped else "Convert it first: ibnn.convert(net)."
        raise TypeError(complaint("method", "a converted network or a baseline", type(method).__name__, remedy))
    if samples == "auto":
        samples, tolerance = 5, TOLERANCE if tolerance is None else tolerance
    check_options(samples, seed, batch_size)
    reference = getattr(method, "reference", None) if novelty else None
    if tolerance is not None:
        check.number("tolerance", tolerance, above=0, remedy="Pass tolerance=0.05.")
        if samples == 1 or batch_size is None:
            expected, got = "given with two samples or more and a batch size", f"{samples} and {batch_size}"
            raise ValueError(complaint("tolerance", expected, got, "Leave tolerance out."))
    if fallback is not None:
        check_fallback(fallback, reference)
    if getattr(method, "fresh", False):
        log.warning("predict: the latents' noise is as convert set it. Call ibnn.calibrate(model, valid) or ibnn.fit.")
        method.fresh = False
    held_out: HeldOut | None = getattr(method, "held_out", None)
    held_out = held_out if held_out is not None and held_out.fits(method.likelihood) else None
    only_draw = not method.random and method.components == 1  # is the output that novelty measures

    def answer(piece: Inputs, first: int) -> Prediction:
        output = None
        if reference is not None:
            from ibnn.novelty.measure import annotated, measured  # loaded where a model has reference data

            novel, mean_output = measured(method, piece)
            output = mean_output if only_draw else None
        if tolerance is None or only_draw:
            found = _answer(method, piece, first, batch_size, samples, seed, output)
        else:
            found = _settled_answer(method, piece, first, batch_size, samples, seed, tolerance)
        if reference is not None:
            found = annotated(method, found, novel, fallback)
        return found if held_out is None else _with_held_out(found, held_out)

    parts = _by_pieces(method, x, answer, batch_size, progress=progress)
    return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)


def draws(
    method: Any,
    x: Inputs,
    *,
    samples: int = 1,
    seed: int = 0,
    components: Sequence[int] | None = None,
    batch_size: int | None = 256,
) -> Tensor:
    """Returns raw outputs of the draws that `predict` makes for the same inputs, (K, S, N, …); S is 1 without noise.

    Arguments and their meaning are those of `predict`: inputs go through the network in pieces, and workers share the
    batches of a loader. All draws are held in memory. `components` chooses among those of a converted network.

    >>> import ibnn
    >>> model, x = ibnn.convert(nn.Linear(4, 3), components=2, seed=0), torch.randn(5, 4)
    >>> draws(model, x, samples=6).shape
    torch.Size([2, 6, 5, 3])
    """
    check_options(samples, seed, batch_size)
    chosen = method.components if components is None else len(components)
    only: dict[str, Any] = {} if components is None else {"components": components}

    def outputs(piece: Inputs, first: int) -> Tensor:
        drawn = torch.cat(list(_each_draw(method, piece, batch_size, samples, seed, **only)))
        _refuse_not_finite(method, [_finite(method, drawn)], first + torch.arange(batch_length(piece)))
        return drawn.unflatten(0, (chosen, -1))  # type: ignore[no-any-return]

    return torch.cat(_by_pieces(method, x, outputs, batch_size, progress=False), 2)


def conformalize(
    model: Any, valid: Any, *, groups: Any = None, samples: int = 5, seed: int = 0, batch_size: int | None = 256
) -> HeldOut:
    """Stores how far held-out targets are from a model's answers, so that `p.set` and `p.interval` cover.

    The distances are returned, and stored as `model.held_out`. `ibnn.fit`, `ibnn.calibrate` and `ibnn.fit_novelty` do
    so themselves, from 50 held-out rows on. Call this after them for groups, another number of draws or fewer rows.
    Training, other noise or another temperature makes them void.

    Args:
        model: A trained model: a converted network, a baseline, or a plain network as `ibnn.baselines.Plain(net)`.
        valid: Held-out data as `fit` takes it: a pair (x, y), a Dataset or a DataLoader. Nothing may have been trained
            on them. Several heads have a dict of targets.
        groups: The group of every row, (N,), an integer: sites, devices, age bands. Rows of a DataLoader are in the
            order of its dataset.
        samples: Draws per component, as later answers will have.
        seed: Decides the draws.
        batch_size: Rows that go through the network at once; None never cuts a batch.

    >>> import ibnn
    >>> x, y = torch.randn(99, 4), torch.randint(3, (99,))
    >>> model = ibnn.convert(torch.nn.Linear(4, 3), components=2, seed=0)
    >>> _ = conformalize(model, (x, y), groups=y % 2)
    >>> model.predict(x[:5]).set(0.9, groups=y[:5] % 2).shape
    torch.Size([5, 3])
    """
    if not hasattr(model, "held_out"):
        remedy = "Convert it first, ibnn.convert(net), or wrap it: ibnn.baselines.Plain(net)."
        raise TypeError(complaint("model", "a converted network or a baseline", type(model).__name__, remedy))
    check_options(samples, seed, batch_size)
    source = as_source(valid, batch_size=batch_size, name="valid", shuffled=False, pack=model.likelihood.pack)
    if groups is not None:
        groups = check_groups(groups, source.rows)
        if not source.divisible:
            got = "a sampler or iterable of your own, which chooses the rows"
            raise ValueError(complaint("groups", "given for rows in a known order", got, "Pass a pair (x, y)."))
    batches: list[list[Conformal | None]] = []
    device, dtype = (getattr(next(model.parameters()), name) for name in ("device", "dtype"))
    with generators_restored(), explaining_cuts(batch_size, source.rows):
        for share in source.epoch(seed, 0):
            x = tree_map(lambda t: t.to(device), as_tensors(share.x, dtype))
            with model.evaluating(), torch.no_grad(), explaining_shapes(model.net, x, "valid"):
                model.likelihood.check(model.mean_output(x), share.y.to(device))
            p = predict(model, x, samples=samples, seed=seed, batch_size=batch_size, novelty=False)
            batches.append(model.likelihood.distances(p.to("cpu"), share.y.cpu()))
    model.held_out = HeldOut.of(model.likelihood, batches, groups)
    if model.held_out is None:
        got, remedy = type(model.likelihood).__name__, "Give the likelihood a `distances` method."
        raise ValueError(complaint("model", "of a likelihood that says how far targets are", got, remedy))
    return model.held_out.to(device)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------- checks


def check_options(samples: int, seed: int, batch_size: int | None) -> None:
    """Raises unless these options of `predict`, `draws`, `calibrate` and others are as they expect them."""
    check.integer("samples", samples, remedy="Pass samples=5.")
    check.seed(seed)
    if batch_size is not None:
        check.integer("batch_size", batch_size, remedy="Pass batch_size=256, or None to never cut a batch.")


def check_fallback(fallback: float, reference: Any) -> None:
    """Raises unless a model with this reference can mix answers with its base rates below a p-value."""
    check.share("fallback", fallback, remedy="Pass fallback=0.01, or leave it out.")
    if reference is None or not len(reference.base):
        remedy = "Call ibnn.fit_novelty(model, train, valid) with labels before you predict."
        raise ValueError(complaint("fallback", "None for a model without base rates", fallback, remedy))
    check_level("fallback", fallback, reference.ranked)


def refuse_nan(inputs: Inputs, first: int = 0, argument: str = "", *, infinity: bool = False) -> None:
    """Raises if a batch contains NaN or, with `infinity`, +inf. −inf is allowed: it masks.

    `first` is the number of the batch's first row, and `argument` what the message names instead of the input.
    """
    rows, args = batch_length(inputs), inputs if isinstance(inputs, tuple | list) else [inputs]
    named = inputs if isinstance(inputs, Mapping) else {f"input {i}": value for i, value in enumerate(args)}
    for name, tensor in ((name, tensor) for name, value in named.items() for tensor in tensors(value)):
        if not tensor.is_floating_point() or not tensor.dim() or len(tensor) != rows:
            continue
        bad = ~(tensor < math.inf) if infinity else tensor.isnan()
        if bad.any():
            row = first + int(bad.reshape(rows, -1).any(1).nonzero()[0])
            what = "NaN" if tensor.isnan().any() else "infinity"
            got = f"{what} in row {row}"
            raise ValueError(complaint(argument or name, f"free of {what}", got, "Clean or drop that row."))


def _finite(method: Any, found: Tensor) -> Tensor:
    """Whether outputs (J, b, …) of each row are finite, (b,); −∞ may mask a class, as long as another one is left."""
    masks = getattr(method.likelihood, "masks", False)
    good = found < math.inf if masks else found.isfinite()  # a NaN is not below infinity
    return good.movedim(1, 0).flatten(1).all(1)


def _finite_answers(method: Any, answer: Prediction) -> list[Tensor]:
    """Whether each part of answers, of every head, is finite, (b,) each."""
    heads = answer.heads.values() if isinstance(answer, JointPrediction) else [answer]
    parts = (getattr(head, name, None) for head in heads for name in ("probs", "mean", "aleatoric"))
    return [_finite(method, part[None]) for part in parts if isinstance(part, Tensor)]


def _refuse_not_finite(method: Any, checks: list[Tensor], numbers: Tensor) -> None:
    """Raises unless all rows pass all checks, (b,) each, and names the first one that does not by its number."""
    good = torch.stack(checks).all(0)
    if bool(good.all()):  # the host waits for this value alone
        return
    root = next(method.modules())
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.is_floating_point() and not bool((tensor < math.inf).all()):
            remedy = "Go back to a checkpoint from before that, or load the weights again."
            raise ValueError(complaint("model", "of finite weights", f"NaN or infinity in {name!r}", remedy))
    got = f"NaN or infinity for row {int(numbers.to(good.device)[~good][0])}"
    remedy = "Is that row finite, and scaled like the training data?"
    raise ValueError(complaint("x", "inputs that the network has finite outputs for", got, remedy))


# ------------------------------------------------------------------------------------------------------------- pieces


def _by_pieces(
    method: Any, x: Inputs, answer: Callable[[Inputs, int], T], batch_size: int | None, *, progress: bool
) -> list[T]:
    """Answers inputs, or the batches of a loader, in pieces; `answer` takes a piece and its first row's number."""
    like = next(method.parameters())
    dtype = next((p.dtype for p in method.parameters() if p.is_floating_point()), torch.float32)
    if isinstance(x, Dataset) and not isinstance(x, IterableDataset):
        x = DataLoader(x, batch_size=batch_size or len(x))  # type: ignore[arg-type]
    x = as_tensors(x, dtype)
    home, rank, world = next(tensors(x), torch.empty(0)).device, 0, 1
    batches: Iterable[Inputs] = [x]
    if not isinstance(x, Tensor | tuple | list | dict) and isinstance(x, Iterable):
        from ibnn.progress import track

        home = torch.device("cpu")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        batches = (as_tensors(split_inputs(b), dtype) for b in (track(x, "predict") if progress else x))
    answers: list[tuple[int, T]] = []  # with the number of their batch
    first = 0
    with method.evaluating(), torch.no_grad():
        for number, batch in enumerate(batches):
            rows = batch_length(batch)
            if number % world == rank:
                refuse_nan(batch, first=first)
                size = batch_size or rows
                for start in range(0, rows, size):
                    piece = batch if size >= rows else slice_rows(batch, slice(start, start + size), rows)
                    piece = tree_map(lambda t: t.to(like.device), piece)
                    try:
                        with explaining_cuts(batch_size, rows):
                            part = answer(piece, first + start)
                    except (RuntimeError, IndexError, ValueError) as error:
                        explain(error, getattr(method, "net", nn.Identity()), piece)
                        raise
                    answers.append((number, part if home == like.device else part.to(home)))
            first += rows
    if world > 1:
        everyone: list[Any] = [None] * world
        torch.distributed.all_gather_object(everyone, answers)
        answers = sorted((part for theirs in everyone for part in theirs), key=lambda part: part[0])
    if not answers:
        raise ValueError(complaint("x", "at least one batch", "an empty loader", "Pass a loader with data."))
    return [part for _, part in answers]


@contextmanager
def explaining_cuts(batch_size: int | None, rows: int) -> Iterator[None]:
    """Rewords an IndexError of the block, if rows were cut into batches, to say how not to."""
    try:
        yield
    except IndexError as error:
        if batch_size is None or batch_size >= rows:
            raise
        remedy = "If rows refer to each other, as the nodes of a graph do, pass batch_size=None."
        expected = "such that the network can take a part of the rows"
        raise ValueError(complaint("batch_size", expected, f"{batch_size} for {rows} rows", remedy)) from error


# ------------------------------------------------------------------------------------------------- one piece's answer


def _each_draw(
    method: Any, piece: Inputs, size: int | None, samples: int, seed: int, **options: Any
) -> Iterator[Tensor]:
    """Yields draws of every component, (J, b, …) at a time; raises unless they have the rows of the piece."""
    with closing(method.each_draw(piece, samples, seed, batch_size=size, **options)) as drawn:
        for part in drawn:
            check_rows(part[0], batch_length(piece))
            yield part


def _answer(
    method: Any, piece: Inputs, first: int, size: int | None, samples: int, seed: int, output: Tensor | None
) -> Prediction:
    """Returns the prediction for a piece that begins with row `first`; `output` is its only draw, if known."""
    numbers = first + torch.arange(batch_length(piece))
    per_sample: int = getattr(method, "per_sample", 1)  # draws of each component: an ensemble's member has several
    running = method.likelihood.running(method.components, samples * per_sample if method.random else 1)
    checks: list[Tensor] = []
    for drawn in _each_draw(method, piece, size, samples, seed) if output is None else [output[None]]:
        checks.append(_finite(method, drawn))
        running.add(drawn)
    answer: Prediction = running.result()
    _refuse_not_finite(method, checks + _finite_answers(method, answer), numbers)
    return answer


def _with_held_out(answer: Prediction, held_out: HeldOut) -> Prediction:
    """Adds the held-out distances of the output, or of each head, to an answer."""
    if not isinstance(answer, JointPrediction):
        return replace(answer, conformal=held_out.head(0))
    heads = enumerate(answer.heads.items())
    return replace(answer, heads={name: replace(head, conformal=held_out.head(h)) for h, (name, head) in heads})


def _settled_answer(
    method: Any, piece: Inputs, first: int, size: int | None, samples: int, seed: int, tolerance: float
) -> Prediction:
    """Takes one draw of every component after the other; inputs leave when their answers have settled."""
    rows = batch_length(piece)
    left = torch.arange(rows, device=next(tensors(piece)).device)
    rounds: list[Tensor] = []  # (K, 1, rows left, …) each
    settled: list[tuple[Tensor, CategoricalPrediction]] = []
    for number in range(samples):
        some = piece if len(left) == rows else slice_rows(piece, left, rows)
        drawn = torch.cat(list(_each_draw(method, some, size, 1, seed, first=number)))
        rounds.append(drawn.unflatten(0, (method.components, -1)))
        answer = method.likelihood.summarise(torch.cat(rounds, 1))
        _refuse_not_finite(method, [_finite(method, drawn), *_finite_answers(method, answer)], first + left)
        if not isinstance(answer, CategoricalPrediction):
            got, remedy = type(answer).__name__, "Leave tolerance out."
            raise TypeError(complaint("tolerance", "given for a classifier only", got, remedy))
        done = answer.settled(tolerance) | (number == samples - 1)
        used = torch.full_like(left, method.components * sum(part.shape[1] for part in rounds))
        settled.append((left[done], replace(answer, draws=used).rows(done.nonzero()[:, 0])))
        left, rounds = left[~done], [part[:, :, ~done] for part in rounds]
        if len(left) == 0:
            break
    answers = [answer for _, answer in settled]
    return type(answers[0]).cat(answers).rows(torch.cat([numbers for numbers, _ in settled]).argsort())
