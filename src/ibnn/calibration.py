"""Chooses a trained network's noise and temperature on held-out labels, without training.

Latents become z ~ N(μ, (a·σ)²), and the factors of single units, where there are any, u ~ N(1, (a·τ)²). Trained latents
keep μ, σ and τ; for others μ is 1, and σ and τ are the layers' shares of the noise. The scale a and a temperature T are
chosen by cost: the loss of all labels, and a price for every change of the network, so that few labels change little
(`PRICE` nats for a factor of e in T, `NOISE_PRICE` · |a − a₀|, where a₀ is 1 if the latents were trained, else 0).

1. The cost of some rows is measured on a grid of scales, each at its best temperature, until noise is clearly too much.
2. The largest scale within one standard error of the lowest cost is taken (`choose`), then refined once.
3. All rows are answered with `predict`'s own draws. Noise that is worse than temperature scaling is dropped.

Noise that costs nothing is worth having: it averages networks, and their disagreement is the epistemic uncertainty.
"""

import functools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source, as_source, gather
from ibnn.draws import Draws
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.inputs import Inputs, check_rows, slice_rows, tree_map
from ibnn.layers.explain import explaining_shapes
from ibnn.likelihood import Heads, own_activation
from ibnn.likelihood.temperature import PRICE, best_temperature, supported_temperature
from ibnn.network import IBNN, by_layer, by_node, require_mixture, snapshot
from ibnn.noise import has_units, shares
from ibnn.normal import Space, address, normals, numbered_words, words
from ibnn.novelty.fitting import fit_novelty_if_possible
from ibnn.prediction import check_options, explaining_cuts, refuse_nan
from ibnn.progress import Bar
from ibnn.units import MIRRORED

FEWEST = 20  # labels
SCALES, SMALLEST = 8, {False: 0.02, True: 0.25}  # of the grid; the smallest by whether latents were trained
DRAWS = 8  # of each row in the search
PASSES, LEAST = 60, 1000  # passes over the held-out rows, or over this many if there are fewer
TOO_MUCH = 4  # standard errors above the lowest NLL, where the grid ends
NOISE_PRICE = 10.0  # nats over all rows that noise must save for each unit of its scale
NEGLIGIBLE = 0.001  # nats per datum that noise may cost: even a little separates known inputs from unknown ones
RANKED = 5000  # most rows that novelty is fitted with
NOTEWORTHY = 0.05  # log of the ratio of temperatures, from which on the report mentions that one was shrunk


