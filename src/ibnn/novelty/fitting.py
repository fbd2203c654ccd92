"""`fit_novelty`: makes a reference of known inputs, and ranks held-out ones among them."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.batches import Source, as_source
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, tree_map
from ibnn.layers.batch_axis import places
from ibnn.layers.explain import explaining_shapes
from ibnn.novelty.measure import see
from ibnn.novelty.nodes import observable
from ibnn.novelty.reference import MEMORY, WIDEST, Reference, fit_layers, ranks_of, score
from ibnn.prediction import Conformal, HeldOut, Prediction, check_options, explaining_cuts, predict, refuse_nan
from ibnn.progress import Bar

ROWS = 5000  # inputs that statistics are made of at most, and held-out ones that are ranked
FEWEST = 50  # inputs of either kind, below which nothing can be said
PER_CLASS = 20  # inputs that classes must have on average to get means of their own
ANSWERED = 2000  # held-out inputs that are predicted, for sets and intervals


class TooFewRowsError(ValueError):
    """Too few inputs were given to fit novelty."""


class NotObservableError(ValueError):
    """A network has no layer whose inputs can be compared row by row."""


def fit_novelty(
    model: Any, train: Any, valid: Any = None, *, rows: int = ROWS, seed: int = 0, batch_size: int | None = 256
) -> Reference:
    """Fits the novelty detector: from then on predictions carry a conformal p-value for every input, `p.p_value`.

    The p-value is small for novel inputs and at least 1 / (n + 1), with n held-out inputs. All n are ranked, in G
    groups (2, or 4 without `valid`). Each group alone gives an exact p-value: among inputs exchangeable with the
    held-out ones, a share of at most α has one of at most α, on average over held-out sets. For `p.p_value`, which
    joins the groups, a share of at most 2α + 2(G − 1)/n is proven; measured, it is α (docs/novelty.md).

    The reference is returned, and stored as `model.reference`. `ibnn.fit` and `ibnn.calibrate` call this at their end
    if enough inputs are held out. Training further removes the reference.

    Args:
        model: A trained model: a converted network, a baseline, or a plain network as `ibnn.baselines.Plain(net)`.
        train: Inputs that statistics are made of: a pair (x, y), a Dataset or a DataLoader as `fit` takes it, or a
            tensor or dict of inputs without labels. Labels give classes means of their own if inputs are enough.
        valid: Held-out inputs, likewise, which are ranked. The weights must not have been trained on them. With labels,
            they also give sets and intervals that cover. By default the inputs of `train`, which then must be held out,
            serve for both: one half is ranked with statistics of the other.
        rows: How many inputs of either kind are used at most.
        seed: Decides which inputs are taken, and their groups.
        batch_size: Rows that go through the network at once. None never cuts a batch, for networks whose rows depend on
            each other, such as the nodes of a graph; rows whose target is ignored are then left out.

    >>> import ibnn
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(400, 4, generator=generator), torch.randint(3, (400,), generator=generator)
    >>> model = ibnn.convert(torch.nn.Linear(4, 3), components=2, seed=0)
    >>> _ = fit_novelty(model, (x[:200], y[:200]), (x[200:], y[200:]))
    >>> model.predict(torch.full((1, 4), 9.0)).novel(0.01)
    tensor([True])
    """
    if not hasattr(model, "reference"):
        remedy = "Convert it first, ibnn.convert(net), or wrap it: ibnn.baselines.Plain(net)."
        raise TypeError(complaint("model", "a converted network or a baseline", type(model).__name__, remedy))
    check.integer("rows", rows, least=FEWEST)
    check_options(1, seed, batch_size)
    return _fit(model, train, valid, rows, seed, batch_size)


def fit_novelty_if_possible(model: Any, train: Any, valid: Any = None, **options: Any) -> None:
    """Calls `fit_novelty` after training or calibration; leaves no reference if there are too few rows.

    A network without layers that can be observed gets a warning. Every other failure is raised. Options are `seed` and
    `batch_size`; `answers`, predictions of the held-out inputs in the order of their source, if they are known already;
    and else `samples`, the draws per component that they are made with here.
    """
    if not hasattr(model, "reference"):
        return
    try:
        _fit(model, train, valid, **options)
    except TooFewRowsError:
        return
    except NotObservableError as error:
        warnings.warn(f"The model is ready, but predictions will have no p-values. {error}", stacklevel=3)


def _fit(
    model: Any,
    train: Any,
    valid: Any,
    rows: int = ROWS,
    seed: int = 0,
    batch_size: int | None = 256,
    answers: Prediction | None = None,
    samples: int = 5,
) -> Reference:
    known = _read(model, train, "train", batch_size, 2 * FEWEST if valid is None else FEWEST)
    held = known if valid is None else _read(model, valid, "valid", batch_size, FEWEST)
    if valid is None and not (known.source.divisible or known.source.whole):
        got = "none, and training data that a sampler or iterable of your own chooses"
        raise ValueError(complaint("valid", "held-out inputs", got, "Pass valid."))
    with generators_restored(), Bar("novelty") as bar, explaining_cuts(batch_size, known.source.rows):
        collector = _Collector(model, rows, seed, batch_size, bar)
        samples = samples if known.labelled and held.labelled else 0
        if valid is None:
            everything = ranked = collector.collect(known, samples, answers)
            halves = torch.randperm(len(ranked.reduced[0]), generator=torch.Generator().manual_seed(seed)).chunk(2)
            first, second = (ranked.rows(half) for half in halves)
            folds = [(first, second), (second, first)]
        else:
            everything, ranked = collector.collect(known), collector.collect(held, samples, answers)
            folds = [(everything, ranked)]
        reference: Reference = collector.reference.to("cpu")
        labels = _classes(model.likelihood, [one for one, _ in folds], reference) if known.labelled else None
        fitted = [fit_layers(one.reduced, labels[fold] if labels else None) for fold, (one, _) in enumerate(folds)]
        reference.whiten, reference.centres = (torch.stack(parts) for parts in zip(*fitted, strict=True))
        _set_ranks(reference, [other for _, other in folds], seed)
        if ranked.distances:
            held_out = HeldOut.of(model.likelihood, ranked.distances)
            model.held_out = held_out and held_out.to(collector.device)
            if everything.targets is not None:
                reference.base = model.likelihood.base_rates(everything.targets).float()
    model.reference = reference.to(collector.device)
    return reference


class _Data(NamedTuple):
    source: Source
    labelled: bool
    name: str


def _read(model: Any, data: Any, name: str, batch_size: int | None, fewest: int) -> _Data:
    labelled = not (isinstance(data, Tensor | Mapping) or hasattr(data, "__array__"))
    if not labelled:
        x = as_tensors(data)
        data = (x, torch.zeros(batch_length(x)))
    if not isinstance(data, Source):
        data = as_source(data, batch_size=batch_size, name=name, pack=model.likelihood.pack)
    if isinstance(data.data, tuple):
        refuse_nan(data.data[0], argument=name)
    if data.rows < fewest:
        remedy = "Pass more: with n held-out inputs, p-values go down to 1 / (n + 1)."
        raise TooFewRowsError(complaint(name, f"at least {fewest} inputs", data.rows, remedy))
    return _Data(data, labelled, name)


class _Rows(NamedTuple):
    """What the network makes of some inputs."""

    reduced: list[Tensor]  # numbers that describe the layers' inputs, (N, P) each
    surprise: Tensor | None  # how unsure the answers are, (N,)
    targets: Tensor | None  # None if dense ones were padded batch by batch
    distances: list[list[Conformal | None]]  # of the first targets, batch by batch

    def rows(self, numbers: Tensor) -> "_Rows":
        """Returns some of the rows."""
        surprise, targets = (None if part is None else part[numbers] for part in (self.surprise, self.targets))
        return _Rows([part[numbers] for part in self.reduced], surprise, targets, [])


class _Collector:
    """Passes data through a model and keeps what describes the inputs of its layers."""

    def __init__(self, model: Any, most: int, seed: int, batch_size: int | None, bar: Bar) -> None:
        self.model, self.device = model, next(model.net.parameters()).device
        self.most, self.seed, self.batch_size, self.bar = most, seed, batch_size, bar
        self.axes: dict[str, int] = {}  # batch axes of the layers' inputs; known, like the reference, after one batch
        self.reference: Any = None

    def collect(self, data: _Data, samples: int = 0, answers: Prediction | None = None) -> _Rows:
        """Returns the rows of some data; with `samples`, also distances of the first `ANSWERED` targets or more."""
        source, likelihood, net = data.source, self.model.likelihood, self.model.net
        if source.divisible and source.rows > self.most:
            source = source.split(self.most, self.seed)[1]
        if samples and answers is None and source.divisible and source.rows > ANSWERED:
            source = replace(source, shuffled=True)  # they may be sorted
        reduced, surprises, targets, distances = [], list[Tensor](), list[Tensor](), list[list[Conformal | None]]()
        dtype, first = next(net.parameters()).dtype, 0
        for share in source.epoch(self.seed, 0):
            refuse_nan(share.x, first, f"{data.name} (rows in random order)")
            x, y = tree_map(lambda t: t.to(self.device), as_tensors(share.x, dtype)), share.y
            if self.reference is None:
                self.axes = _batch_axes(net, x)
            layers = {name: net.get_submodule(name) for name in self.axes}
            with explaining_shapes(net, x, data.name):
                seen = see(self.model, x, layers, self.axes)
            if data.labelled:
                likelihood.check(seen.output, y.to(self.device))
            if self.reference is None:
                self._begin(seen.summaries)
            kept = torch.arange(len(y))
            if self.batch_size is None and data.labelled:  # rows of a whole graph may have no target
                kept = kept[[bool(likelihood.count(y[n : n + 1])) for n in range(len(y))]]
            summaries = [seen.summaries[name] for name in self.axes]
            reduced.append([self.reference.reduce(i, part).cpu()[kept] for i, part in enumerate(summaries)])
            surprises += [] if seen.surprise is None else [seen.surprise.cpu()[kept]]
            targets.append(y.cpu()[kept])
            if samples and answers is not None:
                distances.append(likelihood.distances(answers.rows(first + kept), targets[-1]))
            elif samples and first < ANSWERED:
                options: Any = {"batch_size": self.batch_size, "novelty": False, "progress": False}
                p = predict(self.model, x, samples=samples, **options).to("cpu").rows(kept)
                distances.append(likelihood.distances(p, targets[-1]))
            first += len(y)
            self.bar.advance()
            if first >= self.most:
                break
        joined = [torch.cat(parts) for parts in zip(*reduced, strict=True)]
        if self.batch_size is None and len(joined[0]) < FEWEST:
            remedy = "Targets that are ignored do not count."
            raise TooFewRowsError(complaint(data.name, f"at least {FEWEST} inputs", len(joined[0]), remedy))
        if not all(part.isfinite().all() for part in joined):
            got = "NaN or infinity inside of the network"
            raise ValueError(complaint(data.name, "inputs that the network can take", got, "Check their scale."))
        alike = len({target.shape[1:] for target in targets}) == 1
        surprise = torch.cat(surprises) if surprises else None
        return _Rows(joined, surprise, torch.cat(targets) if alike else None, distances)

    def _begin(self, summaries: Mapping[str, Tensor]) -> None:
        """Makes a reference with widths, shifts and scales, by the summaries of the first batch."""
        self.axes = {name: axis for name, axis in self.axes.items() if name in summaries}
        if not self.axes:
            remedy = "Register its layers (ibnn.register_layer), and put the batch first in their inputs."
            raise NotObservableError(complaint("model", "a network whose layers see the batch", "none", remedy))
        seen, numbers = [summaries[name].cpu().double() for name in self.axes], list(observable(self.model.net))
        most = min(WIDEST, int((MEMORY / 4 / len(seen)) ** 0.5))
        stds = [part.std(0, correction=0) for part in seen]
        floors = [0.01 * std.square().mean().sqrt().clamp_min(1e-12) for std in stds]  # constant nodes may wake up
        self.reference = Reference(
            layers=torch.tensor([numbers.index(name) for name in self.axes]),
            axes=torch.tensor(list(self.axes.values())),
            widths=torch.tensor([[len(std), min(len(std), most)] for std in stds]),
            shift=torch.cat([part.mean(0) for part in seen]).float(),
            scale=torch.cat([1 / std.maximum(floor) for std, floor in zip(stds, floors, strict=True)]).float(),
        ).to(self.device)


def _batch_axes(net: nn.Module, x: Inputs) -> dict[str, int]:
    """Returns the batch axis in the inputs of each layer that can be observed; layers without one are left out."""
    axes: dict[str, int] = {}
    for prefix, member in net.named_children() if isinstance(net, nn.ModuleList) else [("", net)]:
        found = places(member, observable(member), call_arguments(x), strict=False)
        axes |= {f"{prefix}.{name}".strip("."): place.axis for name, place in found.items() if not place.copied}
    return axes


def _classes(likelihood: Any, known: list[_Rows], reference: Reference) -> list[Tensor] | None:
    """Returns the labels of each fold, numbered without gaps, if classes can have means of their own."""
    labels: list[Any] = [None if rows.targets is None else likelihood.classes(rows.targets) for rows in known]
    if any(part is None for part in labels):
        return None
    classes, numbers = torch.cat(labels).unique(return_inverse=True)
    by_fold = list(numbers.split([len(part) for part in labels]))
    counts = torch.stack([torch.bincount(part, minlength=len(classes)) for part in by_fold])
    enough = len(classes) > 1 and int(counts.min()) > 1 and int(counts.sum(1).min()) >= PER_CLASS * len(classes)
    return by_fold if enough and 4 * len(classes) * int(reference.widths[:, 1].sum()) <= MEMORY else None


def _set_ranks(reference: Reference, held: list[_Rows], seed: int) -> None:
    """Ranks the held-out inputs of each fold, in two groups: each is scored by the ranks of the other."""
    ranks, scores = [], []
    size = min(len(rows.reduced[0]) for rows in held) // 2
    for fold, rows in enumerate(held):
        distances, surprise = reference.distances(fold, rows.reduced), rows.surprise
        order = torch.randperm(distances.shape[1], generator=torch.Generator().manual_seed(seed + fold))
        groups = [(distances[:, i], None if surprise is None else surprise[i]) for i in order[: 2 * size].split(size)]
        for own, other in (groups, groups[::-1]):
            ranks.append(ranks_of(*other))
            scores.append(score(ranks[-1], *own).sort().values)
    reference.ranks, reference.scores = torch.stack(ranks), torch.stack(scores)
