"""CALIBRATION: how much noise a trained network's latents bear, and its temperature, chosen on held-out labels.

The weights stay as they are. With z ~ N(μ, (a·w·σ)²) in every layer the held-out NLL is a curve over the scale a; every
point of it has a best temperature T(a). Noise that costs no NLL is worth having: it averages networks, so it lowers the
error, and its disagreement is the epistemic uncertainty.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source, as_source
from ibnn.errors import complaint
from ibnn.inputs import Inputs, check_rows, evaluating, slice_rows, tree_map
from ibnn.layers.observe import explaining_shapes
from ibnn.likelihood import Bernoulli, Categorical, Gaussian, Heads, Weighted
from ibnn.likelihood.temperature import helpful_temperature
from ibnn.network import IBNN
from ibnn.normal import Space, address, check_seed, generators_restored, normals
from ibnn.prediction import refuse_nan
from ibnn.progress import Bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 20  # labels
NEGLIGIBLE = 0.001  # nats per datum that noise may cost: the least of it already tells known inputs from unknown ones
DRAWS = 8  # of all components together, in the search
NARROW, HARDLY = 8, 1e-3  # z of fewer channels (an image's colours) multiply all that follows: nothing averages out
STEPS, ROWS, COPIES, RATE = 80, 64, 8, 0.1  # of the profile's gradient search: Adam on rows × copies at a time
TRIES = 4  # scales, each a quarter of the one before, that are held against temperature scaling
_OTHER = 2**20  # the first draw of the profile's


class Point(NamedTuple):
    """One scale: its NLL at temperature 1, its best temperature, and the NLL at that."""

    scale: float
    nll: float
    temperature: float
    tempered_nll: float


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` chose and how good it is; `print` it.

    Scores are the likelihood's own ("nll" always, "error" and "ece" for classes), of the labels that were chosen by:
    a scale and a temperature (and a number a layer) are fitted to them, so they flatter a little. `cross_nll` flatters
    less: each half of the labels is scored at the temperature that the other half fits, both at the chosen scale.
    `after["nll"]` is never above `temperature_scaling["nll"]`, nor `cross_nll[1]` above `cross_nll[0]` (unless
    calibrated without a temperature).

    Attributes:
        curve: The scales that were tried, in order.
        scale: a, the chosen one. For latents that were never trained it is their standard deviation.
        temperature: T, the chosen one.
        profile: Mean standard deviation of the latents of each layer, by its name.
        profile_kept: Whether layers have scales of their own.
        reason: Why, or why not; and why it is no more than temperature scaling, if so.
        before: Scores of the network as it came: without noise if its latents were never trained.
        temperature_scaling: Scores without noise at the best temperature.
        after: Scores from now on.
        cross_nll: NLL of temperature scaling and of the calibrated network with the draws that answers are made of,
            cross-fitted over the two halves; of a network without temperature each half at the other half's scale.
        rows: How many held-out rows it was chosen by.
    """

    curve: tuple[Point, ...]
    scale: float
    temperature: float
    profile: dict[str, float]
    profile_kept: bool
    reason: str
    before: dict[str, float]
    temperature_scaling: dict[str, float]
    after: dict[str, float]
    cross_nll: tuple[float, float]
    rows: int

    def __str__(self) -> str:
        """A table."""
        entries = {"before": self.before, "temperature": self.temperature_scaling, "calibrated": self.after}
        names = list(self.after)
        lines = [f"{'':<12}" + "".join(f"{name:>9}" for name in names)]
        lines += [f"{e:<12}" + "".join(f"{scores[name]:>9.4f}" for name in names) for e, scores in entries.items()]
        layers = f"{min(self.profile.values()):.3g} … {max(self.profile.values()):.3g}"
        return "\n".join(
            [
                *lines,
                f"scale {self.scale:.3g} (standard deviation of the layers' latents: {layers}), "
                f"temperature {self.temperature:.3g}, chosen on {self.rows:,} rows",
                f"NLL cross-fitted: temperature {self.cross_nll[0]:.4f}, calibrated {self.cross_nll[1]:.4f}",
                self.reason,
            ]
        )

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draws the curve as a matplotlib figure; writes it to a file if a path is given."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        scales = [point.scale for point in self.curve]
        axes.plot(scales, [p.nll for p in self.curve], "o-", color="#56B4E9", ms=4, label="temperature 1")
        tempered = [p.tempered_nll for p in self.curve]
        axes.plot(scales, tempered, "o-", color="#0072B2", ms=4, label="best temperature of each scale")
        axes.axhline(self.temperature_scaling["nll"], color="#E69F00", lw=1, ls="--", label="temperature scaling")
        axes.plot([self.scale], [self.after["nll"]], "*", color="#D55E00", ms=14, label="chosen")
        top = min(max(p.nll for p in self.curve), 2.5 * max(min(tempered), 0.0) + max(tempered) - min(tempered))
        if top > min(tempered):
            axes.set_ylim(min(tempered) - 0.05 * (top - min(tempered)), top * 1.02)
        axes.set(xlabel="scale of the latents' noise", ylabel="held-out NLL (nats)")
        axes.legend(frameon=False, fontsize=9)
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure


