"""`fit_novelty`: makes a reference of known inputs, and ranks held-out ones among them."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.batches import Source, as_source
from ibnn.errors import complaint, did_you_mean
from ibnn.generators import generators_restored
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, tree_map
from ibnn.layers.batch_axis import places
from ibnn.layers.explain import explaining_shapes
from ibnn.layers.registry import layer_type
from ibnn.novelty.measure import Seen, see
from ibnn.novelty.nodes import observable
from ibnn.novelty.reference import MEMORY, WIDEST, Reference, fit_layers, ranks_of, score
from ibnn.prediction import Conformal, HeldOut, Prediction, explaining_cuts, predict, refuse_nan
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
    model: Any,
    train: Any,
    valid: Any = None,
    *,
    exclude: Sequence[str] = (),
    rows: int = ROWS,
    seed: int = 0,
    batch_size: int | None = 256,
) -> Reference:
    """Fits the novelty detector: from then on predictions carry a conformal p-value for every input, `p.p_value`.

    The p-value is small for novel inputs and at least 1 / (n + 1), with n held-out inputs. All n are ranked, in G
    groups (2, or 4 without `valid`). Each group alone gives an exact p-value: among inputs exchangeable with the
    held-out ones, a share of at most α has one of at most α, on average over held-out sets. For `p.p_value`, which
    joins the groups, a share of at most 2α + 2(G − 1)/n is proven; measured, it is α (docs/novelty.md).

    `ibnn.fit` and `ibnn.calibrate` call this at their end if enough inputs are held out. Training further removes the
    reference.

    Args:
        model: A trained model: a converted network, a baseline, or a plain network as `ibnn.baselines.Plain(net)`.
        train: Inputs that statistics are made of: a pair (x, y), a Dataset or a DataLoader as `fit` takes it, or a
            tensor or dict of inputs without labels. Labels give classes means of their own if inputs are enough.
        valid: Held-out inputs, likewise, which are ranked. The weights must not have been trained on them. With labels,
            they also give sets and intervals that cover. By default the inputs of `train`, which then must be held out,
            serve for both: one half is ranked with statistics of the other.
        exclude: Names of layers that are not observed.
        rows: How many inputs of either kind are used at most.
        seed: Decides which inputs are taken, and their groups.
        batch_size: Rows that go through the network at once. None never cuts a batch, for networks whose rows depend on
            each other, such as the nodes of a graph; rows whose target is ignored are then left out.

    Returns:
        The reference, which is also stored as `model.reference`.

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
    if batch_size is not None:
        check.integer("batch_size", batch_size)
    check.seed(seed)
    return _fit(model, train, valid, exclude=exclude, rows=rows, seed=seed, batch_size=batch_size)


def fit_novelty_if_possible(
    model: Any,
    train: Any,
    valid: Any = None,
    *,
    seed: int = 0,
    batch_size: int | None = 256,
    answers: Prediction | None = None,
    samples: int = 5,
) -> None:
    """Calls `fit_novelty` after training or calibration; leaves no reference if there are too few rows.

    A network without layers that can be observed gets a warning. Every other failure is raised. `answers` are
    predictions of the held-out inputs, in the order of their source, if they are known already; else they are made here
    with `samples` draws per component.
    """
    if not hasattr(model, "reference"):
        return
    try:
        _fit(model, train, valid, seed=seed, batch_size=batch_size, answers=answers, samples=samples)
    except TooFewRowsError:
        return
    except NotObservableError as error:
        warnings.warn(f"The model is ready, but predictions will have no p-values. {error}", stacklevel=3)


