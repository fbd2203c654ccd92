"""`distil`: a network that answers in one pass as a model does with all of its draws.

The answer of many draws is a smooth function of the input, and the last layer's input already says most of it. So a
student is the model's network at its mean (an iBNN's latents at the mean of their component means) with a small head.
The head reads the input h of the last linear layer, or 1 × 1 convolution, and gives each place of the output

    a log-temperature t(h) and an epistemic share e(h), both from one MLP:   logits / exp t,   epistemic = e · total.

Head and last layer, or with `whole` all weights, learn the model's own answers to unlabelled inputs, and to noisy and
mixed copies of them: they minimise KL(answer of the draws ‖ answer of the student) + cross-entropy of the share. For a
Gaussian, the temperature scales the standard deviation and the share is that of the variance.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ibnn import check
from ibnn.baselines.plain import Plain
from ibnn.batches import joined
from ibnn.draws import Draw
from ibnn.errors import complaint
from ibnn.files.saving import register_method
from ibnn.generators import generators_restored
from ibnn.inputs import (
    Inputs,
    Pick,
    as_tensors,
    batch_length,
    call_arguments,
    logits_of,
    pick,
    slice_rows,
    split_inputs,
    tensors,
    tree_map,
)
from ibnn.layers.explain import explaining_shapes
from ibnn.layers.registry import duplicate
from ibnn.likelihood import Gaussian, Heads, Likelihood
from ibnn.likelihood.one_pass import OnePassCategorical, OnePassGaussian, one_pass
from ibnn.network import IBNN, folded, mean_latents
from ibnn.prediction import predict, refuse_nan
from ibnn.progress import Bar

FEWEST = 100  # inputs
HELD_OUT, MOST_HELD_OUT = 0.1, 1000  # share of the inputs that agreement is measured on, and the most of them
NOISE = 0.5  # most noise of a perturbed copy, in standard deviations of the inputs
CACHED = 2**28  # most numbers of layers' inputs that are held at once
EPOCHS = {False: 40, True: 15}  # by `whole`
RATES = {False: 3e-3, True: 5e-4}
Seen = tuple[list[Tensor], list[Tensor]]  # outputs and features of each place
Taught = list[tuple[Tensor, ...]]  # what the draws answer: tensors of every output
SAME = 1e-6  # epistemic shares below this are rounding


class Place(NamedTuple):
    """Where the head of an output reads its features."""

    output: str  # its name among several; "" for the only one
    layer: str | None  # name of the layer whose input is read; None reads the output itself
    axis: int  # axis of the features in that input: −1, or 1 for a convolution
    features: int  # how many
    targets: int  # log-temperatures and shares at each place of the layer: 1 for classes
    predicted: bool  # whether the network predicts the noise of a Gaussian
    exact: bool  # whether the layer's output is the network's


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

    def __init__(self, net: nn.Module, likelihood: Likelihood, places: list[Place], hidden: int, part: Any) -> None:
        super().__init__()
        self.net, self.places, self.part = net, places, part
        self.heads: Any = nn.ModuleList(Head(place.features, hidden, place.targets) for place in places)
        self.packers = _by_output(likelihood)  # a list, and so no modules of its own: the model has them

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the packed output, or a mapping of them for several outputs."""
        outputs, features = self.seen(args, kwargs)
        packed = {place.output: self.packed(n, outputs[n], features[n])[0] for n, place in enumerate(self.places)}
        return packed.get("", packed)

    def seen(self, args: Any, kwargs: Any) -> Seen:
        """Runs the network; returns each place's output, and its features (B, …, D)."""
        layers = {place.layer for place in self.places if place.layer is not None}
        returned, calls = _observed(self.net, layers, args, kwargs)
        returned = pick(returned, self.part)
        outputs = [logits_of(pick(returned, place.output or None)) for place in self.places]
        features = [
            packer.features(output) if place.layer is None else calls[place.layer][0].movedim(place.axis, -1)
            for place, packer, output in zip(self.places, self.packers, outputs, strict=True)
        ]
        return outputs, features

    def seen_in(self, x: Inputs, rows: Tensor) -> Seen:
        """Runs the network on some rows of inputs."""
        device = next(self.parameters()).device
        return self.seen(*call_arguments(tree_map(lambda t: t.to(device), slice_rows(x, rows, batch_length(x)))))

    def packed(self, number: int, output: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the packed output of a place, and the logits of its shares."""
        place, packer = self.places[number], self.packers[number]
        shape = packer.data(output, place.predicted).shape
        t, share = (part.movedim(-1, place.axis).reshape(shape) for part in self.heads[number](features))
        return packer.packed(output, t, share.sigmoid()), share


def _by_output(likelihood: Likelihood) -> list[Any]:
    return list(likelihood.heads) if isinstance(likelihood, Heads) else [likelihood]


def _observed(
    net: nn.Module, layers: Iterable[str], args: Any, kwargs: Any
) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
    """Runs a network; returns its output, and the input and output of these layers in the order of their last calls."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}
    thread = get_ident()

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        if get_ident() == thread and given:  # not another thread's pass
            calls.pop(name, None)
            calls[name] = given[0], made

    with ExitStack() as hooks:
        for name in layers:
            hooks.enter_context(net.get_submodule(name).register_forward_hook(partial(note, name)))
        return net(*args, **kwargs), calls


class Agreement(NamedTuple):
    """How far a student is from its model, on inputs that it was not taught; each value with its standard error."""

    kl: tuple[float, float]  # mean KL of the draws' answer to the student's, in nats per datum
    rank: tuple[float, float]  # rank correlation of the epistemic part
    differing: tuple[float, float]  # share of labels that differ; NaN for numbers
    rows: int  # held-out inputs

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
        _, at, counts = values.cpu().double().unique(return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0) - counts / 2)[at])
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


