"""CALIBRATION: how much noise a trained network's latents bear, and its temperature, chosen on held-out labels.

The weights stay as they are. With z ~ N(μ, (a·w·σ)²) in every layer the held-out NLL is a curve over the scale a; every
point of it has a best temperature T(a). Noise that costs no NLL is worth having: it averages networks, so it lowers the
error, and its disagreement is the epistemic uncertainty.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source, as_source
from ibnn.calibration.choice import Candidate, choose, cross_fitted, paired
from ibnn.calibration.outputs import Outputs
from ibnn.calibration.profile import layer_scales
from ibnn.calibration.report import Calibration
from ibnn.errors import complaint
from ibnn.inputs import Inputs, check_rows, evaluating, slice_rows
from ibnn.layers.observe import explaining_shapes
from ibnn.likelihood import Heads, Weighted
from ibnn.likelihood.temperature import helpful_temperature
from ibnn.network import IBNN
from ibnn.normal import check_seed, generators_restored
from ibnn.novelty.fitting import fit_novelty_if_possible
from ibnn.prediction import refuse_nan
from ibnn.progress import Bar

FEWEST = 20  # labels
TRIES = 4  # scales, each a quarter of the one before, that are held against temperature scaling


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
    their means, and their standard deviations are scaled. The result is never worse than temperature scaling, neither
    on all labels nor cross-fitted over two halves of them; docs/calibration.md tells how the scale is chosen. From 100
    rows on `fit_novelty` makes a new reference of them; scores are those without its fallback.

    Args:
        model: What `ibnn.convert` made of the network.
        valid: Held-out data that the weights were not trained on, as `fit` takes it: a pair (x, y), a Dataset or a
            DataLoader. It is held in memory, and so are the network's outputs for it from all draws of one scale
            (about 8, and `samples` times the components at last): for dense outputs pass few rows.
        samples: Draws per component of later answers: what is passed to `predict`. `model.eval_samples` is set to it.
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
    bar = Bar("calibrate", shown=progress)
    with model._lock, _restored_on_error(model), evaluating(model), bar, torch.no_grad():
        options: Any = {"samples": samples, "seed": seed, "batch_size": batch_size}
        found = _Search(Outputs(model, x, tick=bar.advance, **options), y, temper=temperature).run(profile=profile)
    fit_novelty_if_possible(model, (x, y), seed=seed, batch_size=batch_size)
    return found


class _Settled(NamedTuple):
    """The scale that is taken, what comes with it, and why it is not the curve's choice, if so."""

    scale: float
    temperature: float
    scores: dict[str, float]
    cross_nll: tuple[float, float]
    reason: str