class Point(NamedTuple):
    """One scale: its NLL at temperature 1, its best temperature, and the NLL at that."""

    scale: float
    nll: float
    temperature: float
    tempered_nll: float


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` chose and how good it is; `print` it.

    Scores are the likelihood's own ("nll" always, "error" and "ece" for classes), on the labels that chose scale and
    temperature, so they are slightly optimistic. `cross_nll` is less so: each half of the labels is scored at the
    temperature that the other half fits. `after["nll"]` is never above `temperature_scaling["nll"]`, nor `cross_nll[1]`
    above `cross_nll[0]`.
    """

    curve: tuple[Point, ...]  #: The scales that were tried, in order, the first without noise; on the search's rows.
    scale: float  #: a, the chosen one. For latents that were never trained it is their standard deviation.
    temperature: float  #: T, the chosen one: what the labels support, shrunk towards the network's own.
    fitted_temperature: float  #: What these labels would set if they were many: the temperature of the lowest NLL.
    std: dict[str, float]  #: Mean standard deviation of the latents of each layer, by its name.
    unit_std: dict[str, float]  #: That of the factors of a layer's units, for layers whose units have some.
    reason: str  #: Why there is no noise; empty if there is some.
    before: dict[str, float]  #: Scores of the network as it came: without noise if its latents were never trained.
    temperature_scaling: dict[str, float]  #: Scores without noise at the best temperature.
    after: dict[str, float]  #: Scores from now on.
    cross_nll: tuple[float, float]  #: NLL without noise and of the calibrated network, cross-fitted over two halves.
    gain: tuple[float, float]  #: The first of these less the second, and that difference's standard error, in nats.
    rows: int  #: How many held-out rows there were.
    passes: float  #: Rows that went through the network, over `rows`.

    def __str__(self) -> str:
        """A table."""
        widths = {name: max(9, len(name) + 2) for name in self.after}
        lines = [f"{'':<12}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
        entries = {"before": self.before, "temperature": self.temperature_scaling, "calibrated": self.after}
        for entry, scores in entries.items():
            lines.append(f"{entry:<12}" + "".join(f"{scores[name]:>{width}.4f}" for name, width in widths.items()))
        layers = f"latents: {_span(self.std)}"
        if self.unit_std:
            layers += f", of their units' factors: {_span(self.unit_std)}"
        (alone, noisy), (gain, error) = self.cross_nll, self.gain
        unit, per, digits = ("% of the NLL", 100 / alone, 1) if alone > 0 else ("nats", 1.0, 4)
        gained = f": gains {per * gain:.{digits}f} ± {per * error:.{digits}f} {unit}" if error else ""
        given_up = abs(math.log(self.temperature / self.fitted_temperature)) > NOTEWORTHY
        shrunk = f" ({self.fitted_temperature:.3g} fits these rows best: too few to support it)" if given_up else ""
        lines += [
            f"scale {self.scale:.3g} (standard deviation of the layers' {layers}), "
            f"temperature {self.temperature:.3g}{shrunk}, chosen on {self.rows:,} rows",
            f"NLL cross-fitted: temperature {alone:.4f}, calibrated {noisy:.4f}{gained}",
        ]
        return "\n".join([*lines, *filter(None, [self.reason])])


def _span(values: dict[str, float]) -> str:
    return f"{min(values.values()):.3g} … {max(values.values()):.3g}"


def calibrate(
    model: IBNN,
    valid: Any,
    *targets: Any,
    samples: int = 5,
    seed: int = 0,
    batch_size: int | None = 256,
    progress: bool = True,
) -> Calibration:
    """Calibrates a trained network on held-out labels, without training: sets its latents' noise and a temperature.

    Weights and running statistics stay. Latents that were never trained get the mean 1 and a standard deviation by
    layer; trained ones keep their means, and their standard deviations are scaled. On the held-out labels the result
    is never worse than temperature scaling; on new data it may be, by about 1 %. Few labels change little: with 30 the
    network often stays as it is. From 100 rows on `fit_novelty` makes a new reference of them.

    It takes about 60 passes over the held-out rows. Fewer than 1,000 rows cost as much as 60 passes over 1,000. Trained
    latents take up to twice that.

    Args:
        model: What `ibnn.convert` made of the network.
        valid: Held-out data that the weights were not trained on, as `fit` takes it: a pair (x, y), a Dataset or a
            DataLoader. Held in memory with outputs from all draws of an answer: for dense outputs pass few rows.
        *targets: Not used; it only gives calls with `(model, x, y)` a helpful error.
        samples: Draws per component of later answers, as passed to `predict`; sets `model.eval_samples`.
        seed: Decides the draws; sets `model.eval_seed`.
        batch_size: Rows that go through the network at once. None passes all of them, for networks whose rows depend on
            each other, such as graph networks. Give rows that are not held out the ignored target.
        progress: Shows a bar in a terminal.

    >>> import ibnn
    >>> x, y = torch.randn(100, 4), torch.randint(3, (100,))  # nothing to know
    >>> net = torch.nn.Linear(4, 3)
    >>> _ = net.weight.data.mul_(10)  # and overconfident
    >>> report = calibrate(ibnn.convert(net, components=2, seed=0), (x, y))
    >>> report.after["nll"] < report.before["nll"]
    True
    """
    if not isinstance(model, IBNN):
        remedy = "Convert it first. Of an ensemble or a baseline: ibnn.baselines.scale_temperature(model, valid)."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    if targets:
        raise TypeError(complaint("valid", "one argument", "two", "Pass inputs and targets as a pair: (x, y)."))
    require_mixture(model)
    check_options(samples, seed, batch_size)
    with generators_restored():
        options: Any = {"batch_size": batch_size, "shuffled": False, "pack": model.likelihood.pack}
        source = valid if isinstance(valid, Source) else as_source(valid, name="valid", **options)
        if batch_size is None and not source.whole:
            got = "batches, which would be joined"
            raise ValueError(complaint("valid", "a pair (x, y) with batch_size=None", got, "Pass one graph as a pair."))
        with explaining_cuts(batch_size, source.rows):
            x, y = gather(source, seed, "valid")
    refuse_nan(x, argument="valid")
    restore = snapshot(model)
    try:
        with model.evaluating(), torch.no_grad(), Bar("calibrate", shown=progress) as bar:
            outputs = _Outputs(model, x, y, samples=samples, seed=seed, batch_size=batch_size, bar=bar)
            with explaining_cuts(batch_size, len(y)):
                report, answers = _calibrated(outputs)
            _fit_novelty(outputs, answers)
    except BaseException:
        restore()
        raise
    return report


def _calibrated(outputs: "_Outputs") -> tuple[Calibration, Tensor]:
    """Sets the model; returns the report, and the outputs (K, S, N, …) that answers are made of."""
    model, likelihood, y = outputs.model, outputs.model.likelihood, outputs.y

    def scores(draws: Tensor, temperature: float | None) -> dict[str, float]:
        return likelihood.score(likelihood.summarise(draws, temperature), y)

    model.set_posterior(mean=outputs.mean)
    if not outputs.trained:  # a former calibration leaves no trace
        likelihood.set_temperature(1.0, *([torch.ones(())] if isinstance(likelihood, Heads) else []))
    plain = _checked_plain(outputs)
    before = scores(outputs.answers(1.0) if outputs.trained else plain, None)
    if isinstance(likelihood, Heads):
        likelihood.balance(plain, y, functools.partial(supported_temperature, rough=True))
    curve = _curve(outputs, plain)
    scale = _chosen(curve, outputs)
    answers, kept, (cross, counts) = plain, measure(outputs, plain, 0.0), crossed(outputs, plain)
    after, kept_cross = scores(plain, kept.point.temperature), cross
    if scale:
        draws = outputs.answers(scale)
        noisy, noisy_cross = measure(outputs, draws, scale), crossed(outputs, draws)[0]
        tried, cheaper = scores(draws, noisy.point.temperature), bool(noisy.costs.sum() <= kept.costs.sum())
        if cheaper and tried["nll"] <= after["nll"] and noisy_cross.sum() <= cross.sum():
            answers, kept, after, kept_cross = draws, noisy, tried, noisy_cross
    point = kept.point
    outputs.set_noise(point.scale)
    temperature_scaling = scores(plain, supported_temperature(likelihood, plain, y, rough=True))
    fitted = best_temperature(likelihood, answers, y, rough=True)
    likelihood.set_temperature(point.temperature)
    model.eval_samples, model.eval_seed = outputs.samples, outputs.seed
    why = f"Noise of scale {scale:.3g} is no better than none on all rows" if scale else "Noise hardly lowers the NLL"
    units = zip(model.latents, model.unit_std.tolist(), has_units(model).tolist(), strict=True)
    report = Calibration(
        curve=tuple(candidate.point for candidate in curve),
        scale=point.scale,
        temperature=point.temperature,
        fitted_temperature=fitted,
        std={name: float(part.mean()) for name, _, part in by_layer(model, model.posterior().std)},
        unit_std={name: std for name, std, placed in units if placed},
        reason="" if point.scale else f"{why}: this is temperature scaling, without noise.",
        before=before,
        temperature_scaling=temperature_scaling,
        after=after,
        cross_nll=(float(cross.sum() / counts.sum()), float(kept_cross.sum() / counts.sum())),
        gain=paired(cross, kept_cross, counts),
        rows=outputs.rows,
        passes=outputs.passed / outputs.rows,
    )
    return report, answers


def _fit_novelty(outputs: "_Outputs", answers: Tensor) -> None:
    """Stores what `p.novel` and `p.set` need, of the rows that were answered, if they are enough."""
    model, x, y, order, batch_size = outputs.model, outputs.x, outputs.y, outputs.order, outputs.batch_size
    if batch_size is None:  # one graph, in its own order
        answers, y = answers[:, :, order.argsort()], y[order.argsort()]
    else:
        x, y, answers = slice_rows(x, order[:RANKED], len(y)), y[:RANKED], answers[:, :, :RANKED]
    given = model.likelihood.summarise(answers).to("cpu")
    source = as_source((x, y.cpu()), batch_size=batch_size, shuffled=False)
    fit_novelty_if_possible(model, source, answers=given, seed=outputs.seed, batch_size=batch_size)


class Candidate(NamedTuple):
    """A scale as the report shows it, and what it costs groups of rows, (G,) each."""

    point: Point
    costs: Tensor  # losses summed over a group's data, at the point's temperature, and the group's part of the price
    counts: Tensor  # data in each group


def measure(outputs: "_Outputs", draws: Tensor, scale: float) -> Candidate:
    """Returns what draws (K, S, N, …) of the first rows cost, at the temperature that they support.

    Prices are for all held-out rows: where only a part is measured, it pays that part.
    """
    likelihood, y = outputs.model.likelihood, outputs.y[: draws.shape[2]]
    part = len(y) / outputs.rows
    best = supported_temperature(likelihood, draws, y, price=part * PRICE, rough=True)
    price = PRICE * abs(math.log(best / float(likelihood.temperature))) + NOISE_PRICE * abs(scale - outputs.trained)
    (plain, counts), (losses, _) = (likelihood.losses(draws, y, t) for t in (1.0, best))
    number = float(counts.sum())
    point = Point(scale, float(plain.sum()) / number, best, _total(losses) / number)
    return Candidate(point, losses + part * price * counts / number, counts)


def _curve(outputs: "_Outputs", plain: Tensor) -> list[Candidate]:
    """Returns candidates of growing scale, the first without noise, measured on the first rows."""
    smallest = SMALLEST[outputs.trained]

    def tried(scale: float) -> Candidate:
        return measure(outputs, outputs.mirrored(scale) if scale else plain[:, :, : outputs.searched], scale)

    curve = [tried(0.0)]
    for number in range(SCALES):
        curve.append(tried(smallest * 2**number))
        lowest = min(curve, key=lambda candidate: _total(candidate.costs))
        difference, error = paired(curve[-1].costs, lowest.costs, lowest.counts)
        if not difference <= TOO_MUCH * error:
            break
    chosen = _chosen(curve, outputs)
    beside = (chosen / 2**0.5, chosen * 2**0.5) if chosen else (smallest / 2,)
    return sorted([*curve, *map(tried, beside)], key=lambda candidate: candidate.point.scale)


def _chosen(curve: list[Candidate], outputs: "_Outputs") -> float:
    costs, part = [candidate.costs for candidate in curve], outputs.searched / outputs.rows
    return curve[choose(costs, curve[0].counts, part)].point.scale


def choose(losses: list[Tensor], counts: Tensor, part: float = 1.0) -> int:
    """Returns which of some growing scales to take, the first without noise, by the losses of groups of rows (G,).

    That is the largest that is within one standard error of the lowest NLL (of the paired differences) and keeps half
    of its gain over the first, or is within a quarter of one, or 0.001 nats, of it. The rows are this `part` of all
    held-out rows: it is the standard error of all of them that counts.
    """
    totals = [_total(loss) for loss in losses]
    best = min(range(len(totals)), key=totals.__getitem__)
    for at in reversed(range(best + 1, len(totals))):
        difference, error = paired(losses[at], losses[best], counts)
        halfway = totals[at] <= (totals[0] + totals[best]) / 2
        if difference <= max(part**0.5 * error * (1 if halfway else 0.25), NEGLIGIBLE):
            return at
    return best


def _total(losses: Tensor) -> float:
    return float(losses.sum()) if losses.isfinite().all() else math.inf


def paired(losses: Tensor, others: Tensor, counts: Tensor) -> tuple[float, float]:
    """Returns the difference of two NLLs, and its standard error, from the groups' differences."""
    difference = losses - others
    mean = difference.sum() / counts.sum()
    spread = (difference - mean * counts).square().sum() * len(counts) / max(len(counts) - 1, 1)
    return float(mean), float(spread.sqrt() / counts.sum())


def crossed(outputs: "_Outputs", draws: Tensor) -> tuple[Tensor, Tensor]:
    """Returns losses and counts of groups of rows (G,); each half has the temperature of the other."""
    likelihood, parts = outputs.model.likelihood, []
    middle = outputs.rows // 2
    halves = [(draws[:, :, :middle], outputs.y[:middle]), (draws[:, :, middle:], outputs.y[middle:])]
    for half, other in (halves, halves[::-1]):
        parts.append(likelihood.losses(*half, supported_temperature(likelihood, *other, rough=True)))
    losses, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    return losses, counts


class _Outputs:
    """Runs the network on the held-out rows, in a random order, with noise of a given scale."""

    def __init__(
        self, model: IBNN, x: Inputs, y: Tensor, *, samples: int, seed: int, batch_size: int | None, bar: Bar
    ) -> None:
        self.model, self.x, self.device, self.rows, self.bar = model, x, model.examples.device, len(y), bar
        self.samples, self.seed, self.batch_size = samples, seed, batch_size
        self.order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        self.y, self.passed, rows = y[self.order].to(self.device), 0, len(y)  # `passed`: rows through the network
        left = PASSES * max(rows, LEAST) - model.components * samples * rows
        self.searched = min(max(left // ((SCALES + 2) * DRAWS), rows // 4), rows)  # rows that the search uses
        self.by_row = batch_size is not None  # layers that do not see the batch refuse a draw for each row
        self.trained = int(model.examples) > 0
        q = model.posterior()
        self.mean, self.std, self.unit_std = q.mean.clone(), q.std.clone(), model.unit_std.clone()
        if not self.trained:
            channels, units = torch.tensor(shares(model.latents.values(), model.draws)).to(self.mean)
            self.mean, self.unit_std = torch.ones_like(self.mean), units.to(model.unit_std)
            self.std = by_node(model, channels).expand_as(self.mean).clone()

    def set_noise(self, scale: float) -> None:
        """Sets the model's σ and τ."""
        self.model.set_posterior(std=scale * self.std, unit_std=scale * self.unit_std)

    def plain(self) -> Tensor:
        """Returns the outputs without noise, (K, 1, N, …); components that were never trained are alike, and K is 1."""
        z = Draws(self.mean if self.trained else self.mean[:1])
        return self._by_batch(self.rows, lambda rows: z)[:, None]

    def answers(self, scale: float) -> Tensor:
        """Sets the noise; returns the outputs that `predict` makes its answers of, (K, S, N, …)."""
        self.set_noise(scale)
        draws = self.model.draw_latents(self.samples, self.seed)
        outputs = self._by_batch(self.rows, lambda rows: draws)
        return outputs.unflatten(0, (self.model.components, self.samples))  # type: ignore[no-any-return]

    def mirrored(self, scale: float) -> Tensor:
        """Returns outputs of the search's rows, (1, J, R, …), each row with its own draws, in mirrored pairs.

        What is linear in the noise cancels in a pair. Draws are the same at every scale, so that the curve is smooth.
        They differ between rows, so that it does not depend on a few lucky ones.
        """
        pairs = [self._by_batch(self.searched, functools.partial(self.pair, scale, j)) for j in range(DRAWS // 2)]
        return torch.cat(pairs)[None]

    def pair(self, scale: float, number: int, rows: Tensor) -> Draws:
        """Returns a draw and its mirror image for each row; number and row choose the component."""
        rows = rows.to(self.device) if self.by_row else torch.zeros(1, dtype=torch.int64, device=self.device)
        k = (number + rows) % self.model.components
        offset = normals(address(self.seed, Space.SEARCH, number, rows), self.model.nodes).view(len(rows), -1)
        offset = scale * self.std[k] * offset
        z, unit_words = torch.stack([self.mean[k] + offset, self.mean[k] - offset]), None
        if self.model.draws != "channel":
            first = words(address(self.seed, Space.SEARCH_UNITS, number, rows))
            first = numbered_words(first, len(self.model.latents)).view(len(rows), -1)
            unit_words = torch.stack([first, first + MIRRORED])
        if not self.by_row:  # one for all rows
            z, unit_words = z[:, 0], None if unit_words is None else unit_words[:, 0]
        return Draws(z, unit_words, scale * self.unit_std)

    def _by_batch(self, rows: int, draws: Callable[[Tensor], Draws]) -> Tensor:
        """Returns the outputs of the first rows, (J, N, …), given the draws for each batch's rows."""
        parts: list[Tensor] = []
        for batch in torch.arange(rows).split(self.batch_size or rows):
            parts.append(self.model.outputs(self.inputs(batch), draws(batch)))
            self.passed += len(parts[-1]) * (len(batch) if self.batch_size else self.rows)
            self.bar.update(done=self.passed)
        return torch.cat(parts, 1) if self.batch_size else parts[0][:, self.order[:rows]]

    def inputs(self, numbers: Tensor) -> Inputs:
        """Returns rows by their numbers in the order, on the model's device; all of them if they are never cut."""
        part = slice_rows(self.x, self.order[numbers], self.rows) if self.batch_size else self.x
        return tree_map(lambda t: t.to(self.device), part)


def _checked_plain(outputs: _Outputs) -> Tensor:
    """Returns the outputs without noise; raises if they do not fit the labels, or labels are too few."""
    likelihood, few, began = outputs.model.likelihood, torch.arange(min(256, outputs.rows)), time.perf_counter()
    with explaining_shapes(outputs.model.net, outputs.inputs(few), "valid"):
        plain = outputs.plain()
        check_rows(plain[0, 0], outputs.rows)
    passes = PASSES * max(outputs.rows, LEAST) / outputs.rows * (1 + outputs.trained)
    seconds = passes / len(plain) * (time.perf_counter() - began)
    outputs.bar.say(f"calibrate: up to {passes:,.0f} passes over {outputs.rows:,} rows, about {seconds:,.0f} s")
    likelihood.check(plain[0, 0], outputs.y)
    if (labels := likelihood.count(outputs.y)) < FEWEST:
        remedy = "Hold out more: a few hundred do, 2,000 are plenty. Targets that are ignored do not count."
        raise ValueError(complaint("valid", f"data of at least {FEWEST} labels", labels, remedy))
    if not bool((plain < math.inf).all()):  # nor NaN; −∞ masks a class
        got = "NaN or infinity in the network's outputs"
        raise ValueError(complaint("valid", "data that the network can answer", got, "Check the inputs' scale."))
    if end := own_activation(likelihood, outputs.model.net, plain[:, 0]):
        what = f"The network ends in a {end}, and the likelihood adds its own: probabilities stay far from 1"
        warnings.warn(f"{what}. Take the {end} out of the network and calibrate again.", stacklevel=4)
    two = few[: min(2, outputs.batch_size or 2)]
    try:
        outputs.model.outputs(outputs.inputs(two), outputs.pair(0.01, 0, two))
    except ValueError:
        outputs.by_row = False
    return plain