class OnePass(Plain):
    """A network that answers in one pass, made by `ibnn.distil`.

    Its answers have `probs`, `labels`, `total`, `aleatoric` and `epistemic` (for numbers `mean` and variances);
    `between` and `within` are None. It predicts, saves, loads and exports like every model.
    """

    agreement: Tensor  #: How far it is from the model's draws (a buffer), by output: see `report`.
    net: Student

    def __init__(
        self, net: nn.Module, likelihood: Likelihood, *, places: str, hidden: int, part: Pick | None = None
    ) -> None:
        read = [Place(*place) for place in json.loads(places)]
        super().__init__(Student(net, likelihood, read, hidden, part).to(next(net.parameters()).device), likelihood)
        self._places, self._hidden = places, hidden
        self.register_buffer("agreement", torch.full((len(read), 7), math.nan))

    @property
    def options(self) -> dict[str, Any]:
        """Where its heads read, and how wide they are."""
        if callable(self.net.part):
            raise TypeError(complaint("logits", "a path, which files hold", "a function", 'Pass e.g. "heads.age".'))
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
        whole: Whether to train all weights, not only head and last layer. Default: True for an ensemble, else False.
        samples: Draws per component of the answers that are taught.
        epochs: Passes over the inputs and their copies; default 40, or 15 for the whole network.
        lr: Learning rate; default 3e-3, or 5e-4 for the whole network.
        hidden: Width of the head.
        copies: Number of perturbed copies of the inputs. They alternate: the first has added noise, the second mixes
            pairs of inputs. Integer inputs are not copied.
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
    _check(model, lr, copies, seed, samples=samples, epochs=epochs, hidden=hidden, batch_size=batch_size)
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    members = list(getattr(model, "members", [model]))
    first, whole = members[0], len(members) > 1 if whole is None else whole
    epochs, lr = epochs or EPOCHS[whole], lr or RATES[whole]
    likelihood, part = one_pass(first.likelihood).to(device), getattr(first, "logits", None)
    with generators_restored(), model.evaluating():
        x = _inputs(x, dtype, batch_size)
        rows = batch_length(x)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        out = min(max(int(HELD_OUT * rows), 20), MOST_HELD_OUT)
        held, kept = (slice_rows(x, part, rows) for part in (order[:out], order[out:]))
        net = mean_network(first).to(device)
        shown = tree_map(lambda t: t.to(device), slice_rows(x, order[:2], rows))
        with explaining_shapes(net, shown), torch.no_grad():
            places = find_places(net, likelihood, first.likelihood, shown, part)
        torch.manual_seed(seed)
        student = OnePass(net, likelihood, places=json.dumps(places), hidden=hidden, part=part).eval()
        copies = copies if all(tensor.is_floating_point() for tensor in tensors(x)) else 0
        with Bar("distil", 2 + copies + epochs, shown=progress) as bar:

            def answers(x: Inputs, seed: int) -> list[Any]:
                options: Any = {"samples": samples, "batch_size": batch_size, "novelty": False, "progress": False}
                answer: Any = predict(model, x, seed=seed, **options)
                bar.advance()
                return [answer[place.output] if place.output else answer for place in places]

            expected = answers(held, seed)
            inputs, parts = [_perturbed(kept, n, seed) for n in range(1 + copies)], []
            for n, copy in enumerate(inputs):
                own = zip(student.net.packers, answers(copy, seed + n), strict=True)
                parts.append([packer.teaching(answer) for packer, answer in own])
            taught = [tuple(map(torch.cat, zip(*own, strict=True))) for own in zip(*parts, strict=True)]
            if len(members) == 1 and all(bool((own[-1] < SAME).all()) for own in taught):
                _make_exact(student, first.likelihood)
            else:
                for _ in _learn(student.net, joined(inputs, "x"), taught, whole, epochs, lr, seed, batch_size):
                    bar.advance()
        student.requires_grad_(True)
        _judge(student, held, expected, batch_size)
    return student


