"""TRAINING: Algorithm 1 as an engine. accelerate does devices, workers and precision; this file says what a step is.

Everything random in a step is a pure function of (seed, step): order, dropout, draws. So a run that was stopped at any
moment and taken up from a checkpoint ends with the very bits of one that was not.
"""

import copy
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ibnn.baselines import SWAG, Plain
from ibnn.batches import Share, Source, Worker, as_source
from ibnn.calibration import calibrate
from ibnn.diagnosis import diagnose
from ibnn.errors import complaint
from ibnn.inputs import batch_length, check_rows, slice_rows, tensors, tree_map
from ibnn.layers.observe import explaining_shapes
from ibnn.likelihood import Heads, temperature
from ibnn.network import IBNN
from ibnn.normal import Stream, generators_restored, seed_generators
from ibnn.objective import ELBO
from ibnn.prediction import draws, predict, refuse_nan
from ibnn.training import checkpoint, strength
from ibnn.training.averaging import Average, estimate_statistics, load
from ibnn.training.divergence import DivergedError, first_not_finite
from ibnn.training.monitor import History, Monitor, write_history
from ibnn.training.precision import bf16_fault
from ibnn.training.recipe import Recipe

Trainable = IBNN | Plain
Callback = Callable[[dict[str, Any], Trainable], None]
DEFAULT_EPOCHS = 30
ASKED = 128  # inputs that the doctor looks at in the end


@dataclass
class _Progress:
    """Where a run is: what a checkpoint holds besides tensors."""

    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)  # loss, nll, kl, each × mass of the targets; mass
    seen: list[float] = field(default_factory=lambda: [0.0] * 2)  # nll × mass and mass since the last look
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    waited: int = 0  # evaluations since the best one
    prior_std: float = 0.0  # s, which may be steered
    temperature: float = 1.0  # that it was settled with
    weaker: float = 1.0  # what σ was multiplied by in the end
    relative: list[float] = field(default_factory=list)  # temperatures of several heads over the common one
    looks: list[dict[str, float]] = field(default_factory=list)  # what it was steered by
    looked: int = 0  # rows that went through the network for it
    finished: str = ""
    seconds: float = 0.0  # of training, over all sittings


