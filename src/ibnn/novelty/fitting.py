"""FIT NOVELTY: collects what known inputs look like to a network, and ranks held-out ones among them."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ibnn.batches import Source, as_source
from ibnn.errors import complaint, nearest
from ibnn.generators import generators_restored
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, tree_map
from ibnn.layers.observe import explaining_shapes, places
from ibnn.layers.registry import layer_type
from ibnn.likelihood import Likelihood
from ibnn.normal import check_seed
from ibnn.novelty.measure import Seen, fallback_weight, see
from ibnn.novelty.nodes import observable
from ibnn.novelty.ranks import cautious, p_values
from ibnn.novelty.reference import MEMORY, WIDEST, Reference, fit_layers
from ibnn.prediction import Prediction, predict, refuse_nan
from ibnn.progress import Bar

ROWS = 5000  # inputs that statistics are made of at most, and held-out ones that are ranked
FEWEST = 50  # inputs of either kind, below which nothing can be said
PER_CLASS = 20  # inputs that classes must have on average to get means of their own
ANSWERED = 2000  # held-out inputs that are predicted, to choose the fallback
COST = 0.005  # share of the held-out NLL that the fallback may cost; in nats where targets have densities
FALLBACKS = (0.05, 0.02, 0.01, 0.005, 0.002)  # p-values below which answers may fall back
RAREST = 0.001  # the same where the cost cannot be measured
CAUTION = 4  # what is divided by there: chosen on small tables, experiments/novelty_fallback.py
BLOCKS = 10  # parts of the held-out data whose costs tell a standard error
TOUCHED = 10  # held-out answers that a fallback must have changed for its cost to be known


def fit_novelty(
    model: Any,
    train: Any,
    valid: Any = None,
    *,
    exclude: Sequence[str] = (),
    rows: int = ROWS,
    fallback: float | Literal["auto"] = "auto",
    seed: int = 0,
    batch_size: int = 256,
) -> Reference:
    """Lets a trained model tell novel inputs, by `p.novelty` of its predictions; returns what is now part of the model.

    It is a p-value, small for novel inputs: among inputs exchangeable with the held-out ones, a share of at most α has
    one of at most α. `ibnn.fit` and `ibnn.calibrate` do this at their end if enough inputs are held out; training the
    model further removes it.

    Args:
        model: A converted network or a baseline, trained.
        train: Inputs that statistics are made of: a pair (x, y), a Dataset or a DataLoader as `fit` takes it, or a
            tensor or dict of inputs without labels. Labels give classes means of their own if inputs are enough.
        valid: Held-out inputs, likewise, which are ranked; the weights must not have been trained on them. Its labels
            choose the fallback. By default a random half of `train` is ranked, and used for nothing else.
        exclude: Names of layers that are not observed.
        rows: How many inputs of either kind are used at most.
        fallback: p-value below which answers fall back to the base rates, fully as it goes to 0; 0 for never. "auto"
            takes the largest of some that cost at most 0.5 % of the held-out NLL; where inputs are too few to measure
            that, at most 0.00025; 0 without labels.
        seed: Decides which inputs are taken, and which of the held-out ones are ranked layer by layer.
        batch_size: Rows that go through the network at once.

    >>> import ibnn
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(400, 4, generator=generator), torch.randint(3, (400,), generator=generator)
    >>> model = ibnn.convert(torch.nn.Linear(4, 3), components=2, seed=0)
    >>> _ = fit_novelty(model, (x[:200], y[:200]), (x[200:], y[200:]))
    >>> model.predict(torch.full((1, 4), 9.0)).novel(0.01)
    tensor([True])
    """
    _check(model, rows, fallback, batch_size, seed)
    known, held = _sources(model, train, valid, rows=rows, seed=seed, batch_size=batch_size, fallback=fallback)
    return _fitted(_Fitting(model, exclude, seed), known, held, fallback)


def _fitted(fitting: "_Fitting", known: "_Data", held: "_Data", fallback: float | str) -> Reference:
    """Returns what is now part of the model."""
    labelled = known.labelled and held.labelled
    with generators_restored(), Bar("novelty") as bar:
        reference = fitting.statistics(known, bar)
        fitting.rank(reference, held, bar, answered=labelled)
        if labelled:
            fitting.settle(reference, fallback)
    fitting.model.reference = reference
    return reference


def fit_novelty_if_possible(
    model: Any,
    train: Any,
    valid: Any = None,
    *,
    seed: int = 0,
    batch_size: int = 256,
    answers: Prediction | None = None,
    samples: int = 5,
) -> None:
    """Does the same at the end of training or calibration, unless data are too few; a failure is a warning there.

    Args:
        model: As for `fit_novelty`, and so are the others.
        train: Known inputs.
        valid: Held-out ones.
        seed: Decides which are ranked layer by layer.
        batch_size: Rows that go through the network at once.
        answers: Predictions of the held-out inputs, whose source then has an order, if they are known already.
        samples: Draws per component of those that are made here: as many as later predictions will have.
    """
    try:
        sources = [_data(data, "train", 256, model).source for data in (train, valid) if data is not None]
        if min(source.rows for source in sources) >= FEWEST * (3 - len(sources)):
            options: Any = {"rows": ROWS, "seed": seed, "batch_size": batch_size, "fallback": "auto"}
            _fitted(_Fitting(model, (), seed, answers, samples), *_sources(model, train, valid, **options), "auto")
    except Exception as error:  # what was trained is not lost for it
        warnings.warn(f"The model is ready, but cannot tell novel inputs. {error}", stacklevel=3)


@dataclass(frozen=True)
class _Data:
    """Inputs, and labels if there are any."""

    source: Source
    labelled: bool
    name: str
    most: int  # rows that are taken

    def batches(self, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Yields batches of inputs and targets in random order."""
        rows = 0
        for share in self.source.epoch(seed, 0):
            refuse_nan(share.x, rows, f"{self.name} (rows in random order)")
            yield share.x, share.y
            rows += len(share.y)
            if rows >= self.most:
                return