def _check(model: Any, lr: float | None, copies: int, seed: int, **counts: int | None) -> None:
    """Raises if an argument makes no sense; None stands for a default."""
    if not isinstance(model, nn.Module) or not hasattr(model, "each_draw"):
        got = type(model).__name__
        raise TypeError(complaint("model", "an iBNN, an Ensemble or a baseline", got, "Convert and train it first."))
    if not (model.random or model.components > 1):  # type: ignore[operator]
        remedy = "Its only draw is its answer: call predict. SWAG draws once it was fitted with swa < 1."
        raise ValueError(complaint("model", "a method with draws", type(model).__name__, remedy))
    for name, value in counts.items():
        if value is not None:
            check.integer(name, value)
    check.integer("copies", copies, least=0)
    check.seed(seed)
    if lr is not None:
        check.number("lr", lr, above=0)


def mean_network(model: Any) -> nn.Module:
    """Returns a plain copy of a model's network at its mean, in eval mode."""
    if isinstance(model, IBNN):
        net: Any = folded(model, Draw(mean_latents(model).detach()))
        return getattr(net, "single", lambda: net)()  # type: ignore[no-any-return]  # one, of networks side by side
    return duplicate(model.net).eval()


def _inputs(x: Any, dtype: torch.dtype, batch_size: int) -> Inputs:
    """Returns all inputs in memory; raises if they are few or hold NaN."""
    x = DataLoader(x, batch_size=batch_size) if isinstance(x, Dataset) else x
    if isinstance(x, DataLoader):
        x = joined([as_tensors(split_inputs(batch), dtype) for batch in x], "x")
    x = as_tensors(x, dtype)
    if (rows := batch_length(x)) < FEWEST:
        raise ValueError(complaint("x", f"at least {FEWEST} inputs", rows, "Pass more: they need no labels."))
    refuse_nan(x, argument="x")
    return x


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
        return tensor + NOISE * own * (tensor.std(0) if tensor.dim() == 2 else tensor.std()) * noise

    return tree_map(changed, x)


def find_places(net: nn.Module, likelihood: Likelihood, own: Likelihood, x: Inputs, part: Any) -> list[Place]:
    """Returns where the head of each output reads: the last linear layer whose places are the output's, or itself."""
    linear = {name: layer for name, layer in net.named_modules() if _linear(layer)}
    returned, calls = _observed(net, linear, *call_arguments(x))
    returned, found = pick(returned, part), []
    names = likelihood.names if isinstance(likelihood, Heads) else [""]
    for name, packer, owner in zip(names, _by_output(likelihood), _by_output(own), strict=True):
        output = logits_of(pick(returned, name or None))
        predicted = isinstance(owner, Gaussian) and owner.log_std is None
        data, fitting = packer.data(output, predicted), []
        for layer, (given, made) in calls.items():
            axis = -1 if isinstance(linear[layer], nn.Linear) else 1
            shape = given.movedim(axis, -1).shape[:-1]
            same_size = made.numel() == output.numel()
            fits = shape == data.shape
            if not isinstance(packer, OnePassCategorical):  # a layer may make several numbers of its features
                fits = shape[:1] == data.shape[:1] and data.numel() % shape.numel() == 0
                fits = fits and (data.dim() <= 2 or same_size)
            if fits:
                exact = same_size and torch.equal(made.reshape(output.shape), output)
                targets = data.numel() // shape.numel()
                fitting.append(Place(name, layer, axis, given.shape[axis], targets, predicted, exact))
        features = packer.features(output)
        targets = data.numel() // features[..., 0].numel()
        alone = Place(name, None, -1, features.shape[-1], targets, predicted, True)
        exact_ones = [place for place in fitting if place.exact]
        found.append((exact_ones or (fitting if len(names) == 1 else []) or [alone])[-1])
    return found