def _fit(
    model: Any,
    train: Any,
    valid: Any,
    *,
    exclude: Sequence[str] = (),
    rows: int = ROWS,
    seed: int = 0,
    batch_size: int | None = 256,
    answers: Prediction | None = None,
    samples: int = 5,
) -> Reference:
    known = _data(train, "train", batch_size, model)
    held = None if valid is None else _data(valid, "valid", batch_size, model)
    for data, fewest in ((known, FEWEST if held else 2 * FEWEST), (held, FEWEST)):
        if data is not None and data.source.rows < fewest:
            remedy = "Pass more: with n held-out inputs, p-values go down to 1 / (n + 1)."
            raise TooFewRowsError(complaint(data.name, f"at least {fewest} inputs", data.source.rows, remedy))
    if held is None and not (known.source.divisible or known.source.whole):
        got, remedy = "none, and training data that a sampler or iterable of your own chooses", "Pass valid."
        raise ValueError(complaint("valid", "held-out inputs", got, remedy))
    collector = _Collector(model, exclude, batch_size)
    with generators_restored(), Bar("novelty") as bar, explaining_cuts(batch_size, known.source.rows):
        if held is None:
            known = _at_most(known, rows, seed)
            everything = collector.collect(known, seed, bar, samples if known.labelled else 0, answers)
            half = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed)).chunk(2)
            first, second = (everything.rows(part) for part in half)
            folds, answered = [(first, second), (second, first)], everything
        else:
            known, held = _at_most(known, rows, seed), _at_most(held, rows, seed)
            everything = collector.collect(known, seed, bar)
            answered = collector.collect(held, seed, bar, samples if known.labelled and held.labelled else 0, answers)
            folds = [(everything, answered)]
        reference = collector.reference
        assert reference is not None
        _set_statistics(reference, model.likelihood, folds, labelled=known.labelled)
        _set_ranks(reference, [ranked for _, ranked in folds], seed)
        if answered.distances:
            held_out = HeldOut.of(model.likelihood, answered.distances)
            model.held_out = held_out and held_out.to(collector.device)
            if _alike(everything.targets):  # dense targets may be padded batch by batch
                reference.base = model.likelihood.base_rates(torch.cat(everything.targets)).float()
    model.reference = reference.to(collector.device)
    return model.reference  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class _Data:
    """Inputs, and labels if there are any."""

    source: Source
    labelled: bool
    name: str
    most: int  # rows that are taken

    def batches(self, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Yields batches of inputs and targets, in random order unless the source has one."""
        rows = 0
        for share in self.source.epoch(seed, 0):
            refuse_nan(share.x, rows, f"{self.name} (rows in random order)")
            yield share.x, share.y
            rows += len(share.y)
            if rows >= self.most:
                return


def _data(data: Any, name: str, batch_size: int | None, model: Any) -> _Data:
    pack, labelled = model.likelihood.pack, not (isinstance(data, Tensor | Mapping) or hasattr(data, "__array__"))
    if not labelled:
        x = as_tensors(data)
        data, pack = (x, torch.zeros(batch_length(x))), None
    source = data if isinstance(data, Source) else as_source(data, batch_size=batch_size, name=name, pack=pack)
    if isinstance(source.data, tuple):
        refuse_nan(source.data[0], argument=name)
    return _Data(source, labelled, name, source.rows)


def _at_most(data: _Data, rows: int, seed: int) -> _Data:
    """Returns a random part of the data with this many rows, if there are more; the first ones of an iterable."""
    if data.source.rows <= rows:
        return data
    source = data.source.split(rows, seed)[1] if data.source.divisible else data.source
    return replace(data, source=source, most=rows)


@dataclass(frozen=True)
class _Rows:
    """What the network makes of some inputs."""

    reduced: list[Tensor]  # numbers that describe the layers' inputs, (N, P) each
    surprise: Tensor | None  # how unsure the answers are, (N,)
    targets: list[Tensor]  # batch by batch: dense ones may differ in shape
    distances: list[list[Conformal | None]] = field(default_factory=list)  # of the first targets, batch by batch

    def __len__(self) -> int:
        return len(self.reduced[0])

    def rows(self, numbers: Tensor) -> "_Rows":
        """Returns some of the rows; targets only if they can be joined."""
        surprise = None if self.surprise is None else self.surprise[numbers]
        targets = [torch.cat(self.targets)[numbers]] if _alike(self.targets) else []
        return _Rows([part[numbers] for part in self.reduced], surprise, targets)


class _Collector:
    """Passes data through a model and keeps what describes the inputs of its layers."""

    def __init__(self, model: Any, exclude: Sequence[str], batch_size: int | None) -> None:
        self.model, self.batch_size, self.device = model, batch_size, next(model.net.parameters()).device
        self.all_layers = observable(model.net)
        for name in exclude:
            if name not in self.all_layers:
                remedy = did_you_mean(name, self.all_layers, otherwise=f"Known: {', '.join(self.all_layers)}.")
                raise ValueError(complaint("exclude", "names of layers that are observed", repr(name), remedy))
        self.layers = {name: layer for name, layer in self.all_layers.items() if name not in exclude}
        if not self.layers:
            remedy = "Exclude fewer, or register the layers: ibnn.register_layer."
            raise NotObservableError(complaint("model", "a network with layers that can be observed", "none", remedy))
        self.axes = dict.fromkeys(self.layers, 0)
        self.reference: Reference | None = None

    def collect(self, data: _Data, seed: int, bar: Bar, samples: int = 0, answers: Prediction | None = None) -> _Rows:
        """Returns the rows of some data; with `samples`, also distances of the first `ANSWERED` targets or more."""
        if samples and answers is None and data.source.divisible and data.source.rows > ANSWERED:
            data = replace(data, source=replace(data.source, shuffled=True))  # they may be sorted
        reduced, surprises, targets, distances = [], list[Tensor](), list[Tensor](), list[list[Conformal | None]]()
        dtype, first = next(self.model.net.parameters()).dtype, 0
        for x, y in data.batches(seed):
            x = tree_map(lambda t: t.to(self.device), as_tensors(x, dtype))
            self.reference = self.reference or self._begin(x, y, data)
            seen, kept = self._seen(x, y, data), self._kept(y, data)
            summaries = [seen.summaries[name] for name in self.layers]
            reduced.append([self.reference.reduce(i, part).cpu()[kept] for i, part in enumerate(summaries)])
            surprises += [] if seen.surprise is None else [seen.surprise.cpu()[kept]]
            target, p = y.cpu()[kept], None
            if samples and answers is not None:
                p = answers.rows(first + kept)
            elif samples and first < ANSWERED:
                options: Any = {"batch_size": self.batch_size, "novelty": False, "progress": False}
                p = predict(self.model, x, samples=samples, **options).to("cpu").rows(kept)
            if p is not None:
                distances.append(self.model.likelihood.distances(p, target))
            targets.append(target)
            first += len(y)
            bar.advance()
        joined = [torch.cat(parts) for parts in zip(*reduced, strict=True)]
        if self.batch_size is None and len(joined[0]) < FEWEST:
            remedy = "Targets that are ignored do not count."
            raise TooFewRowsError(complaint(data.name, f"at least {FEWEST} inputs", len(joined[0]), remedy))
        if not all(part.isfinite().all() for part in joined):
            got = "NaN or infinity inside of the network"
            raise ValueError(complaint(data.name, "inputs that the network can take", got, "Check their scale."))
        return _Rows(joined, torch.cat(surprises) if surprises else None, targets, distances)

    def _kept(self, y: Tensor, data: _Data) -> Tensor:
        """Returns the numbers of a batch's rows that count: all, but for rows of a whole graph without a target."""
        if self.batch_size is not None or not data.labelled:
            return torch.arange(len(y))
        return torch.tensor([number for number in range(len(y)) if self.model.likelihood.count(y[number : number + 1])])

    def _seen(self, x: Inputs, y: Tensor, data: _Data) -> Seen:
        with explaining_shapes(self.model.net, x, data.name):
            seen = see(self.model, x, self.layers, self.axes)
        if data.labelled:
            self.model.likelihood.check(seen.output, y.to(self.device))
        return seen

    def _begin(self, x: Inputs, y: Tensor, data: _Data) -> Reference:
        """Keeps the layers whose inputs hold the batch; returns a reference with widths, shifts and scales."""
        kinds = {name: layer_type(layer) for name, layer in self.layers.items()}
        known = {n: kind.batch_axis(self.layers[n]) for n, kind in kinds.items() if kind and kind.batch_axis}
        self.axes |= known
        net, call = self.model.net, call_arguments(x)
        members = {f"{i}.": member for i, member in enumerate(net)} if isinstance(net, nn.ModuleList) else {"": net}
        for prefix, member in members.items():
            parts = {n.removeprefix(prefix): layer for n, layer in self.layers.items() if n.startswith(prefix)}
            inner = {n.removeprefix(prefix): axis for n, axis in known.items() if n.startswith(prefix)}
            found = places(member, parts, inner, call, strict=False)
            seeing = {n: place.axis for n, place in found.items() if not place.copied}
            self.axes |= {prefix + n: axis for n, axis in seeing.items()}
            blind = {prefix + n for n in parts if n not in seeing} if found else set()
            self.layers = {n: layer for n, layer in self.layers.items() if n not in blind}
        seen = {n: part.cpu().double() for n, part in self._seen(x, y, data).summaries.items()}
        self.layers = {n: layer for n, layer in self.layers.items() if n in seen}
        if not seen:
            remedy = "Put the batch first in the inputs of its layers."
            raise NotObservableError(complaint("model", "a network whose layers see the batch", "none", remedy))
        most = min(WIDEST, int((MEMORY / 4 / len(seen)) ** 0.5))
        stds = [seen[n].std(0, correction=0) for n in self.layers]
        floors = [0.01 * std.square().mean().sqrt().clamp_min(1e-12) for std in stds]  # constant nodes may wake up
        return Reference(
            layers=torch.tensor([number for number, n in enumerate(self.all_layers) if n in self.layers]),
            axes=torch.tensor([self.axes[n] for n in self.layers]),
            widths=torch.tensor([[len(std), min(len(std), most)] for std in stds]),
            shift=torch.cat([seen[n].mean(0) for n in self.layers]).float(),
            scale=torch.cat([1 / std.maximum(floor) for std, floor in zip(stds, floors, strict=True)]).float(),
        ).to(self.device)


# --------------------------------------------------------------------------------------------------------- statistics


def _set_statistics(reference: Reference, likelihood: Any, folds: list[tuple[_Rows, _Rows]], *, labelled: bool) -> None:
    """Sets means and covariances of each fold's known inputs; classes have means of their own if they are enough."""
    labels: list[Tensor] | None = None
    if labelled and all(_alike(known.targets) for known, _ in folds):
        of_rows = [likelihood.classes(torch.cat(known.targets)) for known, _ in folds]
        labels = _numbered(of_rows, int(reference.widths[:, 1].sum())) if all(c is not None for c in of_rows) else None
    of_folds: list[Any] = labels or [None] * len(folds)
    fitted = [fit_layers(known.reduced, own) for (known, _), own in zip(folds, of_folds, strict=True)]
    reference.to("cpu")
    reference.whiten, reference.centres = (torch.stack(parts) for parts in zip(*fitted, strict=True))


def _numbered(labels: list[Any], width: int) -> list[Tensor] | None:
    """Returns the labels of each fold, numbered without gaps, if classes can have means of their own."""
    classes, numbers = torch.cat(labels).unique(return_inverse=True)
    by_fold = list(numbers.split([len(part) for part in labels]))
    counts = torch.stack([torch.bincount(part, minlength=len(classes)) for part in by_fold])
    enough = len(classes) > 1 and int(counts.min()) > 1 and int(counts.sum(1).min()) >= PER_CLASS * len(classes)
    return by_fold if enough and 4 * len(classes) * width <= MEMORY else None


def _set_ranks(reference: Reference, held: list[_Rows], seed: int) -> None:
    """Ranks the held-out inputs of each fold, in two groups: each is scored by the ranks of the other."""
    ranks, scores = [], []
    size = min(len(rows) for rows in held) // 2
    for fold, rows in enumerate(held):
        distances, surprise = reference.distances(fold, rows.reduced), rows.surprise
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + fold))
        groups = [order[:size], order[size : 2 * size]]
        for group, other in (groups, groups[::-1]):
            ranks.append(ranks_of(distances[:, other], None if surprise is None else surprise[other]))
            own = score(ranks[-1], distances[:, group], None if surprise is None else surprise[group])
            scores.append(own.sort().values)
    reference.ranks, reference.scores = torch.stack(ranks), torch.stack(scores)


def _alike(targets: list[Tensor]) -> bool:
    """Whether targets of all batches have one shape beyond the batch."""
    return len({target.shape[1:] for target in targets}) == 1