def calibrate(
    model: IBNN,
    valid: Any,
    *,
    samples: int = 5,
    seed: int = 0,
    profile: bool = True,
    temperature: bool = True,
    batch_size: int = 256,
    progress: bool = True,
) -> Calibration:
    """Calibrates a trained network on held-out labels, without training: sets its latents' noise and a temperature.

    Afterwards `predict` and the network in eval mode give calibrated answers; weights and running statistics are as
    they were. Latents that were never trained get the mean 1 and a standard deviation by layer; trained ones keep
    their means, and their standard deviations are scaled.

    The largest scale is chosen whose NLL (at its own best temperature) is within one standard error of the lowest and
    keeps half of what that gains over temperature scaling, or is within a quarter of one, or 0.001 nats: noise that
    costs nothing, or next to it. It is then tried with the draws that answers will be made of. Where these are worse
    than temperature scaling, on all labels or cross-fitted over two halves of them, a quarter of the scale is tried,
    and so on, three times; where all are worse there is no noise. So the result is never worse than temperature scaling
    by these two measures, and `reason` says if it is no more than that.

    Args:
        model: What `ibnn.convert` made of the network.
        valid: Held-out data that the weights were not trained on, as `fit` takes it: a pair (x, y), a Dataset or a
            DataLoader. It is held in memory, and so are the network's outputs for it from all draws of one scale
            (about 8, and `samples` times the components at last): for dense outputs pass few rows.
        samples: Draws per component that answers will be made of: what is passed to `predict`, whose default this is.
            `model.eval_samples` is set to it.
        seed: Decides the draws; `model.eval_seed` is set to it.
        profile: Also looks for a scale of each layer, and keeps it if that lowers the NLL of a second half of the data.
        temperature: False leaves the temperature at 1 and takes the scale of the lowest NLL.
        batch_size: Rows that go through the network at once.
        progress: Shows a bar in a terminal.

    >>> import ibnn
    >>> x, y = torch.randn(100, 4), torch.randint(3, (100,))  # nothing to know
    >>> net = torch.nn.Linear(4, 3)
    >>> _ = net.weight.data.mul_(10)  # and quite sure of itself
    >>> report = calibrate(ibnn.convert(net, components=2, seed=0), (x, y))
    >>> report.after["nll"] < report.before["nll"]
    True
    """
    _check_arguments(model, samples, batch_size, seed)
    with generators_restored():
        x, y = _held_out(valid, batch_size, seed, model.likelihood.pack)
    with (
        model._lock,
        _restored_on_error(model),
        evaluating(model),
        Bar("calibrate", shown=progress) as bar,
        torch.no_grad(),
    ):
        search = _Search(
            model, x, y, samples=samples, seed=seed, batch_size=batch_size, temper=temperature, tick=bar.advance
        )
        return search.run(profile=profile)


class _Candidate(NamedTuple):
    """A scale, and sums of losses over groups of rows (G,): at T = 1, at the best T, and at the best T of each half."""

    scale: float
    temperature: float
    counts: Tensor  # data in each group
    plain: Tensor
    tempered: Tensor
    crossed: tuple[Tensor, Tensor]

    def point(self) -> Point:
        total = float(self.counts.sum())
        return Point(self.scale, float(self.plain.sum()) / total, self.temperature, float(self.tempered.sum()) / total)


