"""FIT NOVELTY: collects what known inputs look like to a network, and ranks held-out ones among them."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ibnn.batches import Source, as_source
from ibnn.errors import complaint, nearest
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, slice_rows, tree_map
from ibnn.layers.observe import explaining_shapes, grown_axes
from ibnn.layers.registry import layer_type
from ibnn.likelihood import Likelihood
from ibnn.normal import check_seed, generators_restored
from ibnn.novelty.nodes import observable
from ibnn.novelty.observer import Observer
from ibnn.novelty.ranks import log_tail
from ibnn.novelty.reference import MEMORY, WIDEST, Reference, fit_layers
from ibnn.prediction import Prediction, fallback_weight, predict, refuse_nan
from ibnn.progress import Bar

ROWS = 5000  # inputs that statistics are made of at most, and held-out ones that are ranked
FEWEST = 50  # inputs of either kind, below which nothing can be said
PER_CLASS = 20  # inputs that classes must have on average to get means of their own
ANSWERED = 2000  # held-out inputs that are predicted, to choose the fallback
COST = 0.005  # share of the held-out NLL that the fallback may cost; in nats where targets have densities
FALLBACKS = (0.05, 0.02, 0.01, 0.005, 0.002)  # p-values below which answers may fall back
BLOCKS = 10  # parts of the held-out data whose costs tell a standard error
TOUCHED = 10  # held-out answers that a fallback must have changed for its cost to be known


def fit_novelty(
    model: Observer,
    train: Any,
    valid: Any = None,
    *,
    exclude: Sequence[str] = (),
    rows: int = ROWS,
    fallback: float | Literal["auto"] = "auto",
    seed: int = 0,
    batch_size: int = 256,
) -> Reference:
    """Lets a trained model tell novel inputs: from now on its predictions have p-values, `p.novelty`.

    Among inputs exchangeable with the held-out ones, a share of at most α has a p-value of at most α. `ibnn.fit` and
    `ibnn.calibrate` do this at their end; training the model further removes it.

    Args:
        model: A converted network or a baseline, trained.
        train: Inputs that statistics are made of: a pair (x, y), a Dataset or a DataLoader as `fit` takes it, or a
            tensor or dict of inputs without labels. Labels give classes means of their own if inputs are enough.
        valid: Held-out inputs, likewise, which are ranked; the weights must not have been trained on them. Its labels
            choose the fallback. By default a random half of `train` is ranked, and used for nothing else.
        exclude: Names of layers that are not observed.
        rows: How many inputs of either kind are used at most.
        fallback: p-value below which answers fall back to the base rates, fully as it goes to 0; 0 for never. "auto"
            takes the largest of some that surely cost at most 0.5 % of the held-out NLL, and 0 without labels.
        seed: Decides which inputs are taken, and which of the held-out ones are ranked layer by layer.
        batch_size: Rows that go through the network at once.

    Returns:
        The reference, which is now part of the model and its state dict.

    >>> import ibnn
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(400, 4, generator=generator), torch.randint(3, (400,), generator=generator)
    >>> model = ibnn.convert(torch.nn.Linear(4, 3), components=2, seed=0)
    >>> _ = fit_novelty(model, (x[:200], y[:200]), (x[200:], y[200:]))
    >>> model.predict(torch.full((1, 4), 9.0)).novel(0.01)
    tensor([True])
    """
    _check(model, rows, fallback, batch_size, seed)
    known, held = _sources(train, valid, rows, seed, batch_size, model)
    fitting = _Fitting(model, exclude, seed)
    with generators_restored(), Bar("novelty") as bar:
        statistics = fitting.statistics(known, bar)
        reference = fitting.ranked(statistics, held, bar)
        if known.labelled and held.labelled:
            fitting.settle(reference, held, known, fallback)
    model.reference = reference
    return reference


def fit_novelty_if_possible(model: Any, train: Any, valid: Any = None, **options: Any) -> None:
    """Does the same at the end of training or calibration, unless data are too few; a failure is a warning there."""
    if not isinstance(model, Observer):
        return
    sources = [_data(data, "train", 256, model).source for data in (train, valid) if data is not None]
    if min(source.rows for source in sources) < FEWEST * (3 - len(sources)):
        return
    try:
        fit_novelty(model, train, valid, **options)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # what was trained is not lost for it
        warnings.warn(f"The model is ready, but cannot tell novel inputs. {error}", stacklevel=3)


@dataclass(frozen=True)
class _Data:
    """Inputs, and labels if there are any."""

    source: Source
    labelled: bool
    name: str
    pack: Any

    def batches(self, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Yields batches of inputs and targets in random order."""
        first = 0
        for share in self.source.epoch(seed, 0):
            refuse_nan(share.x, first, self.name)
            first += len(share.y)
            yield share.x, share.y