def fit(
    model: Trainable,
    train: Any,
    valid: Any = None,
    *,
    recipe: Recipe | str | None = None,
    run_dir: str | Path | None = None,
    resume: Literal["auto", "never", "must"] = "auto",
    callbacks: Sequence[Callback] = (),
    n_data: int | None = None,
    quiet: bool = False,
    **changes: Any,
) -> History:
    """Trains a converted network with Algorithm 1, or a baseline with its own objective.

    Held-out labels steer the strength of the noise unless the recipe has a fixed `beta`: those of `valid`, or of a
    tenth of the training data that is then not trained on. The test set has no business here.

    Arguments and data are checked before the first step: tensors and validation data as a whole (so they are loaded
    once more), of other training data the first batch. If training fails, modes are left as they were.

    Args:
        model: Made by `ibnn.convert`, or a method of `ibnn.baselines`; trained in place.
        train: A Dataset, a DataLoader, or a pair (inputs, targets) of tensors or arrays.
        valid: Held-out data, likewise; evaluated as training goes on.
        recipe: A `Recipe`, the name of one, or None for the defaults.
        run_dir: Folder for checkpoints, recipe.toml and history.csv. The same call on the same folder goes on where it
            was stopped.
        resume: "auto" goes on if there is something to go on with, "never" starts anew, "must" insists.
        callbacks: Called as `callback(row, model)` after every row of the history.
        n_data: Number of targets in the training set, if it cannot be counted (see `IBNN.elbo`).
        quiet: Shows nothing.
        **changes: Fields of the recipe to change, e.g. `epochs=10`.

    Returns:
        The history. With `patience` the model is the one of the best evaluation, with `ema` or `swa` the average. It
        is left in eval mode, and with the recipe's `kl` if that names one.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile: fit trains what it wraps
    if not isinstance(model, Trainable):
        expected = "made by ibnn.convert, or one of ibnn.baselines"
        raise TypeError(complaint("model", expected, type(model).__name__, "Convert the network first."))
    recipe = Recipe.named(recipe) if isinstance(recipe, str) else Recipe() if recipe is None else recipe
    folder = Path(run_dir) if run_dir else None
    _check_options(recipe, folder, resume, callbacks, n_data)
    recipe = recipe.but(**changes) if changes else recipe
    if not isinstance(model, IBNN):
        recipe = _without_latents(recipe)
    pack = model.likelihood.pack
    source = as_source(train, batch_size=recipe.batch_size, workers=recipe.workers, pack=pack)
    held_out = None
    if valid is not None:
        held_out = as_source(valid, batch_size=256, name="valid", workers=recipe.workers, shuffled=False, pack=pack)
    elif recipe.patience:
        raise ValueError(complaint("patience", "0 without validation data", recipe.patience, "Pass valid=(x, y)."))
    for data, name in ((source, "train"), (held_out, "valid")):
        if data is not None:
            _check_data(model, data, name)
    whole, note, rows = source, "", source.rows
    if recipe.beta == "auto":
        given = held_out
        source, held_out, note = _hold_out(source, held_out, recipe.seed)
        recipe = recipe.but(beta=1.0, refit=False) if note else recipe
        whole = source.joined(given) if given is not None and recipe.refit else whole
    if recipe.calibrate and held_out is None:
        raise ValueError(complaint("valid", "held-out data to calibrate by", None, "Pass valid=(x, y)."))
    n_data = n_data and max(round(n_data * source.rows / rows), 1)
    start, prior_std = copy.deepcopy(model.state_dict()) if recipe.refit else {}, model.prior_std
    with _mode_restored_on_error(model):
        run = _Run(model, source, held_out, recipe, folder, n_data, quiet, note)
        history = run.run(resume, callbacks)
        if recipe.refit:
            second = run.again(whole, start, prior_std).run("auto" if resume == "must" else resume, callbacks)
            history = replace(second, first=history)
    return history


def _check_options(
    recipe: Any, folder: Path | None, resume: str, callbacks: Sequence[Callback], n_data: int | None
) -> None:
    """Raises if an argument of `fit` makes no sense, whatever the data."""
    if not isinstance(recipe, Recipe):
        got = type(recipe).__name__
        raise TypeError(
            complaint("recipe", "a Recipe, the name of one, or None", got, "Pass fields: fit(..., lr=0.01).")
        )
    if resume not in ("auto", "never", "must"):
        raise ValueError(complaint("resume", '"auto", "never" or "must"', repr(resume), 'Pass "auto".'))
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        got, remedy = repr(callbacks), "Pass callbacks=[function]: it is called as function(row, model)."
        raise TypeError(complaint("callbacks", "a list of functions", got, remedy))
    if n_data is not None and (isinstance(n_data, bool) or not isinstance(n_data, int) or n_data < 1):
        remedy = "Pass the number of targets in the training set, or leave it out: they are counted."
        raise ValueError(complaint("n_data", "an integer of at least 1", repr(n_data), remedy))
    for place in () if folder is None else (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(complaint("run_dir", "a folder", f"the file {place}", "Pass another name."))


def _check_data(model: Trainable, source: Source, name: str) -> None:
    """Raises if the network cannot take the inputs or the likelihood the targets, before anything is trained.

    Tensors are looked at as a whole, and so are validation data; of training data that have to be loaded the first
    batch. One batch goes through the network.
    """
    device, output, rows = next(model.parameters()).device, None, 0
    with generators_restored(), torch.no_grad():
        for share in source.epoch(0, 0):
            x, y = (tree_map(lambda t: t.to(device), part) for part in (share.x, share.y))
            if output is None:
                with explaining_shapes(model.net, x, name):
                    output = next(model.each_draw(x, 1, 0))[0]
                    check_rows(output, batch_length(x))
            if isinstance(source.data, tuple):
                refuse_nan(source.data[0], argument=name, infinity=True)
                model.likelihood.check(output, source.data[1].to(device))
                return
            model.likelihood.check(output, y)
            if name == "train":  # NaN in others than tensors is found, by its row, when the loss is not finite
                return
            refuse_nan(x, rows, name, infinity=True)
            rows += share.total


@contextmanager
def _mode_restored_on_error(model: Trainable) -> Iterator[None]:
    """Puts train and eval modes, and which KL it is, back if the block fails."""
    modes, kl_kind = [(module, module.training) for module in model.modules()], getattr(model, "kl_kind", None)
    try:
        yield
    except BaseException:
        for module, training in modes:
            module.training = training
        if isinstance(model, IBNN) and kl_kind is not None:
            model.kl_kind = kl_kind
        raise


def _without_latents(recipe: Recipe) -> Recipe:
    """What a recipe says to a baseline: what it says of latents has no effect, and a KL has its full weight."""
    if recipe.calibrate or recipe.refit:
        got = "a recipe with calibrate or refit"
        raise ValueError(complaint("recipe", "one for a network without latents", got, "Leave them out."))
    return recipe.but(beta=1.0) if recipe.beta == "auto" else recipe


def _hold_out(source: Source, held_out: Source | None, seed: int) -> tuple[Source, Source | None, str]:
    """Training data, the data that steer the strength, and why it is not steered, if it is not."""
    if held_out is not None:
        few = held_out.rows < strength.FEWEST_HELD_OUT
        return source, held_out, f"only {held_out.rows} held-out examples" if few else ""
    if not source.divisible:
        return source, None, "no held-out data, and none can be split off where a sampler or iterable decides"
    if source.rows < strength.FEWEST:
        return source, None, f"no held-out data, and only {source.rows} examples"
    return *source.split(strength.held_out_rows(source.rows), seed), ""


class _Run:
    """One training run."""

    def __init__(
        self,
        model: Trainable,
        source: Source,
        valid: Source | None,
        recipe: Recipe,
        folder: Path | None,
        n_data: int | None,
        quiet: bool,
        note: str = "",
        replayed: "_Progress | None" = None,
    ) -> None:
        self.model, self.source, self.valid, self.recipe, self.folder = model, source, valid, recipe, folder
        self.note, self.replayed = note, replayed  # why the strength is not steered; the run whose strengths serve
        self.given_n_data, self.n_data = n_data, n_data or _count_targets(model, source)
        self.progress, self.signal, self.since = _Progress(), 0, time.monotonic()
        self.total = recipe.steps or (recipe.epochs or DEFAULT_EPOCHS) * source.steps
        self.steered = recipe.beta == "auto"
        looks = self.steered and (replayed is None or replayed.looks)  # patience may have come before the first
        number, self.look_rows = strength.afford(self.total * source.batch_size, valid.rows if valid else source.rows)
        number = len(replayed.looks) if replayed else number
        self.look_steps = strength.look_steps(self.total, number) if looks else frozenset()
        trackers = list(recipe.trackers)
        if trackers and folder is None:
            raise ValueError(complaint("run_dir", "a folder when there are trackers", None, "Pass run_dir=..."))
        self.owns_state = not AcceleratorState._shared_state
        if not self.owns_state and AcceleratorState().mixed_precision != recipe.precision:
            got = f"an Accelerator of {AcceleratorState().mixed_precision!r}"
            raise ValueError(complaint("precision", "that of the Accelerator made before", got, "Make them equal."))
        self.accelerator = Accelerator(
            mixed_precision=recipe.precision,
            log_with=trackers or None,
            project_config=ProjectConfiguration(project_dir=str(folder)) if folder else None,
        )
        on_cpu = self.accelerator.device.type == "cpu"
        if recipe.precision == "bf16" and on_cpu and (fault := bf16_fault()):
            self._give_back()
            raise ValueError(fault)
        if trackers:
            self.accelerator.init_trackers("ibnn")
        self.worker = Worker(self.accelerator.process_index, self.accelerator.num_processes)
        if source.rows < self.worker.world:
            raise ValueError(complaint("train", "at least a row for each worker", source.rows, "Use fewer workers."))
        if isinstance(model, IBNN):
            model.kl_kind = recipe.kl or model.kl_kind
        self.untrained = recipe.calibrate and int(model.examples) == 0
        model.reseed(recipe.seed)
        if recipe.sync_batchnorm and self.worker.world > 1:
            model.net = nn.SyncBatchNorm.convert_sync_batchnorm(model.net)
        self.optimisers = self._make_optimisers()
        self.loss, *self.prepared = self.accelerator.prepare(_Loss(model, recipe), *self.optimisers)
        if on_cpu and recipe.precision == "no":
            self.prepared = self.optimisers  # the same steps without what accelerate looks up at each: a tenth of them
        self.frozen = [m for m in model.net.modules() if isinstance(m, _BatchNorm)] if recipe.freeze_batchnorm else []
        self.average = Average()  # of EMA or SWA
        self.best: dict[str, Tensor] = {}  # the state of the best evaluation, by name
        self.monitor = Monitor(self.total, 0, quiet=True)
        self.quiet = quiet or not self.accelerator.is_main_process

    def run(self, resume: str, callbacks: Sequence[Callback]) -> History:
        """All of it."""
        with generators_restored(), self.catching_signals():
            try:
                self.take_up(resume)
                self.since = time.monotonic()
                self.train(callbacks)
            finally:
                self.close()
        return self.history()

    def again(self, source: Source, start: dict[str, Tensor], prior_std: float) -> "_Run":
        """The same run from the start on other data, without validation, with this one's strengths."""
        load(self.model, start)
        self.model.prior_std = prior_std
        folder, found = self.folder and self.folder / "refit", self.progress
        n_data = self.given_n_data and round(self.given_n_data * source.rows / self.source.rows)
        return _Run(self.model, source, None, self.recipe, folder, n_data, self.quiet, replayed=found)

    # ------------------------------------------------------------------------------------------------- Algorithm 1

    def train(self, callbacks: Sequence[Callback]) -> None:
        """For each minibatch: spread it over the components, draw, one step on weights and latents together."""
        progress, per_epoch = self.progress, self.source.steps
        self.monitor = Monitor(self.total, progress.step, quiet=self.quiet)
        self.model.zero_grad()  # what a failed run, or the caller, has left
        if self.untrained and progress.step == 0:
            self._calibrate()
        if self.note:
            self.monitor.say(f'beta = 1 stands in for "auto": {self.note}.')
        while not progress.finished:
            epoch, first = divmod(progress.step, per_epoch)
            shares = self.source.epoch(self.recipe.seed, epoch, first=first, worker=self.worker)
            while True:
                seed_generators(self.recipe.seed, progress.step, self.worker.rank, Stream.LOADING)
                share = next(shares, None)
                if share is None:  # fewer batches than announced: a last one with too few rows for all workers
                    progress.step = min((epoch + 1) * per_epoch, self.total)
                    break
                seed_generators(
                    self.recipe.seed, progress.step, self.worker.rank, Stream.FORWARD
                )  # however it was loaded
                sums, rates = self._step(share)
                progress.step += 1
                self._record(sums, rates, share)
                if progress.step >= self.total or progress.step % per_epoch == 0:
                    break
                self._maybe_stop_or_save()
            self._end_epoch(callbacks)

    def _step(self, share: Share) -> tuple[Tensor, dict[str, float]]:
        """Gradients of the batch, piece by piece; then one step of both optimisers. Sums of loss, nll, kl × mass."""
        if self.progress.step in self.look_steps:
            self._look()
        recipe, rates = self.recipe, self._rates(self.progress.step)
        self._set_rates(rates)
        self.model.train()
        for norm in self.frozen:
            norm.eval()
        pieces = list(_pieces(share, recipe.accumulate))
        sums: list[Tensor] = []
        whole = self._whole_mass(share)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            mass = float(self.model.likelihood.mass(piece.y))
            with nullcontext() if last else self.accelerator.no_sync(self.loss):
                x, y = (
                    tree_map(lambda tensor: tensor.to(self.accelerator.device), part) for part in (piece.x, piece.y)
                )
                terms: ELBO = self.loss(x, y, rates["beta"], self.n_data, (piece.offset, piece.total))
                # The loss of the whole batch is the sum over pieces and the mean over workers (DDP) of:
                nll = terms.nll * (mass * self.worker.world / whole)
                loss = nll + (terms.loss - terms.nll) / len(pieces)
                self._check_finite(loss, piece)
                self.accelerator.backward(loss)
            sums.append(torch.stack([terms.loss.detach(), terms.nll.detach(), terms.kl.detach()]) * mass)
        self._clip(share)
        for optimiser in self.prepared:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.model.examples.add_(share.total)
        if recipe.ema:
            self.average.update(self.model, recipe.ema)
        return torch.stack(sums).sum(0), rates

    def _converted(self) -> IBNN:
        """The model where only one with latents comes."""
        assert isinstance(self.model, IBNN), "a baseline has no noise to steer"
        return self.model

    def _calibrate(self) -> None:
        """Starts from the noise and the temperature that the weights bear as they are."""
        model = self._converted()
        found = calibrate(model, self.valid, seed=self.recipe.seed, progress=not self.quiet)
        self.monitor.say(str(found))
        model.prior_std = max(found.scale, strength.WEAKEST)
        model.set_posterior(std=model.posterior().std.clamp_min(1e-3))  # σ = 0 could not be trained

    def _look(self) -> None:
        """Lets the held-out labels steer the strength of the noise."""
        progress, model = self.progress, self._converted()
        if self.replayed is not None:
            look = self.replayed.looks[min(len(progress.looks), len(self.replayed.looks) - 1)] | {"step": progress.step}
        else:
            look = {"step": progress.step} | self._seen()
        model.set_posterior(std=model.posterior().std * (look["prior_std"] / model.prior_std))  # σ goes along at once
        model.prior_std = look["prior_std"]
        progress.looks.append(look)

    def _seen(self) -> dict[str, float]:
        """What a look sees, and the strength that follows from it."""
        likelihood = self.model.likelihood
        draws, targets = self._held_out_draws(-(-strength.DRAWS // self.model.components), self.look_rows)
        best, held_out_nll = temperature.confidence(likelihood, draws, targets)
        nll, mass = self._over_workers(self.progress.seen)
        self.progress.seen = [0.0] * 2
        seen = {"temperature": best, "training_nll": nll / max(mass, 1e-12), "held_out_nll": held_out_nll}
        return seen | {"prior_std": strength.next_std(self.model.prior_std, strength.wish(likelihood, **seen))}

    def _settle(self) -> None:
        """At the end: the temperature that held-out labels ask for, and less noise if the network is underconfident.

        A temperature below 1 sharpens every draw but not their disagreement; weaker noise does.
        """
        model, likelihood = self._converted(), self.model.likelihood
        if self.replayed is not None:
            model.set_posterior(std=model.posterior().std * self.replayed.weaker)
            likelihood.set_temperature(self.replayed.temperature)
            if isinstance(likelihood, Heads):
                likelihood.set_temperature(self.replayed.temperature, torch.tensor(self.replayed.relative))
        else:
            if isinstance(likelihood, Heads):
                drawn = self._held_out_draws(-(-2 * strength.DRAWS // model.components), 2 * self.look_rows)
                likelihood.balance(*drawn, temperature.settled_temperature)
                self.progress.relative = likelihood.relative.tolist()
            std = model.posterior().std.detach()
            found: list[tuple[float, float, float]] = []  # NLL, factor on σ, temperature
            for weaker in strength.WEAKER:
                model.set_posterior(std=std * weaker)
                draws, targets = self._held_out_draws(-(-2 * strength.DRAWS // model.components), 2 * self.look_rows)
                best = temperature.settled_temperature(likelihood, draws, targets)
                found.append((temperature.nll(likelihood, draws, targets, best), weaker, best))
                if found[-1] > min(found) or temperature.confidence(likelihood, draws, targets)[0] >= 1:
                    break
            _, self.progress.weaker, self.progress.temperature = min(found)
            model.set_posterior(std=std * self.progress.weaker)
            likelihood.set_temperature(self.progress.temperature)

    def _held_out_draws(self, samples: int, rows: int) -> tuple[Tensor, Tensor]:
        """Draws (K, S, N, …) for so many of the held-out examples, and their targets."""
        source = self.valid
        assert source is not None, "held-out data steer"
        if source.divisible and source.rows > rows:
            source = source.split(rows, self.recipe.seed)[1]  # any, not the first: they may be sorted
        inputs, targets = self._inputs(source, rows)
        drawn, device = draws(self.model, inputs, samples=samples), self.accelerator.device
        self.progress.looked += math.prod(drawn.shape[:3])
        return drawn.to(device), torch.cat(targets).to(device)

    # -------------------------------------------------------------------------------------------------- parts of it

    def _make_optimisers(self) -> list[torch.optim.Optimizer]:
        """One optimiser for the weights (and the likelihood's parameters), one for the latents if there are any."""
        recipe = self.recipe
        groups = self.model.parameter_groups(recipe.lr, recipe.latent_lr, recipe.weight_decay, undo_k=recipe.undo_k)
        latents = [group for group in groups if group["name"] == "latents"]
        others = [group for group in groups if group["name"] != "latents"]
        kinds = ((recipe.optimiser, others), (recipe.latent_optimiser, latents))
        return [self._optimiser(kind, part) for kind, part in kinds if part]

    def _optimiser(self, kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if kind == "adam":
            return torch.optim.AdamW(groups)
        return torch.optim.SGD(groups, momentum=self.recipe.momentum, nesterov=self.recipe.momentum > 0)

    def _rates(self, step: int) -> dict[str, float]:
        """β and learning rates at the middle of a step."""
        recipe, t = self.recipe, (step + 0.5) / self.total
        steered = strength.grip(t, n_data=self.n_data, nodes=self.model.nodes) if self.steered else None
        return {
            "beta": recipe.beta_at(t) if steered is None else steered,
            "lr": recipe.lr * recipe.schedule.factor(t),
            "latent_lr": recipe.latent_lr * recipe.latent_schedule.factor(t),
        }

    def _whole_mass(self, share: Share) -> float:
        """What the loss of the whole batch is divided by, over all workers."""
        mass = self.model.likelihood.mass(share.y).to(self.accelerator.device)
        return max(float(self.accelerator.reduce(mass) if self.worker.world > 1 else mass), 1e-12)

    def _set_rates(self, rates: dict[str, float]) -> None:
        recipe = self.recipe
        faster = (recipe.noise_lr or recipe.lr) / recipe.lr
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                rate = rates["latent_lr" if group["name"] == "latents" else "lr"]
                group["lr"] = rate * faster if group["name"] == "likelihood" else rate

    def _clip(self, share: Share) -> None:
        """Limits the gradient norms of weights and latents apart; refuses what is not finite."""
        for optimiser, limit in zip(self.optimisers, (self.recipe.clip, self.recipe.latent_clip), strict=False):
            parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
            norm = self.accelerator.clip_grad_norm_(parameters, limit or float("inf"))
            if self.recipe.precision != "fp16" and not bool(torch.isfinite(torch.as_tensor(norm))):
                names = {id(p): name for name, p in self.model.named_parameters()}
                bad = [names[id(p)] for p in parameters if not bool(p.grad.isfinite().all())]
                what = f"the gradient of {bad[0]!r} is not finite" if bad else "the gradient's norm overflows"
                self._diverged(what, share)

    def _check_finite(self, loss: Tensor, piece: Share) -> None:
        if not bool(loss.detach().isfinite()):
            where = first_not_finite(self.model, piece)
            self._diverged(f"the loss is {loss.item()} ({where})", piece)

    def _refuse_not_finite(self, piece: Share) -> None:
        """Raises if inputs are not finite."""
        rows = batch_length(piece.x)
        for tensor in tensors(piece.x):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == rows and not tensor.isfinite().all():
                row = piece.offset + int((~tensor.isfinite()).reshape(rows, -1).any(1).nonzero()[0])
                epoch, batch = divmod(self.progress.step, self.source.steps)
                number = self.source.number(self.recipe.seed, epoch, batch, row)
                got = "NaN or infinity in " + (f"row {number}" if number is not None else f"row {row} of batch {batch}")
                raise ValueError(complaint("train", "finite", got, "Clean or drop that row."))

    def _diverged(self, what: str, piece: Share) -> None:
        """Raises, with the data to blame if they are not finite."""
        self._refuse_not_finite(piece)
        kept = f" The last good checkpoint is kept in {self.folder}." if self.folder else ""
        raise DivergedError(
            f"Training diverged at step {self.progress.step}: {what}. Lower lr={self.recipe.lr:g} or "
            f"latent_lr={self.recipe.latent_lr:g}, set clip and latent_clip to 1, or convert with less init_std.{kept}"
        )

    def _record(self, sums: Tensor, rates: dict[str, float], share: Share) -> None:
        values, mass = sums.tolist(), float(self.model.likelihood.mass(share.y))
        for index, value in enumerate([*values, mass]):
            self.progress.sums[index] += value
        self.progress.seen = [self.progress.seen[0] + values[1], self.progress.seen[1] + mass]
        shown = {name: value / max(mass, 1e-12) for name, value in zip(("loss", "nll", "kl"), values, strict=True)}
        self.monitor.step(rates | shown, share.total)

    def _end_epoch(self, callbacks: Sequence[Callback]) -> None:
        """Averages, evaluates, writes a row, saves; decides whether to go on."""
        progress, recipe = self.progress, self.recipe
        epoch = -(-progress.step // self.source.steps)
        last = progress.step >= self.total
        if recipe.swa < 1 and progress.step > recipe.swa * self.total:
            self.model.collect() if isinstance(self.model, SWAG) else self.average.update(self.model)
        if last and (self.average.state or isinstance(self.model, SWAG)):
            self._use_average()
        if last or epoch % recipe.evaluate_every == 0:
            self._write_row(epoch, callbacks)
        if last:
            progress.finished = "finished"
        elif recipe.patience and progress.waited >= recipe.patience:
            progress.finished = "patience"
        if progress.finished and self.best:
            load(self.model, self.best)
            self.model.prior_std = (progress.best or {}).get("prior_std", self.model.prior_std)
        if progress.finished and self.steered:
            self._settle()
        self._maybe_stop_or_save(at_epoch=True)

    def _write_row(self, epoch: int, callbacks: Sequence[Callback]) -> None:
        progress, recipe = self.progress, self.recipe
        loss, nll, kl, mass = self._over_workers(self.progress.sums)
        row: dict[str, Any] = {"epoch": epoch, "step": progress.step}
        row |= {"loss": loss / mass, "nll": nll / mass, "kl": kl / mass} | self._rates(progress.step - 1)
        row |= {"prior_std": self.model.prior_std} if self.steered else {}
        progress.sums = [0.0] * 4
        if self.valid is not None:
            row |= {f"valid_{name}": value for name, value in self._evaluate(self.valid).items()}
            progress.waited += 1
            if progress.best is None or row["valid_nll"] < progress.best["valid_nll"]:
                progress.best, progress.waited = row, 0
                if recipe.patience:
                    self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        progress.rows.append(row)
        self.monitor.row(row)
        self.accelerator.log({name: value for name, value in row.items() if name != "step"}, step=progress.step)
        if self.folder and self.accelerator.is_main_process:
            write_history(self.folder / "history.csv", progress.rows)
        for callback in callbacks:
            callback(row, self.model)

    def _use_average(self) -> None:
        """Puts the average in the model's place."""
        self.model.settle() if isinstance(self.model, SWAG) else load(self.model, self.average.state)
        if self.recipe.swa < 1 and not self.frozen:
            shares = self.source.epoch(self.recipe.seed, 0)
            device = self.accelerator.device
            estimate_statistics(self.model, (tree_map(lambda t: t.to(device), share.x) for share in shares))

    def _evaluate(self, source: Source) -> dict[str, float]:
        """Scores on validation data; the workers share the batches of `predict`."""
        inputs, targets = self._inputs(source)
        prediction = predict(self.model, inputs, samples=self.recipe.eval_samples, progress=False)
        return self.model.likelihood.score(prediction, torch.cat(targets).cpu())

    def _inputs(self, source: Source, rows: int | None = None) -> tuple[Iterator[Any], list[Tensor]]:
        """The inputs of the first batches of a source, for `predict`; their targets are filled in as it goes on."""
        targets: list[Tensor] = []

        def inputs() -> Iterator[Any]:
            for share in source.epoch(0, 0):
                targets.append(share.y)
                yield (share.x,)
                if rows is not None and sum(map(len, targets)) >= rows:
                    return

        return inputs(), targets

    def _over_workers(self, sums: list[float]) -> list[float]:
        """Running sums of all workers together."""
        if self.worker.world == 1:
            return list(sums)
        mine = torch.tensor(sums, dtype=torch.float64, device=self.accelerator.device)
        return list(self.accelerator.reduce(mine, "sum").tolist())

    # -------------------------------------------------------------------------------------------------- checkpoints

    def _maybe_stop_or_save(self, at_epoch: bool = False) -> None:
        every = self.recipe.checkpoint_every
        due = self.progress.step % every == 0 if every else at_epoch
        stop = self._agreed_signal(at_epoch)
        now = time.monotonic()
        self.progress.seconds, self.since = self.progress.seconds + now - self.since, now
        if self.folder and (due or stop or self.progress.finished):
            self._save()
        if stop and not self.progress.finished:
            self.monitor.close()
            at = f"step {self.progress.step} of {self.total}; saved in {self.folder}"
            print(f"Stopped at {at}: the same call goes on from there.", file=sys.stderr)
            raise SystemExit(128 + stop)

    def _agreed_signal(self, at_epoch: bool) -> int:
        """The signal to stop on. Several workers must stop at the same step, and ask each other only now and then."""
        if self.worker.world == 1:
            return self.signal
        if self.folder is None or not (at_epoch or self.progress.step % 10 == 0):
            return 0
        mine = torch.tensor([self.signal], device=self.accelerator.device)
        return int(self.accelerator.gather(mine).max())

    def _save(self) -> None:
        for name in ("sums", "seen"):  # from here on the first worker holds them
            total = self._over_workers(getattr(self.progress, name))
            setattr(self.progress, name, total if self.accelerator.is_main_process else [0.0] * len(total))
        if not self.accelerator.is_main_process or self.folder is None:
            return
        kept: dict[str, Tensor] = {}
        for prefix, state in (("model", self.model.state_dict()), ("average", self.average.state), ("best", self.best)):
            kept |= {f"{prefix}/{name}": value for name, value in state.items()}
        optimisers = []
        for number, optimiser in enumerate(self.optimisers):
            packed, data = checkpoint.pack_optimiser(optimiser, f"optimiser{number}")
            kept |= packed
            optimisers.append(data)
        self.progress.prior_std = self.model.prior_std
        data = {"progress": asdict(self.progress), "recipe": self.recipe.to_toml(), "optimisers": optimisers}
        data |= {"averaged": self.average.count, "facts": self._facts()}
        checkpoint.save(self.folder / "checkpoints", self.progress.step, kept, data, keep=self.recipe.keep)

    def take_up(self, resume: str) -> None:
        """Restores the newest whole checkpoint, if there is one and it is wanted; writes recipe.toml."""
        saved = None
        if self.folder is not None:
            folder = self.folder / "checkpoints"
            if resume == "never" and self.accelerator.is_main_process:
                checkpoint.clear(folder)
                checkpoint.clear(self.folder / "refit" / "checkpoints")
            self.accelerator.wait_for_everyone()
            saved = checkpoint.latest(folder)
        if saved is None and resume == "must":
            raise ValueError(
                complaint("run_dir", "a folder with a whole checkpoint", self.folder, 'Pass resume="auto".')
            )
        if saved is not None:
            self._check_same_run(saved)
            self._restore(saved)
        if self.folder is not None and self.accelerator.is_main_process:
            checkpoint.write_atomically(self.folder / "recipe.toml", self.recipe.to_toml().encode())

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "best": {}}
        for name, tensor in saved.tensors.items():
            prefix, _, rest = name.partition("/")
            parts.get(prefix, {})[rest] = tensor.to(self.accelerator.device)
        self.model.load_state_dict(parts["model"])
        self.average.state, self.average.count, self.best = parts["average"], saved.data["averaged"], parts["best"]
        for number, (optimiser, data) in enumerate(zip(self.optimisers, saved.data["optimisers"], strict=True)):
            checkpoint.unpack_optimiser(optimiser, f"optimiser{number}", saved.tensors, data)
        self.progress = _Progress(**saved.data["progress"])
        if self.steered or self.recipe.calibrate:
            self.model.prior_std = self.progress.prior_std
        if not self.accelerator.is_main_process:
            self.progress.sums, self.progress.seen = [0.0] * 4, [0.0] * 2

    def _facts(self) -> dict[str, Any]:
        """What besides the recipe makes a run what it is."""
        model = self.model
        facts: dict[str, Any] = {"components": model.components, "nodes": model.nodes}
        facts |= {} if self.steered or self.recipe.calibrate else {"prior_std": model.prior_std}
        return facts | {"examples": self.source.rows, "n_data": self.n_data}

    def _check_same_run(self, saved: checkpoint.Checkpoint) -> None:
        mine = self.recipe.model_dump() | self._facts()
        theirs = Recipe.from_toml(saved.data["recipe"]).model_dump() | saved.data["facts"]
        changed = [name for name in mine if name in theirs and mine[name] != theirs[name]]
        if changed:
            names = ", ".join(f"{name} = {theirs[name]}" for name in changed)
            remedy = 'Use another run_dir, or resume="never" to start anew.'
            raise ValueError(complaint("run_dir", "a folder of the same run", f"one with {names}", remedy))

    # ---------------------------------------------------------------------------------------------------- the frame

    @contextmanager
    def catching_signals(self) -> Iterator[None]:
        """With a run folder, SIGINT and SIGTERM let the step finish and be saved; a second one stops at once."""
        if self.folder is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            self.signal = number
            signal.signal(number, before[signal.Signals(number)])

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Takes the bar down and gives the engine back."""
        self.monitor.close()
        if self.recipe.trackers and self.folder:
            self.accelerator.end_training()
        self._give_back()

    def _give_back(self) -> None:
        """Forgets the engine's state, if it is this run's, so that a later run may choose another precision."""
        if self.owns_state:
            AcceleratorState._reset_state()

    def history(self) -> History:
        """What there is to say at the end."""
        model, words = self.model.eval(), ""
        if isinstance(model, IBNN):
            diagnosis = diagnose(model, optimiser=self.optimisers, inputs=self._some_inputs())
            words = str(diagnosis)
            if not diagnosis.healthy:
                self.monitor.say(words)
        progress, rows, looks = self.progress, tuple(self.progress.rows), tuple(self.progress.looks)
        ending = progress.best or rows[-1], progress.finished, words
        return History(rows, *ending, looks, progress.seconds, self.source.rows, progress.looked)

    def _some_inputs(self) -> Any:
        """Held-out inputs for the doctor, or training inputs where nothing is held out."""
        with generators_restored():
            share = next((self.valid or self.source).epoch(0, 0))
        rows = batch_length(share.x)
        return slice_rows(share.x, slice(0, ASKED), rows) if rows > ASKED else share.x


class _Loss(nn.Module):
    """The objective as a module, because DDP hooks onto a forward."""

    def __init__(self, model: Trainable, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, x: Any, y: Tensor, beta: float, n_data: int, part: tuple[int, int]) -> ELBO:
        recipe = self.recipe
        return self.model.elbo(
            x,
            y,
            n_data=n_data,
            samples=recipe.samples,
            beta=beta,
            gamma=recipe.gamma,
            spread=recipe.spread,
            part=part,
        )


def _pieces(share: Share, count: int) -> Iterator[Share]:
    """Cuts a worker's share into pieces of (nearly) equal length."""
    rows = batch_length(share.x)
    count = min(count, rows)
    for number in range(count):
        start, stop = rows * number // count, rows * (number + 1) // count
        x = slice_rows(share.x, slice(start, stop), rows)
        yield Share(x, share.y[start:stop], share.offset + start, share.total)


def _count_targets(model: Trainable, source: Source) -> int:
    """N: counted in tensors; in a Dataset, as many targets an example as the first batch has."""
    if isinstance(source.data, tuple):
        return model.likelihood.data(source.data[1])
    with generators_restored():
        first = next(source.epoch(0, 0))
    return max(round(source.rows * model.likelihood.data(first.y) / len(first.y)), source.batch_size)