class _Search:
    """Chooses a scale; rows come in random order, so that the first half of them is a random half."""

    def __init__(self, outputs: Outputs, y: Tensor, *, temper: bool) -> None:
        self.outputs, self.model, self.likelihood = outputs, outputs.model, outputs.model.likelihood
        self.y, self.temper = y.to(outputs.device), temper
        self.first = 0.25 if outputs.trained else 0.02  # the smallest scale that is tried
        self.whole, self.half = slice(0, len(y)), len(y) // 2

    def run(self, *, profile: bool) -> Calibration:
        """Finds curve, choice and scores; then, at last, sets the model."""
        outputs, flat = self.outputs, self.outputs.flat
        self.model.set_posterior(mean=outputs.mean)
        plain = self._checked_plain()
        self._find_rows(flat)
        before = self._scores(outputs.predicted(flat, 1.0), None) if outputs.trained else self._scores(plain, 1.0)
        if isinstance(self.likelihood, Heads) and self.temper:
            self.likelihood.balance(plain, self.y, helpful_temperature)
        factors, kept, reason = flat, False, "One scale for all layers, as asked for."
        if profile:
            factors, kept, reason = self._profile(flat)
        zero = self._candidate(plain, 0.0, self.y, crossed=True)
        curve = self._curve(factors, zero)
        scaled = self._scores(plain, zero.temperature)
        found = self._settle(factors, curve, scaled)
        std = outputs.std(factors, found.scale)
        outputs.set_noise(factors, found.scale)
        self.likelihood.set_temperature(found.temperature)
        self.model.eval_samples, self.model.eval_seed = outputs.samples, outputs.seed
        means = [float(part.mean()) for part in std.split(outputs.layers.tolist(), 1)]
        return Calibration(
            curve=tuple(candidate.point() for candidate in curve),
            scale=found.scale,
            temperature=found.temperature,
            profile=dict(zip(self.model.latents, means, strict=True)),
            profile_kept=kept,
            reason=" ".join(filter(None, (reason, found.reason))),
            before=before,
            temperature_scaling=scaled,
            after=found.scores,
            cross_nll=found.cross_nll,
            rows=len(self.y),
        )

    def _checked_plain(self) -> Tensor:
        """Returns the outputs without noise; raises if they do not fit the labels, or labels are too few."""
        with explaining_shapes(self.model.net, self.outputs.inputs(slice(0, self.outputs.batch_size)), "valid"):
            plain = self.outputs.plain(self.whole)
            check_rows(plain[0, 0], len(self.y))
        self.likelihood.check(plain[0, 0], self.y)
        if not isinstance(self.likelihood, Weighted) and (labels := self.likelihood.data(self.y)) < FEWEST:
            remedy = "Hold out more: targets that are ignored do not count."
            raise ValueError(complaint("valid", f"data of at least {FEWEST} labels", labels, remedy))
        if plain.isnan().any() or plain.isposinf().any():  # −∞ masks a class
            got = "NaN or infinity in the network's outputs"
            raise ValueError(complaint("valid", "data that the network can answer", got, "Check the inputs' scale."))
        return plain

    def _find_rows(self, flat: Tensor) -> None:
        """Finds out whether each row can have its own draw: layers that do not see the batch first refuse that."""
        try:
            self.outputs.noisy(flat, self.first, slice(0, min(2, self.outputs.batch_size)))
        except ValueError:
            self.outputs.by_row = False

    def _settle(self, factors: Tensor, curve: list[Candidate], scaled: dict[str, float]) -> _Settled:
        """Tries the curve's choice with the draws that answers will be made of, then a quarter of it, and so on.

        The first that is not worse than temperature scaling is taken, and no noise if none is.
        """
        zero, chosen = curve[0], curve[self._choose(curve)]
        alone, reason = cross_fitted([zero], temper=True), ""
        if not self.temper:
            after = self._scores(self.outputs.predicted(factors, chosen.scale), 1.0)
            return _Settled(chosen.scale, 1.0, after, (alone, cross_fitted(curve, temper=False)), "")
        for step in range(TRIES if chosen.scale else 0):
            scale = chosen.scale / 4**step
            drawn = self.outputs.predicted(factors, scale)
            tried = self._candidate(drawn, scale, self.y, crossed=True)
            after, cross = self._scores(drawn, tried.temperature), cross_fitted([tried], temper=True)
            if cross <= alone and after["nll"] <= scaled["nll"]:
                reason = reason and f"{reason}: {scale:.3g} is not."
                return _Settled(scale, tried.temperature, after, (alone, cross), reason)
            reason = reason or (
                f"Noise of scale {scale:.3g} is worse than temperature scaling (NLL {after['nll']:.4f} to "
                f"{scaled['nll']:.4f}, cross-fitted {cross:.4f} to {alone:.4f})"
            )
        less = f"{reason}, and so is less of it: this" if reason else "Noise does not lower the NLL: this"
        reason = f"{less} is temperature scaling, without noise."
        return _Settled(0.0, zero.temperature, scaled, (alone, alone), reason)

    def _candidate(self, draws: Tensor, scale: float, y: Tensor, *, crossed: bool = False) -> Candidate:
        """Returns the losses of draws, with `crossed` also at the best temperatures of the two halves."""
        plain, counts = self.likelihood.losses(draws, y, 1.0)
        best = helpful_temperature(self.likelihood, draws, y)
        tempered, halves = self.likelihood.losses(draws, y, best)[0], [plain, plain]
        if crossed:
            parts = slice(0, self.half), slice(self.half, len(y))
            own = [helpful_temperature(self.likelihood, draws[:, :, part], y[part]) for part in parts]
            halves = [self.likelihood.losses(draws, y, temperature)[0] for temperature in own]
        return Candidate(scale, best, counts, plain, tempered, (halves[0], halves[1]))

    def _scores(self, draws: Tensor, temperature: float | None) -> dict[str, float]:
        return self.likelihood.score(self.likelihood.summarise(draws, temperature), self.y)

    def _curve(
        self, factors: Tensor, zero: Candidate, *, rows: slice | None = None, refinements: int = 2
    ) -> list[Candidate]:
        """Returns candidates of growing scale until it is clearly too much, and some around the choice, in order."""
        rows = rows or self.whole

        def tried(scale: float) -> Candidate:
            return self._candidate(self.outputs.noisy(factors, scale, rows), scale, self.y[rows])

        curve, scale = [zero], self.first
        for _ in range(8):
            curve.append(tried(scale))
            best = min(curve, key=self._value)
            difference, error = paired(self._losses(curve[-1]), self._losses(best), zero.counts)
            if not difference <= 4 * error:
                break
            scale *= 2
        for step in range(refinements):
            at = self._choose(curve)
            below = curve[at].scale / 2 ** (0.5 ** (step + 1))
            above = curve[at].scale * 2 ** (0.5 ** (step + 1)) if at else curve[1].scale / 2
            new = [above] if self.temper else [below, above] if at else [above]
            curve = sorted([*curve, *map(tried, new)], key=lambda c: c.scale)
        return curve

    def _losses(self, candidate: Candidate) -> Tensor:
        return candidate.tempered if self.temper else candidate.plain

    def _value(self, candidate: Candidate) -> float:
        value = float(self._losses(candidate).sum())
        return value if math.isfinite(value) else math.inf

    def _choose(self, curve: list[Candidate]) -> int:
        return choose([self._losses(c) for c in curve], curve[0].counts, largest=self.temper)

    def _profile(self, flat: Tensor) -> tuple[Tensor, bool, str]:
        """Returns factors of the layers, whether they are kept, and why."""
        few, second = slice(0, min(self.half, 512)), slice(self.half, len(self.y))
        zero = self._candidate(self.outputs.plain(few), 0.0, self.y[few])
        best = min(self._curve(flat, zero, rows=few, refinements=0), key=self._value)
        start, temperature = 2 * best.scale or self.first, best.temperature if self.temper else 1.0
        try:
            std = layer_scales(self.outputs, self.y[: self.half], start, temperature, temper=self.temper)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            return flat, False, f"One scale for all layers: scales of their own could not be fitted ({error})."
        scale = float(std[self.outputs.noisy_parts].log().mean().exp())
        factors = std / scale
        rivals = [
            self._candidate(self.outputs.noisy(w, a, second), a, self.y[second]).point()
            for w, a in ((flat, best.scale), (factors, scale))
        ]
        one, own = (p.tempered_nll if self.temper else p.nll for p in rivals)
        if not own < one:
            return flat, False, f"One scale for all layers: scales of their own did not help ({own:.4f} to {one:.4f})."
        self.first = scale / 2
        return factors, True, f"A scale for each layer: the NLL of a second half fell from {one:.4f} to {own:.4f}."


def _check_arguments(model: IBNN, samples: int, batch_size: int, seed: int) -> None:
    if not isinstance(model, IBNN):
        remedy = "Convert it first: calibrate(ibnn.convert(net), valid)."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    model.posterior()  # refuses a reverted one
    model.require_mixture()
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
    settings, reference = (model.eval_samples, model.eval_seed), model.reference
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        (model.eval_samples, model.eval_seed), model.reference = settings, reference
        raise