def _linear(layer: nn.Module) -> bool:
    """Whether a layer is linear in the features at each place."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return isinstance(layer, nn.Linear)
    return {*layer.kernel_size, *layer.stride, layer.groups} == {1} and set(layer.padding) == {0}


def _learn(
    student: Student, x: Inputs, taught: Taught, whole: bool, epochs: int, lr: float, seed: int, batch_size: int
) -> Iterator[int]:
    """Trains head and last layers, or all weights, in eval mode: running statistics stay. Yields after every epoch."""
    rows, device = batch_length(x), next(student.parameters()).device
    cached = None if whole or not all(place.exact for place in student.places) else _cached(student, x)
    see = cached or partial(student.seen_in, x)
    _start(student, see(torch.arange(min(rows, 1024)))[1], taught)
    layers = [student.net.get_submodule(place.layer) for place in student.places if place.layer is not None]
    student.requires_grad_(whole)
    for module in (student.heads, *layers):
        module.requires_grad_(True)
    optimiser = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for step, batch in enumerate(torch.randperm(rows, generator=generator).split(batch_size)):
            progress = (epoch + step * batch_size / rows) / epochs
            optimiser.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * progress))
            outputs, features = see(batch)
            loss = torch.zeros((), device=device)
            for n, own in enumerate(taught):
                packed, share = student.packed(n, outputs[n], features[n])
                target = tuple(part[batch].to(device) for part in own)
                kl = student.packers[n].apart(packed, target)
                loss = loss + kl.mean() + F.binary_cross_entropy_with_logits(share, target[-1])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        yield epoch


def _cached(student: Student, x: Inputs) -> Callable[[Tensor], Seen] | None:
    """Runs the network once; returns what `seen_in` does by last layers alone, or None if that takes much memory."""
    held, found = 0, []
    for batch in torch.arange(batch_length(x)).split(256):
        with torch.no_grad():
            outputs, features = student.seen_in(x, batch)
        held += sum(part.numel() for part in features)
        if held > CACHED:
            return None
        made = [own if p.layer is None else own[:0].clone() for p, own in zip(student.places, outputs, strict=True)]
        found.append((made, features))
    outputs, features = ([torch.cat(own) for own in zip(*parts, strict=True)] for parts in zip(*found, strict=True))

    def see(rows: Tensor) -> Seen:
        own, made = [part[rows] for part in features], []
        for place, part, like in zip(student.places, own, outputs, strict=True):
            if place.layer is None:
                made.append(like[rows])
            else:
                layer = student.net.get_submodule(place.layer)
                made.append(layer(part.movedim(-1, place.axis)).reshape(-1, *like.shape[1:]))
        return made, own

    return see


@torch.no_grad()
def _start(student: Student, features: list[Tensor], taught: Taught) -> None:
    """Standardises the heads' features, and starts them at the mean share and, for numbers, the mean deviation."""
    for n, (head, place, packer) in enumerate(zip(student.heads, student.places, student.packers, strict=True)):
        flat = features[n].flatten(0, -2).float()
        std = flat.std(0)
        head.shift.copy_(flat.mean(0))
        head.scale.copy_(1 / std.clamp_min(0.01 * std.square().mean().sqrt().clamp_min(1e-12)))
        head.outer_bias[place.targets :] = taught[n][-1].mean().clamp(1e-4, 1 - 1e-4).logit()
        if isinstance(packer, OnePassGaussian) and not place.predicted:
            logs = 0.5 * taught[n][1].clamp_min(1e-12).log() - packer.scale.log().to(taught[n][1].device)
            head.outer_bias[: place.targets] = logs.mean()


@torch.no_grad()
def _make_exact(model: OnePass, own: Likelihood) -> None:
    """Sets the heads to the model's temperatures and noise, and all shares to 0."""
    for likelihood, place, head in zip(_by_output(own), model.net.places, model.net.heads, strict=True):
        t = likelihood.temperature.log().expand(place.targets)
        if isinstance(likelihood, Gaussian) and likelihood.log_std is not None:
            t = t + likelihood.log_std
        head.outer_bias.copy_(torch.cat([t, torch.full_like(t, -math.inf)]))


@torch.no_grad()
def _judge(model: OnePass, x: Inputs, expected: list[Any], batch_size: int) -> None:
    """Measures the agreement with the expected answers to held-out inputs, and stores it."""
    rows, student = batch_length(x), model.net
    passes = []
    for batch in torch.arange(rows).split(batch_size):
        outputs, features = student.seen_in(x, batch)
        passes.append([student.packed(n, outputs[n], features[n])[0] for n in range(len(outputs))])
    for n, (theirs, packer) in enumerate(zip(expected, student.packers, strict=True)):
        output = torch.cat([packed[n] for packed in passes])
        theirs = theirs.to(output.device)
        mine = packer.summarise(output[None, None])
        kl = _mean_and_error(packer.apart(output, packer.teaching(theirs)))
        rank = rank_correlation(theirs.epistemic.flatten(), mine.epistemic.flatten())
        differing = [math.nan] * 2 if isinstance(packer, Gaussian) else _mean_and_error(theirs.labels != mine.labels)
        model.agreement[n] = torch.tensor([*kl, rank, (1 - rank**2) / math.sqrt(rows), *differing, rows])


def _mean_and_error(values: Tensor) -> list[float]:
    """Returns the mean of values (B, …), and its standard error over the rows."""
    by_row = values.cpu().double().reshape(len(values), -1).mean(1)
    return [by_row.mean().item(), by_row.std().item() / math.sqrt(len(values))]