class _Search:
    """The model and the data, rows in random order, so that the first half of them is a random half."""

    def __init__(
        self, model: IBNN, x: Inputs, y: Tensor, *, samples: int, seed: int, batch_size: int, temper: bool,
        tick: Callable[[], None],
    ) -> None:  # fmt: skip
        self.model, self.likelihood, self.x, self.y = model, model.likelihood, x, y.to(model.examples.device)
        self.samples, self.seed, self.batch_size, self.temper, self.tick = samples, seed, batch_size, temper, tick
        self.trained = int(model.examples) > 0
        self.sizes = torch.tensor([latent.nodes for latent in model.latents.values()], device=self.y.device)
        q = model.posterior()
        self.mean, self.base = (q.mean.clone(), q.std.clone()) if self.trained else self._untrained(q.mean)
        self.came = float(self.likelihood.temperature)
        self.first = 0.25 if self.trained else 0.02  # the smallest scale that is tried
        self.few = max(1, min(samples, -(-DRAWS // model.components)))  # draws per component in the search
        self.by_row = True
        self.whole, self.half = slice(0, len(y)), len(y) // 2

    def _untrained(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Means and relative deviations to begin with: 1, but hardly any noise on few channels if there are others."""
        wide = torch.tensor([latent.axis == -1 or latent.nodes >= NARROW for latent in self.model.latents.values()])
        relative = torch.where(wide | ~wide.any(), 1.0, HARDLY).to(mean)
        return torch.ones_like(mean), relative.repeat_interleave(self.sizes).expand_as(mean)

    def run(self, *, profile: bool) -> Calibration:
        """Curve, choice, scores; then, at last, the model is set."""
        self.model.set_posterior(mean=self.mean)
        flat = torch.ones_like(self.sizes, dtype=self.mean.dtype)
        with explaining_shapes(self.model.net, self._inputs(slice(0, self.batch_size)), "valid"):
            plain = self._outputs(flat, 0.0, self.whole)
            check_rows(plain[0, 0], len(self.y))
        self.likelihood.check(plain[0, 0], self.y)
        if not isinstance(self.likelihood, Weighted) and (labels := self.likelihood.data(self.y)) < FEWEST:
            remedy = "Hold out more: targets that are ignored do not count."
            raise ValueError(complaint("valid", f"data of at least {FEWEST} labels", labels, remedy))
        if plain.isnan().any() or plain.isposinf().any():  # −∞ masks a class
            got = "NaN or infinity in the network's outputs"
            raise ValueError(complaint("valid", "data that the network can answer", got, "Check the inputs' scale."))
        try:
            self._outputs(flat, self.first, slice(0, min(2, self.batch_size)))
        except ValueError:
            self.by_row = False
        if self.trained:
            before = self._scores(self._outputs(flat, 1.0, self.whole, self.samples), self.came)
        else:
            before = self._scores(plain, 1.0)
        if isinstance(self.likelihood, Heads) and self.temper:
            self.likelihood.balance(plain, self.y, helpful_temperature)
        layers, kept, reason = flat, False, "One scale for all layers, as asked for."
        if profile:
            layers, kept, reason = self._profile(flat)
        zero = self._candidate(plain, 0.0, self.y, crossed=True)
        curve = self._curve(layers, zero)
        scaled = self._scores(plain, zero.temperature)
        scale, temperature, after, cross_nll, words = self._settle(layers, curve, scaled)
        std = self._std(layers, scale)
        self.model.set_posterior(std=std)
        self.likelihood.set_temperature(temperature)
        self.model.eval_samples, self.model.eval_seed = self.samples, self.seed
        means = [float(part.mean()) for part in std.split(self.sizes.tolist(), 1)]
        return Calibration(
            curve=tuple(candidate.point() for candidate in curve),
            scale=scale,
            temperature=temperature,
            profile=dict(zip(self.model.latents, means, strict=True)),
            profile_kept=kept,
            reason=" ".join(filter(None, (reason, words))),
            before=before,
            temperature_scaling=scaled,
            after=after,
            cross_nll=cross_nll,
            rows=len(self.y),
        )

    def _settle(
        self, layers: Tensor, curve: list[_Candidate], scaled: dict[str, float]
    ) -> tuple[float, float, dict[str, float], tuple[float, float], str]:
        """Scale, temperature, scores, cross-fitted NLLs, and why it is not the scale that the curve says, if so.

        The curve's scale is tried with the draws that answers will be made of, then a quarter of it, and so on: the
        first that is not worse than temperature scaling is taken, and no noise if none is.
        """
        zero, chosen = curve[0], curve[self._choose(curve)]
        alone, words = self._crossed([zero], temper=True), ""
        if not self.temper:
            after = self._scores(self._outputs(layers, chosen.scale, self.whole, self.samples), 1.0)
            return chosen.scale, 1.0, after, (alone, self._crossed(curve, temper=False)), ""
        for step in range(TRIES if chosen.scale else 0):
            scale = chosen.scale / 4**step
            draws = self._outputs(layers, scale, self.whole, self.samples)
            tried = self._candidate(draws, scale, self.y, crossed=True)
            after, cross = self._scores(draws, tried.temperature), self._crossed([tried], temper=True)
            if cross <= alone and after["nll"] <= scaled["nll"]:
                return scale, tried.temperature, after, (alone, cross), words and f"{words}: {scale:.3g} is not."
            words = words or (
                f"Noise of scale {scale:.3g} is worse than temperature scaling (NLL {after['nll']:.4f} to "
                f"{scaled['nll']:.4f}, cross-fitted {cross:.4f} to {alone:.4f})"
            )
        less = f"{words}, and so is less of it: this" if words else "Noise does not lower the NLL: this"
        return 0.0, zero.temperature, scaled, (alone, alone), f"{less} is temperature scaling, without noise."

    # ------------------------------------------------------------------------------------------------ one scale

    def _std(self, layers: Tensor, scale: float) -> Tensor:
        """a·w·σ, (K, nodes)."""
        std: Tensor = scale * layers.repeat_interleave(self.sizes) * self.base
        return std

    def _outputs(self, layers: Tensor, scale: float, rows: slice, samples: int | None = None) -> Tensor:
        """Outputs of draws at a scale, (K, S, N, …): of the draws that `predict` makes, or, in the search, of others.

        In the search every row has draws of its own, the same at every scale: what is found is then true of any draws
        and not of a lucky few. (A layer of one node, such as the first of a network for gray images, multiplies
        all that comes after it: 20 shared draws of it are anything but typical.)
        """
        count = self.model.components
        if scale == 0:  # there is nothing to draw, and components that were never trained are alike
            z = self.mean[: count if self.trained else 1]
        elif samples is not None:
            self.model.set_posterior(std=self._std(layers, scale))
            z = self.model.draw_latents(samples, self.seed)
        parts = []
        for start in range(rows.start, rows.stop, self.batch_size):
            part = slice(start, min(start + self.batch_size, rows.stop))
            inputs = self._inputs(part)
            if scale == 0 or samples is not None:
                parts.append(self.model.outputs(inputs, z))
            else:
                draws = (
                    self._own(layers * scale, j, torch.arange(part.start, part.stop)) for j in range(self.few * count)
                )
                parts.append(torch.cat([self.model.outputs(inputs, z[None]) for z in draws]))
            self.tick()
        outputs: Tensor = torch.cat(parts, 1).unflatten(0, (-1, 1 if scale == 0 else samples or self.few))
        return outputs

    def _own(self, std: Tensor, draw: int, rows: Tensor) -> Tensor:
        """z of one draw for each of some rows (R, nodes), or one for all if the layers do not see the batch first."""
        rows = rows.to(self.y.device) if self.by_row else torch.zeros(1, dtype=torch.int64, device=self.y.device)
        noise = normals(address(self.seed, Space.SEARCH, draw, rows), self.base.shape[1])
        k = draw // self.few % self.model.components
        z: Tensor = self.mean[k] + std.repeat_interleave(self.sizes) * self.base[k] * noise
        return z if self.by_row else z[0]

    def _inputs(self, rows: slice | Tensor) -> Inputs:
        count, device = len(self.y), self.y.device
        inputs: Inputs = tree_map(lambda t: (t[rows] if t.dim() and len(t) == count else t).to(device), self.x)
        return inputs

    def _candidate(self, draws: Tensor, scale: float, y: Tensor, *, crossed: bool = False) -> _Candidate:
        plain, counts = self.likelihood.losses(draws, y, 1.0)
        best = helpful_temperature(self.likelihood, draws, y)
        tempered, halves = self.likelihood.losses(draws, y, best)[0], [plain, plain]
        if crossed:
            parts = slice(0, self.half), slice(self.half, len(y))
            own = [helpful_temperature(self.likelihood, draws[:, :, part], y[part]) for part in parts]
            halves = [self.likelihood.losses(draws, y, temperature)[0] for temperature in own]
        return _Candidate(scale, best, counts, plain, tempered, (halves[0], halves[1]))

    def _scores(self, draws: Tensor, temperature: float) -> dict[str, float]:
        return self.likelihood.score(self.likelihood.summarise(draws, temperature), self.y)

    # ------------------------------------------------------------------------------------------------ the choice

    def _curve(self, layers: Tensor, zero: _Candidate, *, first: float | None = None, rows: slice | None = None,
               refine: int = 2) -> list[_Candidate]:  # fmt: skip
        """Candidates of ever larger scale until it is clearly too much, then some around the choice; in order."""
        rows = rows or self.whole
        y = self.y[rows]

        def tried(scale: float) -> _Candidate:
            return self._candidate(self._outputs(layers, scale, rows), scale, y)

        curve, scale = [zero], first or self.first
        for _ in range(8):
            curve.append(tried(scale))
            best = min(curve, key=self._value)
            difference, error = _paired(self._losses(curve[-1]), self._losses(best), zero.counts)
            if not difference <= 4 * error:
                break
            scale *= 2
        for step in range(refine):
            at = self._choose(curve)
            below = curve[at].scale / 2 ** (0.5 ** (step + 1))
            above = curve[at].scale * 2 ** (0.5 ** (step + 1)) if at else curve[1].scale / 2
            new = [above] if self.temper else [below, above] if at else [above]
            curve = sorted([*curve, *map(tried, new)], key=lambda c: c.scale)
        return curve

    def _losses(self, candidate: _Candidate) -> Tensor:
        return candidate.tempered if self.temper else candidate.plain

    def _value(self, candidate: _Candidate) -> float:
        value = float(self._losses(candidate).sum())
        return value if math.isfinite(value) else math.inf

    def _choose(self, curve: list[_Candidate]) -> int:
        return choose([self._losses(c) for c in curve], curve[0].counts, largest=self.temper)

    def _crossed(self, curve: list[_Candidate], *, temper: bool) -> float:
        """NLL of each half with what the other half chooses: a scale of the curve, and with `temper` a temperature."""
        middle, total = len(curve[0].counts) // 2, 0.0
        halves = slice(0, middle), slice(middle, None)
        for number, (own, other) in enumerate((halves, halves[::-1])):
            losses = [c.crossed[number] if temper else c.plain for c in curve]
            at = choose([loss[own] for loss in losses], curve[0].counts[own], largest=temper)
            total += float(losses[at][other].sum())
        return total / float(curve[0].counts.sum())

    # ------------------------------------------------------------------------------------------------ the profile

    def _profile(self, flat: Tensor) -> tuple[Tensor, bool, str]:
        """Scales of the layers relative to each other, whether they are kept, and why."""
        few, second = slice(0, min(self.half, 512)), slice(self.half, len(self.y))
        zero = self._candidate(self._outputs(flat, 0.0, few), 0.0, self.y[few])
        coarse = self._curve(flat, zero, rows=few, refine=0)
        best = min(coarse, key=self._value)
        try:
            std = self._gradient(2 * best.scale or self.first, best.temperature if self.temper else 1.0)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            return flat, False, f"One scale for all layers: scales of their own could not be fitted ({error})."
        scale = float(std.log().mean().exp())
        layers = std / scale
        rivals = [
            self._candidate(self._outputs(w, a, second), a, self.y[second]).point()
            for w, a in ((flat, best.scale), (layers, scale))
        ]
        one, own = (p.tempered_nll if self.temper else p.nll for p in rivals)
        if not own < one:
            return flat, False, f"One scale for all layers: scales of their own did not help ({own:.4f} to {one:.4f})."
        self.first = scale / 2
        return layers, True, f"A scale for each layer: the NLL of a second half fell from {one:.4f} to {own:.4f}."

    @torch.enable_grad()
    def _gradient(self, scale: float, temperature: float) -> Tensor:
        """Standard deviations by layer (L,) that lower the NLL of the first half, by Adam through the draws."""
        if type(self.likelihood) not in (Categorical, Bernoulli, Gaussian):
            raise NotImplementedError("its likelihood is not one of the library's own")
        device = self.y.device
        log_std = torch.full((len(self.sizes),), math.log(scale), device=device, requires_grad=True)
        log_t = torch.tensor(math.log(temperature), device=device, requires_grad=self.temper)
        learnt = [log_std, log_t] if self.temper else [log_std]
        optimiser = torch.optim.Adam(learnt, RATE)
        generator = torch.Generator().manual_seed(self.seed)
        order: list[Tensor] = []
        late = torch.zeros_like(log_std)  # the mean over the last quarter
        for step in range(STEPS):
            order = order or list(torch.randperm(self.half, generator=generator).split(ROWS))
            rows = order.pop()
            z = torch.stack([self._own(log_std.exp(), _OTHER + step * COPIES + c, rows) for c in range(COPIES)])
            draws = self.model.outputs(self._inputs(rows), z)
            losses, counts = self.likelihood.losses(draws[None], self.y[rows.to(device)], log_t.exp())
            gradients = torch.autograd.grad(losses.sum() / counts.sum(), learnt)
            if not all(g.isfinite().all() for g in gradients):
                raise ValueError("the gradient is not finite")
            for parameter, gradient in zip(learnt, gradients, strict=True):
                parameter.grad = gradient
            optimiser.param_groups[0]["lr"] = RATE * min(1.0, 2 * (1 - step / STEPS))
            optimiser.step()
            late += log_std.detach() if step >= STEPS * 3 // 4 else 0
            self.tick()
        return (late / (STEPS - STEPS * 3 // 4)).exp()


def choose(losses: list[Tensor], counts: Tensor, *, largest: bool) -> int:
    """Which of some scales in order, the first without noise, to take by the losses of groups of rows (G,).

    The one of the lowest NLL; with `largest` the largest that is within one standard error of it (of the paired
    differences) and keeps half of what it gains over the first, or is within a quarter of one, or 0.001 nats, of it.

    >>> losses = [torch.tensor(pair) for pair in ([4.0, 2.0], [2.0, 2.0], [2.0, 2.5], [3.0, 4.0])]
    >>> [choose(losses, torch.ones(2), largest=largest) for largest in (False, True)]
    [1, 2]
    """
    totals = [float(loss.sum()) if loss.isfinite().all() else math.inf for loss in losses]
    best = min(range(len(totals)), key=totals.__getitem__)
    if not largest:
        return best
    for at in reversed(range(best, len(totals))):
        difference, error = _paired(losses[at], losses[best], counts)
        halfway = totals[at] <= (totals[0] + totals[best]) / 2
        if difference <= max(error if halfway else error / 4, NEGLIGIBLE):
            return at
    return best


def _paired(losses: Tensor, others: Tensor, counts: Tensor) -> tuple[float, float]:
    """Difference of two NLLs, and its standard error, from the groups' differences."""
    difference = losses - others
    mean = difference.sum() / counts.sum()
    spread = (difference - mean * counts).square().sum() * len(counts) / max(len(counts) - 1, 1)
    return float(mean), float(spread.sqrt() / counts.sum())


# ------------------------------------------------------------------------------------------------------- around it


def _check_arguments(model: IBNN, samples: int, batch_size: int, seed: int) -> None:
    if not isinstance(model, IBNN):
        remedy = "Convert it first: calibrate(ibnn.convert(net), valid)."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    model.posterior()  # refuses a reverted one
    for name, value in (("samples", samples), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(complaint(name, "an integer of at least 1", value, f"Leave {name} out."))
    check_seed(seed)


def _held_out(
    valid: Any, batch_size: int, seed: int, pack: Callable[[Any], Tensor] | None = None
) -> tuple[Inputs, Tensor]:
    """All inputs and targets, in an order of their own."""
    known = isinstance(valid, Source)
    source = valid if known else as_source(valid, batch_size=batch_size, name="valid", shuffled=False, pack=pack)
    batches = [(share.x, share.y) for share in source.epoch(seed, 0)]
    rows = sum(len(y) for _, y in batches)
    if rows < FEWEST:
        remedy = "Hold out more: a few hundred do, 2,000 are plenty."
        raise ValueError(complaint("valid", f"at least {FEWEST} labelled rows", rows, remedy))
    try:
        x, y = _joined([x for x, _ in batches]), torch.cat([y for _, y in batches])
    except (RuntimeError, TypeError) as error:
        remedy = "Pad them to one length."
        raise ValueError(complaint("valid", "batches of rows of one shape", str(error), remedy)) from error
    refuse_nan(x, argument="valid")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return slice_rows(x, order, rows), y[order]


def _joined(parts: list[Any]) -> Any:
    """Batches of inputs as one; what is not a tensor of the batch's length is the first batch's."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.dim() else first
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(list(part)) for part in zip(*parts, strict=True))
    return first


@contextmanager
def _restored_on_error(model: IBNN) -> Iterator[None]:
    """Puts latents, temperature and eval settings back if the block fails."""
    likelihood = model.likelihood
    kept: list[tuple[Tensor, Tensor]] = [
        (p, p.detach().clone()) for latent in model.latents.values() for p in latent.parameters()
    ]
    kept += [(buffer, buffer.clone()) for buffer in likelihood.buffers()]
    settings = model.eval_samples, model.eval_seed
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        model.eval_samples, model.eval_seed = settings
        raise
