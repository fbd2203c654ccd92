"""`distil`: a network that answers in one pass as a model does with all of its draws.

The answer of many draws is a smooth function of the input, and the last layer's input already says most of it. So a
student is the model's network at its mean (an iBNN's latents at the mean of their component means) with a small head.
The head reads the input h of the last linear layer, or 1 × 1 convolution, and gives each place of the output

    a log-temperature t(h) and an epistemic share e(h), both from one MLP:   logits / exp t,   epistemic = e · total.

Head and last layer, or with `whole` all weights, learn the model's own answers to unlabelled inputs, and to noisy and
mixed copies of them: they minimise KL(answer of the draws ‖ answer of the student) + cross-entropy of the share. For a
Gaussian, the temperature scales the standard deviation and the share is that of the variance.

Nothing here knows the method: whatever `predict` answers for can be distilled.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ibnn import check
from ibnn.baselines.plain import Plain
from ibnn.draws import Draws
from ibnn.errors import complaint
from ibnn.files.saving import register_method
from ibnn.generators import generators_restored
from ibnn.inputs import (
    Inputs,
    Pick,
    as_tensors,
    batch_length,
    call_arguments,
    pick,
    slice_rows,
    split_inputs,
    tensors,
    tree_map,
)
from ibnn.layers.explain import explaining_shapes
from ibnn.layers.registry import duplicate
from ibnn.likelihood import Gaussian, Heads, Likelihood
from ibnn.likelihood.one_pass import OnePass as Packed
from ibnn.likelihood.one_pass import OnePassCategorical, OnePassGaussian, one_pass, share_loss
from ibnn.network import IBNN, folded, mean_latents
from ibnn.prediction import predict, refuse_nan
from ibnn.progress import Bar

FEWEST = 100  # inputs
HELD_OUT, MOST_HELD_OUT = 0.1, 1000  # share of the inputs that agreement is measured on, and the most of them
NOISE = 0.5  # most noise of a perturbed copy, in standard deviations of the inputs
CACHED = 2**28  # most numbers of layers' inputs that are held at once
EPOCHS = {False: 40, True: 15}  # by `whole`
RATES = {False: 3e-3, True: 5e-4}
SAME = 1e-6  # epistemic shares below this are rounding


class Place(NamedTuple):
    """Where the head of an output reads its features.

    Attributes:
        output: Name of the output among several; "" for the only one.
        layer: Name of the layer whose input it reads; None reads the output itself.
        axis: Axis of the features in that input: −1, or 1 for a convolution.
        features: How many.
        targets: Log-temperatures and shares at each place: 1 for classes.
        predicted: Whether the network predicts the noise of a Gaussian.
        exact: Whether the layer's output is the network's.
    """

    output: str
    layer: str | None
    axis: int
    features: int
    targets: int
    predicted: bool
    exact: bool


class Head(nn.Module):
    """Maps features (…, D) to log-temperatures and logits of epistemic shares, (…, targets) each, by an MLP.

    Its weights are bare parameters: it is no layer of the network, and novelty does not observe it.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, features: int, hidden: int, targets: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.inner = nn.Parameter(torch.randn(hidden, features) * math.sqrt(2 / features))
        self.inner_bias = nn.Parameter(torch.zeros(hidden))
        self.outer = nn.Parameter(torch.zeros(2 * targets, hidden))
        self.outer_bias = nn.Parameter(torch.zeros(2 * targets))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-temperatures and logits of shares."""
        x = (features.to(self.shift.dtype) - self.shift) * self.scale
        hidden = nn.functional.linear(x, self.inner, self.inner_bias).relu()
        t, share = nn.functional.linear(hidden, self.outer, self.outer_bias).chunk(2, -1)
        return t, share


class Student(nn.Module):
    """A network and a head for each of its outputs; it returns packed outputs (see `ibnn.likelihood.one_pass`)."""

    def __init__(self, net: nn.Module, packers: dict[str, Packed], places: list[Place], hidden: int, part: Any) -> None:
        super().__init__()
        self.net, self.places, self.part = net, places, part
        self.heads: Any = nn.ModuleList(Head(place.features, hidden, place.targets) for place in places)
        self._packers = packers  # no modules of their own here: the model has them

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the packed output, or a mapping of them for several outputs."""
        outputs, features = self.seen(args, kwargs)
        packed = {place.output: self.packed(n, outputs[n], features[n])[0] for n, place in enumerate(self.places)}
        return packed if len(packed) > 1 or "" not in packed else packed[""]

    def seen(self, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the network; returns each place's output, and its features (B, …, D)."""
        inputs: dict[str, Tensor] = {}
        thread = get_ident()

        def note(name: str, layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            if get_ident() == thread:  # not another one's pass
                inputs[name] = given[0]

        names = {place.layer for place in self.places if place.layer is not None}
        hooks = [self.net.get_submodule(name).register_forward_pre_hook(partial(note, name)) for name in names]
        try:
            returned = pick(self.net(*args, **kwargs), self.part)
        finally:
            for hook in hooks:
                hook.remove()
        outputs = [self._read(place, returned) for place in self.places]
        features = [
            self._own(p, o) if p.layer is None else inputs[p.layer].movedim(p.axis, -1) for p, o in self._zip(outputs)
        ]
        return outputs, features

    def _zip(self, outputs: list[Tensor]) -> Iterator[tuple[Place, Tensor]]:
        return zip(self.places, outputs, strict=True)

    def _read(self, place: Place, returned: Any) -> Tensor:
        return Likelihood.read(self._packers[place.output], pick(returned, place.output or None))

    def _own(self, place: Place, output: Tensor) -> Tensor:
        """Returns an output as its own features."""
        return _features(self._packers[place.output], output)

    def output_of(self, number: int, features: Tensor, shape: torch.Size) -> Tensor:
        """Returns the output that a place's layer makes of features, where it is exact; else the output itself."""
        place = self.places[number]
        if place.layer is None:
            packer = self._packers[place.output]
            dim = packer.class_dim(features) if isinstance(packer, OnePassCategorical) else -1
            return features.movedim(-1, dim).reshape(-1, *shape)
        made: Tensor = self.net.get_submodule(place.layer)(features.movedim(-1, place.axis))
        return made.reshape(-1, *shape)

    def packed(self, number: int, output: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the packed output of a place, and the logits of its shares."""
        place, packer = self.places[number], self._packers[self.places[number].output]
        t, share = self.heads[number](features)
        if isinstance(packer, OnePassCategorical):
            t, share = t[..., 0], share[..., 0]
        else:
            mean = _mean(place.predicted, output)
            t, share = (part.movedim(-1, place.axis).reshape(mean.shape) for part in (t, share))
        if isinstance(packer, OnePassGaussian):
            one = (output, torch.ones_like(output))
            output = torch.stack(Gaussian(noise="predicted").split(output, 1.0) if place.predicted else one)
        return packer.packed(output, t, share.sigmoid()), share


def _mean(predicted: bool, output: Tensor) -> Tensor:
    return output.chunk(2, -1)[0] if predicted else output


def _features(packer: Packed, output: Tensor) -> Tensor:
    """Returns an output (B, …) with its classes or numbers in the last axis."""
    if isinstance(packer, OnePassCategorical):
        return output.movedim(packer.class_dim(output), -1)
    return output if output.dim() > 1 else output[:, None]


class Agreement(NamedTuple):
    """How far a student is from its model, on inputs that it was not taught; each value with its standard error.

    Attributes:
        kl: Mean KL of the draws' answer to the student's, in nats per datum (of Gaussians with its mean and variance).
        rank: Rank correlation of the epistemic part.
        differing: Share of labels that differ; NaN for numbers.
        rows: Held-out inputs.
    """

    kl: tuple[float, float]
    rank: tuple[float, float]
    differing: tuple[float, float]
    rows: int

    def __str__(self) -> str:
        kl, rank, differing = (f"{value:.3g} ± {error:.2g}" for value, error in self[:3])
        labels = "" if math.isnan(self.differing[0]) else f", labels that differ {differing}"
        return f"KL to the draws {kl} nats, rank correlation of epistemic {rank}{labels}, {self.rows} held-out inputs"


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Returns Spearman's rank correlation; ties have their mean rank.

    >>> round(rank_correlation(torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([0.0, 1.0, 1.0, 9.0])), 4)
    1.0
    """
    ranks = []
    for values in (a, b):
        _, at, counts = values.double().unique(return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0) - counts / 2)[at])
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


class OnePass(Plain):
    """A network that answers in one pass, made by `ibnn.distil`.

    Its answers have `probs`, `labels`, `total`, `aleatoric` and `epistemic` (for numbers `mean` and variances);
    `between` and `within` are None. It predicts, saves, loads and exports like every model.

    Attributes:
        agreement: How far it is from the model's draws (a buffer), by output: see `report`.
    """

    agreement: Tensor
    net: Student

    def __init__(
        self, net: nn.Module, likelihood: Likelihood, *, places: str, hidden: int, part: Pick | None = None
    ) -> None:
        read = [Place(*place) for place in json.loads(places)]
        student = Student(net, _packers(likelihood), read, hidden, part)
        super().__init__(student, likelihood)
        student.to(next(net.parameters()).device)
        self._places, self._hidden = places, hidden
        self.register_buffer("agreement", torch.full((len(read), 7), math.nan, dtype=torch.float64))

    @property
    def options(self) -> dict[str, Any]:
        """Where its heads read, and how wide they are."""
        if callable(self.net.part):
            remedy = 'Give convert a path to the output, such as logits="heads.age".'
            raise TypeError(complaint("logits", "a path, which a file can hold", "a function", remedy))
        return {"places": self._places, "hidden": self._hidden, "part": self.net.part}

    @property
    def report(self) -> dict[str, Agreement]:
        """The agreement with the draws of each output, "" for the only one."""
        rows = zip(self.net.places, self.agreement.tolist(), strict=True)
        return {p.output: Agreement((r[0], r[1]), (r[2], r[3]), (r[4], r[5]), int(r[6])) for p, r in rows}

    def __str__(self) -> str:
        lines = [f"One pass of {type(self.net.net).__name__}:"]
        for name, found in self.report.items():
            lines.append(f"  {name + ': ' if name else ''}{found}")
        return "\n".join([*lines, "  The draws do not differ, so one pass is exact."] if self.exact else lines)

    @property
    def exact(self) -> bool:
        """Whether the draws did not differ, so that one pass is their answer."""
        return all(bool(head.outer_bias.isneginf().any()) for head in self.net.heads)


register_method(OnePass)


def _packers(likelihood: Likelihood) -> dict[str, Any]:
    """Returns the likelihoods of packed outputs by the name of the output."""
    return (
        dict(zip(likelihood.names, likelihood.heads, strict=True))
        if isinstance(likelihood, Heads)
        else {"": likelihood}
    )


# ------------------------------------------------------------------------------------------------------------- distil


@dataclass(frozen=True)
class _Taught:
    """Inputs and what the draws answer to them: tensors of every output."""

    x: Inputs
    answers: list[tuple[Tensor, ...]]
    rows: int


def distil(
    model: Any,
    x: Any,
    *,
    whole: bool | None = None,
    samples: int = 5,
    epochs: int | None = None,
    lr: float | None = None,
    hidden: int = 64,
    copies: int = 2,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> OnePass:
    """Distils a model's draws into a network that answers in one pass; labels are not needed.

    The model stays as it is, also if this is interrupted. The student is taught the answers to nine tenths of the
    inputs, and `print(fast)` says how far it is from the draws on the others.

    Args:
        model: A trained model: an iBNN, an `ibnn.Ensemble`, or a baseline that draws.
        x: Inputs like those to be answered: what `predict` takes, or a Dataset. The more, the better.
        whole: Whether all weights learn, not only the head and the last layer. Default: for an ensemble.
        samples: Draws per component of the answers that are taught.
        epochs: Passes over the inputs and their copies; default 40, or 15 for the whole network.
        lr: Learning rate; default 3e-3, or 5e-4 for the whole network.
        hidden: Width of the head.
        copies: Perturbed copies of the inputs: noisy ones, then mixed ones, in turn. Integers are never perturbed.
        seed: Decides the draws, the copies, the order and the held-out inputs.
        batch_size: Rows of a step.
        progress: Shows a bar in a terminal.

    >>> from ibnn import convert, nets
    >>> model, x = convert(nets.mlp(4, 3, hidden=8), components=2, seed=0), torch.randn(200, 4)
    >>> fast = distil(model, x, epochs=1)
    >>> p = fast.predict(x)
    >>> p.probs.shape, p.epistemic.shape, p.between
    (torch.Size([200, 3]), torch.Size([200]), None)
    """
    likelihood = _checked(model, samples, epochs, lr, hidden, copies, batch_size)
    check.seed(seed)
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    members = list(getattr(model, "members", [model]))
    whole = len(members) > 1 if whole is None else whole
    with generators_restored(), model.evaluating():
        x = _inputs(x, dtype, batch_size)
        rows = batch_length(x)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        out = min(max(int(HELD_OUT * rows), 20), MOST_HELD_OUT)
        net, part = mean_network(members[0]).to(device), getattr(members[0], "logits", None)
        shown = tree_map(lambda t: t.to(device), slice_rows(x, order[:2], rows))
        with explaining_shapes(net, shown), torch.no_grad():
            places = find_places(net, likelihood, members[0].likelihood, shown, part)
        torch.manual_seed(seed)
        student = OnePass(net, likelihood.to(device), places=json.dumps(places), hidden=hidden, part=part).eval()
        kept, held = slice_rows(x, order[out:], rows), slice_rows(x, order[:out], rows)
        total = 1 + (copies if _perturbable(x) else 0)
        epochs = epochs or EPOCHS[whole]
        with Bar("distil", total + 1 + epochs, shown=progress) as bar:
            teach = partial(_taught, model, student, samples=samples, batch_size=batch_size, bar=bar)
            judged = teach(held, seed=seed)
            taught = [teach(_perturbed(kept, n, seed), seed=seed + n) for n in range(total)]
            if all(bool((answer[-1] < SAME).all()) for part in taught for answer in part.answers):
                _make_exact(student, model.likelihood)
            else:
                _learn(student, taught, whole, epochs, lr or RATES[whole], seed, batch_size, bar)
        for parameter in student.parameters():
            parameter.requires_grad_(True)
        _judge(student, judged, batch_size)
    return student


def _checked(model: Any, samples: int, epochs: Any, lr: Any, hidden: int, copies: int, batch_size: int) -> Likelihood:
    """Returns the student's likelihood; raises if an argument makes no sense."""
    if not isinstance(model, nn.Module) or not hasattr(model, "each_draw"):
        remedy = "Convert the network and train it first."
        raise TypeError(complaint("model", "an iBNN, an Ensemble or a baseline", type(model).__name__, remedy))
    if not (model.random or model.components > 1):  # type: ignore[operator]
        remedy = "Its only draw is its answer: call predict."
        raise ValueError(complaint("model", "a method with draws", type(model).__name__, remedy))
    for name, value in (("samples", samples), ("hidden", hidden), ("batch_size", batch_size), ("epochs", epochs)):
        if value is not None:
            check.integer(name, value)
    check.integer("copies", copies, least=0)
    if lr is not None:
        check.number("lr", lr, above=0)
    likelihood = one_pass(model.likelihood)  # type: ignore[arg-type]
    if likelihood is None:
        got, remedy = type(model.likelihood).__name__, "Use one of these, or Heads of them."
        raise TypeError(complaint("likelihood", "Categorical, Bernoulli or Gaussian", got, remedy))
    return likelihood


def mean_network(model: Any) -> nn.Module:
    """Returns a plain copy of a model's network at its mean, in eval mode."""
    if isinstance(model, IBNN):
        return folded(model, Draws(mean_latents(model).detach()))
    return duplicate(model.net).eval()


def _inputs(x: Any, dtype: torch.dtype, batch_size: int) -> Inputs:
    """Returns all inputs in memory; raises if they are few or hold NaN."""
    if isinstance(x, Dataset):
        x = DataLoader(x, batch_size=batch_size)
    if isinstance(x, DataLoader):
        batches = [as_tensors(split_inputs(batch), dtype) for batch in x]
        if not batches:
            raise ValueError(complaint("x", f"at least {FEWEST} inputs", 0, "Pass a loader with data."))
        x = _joined(batches)
    x = as_tensors(x, dtype)
    if (rows := batch_length(x)) < FEWEST:
        raise ValueError(complaint("x", f"at least {FEWEST} inputs", rows, "Pass more: they need no labels."))
    refuse_nan(x, argument="x")
    return x


def _joined(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: _joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(list(parts)) for parts in zip(*batches, strict=True))
    try:
        return torch.cat(batches)
    except RuntimeError as error:
        raise ValueError(complaint("x", "batches of rows of one shape", str(error), "Pad them alike.")) from error


def _perturbable(x: Inputs) -> bool:
    return all(tensor.is_floating_point() for tensor in tensors(x))


def _perturbed(x: Inputs, number: int, seed: int) -> Inputs:
    """Returns copy `number` of inputs: 0 as they are, then in turn with noise, or each row mixed with another."""
    if not number:
        return x
    rows, generator = batch_length(x), torch.Generator().manual_seed(seed + 1000 * number)
    amount, other = torch.rand(rows, generator=generator), torch.randperm(rows, generator=generator)

    def changed(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != rows:
            return tensor
        own = amount.to(tensor).view(-1, *[1] * (tensor.dim() - 1))
        if number % 2 == 0:
            return tensor + own / 2 * (tensor[other.to(tensor.device)] - tensor)
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        spread = tensor.std(0) if tensor.dim() == 2 else tensor.std()
        return tensor + NOISE * own * spread * noise

    return tree_map(changed, x)


def _taught(model: Any, student: OnePass, x: Inputs, *, samples: int, seed: int, batch_size: int, bar: Bar) -> _Taught:
    answer: Any = predict(model, x, samples=samples, seed=seed, batch_size=batch_size, novelty=False, progress=False)
    names = [place.output for place in student.net.places]
    packers = _packers(student.likelihood)
    bar.advance()
    answers = [packers[name].teaching(answer[name] if name else answer) for name in names]
    return _Taught(x, answers, batch_length(x))


# ------------------------------------------------------------------------------------------------------------- places


def find_places(net: nn.Module, likelihood: Likelihood, own: Likelihood, x: Inputs, part: Any) -> list[Place]:
    """Returns where the head of each output reads: the last linear layer whose places are the output's, or itself."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def note(name: str, layer: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        if len(given) == 1 and isinstance(given[0], Tensor) and isinstance(made, Tensor):
            calls.append((name, layer, given[0], made))

    hooks = [m.register_forward_hook(partial(note, name)) for name, m in net.named_modules() if _linear(m)]
    try:
        args, kwargs = call_arguments(x)
        returned = pick(net(*args, **kwargs), part)
    finally:
        for hook in hooks:
            hook.remove()
    packers, owners = _packers(likelihood), _packers(own)
    found = []
    for name, packer in packers.items():
        output = Likelihood.read(packer, pick(returned, name or None))
        predicted = isinstance(packer, OnePassGaussian) and owners[name].log_std is None
        fitting = [place for call in calls if (place := _fitting(name, packer, output, predicted, *call)) is not None]
        exact = [place for place in fitting if place.exact]
        alone = _alone(name, packer, output, predicted)
        found.append(exact[-1] if exact else fitting[-1] if fitting and len(packers) == 1 else alone)
    return found


def _linear(layer: nn.Module) -> bool:
    """Whether a layer is linear in the features at each place."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return isinstance(layer, nn.Linear)
    return {*layer.kernel_size, *layer.stride, layer.groups} == {1} and set(layer.padding) == {0}


def _fitting(
    name: str, packer: Packed, output: Tensor, predicted: bool, layer: str, module: nn.Module, x: Tensor, made: Tensor
) -> Place | None:
    """Returns a layer as the place of an output if each of its places is one of the output's."""
    axis = -1 if isinstance(module, nn.Linear) else 1
    places, targets = x.movedim(axis, -1).shape[:-1], 1
    if isinstance(packer, OnePassCategorical):
        if places != _features(packer, output).shape[:-1]:
            return None
    else:
        mean = _mean(predicted, output)
        targets, rest = divmod(mean.numel(), places.numel())
        if rest or not targets or places[0] != mean.shape[0] or places.numel() > mean.numel():
            return None
        if mean.dim() > 2 and made.numel() != output.numel():
            return None
    exact = made.numel() == output.numel() and torch.equal(made.reshape(output.shape), output)
    return Place(name, layer, axis, x.shape[axis], targets, predicted, exact)


def _alone(name: str, packer: Packed, output: Tensor, predicted: bool) -> Place:
    """Returns an output as its own place."""
    features = _features(packer, output).shape[-1]
    targets = 1 if isinstance(packer, OnePassCategorical) else features // 2 if predicted else features
    return Place(name, None, -1, features, targets, predicted, True)


# ------------------------------------------------------------------------------------------------------------ learning


def _learn(
    model: OnePass, taught: list[_Taught], whole: bool, epochs: int, lr: float, seed: int, batch_size: int, bar: Bar
) -> None:
    """Trains the head and the last layers, or all weights, in eval mode: running statistics stay, nothing drops out."""
    student, device = model.net, next(model.parameters()).device
    cached = None if whole or not all(place.exact for place in student.places) else _cached(student, taught, device)
    _start(model, taught, cached, device)
    student.requires_grad_(whole)
    student.heads.requires_grad_(True)
    for place in student.places:
        if place.layer is not None:
            student.net.get_submodule(place.layer).requires_grad_(True)
    optimiser = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr)
    sizes = torch.tensor([part.rows for part in taught])
    rows, generator = int(sizes.sum()), torch.Generator().manual_seed(seed)
    answers = [tuple(map(torch.cat, zip(*own, strict=True))) for own in zip(*(t.answers for t in taught), strict=True)]
    inputs = _joined([part.x for part in taught]) if cached is None else None
    for epoch in range(epochs):
        for step, batch in enumerate(torch.randperm(rows, generator=generator).split(batch_size)):
            progress = (epoch + step * batch_size / rows) / epochs
            optimiser.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * progress))
            if cached is None:
                piece = tree_map(lambda t: t.to(device), slice_rows(inputs, batch, rows))
                outputs, features = student.seen(*call_arguments(piece))
            else:
                features = [part[batch] for part, _ in cached]
                outputs = [student.output_of(n, features[n], shape) for n, (_, shape) in enumerate(cached)]
            loss = torch.zeros((), device=device)
            for n, own in enumerate(answers):
                packed, share = student.packed(n, outputs[n], features[n])
                target = tuple(part[batch].to(device) for part in own)
                kl = student._packers[student.places[n].output].apart(packed, target)
                loss = loss + kl.mean() + share_loss(share, target[-1]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        bar.advance()


@torch.no_grad()
def _pass(
    student: Student, x: Inputs, batch_size: int, device: torch.device
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yields outputs and features of inputs, batch by batch."""
    rows = batch_length(x)
    for batch in torch.arange(rows).split(batch_size):
        yield student.seen(*call_arguments(tree_map(lambda t: t.to(device), slice_rows(x, batch, rows))))


def _cached(student: Student, taught: list[_Taught], device: torch.device) -> list[tuple[Tensor, torch.Size]] | None:
    """Returns all features and the shape of the outputs, of each place; None where that takes much memory."""
    parts: list[list[Tensor]] = [[] for _ in student.places]
    shapes: list[torch.Size] = []
    held = 0
    for data in taught:
        for outputs, features in _pass(student, data.x, 256, device):
            held += sum(part.numel() for part in features)
            if held > CACHED:
                return None
            shapes = [output.shape[1:] for output in outputs]
            for own, part in zip(parts, features, strict=True):
                own.append(part)
    return [(torch.cat(own), shape) for own, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def _start(model: OnePass, taught: list[_Taught], cached: Any, device: torch.device) -> None:
    """Standardises the heads' features, and starts them at the mean share and, for numbers, the mean deviation."""
    student = model.net
    first = [part for part, _ in cached] if cached else next(_pass(student, taught[0].x, 1024, device))[1]
    for n, (head, features) in enumerate(zip(student.heads, first, strict=True)):
        flat, answers = features.flatten(0, -2).float(), taught[0].answers[n]
        std = flat.std(0)
        head.shift.copy_(flat.mean(0))
        head.scale.copy_(1 / std.clamp_min(0.01 * std.square().mean().sqrt().clamp_min(1e-12)))
        targets = student.places[n].targets
        head.outer_bias[targets:] = answers[-1].mean().clamp(1e-4, 1 - 1e-4).logit()
        if isinstance(student._packers[student.places[n].output], OnePassGaussian) and not student.places[n].predicted:
            head.outer_bias[:targets] = 0.5 * answers[1].clamp_min(1e-12).log().mean()


@torch.no_grad()
def _make_exact(model: OnePass, own: Likelihood) -> None:
    """Sets the heads to the model's temperatures and noise, and all shares to 0."""
    owners = dict(own.each()) if isinstance(own, Heads) else {"": own}
    for place, head in zip(model.net.places, model.net.heads, strict=True):
        likelihood = owners[place.output]
        t = likelihood.temperature.log().expand(place.targets)
        if isinstance(likelihood, Gaussian) and likelihood.log_std is not None:
            t = t + likelihood.log_std
        head.outer_bias.copy_(torch.cat([t, torch.full_like(t, -math.inf)]))


@torch.no_grad()
def _judge(model: OnePass, judged: _Taught, batch_size: int) -> None:
    """Measures the agreement on held-out inputs, and stores it."""
    answer: Any = model.predict(judged.x, batch_size=batch_size, novelty=False, progress=False)
    packers = _packers(model.likelihood)
    for n, place in enumerate(model.net.places):
        own, packer = answer[place.output] if place.output else answer, packers[place.output]
        *taught, share = judged.answers[n]
        mine = packer.teaching(own)
        if isinstance(packer, OnePassGaussian):
            ratio = (taught[1] + (taught[0] - mine[0]).square()) / mine[1].clamp_min(1e-12)
            kl = 0.5 * (ratio - 1 - (taught[1] / mine[1]).clamp_min(1e-12).log())
            differing, total = torch.full((judged.rows,), math.nan), taught[1]
        else:
            kl = (taught[0] * (taught[0].clamp_min(1e-12).log() - mine[0].clamp_min(1e-12).log())).sum(-1)
            differing = (taught[0].argmax(-1) != mine[0].argmax(-1)).double().reshape(judged.rows, -1).mean(1)
            total = torch.special.entr(taught[0]).sum(-1)
        rank = rank_correlation((share * total).flatten(), own.epistemic.flatten())
        kl = kl.double().reshape(judged.rows, -1).mean(1)
        root = math.sqrt(judged.rows)
        values = [kl.mean(), kl.std() / root, rank, (1 - rank**2) / root]
        values += [differing.mean(), differing.std() / root, judged.rows]
        model.agreement[n] = torch.tensor([float(value) for value in values])
