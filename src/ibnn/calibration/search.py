"""CALIBRATION: how much noise a trained network's latents bear, and its temperature, chosen on held-out labels.

The weights stay as they are. With z ~ N(μ, (a·w·σ)²) in every layer the held-out NLL is a curve over the scale a; every
point of it has a best temperature T(a). Noise that costs no NLL is worth having: it averages networks, so it lowers the
error, and its disagreement is the epistemic uncertainty.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ibnn.batches import Source, as_source
from ibnn.calibration import profile as descent
from ibnn.calibration.check import Check, Settled
from ibnn.calibration.choice import measured
from ibnn.calibration.outputs import Outputs
from ibnn.calibration.plan import SWEEP, Plan, plan
from ibnn.calibration.race import Race
from ibnn.calibration.report import Calibration, Point
from ibnn.errors import complaint
from ibnn.generators import generators_restored
from ibnn.inputs import Inputs, check_rows, evaluating, slice_rows
from ibnn.layers.observe import explaining_shapes
from ibnn.likelihood import Heads
from ibnn.likelihood.temperature import helpful_temperature
from ibnn.network import IBNN
from ibnn.normal import check_seed
from ibnn.novelty.fitting import fit_novelty_if_possible
from ibnn.prediction import refuse_nan
from ibnn.progress import Bar

FEWEST = 20  # labels
RANKED = 5000  # most rows that `fit_novelty` sees


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
    on all labels nor cross-fitted over two halves of them; docs/calibration.md tells how the scale is chosen, in 40
    passes over the held-out rows, or over 1,000 rows if there are fewer. From 100 rows on `fit_novelty` makes a new
    reference of them.

    Args:
        model: What `ibnn.convert` made of the network.
        valid: Held-out data that the weights were not trained on, as `fit` takes it: a pair (x, y), a Dataset or a
            DataLoader. Held in memory with outputs from all draws of an answer: for dense outputs pass few rows.
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
    outputs = Outputs(model, x, samples=samples, seed=seed, batch_size=batch_size)
    with model._lock, _restored_on_error(model), evaluating(model), torch.no_grad():
        search = _Search(outputs, y, temper=temperature, profile=profile)
        with Bar("calibrate", search.plan.total, shown=progress) as bar:
            outputs.tick = lambda done: bar.update(done=done)
            found = search.run()
        _tell_novel(model, x, y, search.answers, seed=seed, batch_size=batch_size)
    return found


class _Search:
    """Chooses a scale; rows come in random order, so that the first half of them is a random half."""

    def __init__(self, outputs: Outputs, y: Tensor, *, temper: bool, profile: bool) -> None:
        self.outputs, self.model, self.likelihood = outputs, outputs.model, outputs.model.likelihood
        self.y, self.temper, self.profile = y.to(outputs.device), temper, profile
        self.first = 0.25 if outputs.trained else 0.02  # the smallest scale that is tried
        sizes = {"components": self.model.components, "samples": outputs.samples, "batch_size": outputs.batch_size}
        steps = descent.STEPS if profile else 0
        self.plan: Plan = plan(len(y), trained=outputs.trained, steps=steps, **sizes)
        self.answers = torch.empty(0)  # outputs that are answered with, (K, S, N, …)

    def run(self) -> Calibration:
        """Finds curve, choice and scores; then, at last, sets the model."""
        outputs, flat = self.outputs, self.outputs.flat
        self.model.set_posterior(mean=outputs.mean)
        plain = self._checked_plain()
        self._find_rows(flat)
        check = Check(outputs, self.y, plain, self.plan, temper=self.temper)
        before = check.scores(plain, 1.0)
        if outputs.trained:
            before = check.scores(check.cycled(check.drawn(flat, 1.0)), None)
        if isinstance(self.likelihood, Heads) and self.temper:
            self.likelihood.balance(plain, self.y, helpful_temperature)
        race, scale, reason = self._raced(flat, plain)
        zero = measured(self.likelihood, plain, 0.0, self.y)
        found, self.answers = check.settled(race, scale, zero)
        outputs.set_noise(race.factors, found.scale)
        self.likelihood.set_temperature(found.temperature)
        self.model.eval_samples, self.model.eval_seed = outputs.samples, outputs.seed
        return self._report(race, found, before, reason, race.points(zero))

    def _report(
        self, race: Race, found: Settled, before: dict[str, float], reason: str, curve: tuple[Point, ...]
    ) -> Calibration:
        std, names = self.outputs.std(race.factors, found.scale), list(self.model.latents)
        means = [float(part.mean()) for part in std.split(self.outputs.layers.tolist(), 1)]
        units = zip(names, self.model.unit_std.tolist(), self.model.has_units.tolist(), strict=True)
        return Calibration(
            curve=curve,
            scale=found.scale,
            temperature=found.temperature,
            profile=dict(zip(names, means, strict=True)),
            unit_profile={name: std for name, std, own in units if own},
            profile_kept=race.factors is not self.outputs.flat,
            reason=" ".join(filter(None, (reason, found.reason))),
            before=before,
            temperature_scaling=found.scaled,
            after=found.scores,
            cross_nll=found.cross_nll,
            gain=found.gain,
            rows=len(self.y),
            passes=self.outputs.passed / len(self.y),
        )

    def _checked_plain(self) -> Tensor:
        """Returns the outputs without noise; raises if they do not fit the labels, or labels are too few."""
        with explaining_shapes(self.model.net, self.outputs.inputs(self.outputs.everything[:256]), "valid"):
            plain = self.outputs.plain(self.outputs.everything)
            check_rows(plain[0, 0], len(self.y))
        self.likelihood.check(plain[0, 0], self.y)
        if (labels := self.likelihood.count(self.y)) < FEWEST:
            remedy = "Hold out more: targets that are ignored do not count."
            raise ValueError(complaint("valid", f"data of at least {FEWEST} labels", labels, remedy))
        if plain.isnan().any() or plain.isposinf().any():  # −∞ masks a class
            got = "NaN or infinity in the network's outputs"
            raise ValueError(complaint("valid", "data that the network can answer", got, "Check the inputs' scale."))
        return plain

    def _find_rows(self, flat: Tensor) -> None:
        """Finds out whether each row can have its own draw: layers that do not see the batch first refuse that."""
        try:
            self.outputs.noisy(flat, self.first, self.outputs.everything[: min(2, self.outputs.batch_size)], 2)
        except ValueError:
            self.outputs.by_row = False

    def _raced(self, flat: Tensor, plain: Tensor) -> tuple[Race, float, str]:
        """Returns the race with the layers' factors that won, the scale to take, and why these factors."""

        def race(factors: Tensor) -> Race:
            return Race(self.outputs, factors, plain, self.y, self.plan, temper=self.temper)

        one = race(flat)
        reserve = self.plan.steps * descent.COST
        curve = one.narrow(one.begin(self.first, SWEEP), reserve)
        if not self.profile:
            return one, one.finish(curve), "One scale for all layers, as asked for."
        best, first_half = one.best(curve), self.y[: len(self.y) // 2]
        start, temperature = 2 * best.scale or self.first, best.temperature if self.temper else 1.0
        options: Any = {"temper": self.temper, "steps": self.plan.steps}
        try:
            std = descent.layer_scales(self.outputs, first_half, start, temperature, **options)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            reason = f"One scale for all layers: scales of their own could not be fitted ({error})."
            return one, one.finish(curve), reason
        scale = float(std[self.outputs.noisy_parts].log().mean().exp())
        own = race(std / scale)
        own.rows = one.rows
        layers = own.begin(scale, 2)
        without, nll = (float(best.losses(self.temper).sum() / best.counts.sum()) for best in (best, own.best(layers)))
        if not nll < without:
            reason = f"One scale for all layers: scales of their own did not help ({nll:.4f} to {without:.4f})."
            return one, one.finish(curve), reason
        reason = f"A scale for each layer: the NLL of a second half fell from {without:.4f} to {nll:.4f}."
        return own, own.finish(layers), reason


def _tell_novel(model: IBNN, x: Inputs, y: Tensor, answers: Tensor, *, seed: int, batch_size: int) -> None:
    """Makes a reference of the held-out rows: each half is ranked with statistics of the other."""
    part = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:RANKED].sort().values
    data = as_source((slice_rows(x, part, len(y)), y[part]), batch_size=batch_size, shuffled=False)
    given = model.likelihood.summarise(answers[:, :, part.to(answers.device)]).to(torch.device("cpu"))
    fit_novelty_if_possible(model, data, answers=given, seed=seed, batch_size=batch_size)


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