def _check(model: Any, rows: int, fallback: Any, batch_size: int, seed: int) -> None:
    if not hasattr(model, "reference"):
        remedy = "Convert it first, ibnn.convert(net), or wrap it: ibnn.baselines.Plain(net)."
        raise TypeError(complaint("model", "a converted network or a baseline", type(model).__name__, remedy))
    for name, value, least in (("rows", rows, FEWEST), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            expected = f"an integer of at least {least}"
            raise ValueError(complaint(name, expected, repr(value), f"Leave {name} out."))
    if fallback != "auto" and not (isinstance(fallback, float | int) and 0 <= fallback < 1):
        raise ValueError(complaint("fallback", '"auto" or in [0, 1)', repr(fallback), "Pass 0.01, or 0 for none."))
    check_seed(seed)


def _sources(
    model: Any, train: Any, valid: Any, *, rows: int, seed: int, batch_size: int, fallback: float | str
) -> tuple[_Data, _Data]:
    """Returns the inputs that are known, and those that are ranked, at most so many of each."""
    known = _data(train, "train", batch_size, model)
    if valid is not None:
        held = _data(valid, "valid", batch_size, model)
    elif not known.source.divisible:
        got, remedy = "none, and training data that a sampler or iterable of your own chooses", "Pass valid."
        raise ValueError(complaint("valid", "held-out inputs", got, remedy))
    else:
        known, held = (replace(known, source=part) for part in known.source.split(known.source.rows // 2, seed))
    few = min((known, held), key=lambda data: data.source.rows)
    if few.source.rows < FEWEST:
        times = 1 if valid is not None else 2
        remedy = "Pass more: with n held-out inputs, half of which are ranked last, p-values go down to 2 / (n + 2)."
        expected = f"at least {times * FEWEST} inputs"
        raise ValueError(complaint(few.name, expected, times * few.source.rows, remedy))
    if fallback not in ("auto", 0) and not (known.labelled and held.labelled):
        raise ValueError(complaint("fallback", '0 or "auto" without labels', fallback, "Pass labels, too."))
    return _at_most(known, rows, seed), _at_most(held, rows, seed)


def _data(data: Any, name: str, batch_size: int, model: Any) -> _Data:
    pack, labelled = model.likelihood.pack, not (isinstance(data, Tensor | Mapping) or hasattr(data, "__array__"))
    if not labelled:
        x = as_tensors(data)
        data, pack = (x, torch.zeros(batch_length(x))), None
    source = data if isinstance(data, Source) else as_source(data, batch_size=batch_size, name=name, pack=pack)
    if isinstance(source.data, tuple):
        refuse_nan(source.data[0], argument=name)
    return _Data(source, labelled, name, source.rows)


def _at_most(data: _Data, rows: int, seed: int) -> _Data:
    """Returns a random part of the data with so many rows, if there are more; the first ones of an iterable."""
    if data.source.rows <= rows:
        return data
    source = data.source.split(rows, seed)[1] if data.source.divisible else data.source
    return replace(data, source=source, most=rows)


class _Fitting:
    """Passes data through a model and makes a reference of what its layers see."""

    def __init__(
        self,
        model: Any,
        exclude: Sequence[str],
        seed: int,
        answers: Prediction | None = None,
        samples: int = 5,
    ) -> None:
        self.model, self.seed, self.known_answers = model, seed, answers
        self.options: Any = {"samples": samples, "novelty": False, "progress": False}
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
        self.targets: list[Tensor] = []  # of known inputs
        self.answers: list[Prediction] = []  # for held-out inputs
        self.held_targets: list[Tensor] = []

    def _inputs(self, x: Inputs) -> Inputs:
        like = next(self.model.net.parameters()).dtype
        return tree_map(lambda t: t.to(self.device), as_tensors(x, like))

    def _seen(self, x: Inputs, y: Tensor, data: _Data) -> Seen:
        with explaining_shapes(self.model.net, x, data.name):
            seen = see(self.model, x, self.layers, self.axes)
        if data.labelled:
            self.model.likelihood.check(seen.output, y.to(self.device))
        return seen

    def _begin(self, x: Inputs, y: Tensor, data: _Data) -> Reference:
        """Keeps the layers that see the batch; returns a reference with widths, shifts and scales."""
        kinds = {name: layer_type(layer) for name, layer in self.layers.items()}
        own = {n: kind.batch_axis(self.layers[n]) for n, kind in kinds.items() if kind and kind.batch_axis}
        self.axes |= own
        net, call = self.model.net, call_arguments(x)
        members = {f"{i}.": member for i, member in enumerate(net)} if isinstance(net, nn.ModuleList) else {"": net}
        for prefix, member in members.items():
            parts = {n.removeprefix(prefix): layer for n, layer in self.layers.items() if n.startswith(prefix)}
            inner = {n.removeprefix(prefix): axis for n, axis in own.items() if n.startswith(prefix)}
            found = places(member, parts, inner, call, strict=False)
            seeing = {n: place.axis for n, place in found.items() if not place.copied}
            self.axes |= {prefix + n: axis for n, axis in seeing.items()}
            blind = {prefix + n for n in parts if n not in seeing} if found else set()
            self.layers = {n: layer for n, layer in self.layers.items() if n not in blind}
        seen = {n: part.cpu().double() for n, part in self._seen(x, y, data).summaries.items()}
        self.layers = {n: layer for n, layer in self.layers.items() if n in seen}
        if not seen:
            remedy = "Put the batch first in the inputs of its layers."
            raise ValueError(complaint("model", "a network whose layers see the batch", "none that does", remedy))
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

    def statistics(self, known: _Data, bar: Bar) -> Reference:
        """Returns a reference without ranks."""
        reference, kept = None, []
        for x, y in known.batches(self.seed):
            x = self._inputs(x)
            reference = reference or self._begin(x, y, known)
            summaries = self._seen(x, y, known).summaries
            kept.append([reference.reduce(i, summaries[name]).cpu() for i, name in enumerate(self.layers)])
            self.targets.append(y.cpu())
            bar.advance()
        assert reference is not None
        joined = [_finite(torch.cat(parts), known.name) for parts in zip(*kept, strict=True)]
        classes = self._classes(sum(part.shape[1] for part in joined)) if known.labelled else None
        reference.whiten, reference.centres = (part.to(self.device) for part in fit_layers(joined, classes))
        return reference

    def _classes(self, width: int) -> Tensor | None:
        """Returns the known inputs' labels, numbered without gaps, if classes can have means of their own."""
        of_rows = self.model.likelihood.classes(torch.cat(self.targets)) if _alike(self.targets) else None
        if of_rows is None:
            return None
        found, numbers = of_rows.unique(return_inverse=True)
        enough = len(numbers) >= PER_CLASS * len(found) and int(torch.bincount(numbers).min()) > 1
        return numbers if len(found) > 1 and enough and 4 * len(found) * width <= MEMORY else None

    def rank(self, reference: Reference, held: _Data, bar: Bar, *, answered: bool) -> None:
        """Adds the ranks of held-out inputs: of a random half layer by layer, of the other half the scores.

        If they are to be answered, keeps the predictions of some of them, without novelty, and their targets.
        """
        distances, surprises = [], list[Tensor]()
        if answered and self.known_answers is None and held.source.divisible and held.source.rows > ANSWERED:
            held = replace(held, source=replace(held.source, shuffled=True))  # they may be sorted
        for x, y in held.batches(self.seed):
            x = self._inputs(x)
            seen = self._seen(x, y, held)
            distances.append(reference.distances([seen.summaries[name] for name in self.layers]))
            surprises += [] if seen.surprise is None else [seen.surprise]
            if answered and sum(map(len, self.held_targets)) < ANSWERED:
                if self.known_answers is None:
                    self.answers.append(predict(cast(Any, self.model), x, **self.options).to("cpu"))
                self.held_targets.append(y.cpu())
            bar.advance()
        if answered and self.known_answers is not None:
            self.answers = [self.known_answers.rows(torch.arange(sum(map(len, self.held_targets))))]
        rows = _finite(torch.cat(distances, 1), held.name)
        surprise = torch.cat(surprises).to(rows) if surprises else None
        order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(self.seed)).to(rows.device)
        first, last = order[: len(order) // 2], order[len(order) // 2 :]
        reference.rank(rows[:, first], None if surprise is None else surprise[first])
        scores = reference.score(rows, surprise)
        reference.scores = scores[last].sort().values
        log_p = cautious(p_values(reference.scores, scores), reference.scores, scores)
        above = len(last) - torch.searchsorted(reference.scores, scores[last])
        log_p[last] = (above / len(last)).log()  # among the others
        self.log_p = log_p.cpu()

    def settle(self, reference: Reference, fallback: float | str) -> None:
        """Sets base rates, the p-value below which answers fall back to them, and how far held-out targets were off."""
        if not (_alike(self.targets) and _alike(self.held_targets)):
            return  # dense targets, padded batch by batch
        likelihood, base = self.model.likelihood, self.model.likelihood.base_rates(torch.cat(self.targets)).float()
        answer, target = type(self.answers[0]).cat(self.answers), torch.cat(self.held_targets)
        log_p = self.log_p[: len(target)]
        if len(base):
            auto = fallback == "auto"
            level = _affordable(likelihood, answer, target, log_p, base) if auto else float(fallback)
            answer = likelihood.fall_back(answer, fallback_weight(log_p, level), base) if level else answer
            reference.base, reference.fallback = base.to(self.device), torch.tensor(level, device=self.device)
        elif fallback not in ("auto", 0):
            got, remedy = f"{fallback} for {type(likelihood).__name__}", "Leave it out: it knows no base rates."
            raise ValueError(complaint("fallback", '0 or "auto" for a likelihood of your own', got, remedy))
        errors, classes = likelihood.nonconformity(answer, target), likelihood.classes(target)
        if errors is not None:
            reference.errors = errors.float().to(self.device)
            reference.classes = (classes if classes is not None else torch.zeros(0)).to(self.device)
            reference.temperature = likelihood.temperature.detach().float().clone()


def _finite(values: Tensor, name: str) -> Tensor:
    """Returns values inside of a network; raises unless they are finite."""
    if not values.isfinite().all():
        got = "NaN or infinity inside of the network"
        raise ValueError(complaint(name, "inputs that the network can take", got, "Check their scale."))
    return values


def _alike(targets: list[Tensor]) -> bool:
    """Whether targets of all batches have one shape beyond the batch."""
    return len({target.shape[1:] for target in targets}) == 1


def _affordable(likelihood: Likelihood, answer: Prediction, target: Tensor, log_p: Tensor, base: Tensor) -> float:
    """Returns the largest p-value to fall back from whose cost on held-out data is, but for a standard error, small."""
    blocks = [rows for rows in torch.arange(len(target)).tensor_split(BLOCKS) if likelihood.count(target[rows])]

    def losses(weight: Tensor) -> Tensor:
        fallen = likelihood.fall_back(answer, weight, base)
        return torch.tensor([likelihood.score(fallen.rows(rows), target[rows])["nll"] for rows in blocks])

    if not blocks:
        return RAREST / CAUTION
    plain = losses(torch.ones(len(target)))
    most = COST * (float(plain.mean().abs()) if likelihood.discrete else 1.0)
    for level in FALLBACKS if len(blocks) == BLOCKS else ():
        if level * len(log_p) >= TOUCHED:
            more = losses(fallback_weight(log_p, level)) - plain
            if float(more.mean() + more.std() / BLOCKS**0.5) <= most:
                return level
    # Too few are touched to measure it. A known input's p-value is uniform, so below a level its weight is, too.
    each = [losses(torch.full((len(target),), w)) - plain for w in (0.1, 0.3, 0.5, 0.7, 0.9)]
    return min(RAREST, most / max(float(torch.stack(each).mean()), 1e-9)) / CAUTION