def _check(model: Any, rows: int, fallback: Any, batch_size: int, seed: int) -> None:
    if not isinstance(model, Observer):
        remedy = "Convert it first, ibnn.convert(net), or wrap it: ibnn.baselines.Plain(net)."
        raise TypeError(complaint("model", "a converted network or a baseline", type(model).__name__, remedy))
    for name, value, least in (("rows", rows, FEWEST), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            expected = f"an integer of at least {least}"
            raise ValueError(complaint(name, expected, repr(value), f"Leave {name} out."))
    if fallback != "auto" and not (isinstance(fallback, float | int) and 0 <= fallback < 1):
        raise ValueError(complaint("fallback", '"auto" or in [0, 1)', repr(fallback), "Pass 0.01, or 0 for none."))
    check_seed(seed)


def _sources(train: Any, valid: Any, rows: int, seed: int, batch_size: int, model: Observer) -> tuple[_Data, _Data]:
    """Returns the inputs that are known, and those that are ranked, at most so many of each."""
    known = _data(train, "train", batch_size, model)
    if valid is not None:
        held = _data(valid, "valid", batch_size, model)
    elif not known.source.divisible:
        got, remedy = "none, and training data that a sampler or iterable of your own chooses", "Pass valid."
        raise ValueError(complaint("valid", "held-out inputs", got, remedy))
    else:
        parts = known.source.split(known.source.rows // 2, seed)
        known, held = (_Data(part, known.labelled, "train", known.pack) for part in parts)
    few = min((known, held), key=lambda data: data.source.rows)
    if few.source.rows < FEWEST:
        expected = f"at least {FEWEST if valid is not None else 2 * FEWEST} inputs"
        remedy = "Pass more: with n held-out inputs, half of which are ranked last, p-values go down to 2 / (n + 2)."
        raise ValueError(complaint(few.name, expected, few.source.rows * (1 if valid is not None else 2), remedy))
    return _at_most(known, rows, seed), _at_most(held, rows, seed)


def _data(data: Any, name: str, batch_size: int, model: Observer) -> _Data:
    pack, labelled = model.likelihood.pack, not (isinstance(data, Tensor | Mapping) or hasattr(data, "__array__"))
    if not labelled:
        x = as_tensors(data)
        data, pack = (x, torch.zeros(batch_length(x))), None  # type: ignore[assignment]
    source = data if isinstance(data, Source) else as_source(data, batch_size=batch_size, name=name, pack=pack)
    return _Data(source, labelled, name, pack)


def _at_most(data: _Data, rows: int, seed: int) -> _Data:
    """Returns a random part of the data with so many rows, if there are more."""
    if data.source.rows <= rows or not data.source.divisible:
        return data
    return _Data(data.source.split(rows, seed)[1], data.labelled, data.name, data.pack)


class _Fitting:
    """Passes data through a model and makes a reference of what its layers see."""

    def __init__(self, model: Observer, exclude: Sequence[str], seed: int) -> None:
        self.model, self.seed = model, seed
        self.device = next(model.net.parameters()).device
        self.all_layers = observable(model.net)
        unknown = [name for name in exclude if name not in self.all_layers]
        if unknown:
            remedy = f"Did you mean {nearest(unknown[0], self.all_layers)!r}?"
            raise ValueError(complaint("exclude", "names of layers that are observed", unknown, remedy))
        self.layers = {name: layer for name, layer in self.all_layers.items() if name not in exclude}
        if not self.layers:
            remedy = "Exclude fewer, or register the layers: ibnn.register_layer."
            raise ValueError(complaint("model", "a network with layers that can be observed", "none", remedy))
        self.axes = dict.fromkeys(self.layers, 0)

    def _inputs(self, x: Inputs) -> Inputs:
        like = next(self.model.net.parameters()).dtype
        return tree_map(lambda t: t.to(self.device), as_tensors(x, like))

    def _seen(self, x: Inputs, name: str) -> Any:
        with explaining_shapes(self.model.net, x, name):
            return self.model.see(x, self.layers, self.axes)

    def _begin(self, x: Inputs, name: str) -> Reference:
        """Finds out which layers see the batch, and where; returns a reference with widths, shifts and scales."""
        kinds = {name: layer_type(layer) for name, layer in self.layers.items()}
        own = {n: kind.batch_axis(self.layers[n]) for n, kind in kinds.items() if kind and kind.batch_axis}
        self.axes |= own
        if isinstance(self.model.net, torch.nn.ModuleList):  # an ensemble calls each
            found: dict[str, int] = {}
        else:
            found = grown_axes(self.model.net, self.layers, own, call_arguments(x))
        self.axes |= {n: axis for n, axis in found.items() if n in self.axes}
        summaries = self._seen(x, name).summaries
        self.layers = {n: layer for n, layer in self.layers.items() if n in summaries}
        numbers = [number for number, n in enumerate(self.all_layers) if n in self.layers]
        raw = [summaries[n].shape[1] for n in self.layers]
        most = min(WIDEST, int((MEMORY / 4 / len(raw)) ** 0.5))
        shifts = torch.cat([summaries[n].double().mean(0) for n in self.layers])
        stds = [summaries[n].double().std(0, correction=0) for n in self.layers]
        floors = [0.01 * std.square().mean().sqrt().clamp_min(1e-12) for std in stds]  # constant nodes may wake up
        scale = torch.cat([1 / std.maximum(floor) for std, floor in zip(stds, floors, strict=True)])
        return Reference(
            layers=torch.tensor(numbers),
            axes=torch.tensor([self.axes[n] for n in self.layers]),
            widths=torch.tensor([[width, min(width, most)] for width in raw]),
            shift=shifts.float(),
            scale=scale.float(),
        ).to(self.device)

    def statistics(self, known: _Data, bar: Bar) -> Reference:
        """Returns a reference without ranks."""
        reference, kept, labels = None, [], []
        for x, y in known.batches(self.seed):
            x = self._inputs(x)
            reference = reference or self._begin(x, known.name)
            summaries = self._seen(x, known.name).summaries
            reduced = [reference.reduce(i, summaries[name]) for i, name in enumerate(self.layers)]
            kept.append([part.float().cpu() for part in reduced])
            labels.append(y)
            bar.advance()
        assert reference is not None
        joined = [torch.cat(parts) for parts in zip(*kept, strict=True)]
        if not all(part.isfinite().all() for part in joined):
            got = "NaN or infinity inside of the network"
            raise ValueError(complaint(known.name, "inputs that the network can take", got, "Check their scale."))
        classes = self._classes(torch.cat(labels), sum(part.shape[1] for part in joined)) if known.labelled else None
        reference.whiten, reference.centres = (part.to(self.device) for part in fit_layers(joined, classes))
        return reference

    def _classes(self, labels: Tensor, width: int) -> Tensor | None:
        """Returns labels numbered without gaps, if classes can have means of their own."""
        of_rows = self.model.likelihood.classes(labels)
        if of_rows is None:
            return None
        found, numbers = of_rows.cpu().unique(return_inverse=True)
        enough = len(numbers) >= PER_CLASS * len(found) and int(torch.bincount(numbers).min()) > 1
        return numbers if len(found) > 1 and enough and 4 * len(found) * width <= MEMORY else None

    def ranked(self, reference: Reference, held: _Data, bar: Bar) -> Reference:
        """Adds the ranks of held-out inputs: of a random half layer by layer, of the other half the scores."""
        distances, surprises = [], []
        for x, _ in held.batches(self.seed):
            seen = self._seen(self._inputs(x), held.name)
            distances.append(reference.distances([seen.summaries[name] for name in self.layers]))
            surprises.append(seen.surprise)
            bar.advance()
        rows = torch.cat(distances, 1)
        surprise = None if surprises[0] is None else torch.cat(surprises).to(rows)
        order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(self.seed)).to(rows.device)
        first, last = order[: len(order) // 2], order[len(order) // 2 :]
        reference.rank(rows[:, first], None if surprise is None else surprise[first])
        scores = reference.score(rows, surprise)
        reference.scores = scores[last].sort().values
        log_p = log_tail(reference.scores, scores)
        above = len(last) - torch.searchsorted(reference.scores, scores[last])
        log_p[last] = (above / len(last)).log()  # among the others
        self.log_p = log_p.cpu()
        return reference

    def settle(self, reference: Reference, held: _Data, known: _Data, fallback: float | str) -> None:
        """Sets base rates, the p-value below which answers fall back to them, and how far held-out targets were off."""
        likelihood, chosen = self.model.likelihood, torch.arange(len(self.log_p))[:ANSWERED]
        answer, target = self._answered(held, chosen)
        targets = torch.cat([y for _, y in known.batches(self.seed)])
        reference.base = likelihood.base_rates(targets).float().to(self.device)
        if len(reference.base):  # else a likelihood that knows none
            log_p, base = self.log_p[chosen], reference.base.cpu()
            chosen_by_cost = fallback == "auto"
            level = _affordable(likelihood, answer, target, log_p, base) if chosen_by_cost else float(fallback)
            reference.fallback = torch.tensor(level, device=self.device)
            answer = likelihood.fall_back(answer, fallback_weight(log_p, level), base) if level else answer
        errors, classes = likelihood.nonconformity(answer, target), likelihood.classes(target)
        if errors is not None:
            reference.errors = errors.float().to(self.device)
            reference.classes = (classes if classes is not None else torch.zeros(0)).to(self.device)

    def _answered(self, held: _Data, chosen: Tensor) -> tuple[Prediction, Tensor]:
        """Returns predictions without novelty for the first held-out inputs, and their targets, on the CPU."""
        answers: list[Prediction] = []
        targets: list[Tensor] = []
        for x, y in held.batches(self.seed):
            rows = min(batch_length(x), len(chosen) - sum(map(len, targets)))
            part = slice_rows(self._inputs(x), slice(0, rows), batch_length(x))
            answers.append(predict(cast(Any, self.model), part, novelty=False, progress=False).to("cpu"))
            targets.append(y[:rows].cpu())
            if sum(map(len, targets)) == len(chosen):
                break
        return type(answers[0]).cat(answers), torch.cat(targets)


def _affordable(likelihood: Likelihood, answer: Prediction, target: Tensor, log_p: Tensor, base: Tensor) -> float:
    """Returns the largest p-value to fall back from whose cost on held-out data is, but for a standard error, small."""
    blocks = torch.arange(len(target)).tensor_split(BLOCKS)

    def losses(given: Prediction) -> Tensor:
        return torch.tensor([likelihood.score(given.rows(rows), target[rows])["nll"] for rows in blocks])

    plain = losses(answer)
    most = COST * (float(plain.mean().abs()) if likelihood.discrete else 1.0)
    for level in FALLBACKS:
        if level * len(log_p) >= TOUCHED:
            more = losses(likelihood.fall_back(answer, fallback_weight(log_p, level), base)) - plain
            if float(more.mean() + more.std() / BLOCKS**0.5) <= most:
                return level
    return FALLBACKS[-1] / 2  # it touches one known input in a thousand
