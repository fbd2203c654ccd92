"""`fit`: Algorithm 1, step by step. accelerate does devices, workers and precision.

Everything random in a step is a pure function of (seed, step): order, dropout, draws. So a run that was stopped at any
moment and resumed from a checkpoint ends with the same bits as one that was not.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from enum import IntEnum, unique
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ibnn import check
from ibnn.batches import Share
from ibnn.errors import complaint
from ibnn.generators import generators_restored, seed_generators
from ibnn.mixture import KLKind
from ibnn.network import IBNN
from ibnn.novelty.fitting import fit_novelty_if_possible
from ibnn.objective import ELBO
from ibnn.training.averaging import estimate_statistics
from ibnn.training.data import HeldOut, Split, choose_units, count_targets, read_data
from ibnn.training.divergence import Guard
from ibnn.training.engine import Engine, make_optimisers, rates_at, set_rates
from ibnn.training.history import Callback, History, Journal, joined, summarise
from ibnn.training.recipe import Recipe, Schedule
from ibnn.training.session import Session, State
from ibnn.training.sharding import average_gradients, clip_gradients, reshard, whole
from ibnn.training.steering import LEAST_STD, START, Steering, start_calibrated, start_divided
from ibnn.training.trainable import Trainable, as_trainable, restored_on_error


@unique
class Stream(IntEnum):
    """Last part of what seeds the global generators in a training step: (seed, step, worker, stream)."""

    LOADING = 1  # augmentation and whatever else loading a batch draws
    FORWARD = 2  # dropout and whatever else the network draws, however the batch was loaded


def fit(  # noqa: D417  fields of the recipe are described there
    model: Trainable,
    train: Any,
    valid: Any = None,
    *,
    recipe: Recipe | str | None = None,
    run_dir: str | Path | None = None,
    resume: Literal["auto", "never", "must"] = "auto",
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    n_data: int | None = None,
    novelty: bool = True,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    optimiser: Literal["adam", "sgd"] | None = None,
    lr: float | None = None,
    noise_lr: float | None = None,
    latent_optimiser: Literal["adam", "sgd"] | None = None,
    latent_lr: float | None = None,
    undo_k: bool | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    schedule: Schedule | None = None,
    latent_schedule: Schedule | None = None,
    clip: float | None = None,
    latent_clip: float | None = None,
    beta: float | Literal["auto"] | None = None,
    beta_warmup: float | None = None,
    calibrate: bool | None = None,
    freeze_batchnorm: bool | None = None,
    gamma: float | None = None,
    kl: KLKind | None = None,
    spread: bool | None = None,
    precision: Literal["no", "bf16", "fp16"] | None = None,
    accumulate: int | None = None,
    seed: int | None = None,
    workers: int | None = None,
    evaluate_every: int | None = None,
    eval_samples: int | None = None,
    patience: int | None = None,
    ema: float | None = None,
    swa: float | None = None,
    checkpoint_every: int | None = None,
    sync_batchnorm: bool | None = None,
    trackers: tuple[str, ...] | None = None,
) -> History:
    """Trains a converted network with Algorithm 1, or a baseline with its own objective.

    Held-out labels steer the noise unless the recipe has a fixed `beta`: those of `valid`, or of a tenth of the
    training data, which is then not trained on. If training fails before
    its first step, the model is as it was; after that, it keeps the weights of the last step, and its former mode.

    All arguments from `epochs` on are fields of the recipe, and described there; None keeps the recipe's value.

    Args:
        model: Made by `ibnn.convert`, or a method of `ibnn.baselines`; trained in place.
        train: A Dataset, a DataLoader, or a pair (inputs, targets) of tensors or arrays.
        valid: Held-out data, likewise, but never the test set; evaluated as training goes on.
        recipe: A `Recipe`, the name of one, or None for the defaults.
        run_dir: Folder for checkpoints, recipe.toml and history.csv. The same call on the same folder resumes the run;
            other data or another recipe is an error. A second process waits for the first.
        resume: "auto" resumes if there is a checkpoint, "never" starts anew, "must" requires a checkpoint.
        quiet: Shows nothing.
        callbacks: Functions, called as `callback(row, model)` after every row of the history.
        n_data: Number of training targets, if it cannot be counted.
        novelty: Whether `fit_novelty` is called at the end, if enough data are held out.

    Returns:
        The history. The model is left in eval mode: the best one with `patience`, the average with `ema` or `swa`.
    """
    arguments = locals()
    if hasattr(model, "members"):
        return _fit_members(model, arguments)
    fields = {name: value for name in Recipe.model_fields if (value := arguments[name]) is not None}
    model, folder = as_trainable(model), None if run_dir is None else check.path("run_dir", run_dir, folder=True)
    given = Recipe.named(recipe) if isinstance(recipe, str) else Recipe() if recipe is None else recipe
    _check_arguments(given, folder, resume, callbacks, n_data)
    given = given.but(**fields) if fields else given
    if not isinstance(model, IBNN):
        if given.calibrate:
            raise ValueError(complaint("calibrate", "left out for a network without latents", True, "Leave it out."))
        given = given.but(beta=1.0) if given.beta == "auto" else given
    data = read_data(model, train, valid, given)
    given = given.but(beta=1.0) if data.note else given
    n_data = n_data and max(round(n_data * data.train.rows / data.given), 1)
    with restored_on_error(model) as runs:
        runs.append(run := _Run(model, data, given, folder, n_data, quiet))
        history = run.run(resume, callbacks)
        if novelty and data.held_out is not None:
            with whole(model):
                fit_novelty_if_possible(model, data.train, data.held_out, seed=given.seed)
    return history


def _fit_members(model: Any, arguments: dict[str, Any]) -> History:
    """Trains the members of an ensemble one after the other, each as if alone, on the same training rows."""
    recipe, run_dir = arguments["recipe"], arguments["run_dir"]
    given = Recipe.named(recipe) if isinstance(recipe, str) else Recipe() if recipe is None else recipe
    seed = given.seed if arguments["seed"] is None else arguments["seed"]
    found = given.but(**{n: arguments[n] for n in Recipe.model_fields if arguments[n] is not None})
    found = found if isinstance(model.members[0], IBNN) or found.beta != "auto" else found.but(beta=1.0)
    data = read_data(model.members[0], arguments["train"], arguments["valid"], found)
    rows, histories = {"train": data.train, "valid": data.held_out, "novelty": False}, []
    for number, member in enumerate(model.members):
        folder = run_dir and Path(run_dir) / f"member-{number}"
        own = arguments | rows | {"model": member, "seed": seed + number, "run_dir": folder}
        own["resume"] = "auto" if number and own["resume"] == "must" else own["resume"]
        histories.append(fit(**own))
    model.eval()
    model.reference = model.held_out = None
    if arguments["novelty"] and data.held_out is not None:
        fit_novelty_if_possible(model, data.train, data.held_out, seed=seed)
    return joined(histories)


def _check_arguments(
    recipe: Any, folder: Path | None, resume: str, callbacks: Sequence[Callback], n_data: int | None
) -> None:
    """Raises if an argument of `fit` makes no sense, whatever the data."""
    if not isinstance(recipe, Recipe):
        got, remedy = type(recipe).__name__, "Pass fields: fit(..., lr=0.01)."
        raise TypeError(complaint("recipe", "a Recipe, the name of one, or None", got, remedy))
    check.choice("resume", resume, ("auto", "never", "must"))
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        got, remedy = repr(callbacks), "Pass callbacks=[function]: it is called as function(row, model)."
        raise TypeError(complaint("callbacks", "a list of functions", got, remedy))
    if n_data is not None:
        remedy = "Pass the number of targets in the training set, or leave it out: they are counted."
        check.integer("n_data", n_data, remedy=remedy)


class _Run:
    """One training run: Algorithm 1, and the collaborators that it calls."""

    def __init__(
        self, model: Trainable, data: Split, recipe: Recipe, folder: Path | None, n_data: int | None, quiet: bool
    ) -> None:
        self.model, self.data, self.recipe, self.source = model, data, recipe, data.train
        self.latents = model if isinstance(model, IBNN) else None  # the same model, if it has any
        self.n_data = n_data or count_targets(model.likelihood, self.source)
        self.length = recipe.length(self.source.steps, held_out=data.held_out is not None)
        self.total = self.length.total
        self.engine = engine = Engine(recipe, folder, self.source.rows, next(model.net.parameters()).device)
        self.held_out = HeldOut(model, data.held_out, engine.device, recipe.seed) if data.held_out else None
        steering = None
        if recipe.beta == "auto" and self.latents is not None and self.held_out is not None:
            sizes = {"total": self.total, "batch_size": self.source.batch_size, "n_data": self.n_data}
            steering = Steering(self.latents, self.held_out, **sizes, calibrated=recipe.calibrate)
        model.kl_kind = recipe.kl or model.kl_kind
        self.untrained = int(model.examples) == 0
        self.calibrates = recipe.calibrate and self.untrained
        model.reseed(recipe.seed)
        if recipe.sync_batchnorm and engine.worker.world > 1:
            model.net = nn.SyncBatchNorm.convert_sync_batchnorm(model.net)
        reshard(model)  # the data were tried on it; optimisers take the parts
        self.state = state = State(model, make_optimisers(model, recipe), steering)
        self.loss, self.steppers = engine.prepare(_Loss(model, recipe), state.optimisers)
        self.frozen = [m for m in model.net.modules() if isinstance(m, _BatchNorm)] if recipe.freeze_batchnorm else []
        self.guard = Guard(model, self.source, recipe, folder)
        self.session = Session(state, engine, recipe, folder, self._facts() if folder else {}, self.length)
        self.folder, self.quiet = folder, quiet or not engine.main

    def _facts(self) -> dict[str, Any]:
        """Returns what besides the recipe makes a run what it is: a folder with other facts is of another run."""
        model, recipe = self.model, self.recipe
        facts: dict[str, Any] = {"components": model.components}
        if self.latents is not None:
            facts |= {name: getattr(model, name) for name in ("nodes", "draws", "where", "bias_latents")}
        if self.state.steering is None and not recipe.calibrate:  # else training changes it
            facts["prior_std"] = model.prior_std
        return facts | {"examples": self.source.rows, "n_data": self.n_data, "data": self.data.fingerprint()}

    def run(self, resume: str, callbacks: Sequence[Callback]) -> History:
        """Resumes or starts, trains, and returns the history."""
        with (
            generators_restored(),
            closing(self.engine),
            self.session.opened(resume),
            closing(Journal(self.session, quiet=self.quiet)) as self.journal,
        ):
            with self._gathered():
                self._start()
            while not self.state.progress.finished:
                self._epoch()
                self._end_epoch(callbacks)
        return summarise(self.journal, self.data)

    def _gathered(self) -> AbstractContextManager[None]:
        """Holds whole weights on every worker while held-out data are asked about; a model may be sharded."""
        return whole(self.model) if self.held_out is not None else nullcontext()

    def _start(self) -> None:
        """Clears old gradients, calibrates untrained latents if asked to, and gives latents without noise a little."""
        self.model.zero_grad()  # of a failed run, or of the caller
        if self.untrained and self.state.progress.step == 0:
            choose_units(self.model, self.source, self.recipe.seed)
        if self.latents is not None:
            if self.state.progress.step == 0:
                self._start_noise(self.latents)
            std = self.latents.posterior().std
            if not bool(std.all()):  # `ibnn.calibrate` may have chosen σ = 0
                self.latents.set_posterior(std=std.clamp_min(LEAST_STD))
        data, rows = self.data, f"{self.source.rows:,} rows"
        if data.held_out is not None:
            of = f" of {data.given:,}" if data.given > self.source.rows else ""
            rows += f"; {data.held_out.rows:,}{of} rows are held out"
        self.journal.say(f"Training on {rows}. Length: {self.length}.")
        if self.data.note:
            self.journal.say(f'beta = 1 stands in for "auto": {self.data.note}.')

    def _start_noise(self, model: IBNN) -> None:
        """Calibrates untrained latents, or divides the prior's noise among them; tells steering that of the units."""
        steering, held_out = self.state.steering, self.data.held_out
        if self.calibrates and held_out is not None:
            found = start_calibrated(model, held_out, seed=self.recipe.seed, progress=not self.quiet)
            self.journal.say(str(found))
        elif self.untrained:
            start_divided(model, START if steering is not None else 1.0)
        if steering is not None:
            steering.state.unit_std = model.unit_std.tolist()
            steering.state.rising = self.untrained and not self.calibrates

    # ------------------------------------------------------------------------------------------------- Algorithm 1

    def _epoch(self) -> None:
        """For each minibatch: spreads it over the components, draws, and steps on weights and latents together."""
        progress, seed, worker, per_epoch = self.state.progress, self.recipe.seed, self.engine.worker, self.source.steps
        epoch, first = divmod(progress.step, per_epoch)
        shares = self.source.epoch(seed, epoch, first=first, worker=worker)
        while True:
            seed_generators(seed, progress.step, worker.rank, Stream.LOADING)
            share = next(shares, None)
            if share is None:  # fewer batches than announced: a last one with too few rows for all workers
                progress.step = min((epoch + 1) * per_epoch, self.total)
                return
            seed_generators(seed, progress.step, worker.rank, Stream.FORWARD)  # however it was loaded
            self._steer()
            rates = self._rates(progress.step)
            sums = self._step(share, rates)
            progress.step += 1
            self.journal.record(sums, rates, share)
            if progress.step >= self.total or progress.step % per_epoch == 0:
                return
            self.session.after_step()

    def _steer(self) -> None:
        """Lets held-out labels move the prior's standard deviation, at the steps where that is due."""
        steering, progress = self.state.steering, self.state.progress
        if steering is not None and progress.step in steering.steps:
            nll, count = self.engine.total(progress.seen)
            progress.seen = [0.0] * 2
            with self._gathered():
                steering.look(progress.step, nll / max(count, 1e-12))
        if steering is not None:
            steering.set_units((progress.step + 0.5) / self.total)

    def _rates(self, step: int) -> dict[str, float]:
        """Returns β and the learning rates at the middle of a step."""
        t, steering = (step + 0.5) / self.total, self.state.steering
        beta = self.recipe.beta_at(t) if steering is None else steering.beta(t)
        return {"beta": beta} | rates_at(t, self.recipe)

    def _step(self, share: Share, rates: dict[str, float]) -> Tensor:
        """Takes one step on a batch, in pieces to save memory; returns sums over its data of loss, nll and kl."""
        recipe, engine, likelihood = self.recipe, self.engine, self.model.likelihood
        set_rates(self.state.optimisers, rates, recipe)
        self.model.train()
        for norm in self.frozen:
            norm.eval()
        pieces, sums = list(share.pieces(recipe.accumulate)), []
        (whole,) = engine.total([float(likelihood.total_weight(share.y))])
        weights: dict[str, Any] = {"n_data": self.n_data, "beta": rates["beta"], "gamma": recipe.gamma}
        for number, piece in enumerate(pieces):
            weight, count = float(likelihood.total_weight(piece.y)), likelihood.count(piece.y)
            with nullcontext() if number == len(pieces) - 1 else engine.accelerator.no_sync(self.loss):
                x, y = engine.to_device((piece.x, piece.y))
                terms: ELBO = self.loss(x, y, weights, (piece.offset, piece.total))
                # The loss of the whole batch is the sum over pieces and the mean over workers (DDP) of:
                loss = terms.loss * (weight * engine.worker.world / whole if whole else 1 / len(pieces))
                self.guard.check_loss(loss, piece, self.state.progress.step)
                engine.accelerator.backward(loss)
            values = terms.loss.detach() * weight, terms.nll.detach() * count, terms.kl.detach() * weight
            sums.append(torch.stack(values))
        if engine.sharded:
            average_gradients(self.model)
        self._clip(share)
        for stepper in self.steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        self.model.examples.add_(share.total)
        if recipe.ema:
            self.state.average.update(self.model, recipe.ema)
        return torch.stack(sums).sum(0)

    def _clip(self, share: Share) -> None:
        """Limits the gradient norms of weights and latents separately."""
        for optimiser, limit in zip(self.state.optimisers, (self.recipe.clip, self.recipe.latent_clip), strict=False):
            parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
            clip = clip_gradients if self.engine.sharded else self.engine.accelerator.clip_grad_norm_
            norm = clip(parameters, limit or float("inf"))
            if self.recipe.precision != "fp16":  # there, accelerate skips such a step
                self.guard.check_gradient(norm, parameters, share, self.state.progress.step)

    def _end_epoch(self, callbacks: Sequence[Callback]) -> None:
        """Averages, evaluates, saves, and decides whether training is finished."""
        state, recipe, step = self.state, self.recipe, self.state.progress.step
        epoch, last = -(-step // self.source.steps), step >= self.total
        collect = recipe.swa < 1 and step > recipe.swa * self.total
        averaged = state.average.end_epoch(self.model, collect=collect, last=last)
        if averaged and recipe.swa < 1 and not self.frozen:
            shares = self.source.epoch(recipe.seed, 0)
            estimate_statistics(self.model, (self.engine.to_device(share.x) for share in shares))
        if last or epoch % (recipe.evaluate_every or self.length.every) == 0:
            with self._gathered():
                self.journal.write(epoch, self._rates(step - 1), self.held_out, callbacks)
        if last:
            state.progress.finished = "finished"
        elif self.length.patience and step >= self.length.least and state.best.waited >= self.length.patience:
            state.progress.finished = "patience"
        if state.progress.finished and state.best.state:
            self.model.load_state_dict(state.best.state)
        if state.progress.finished and state.steering is not None:
            with self._gathered():
                state.steering.settle()
        self.session.after_step(at_epoch=epoch % self.length.every == 0)


class _Loss(nn.Module):
    """The objective as a module, because DDP hooks onto a forward."""

    def __init__(self, model: Trainable, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.samples, self.spread = model, recipe.samples, recipe.spread

    def forward(self, x: Any, y: Tensor, weights: Mapping[str, Any], part: tuple[int, int]) -> ELBO:
        return self.model.elbo(x, y, samples=self.samples, spread=self.spread, part=part, **weights)
