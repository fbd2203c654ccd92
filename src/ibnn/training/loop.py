"""`fit`: Algorithm 1, step by step. accelerate does devices, workers and precision.

Everything random in a step is a pure function of (seed, step): order, dropout, draws. So a run that was stopped at any
moment and resumed from a checkpoint ends with the same bits as one that was not.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ibnn import check
from ibnn.batches import Share
from ibnn.errors import DivergedError, complaint
from ibnn.generators import generators_restored, seed_generators
from ibnn.inputs import tensors
from ibnn.mixture import KLKind
from ibnn.network import IBNN
from ibnn.novelty.fitting import fit_novelty_if_possible
from ibnn.objective import ELBO
from ibnn.training.averaging import estimate_statistics
from ibnn.training.data import HeldOut, Split, choose_units, count_targets, read_data
from ibnn.training.engine import Engine, make_optimisers, set_rates, trace_rates
from ibnn.training.history import Callback, History, Journal, joined, summarise
from ibnn.training.recipe import Recipe, Schedule
from ibnn.training.session import Session, State
from ibnn.training.steering import LEAST_STD, START, Steering, kl_weight, start_calibrated, start_divided
from ibnn.training.trainable import Trainable, as_trainable, restored_on_error

# Last part of what seeds the global generators in a training step, (seed, step, worker, stream): one stream for
# augmentation and whatever else loading a batch draws, and one for dropout and whatever else the network draws.
LOADING, FORWARD = 1, 2


def fit(  # noqa: D417  fields of the recipe are described there
    model: Trainable,
    train: Any,
    valid: Any = None,
    *,
    recipe: Recipe | str | None = None,
    run_dir: str | Path | None = None,
    resume: bool = True,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    n_data: int | None = None,
    novelty: bool = True,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    optimiser: str | type[Optimizer] | None = None,
    lr: float | None = None,
    latent_optimiser: str | type[Optimizer] | None = None,
    latent_lr: float | None = None,
    undo_k: bool | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    schedule: Schedule | str | None = None,
    latent_schedule: Schedule | str | None = None,
    clip: float | None = None,
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
    trackers: tuple[str, ...] | None = None,
) -> History:
    """Trains a converted network (Algorithm 1 of Trinh et al., 2020), or a baseline with its own objective.

    Held-out labels decide how much noise there is, unless you fix `beta`. They come from `valid`; without `valid`,
    `fit` holds out a tenth of the training data. The model is left in eval mode: the best one with `patience`, the
    average with `ema` or `swa`. If training fails, mode, noise and count of examples are as they were, and the network
    has the weights of the last step.

    All arguments from `epochs` on are fields of the recipe, and described there; None keeps the recipe's value.

    Args:
        model: Made by `ibnn.convert`, or a method of `ibnn.baselines`; trained in place.
        train: A Dataset, a DataLoader, a list of dicts with "labels", or a pair (inputs, targets) of tensors or arrays.
        valid: Held-out data, likewise, but never the test set; evaluated as training goes on.
        recipe: A `Recipe`, the name of one, or None for the defaults.
        run_dir: Folder for checkpoints, recipe.toml and history.csv. The same call on the same folder resumes the run;
            other data or another recipe is an error. A second process waits for the first.
        resume: False starts anew.
        quiet: Shows nothing.
        callbacks: Functions, called as `callback(row, model)` after every row of the history.
        n_data: Number of training targets, if it cannot be counted.
        novelty: Whether `fit_novelty` is called at the end, if enough data are held out.
        scheduler: A function that takes an optimiser and returns a torch scheduler, such as
            `lambda o: OneCycleLR(o, 0.1, total_steps=500)`. Its rates of the weights, computed once before training,
            replace `schedule`.
    """
    arguments = locals()
    if hasattr(model, "members"):
        return _fit_members(model, arguments)
    model, folder = as_trainable(model), None if run_dir is None else check.path("run_dir", run_dir, folder=True)
    found = _read_recipe(model, arguments)
    if not isinstance(resume, bool):
        raise TypeError(complaint("resume", "True or False", repr(resume), "Pass False to start anew."))
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(complaint("callbacks", "a list of functions", callbacks, "Pass callbacks=[function]."))
    if n_data is not None:
        check.integer("n_data", n_data, remedy="Pass the number of training targets, or leave it out.")
    data = read_data(model, train, valid, found)
    found = found.but(beta=1.0) if data.note else found
    n_data = n_data and max(round(n_data * data.train.rows / data.given), 1)
    with restored_on_error(model):
        history = _Run(model, data, found, folder, n_data, scheduler).run(resume, callbacks, quiet)
    if novelty and data.held_out is not None:
        fit_novelty_if_possible(model, data.train, data.held_out, seed=found.seed)
    return history


def _read_recipe(model: Trainable, arguments: dict[str, Any]) -> Recipe:
    """Returns the recipe with the fields that are arguments of `fit`, and a fixed β where there are no latents."""
    recipe = arguments["recipe"]
    if isinstance(recipe, str | None):
        recipe = Recipe.named(recipe) if recipe else Recipe()
    if not isinstance(recipe, Recipe):
        raise TypeError(complaint("recipe", "a Recipe or the name of one", recipe, "Pass fields: fit(..., lr=0.01)."))
    found = recipe.but(**{name: arguments[name] for name in Recipe.model_fields if arguments[name] is not None})
    if isinstance(model, IBNN):
        return found
    if found.calibrate:
        raise ValueError(complaint("calibrate", "left out for a network without latents", True, "Leave it out."))
    return found.but(beta=1.0) if found.beta == "auto" else found


def _fit_members(model: Any, arguments: dict[str, Any]) -> History:
    """Trains the members of an ensemble one after the other, each as if alone, on the same training rows."""
    found, run_dir, histories = _read_recipe(model.members[0], arguments), arguments["run_dir"], []
    data = read_data(model.members[0], arguments["train"], arguments["valid"], found)
    for number, member in enumerate(model.members):
        own = {"model": member, "train": data.train, "valid": data.held_out, "novelty": False}
        own |= {"seed": found.seed + number, "run_dir": run_dir and Path(run_dir) / f"member-{number}"}
        histories.append(fit(**arguments | own))
    model.eval()
    model.reference = model.held_out = None
    if arguments["novelty"] and data.held_out is not None:
        fit_novelty_if_possible(model, data.train, data.held_out, seed=found.seed)
    return joined(histories)


class _Run:
    """One training run: Algorithm 1, and the collaborators that it calls."""

    def __init__(
        self, model: Trainable, data: Split, recipe: Recipe, folder: Path | None, n_data: int | None, scheduler: Any
    ) -> None:
        self.model, self.data, self.recipe, self.source = model, data, recipe, data.train
        self.latents = model if isinstance(model, IBNN) else None  # the same model, if it has any
        self.n_data = n_data or count_targets(model.likelihood, self.source)
        self.length = recipe.length(self.source.steps, held_out=data.held_out is not None)
        self.total = self.length.total
        self.traced = trace_rates(scheduler, recipe, self.total) if scheduler else None
        self.engine = engine = Engine(recipe, folder, self.source.rows, next(model.net.parameters()).device)
        self.held_out = HeldOut(model, data.held_out, engine.device, recipe.seed) if data.held_out else None
        steering = None
        if recipe.beta == "auto" and self.latents is not None and self.held_out is not None:
            sizes = {"total": self.total, "batch_size": self.source.batch_size}
            steering = Steering(self.latents, self.held_out, **sizes, calibrated=recipe.calibrate)
        model.kl_kind = recipe.kl or model.kl_kind
        self.untrained = int(model.examples) == 0
        model.reseed(recipe.seed)
        self.state = state = State(model, make_optimisers(model, recipe), steering)
        self.loss, self.steppers = engine.prepare(_Loss(model, recipe), state.optimisers)
        self.frozen = [m for m in model.net.modules() if isinstance(m, _BatchNorm)] if recipe.freeze_batchnorm else []
        self.session = Session(state, engine, recipe, folder, self._facts() if folder else {}, self.length)

    def _facts(self) -> dict[str, Any]:
        """Returns what besides the recipe makes a run what it is: a folder with other facts is of another run."""
        names = ["components"]
        if self.latents is not None:
            names += ["nodes", "draws", "where", "bias_latents"]
        if self.state.steering is None and not self.recipe.calibrate:  # else training changes it
            names += ["prior_std"]
        data = " ".join(source.fingerprint() for source in (self.source, self.data.held_out) if source is not None)
        facts = {"examples": self.source.rows, "n_data": self.n_data, "data": data}
        facts["scheduler"] = hashlib.md5(repr(self.traced).encode()).hexdigest() if self.traced else None
        return {name: getattr(self.model, name) for name in names} | facts

    def run(self, resume: bool, callbacks: Sequence[Callback], quiet: bool) -> History:
        """Resumes or starts, trains, and returns the history."""
        with (
            generators_restored(),
            closing(self.engine),
            self.session.opened(resume),
            closing(Journal(self.session, quiet=quiet or not self.engine.main)) as self.journal,
        ):
            self.model.zero_grad()  # of a failed run, or of the caller
            self._start()
            while not self.state.progress.finished:
                self._epoch()
                self._end_epoch(callbacks)
        return summarise(self.journal, self.data)

    def _start(self) -> None:
        """Says what is trained on; an untrained model gets its units and its noise, latents without noise a little."""
        data, model = self.data, self.latents
        if self.state.progress.step == 0:
            if self.untrained:
                choose_units(self.model, self.source, self.recipe.seed)
            if model is not None:
                self._start_noise(model)
        if model is not None and not bool((std := model.posterior().std).all()):  # `ibnn.calibrate` may have chosen 0
            model.set_posterior(std=std.clamp_min(LEAST_STD))
        rows = f"{self.source.rows:,} rows"
        if data.held_out is not None:
            of = f" of {data.given:,}" if data.given > self.source.rows else ""
            rows += f"; {data.held_out.rows:,}{of} rows are held out"
        self.journal.say(f"Training on {rows}. Length: {self.length}.")
        if data.note:
            self.journal.say(f'beta = 1 stands in for "auto": {data.note}.')

    def _start_noise(self, model: IBNN) -> None:
        """Calibrates untrained latents, or divides the prior's noise among them; tells steering that of the units."""
        steering, held_out = self.state.steering, self.data.held_out
        calibrates = self.recipe.calibrate and self.untrained
        if calibrates and held_out is not None:
            found = start_calibrated(model, held_out, seed=self.recipe.seed, progress=not self.journal.quiet)
            self.journal.say(str(found))
        elif self.untrained:
            start_divided(model, START if steering is not None else 1.0)
        if steering is not None:
            steering.state.unit_std = model.unit_std.tolist()
            steering.state.rising = self.untrained and not calibrates

    # ------------------------------------------------------------------------------------------------- Algorithm 1

    def _epoch(self) -> None:
        """For each minibatch: spreads it over the components, draws, and steps on weights and latents together."""
        progress, seed, worker, per_epoch = self.state.progress, self.recipe.seed, self.engine.worker, self.source.steps
        epoch, first = divmod(progress.step, per_epoch)
        shares = self.source.epoch(seed, epoch, first=first, worker=worker)
        while True:
            seed_generators(seed, progress.step, worker.rank, LOADING)
            share = next(shares, None)
            if share is None:  # fewer batches than announced: a last one with too few rows for all workers
                progress.step = min((epoch + 1) * per_epoch, self.total)
                return
            seed_generators(seed, progress.step, worker.rank, FORWARD)
            self._steer()
            rates = self._rates(progress.step)
            sums = self._step(share, rates)
            progress.step += 1
            self.journal.record(sums, rates, share.total)
            if progress.step >= self.total or progress.step % per_epoch == 0:
                return
            self.session.after_step()

    def _steer(self) -> None:
        """Lets held-out labels move the prior's standard deviation, at the steps where that is due."""
        steering, progress = self.state.steering, self.state.progress
        if steering is not None and progress.step in steering.steps:
            nll, count = self.engine.total(progress.seen)
            progress.seen = [0.0] * 2
            steering.look(progress.step, nll / max(count, 1e-12))
        if steering is not None:
            steering.set_units((progress.step + 0.5) / self.total)

    def _rates(self, step: int) -> dict[str, float]:
        """Returns β and the learning rates at the middle of a step."""
        recipe, steering, t = self.recipe, self.state.steering, (step + 0.5) / self.total
        beta = recipe.beta_at(t) if steering is None else kl_weight(t, n_data=self.n_data, nodes=steering.model.nodes)
        lr = self.traced[step] if self.traced else recipe.lr * recipe.schedule.factor(t)
        return {"beta": beta, "lr": lr, "latent_lr": recipe.latent_lr * recipe.latent_schedule.factor(t)}

    def _step(self, share: Share, rates: dict[str, float]) -> list[float]:
        """Takes one step on a batch, in pieces to save memory; returns sums over its data, as `Progress.sums`."""
        recipe, engine, likelihood = self.recipe, self.engine, self.model.likelihood
        set_rates(self.state.optimisers, rates, recipe)
        self.model.train()
        for norm in self.frozen:
            norm.eval()
        pieces, sums = list(share.pieces(recipe.accumulate)), []
        mine = float(likelihood.total_weight(share.y))
        (whole,) = engine.total([mine])
        weights: dict[str, Any] = {"n_data": self.n_data, "beta": rates["beta"], "gamma": recipe.gamma}
        for number, piece in enumerate(pieces):
            weight, count = float(likelihood.total_weight(piece.y)), likelihood.count(piece.y)
            with nullcontext() if number == len(pieces) - 1 else engine.accelerator.no_sync(self.loss):
                x, y = engine.to_device((piece.x, piece.y))
                terms: ELBO = self.loss(x, y, weights, (piece.offset, piece.total))
                # The loss of the whole batch is the sum over pieces and the mean over workers (DDP) of:
                loss = terms.loss * (weight * engine.worker.world / whole if whole else 1 / len(pieces))
                self._check_finite(loss.item(), "the loss", piece)
                engine.accelerator.backward(loss)
            values = terms.loss.detach() * weight, terms.nll.detach() * count, terms.kl.detach() * weight
            sums.append(torch.stack(values))
        self._clip(share)
        for stepper in self.steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        self.model.examples.add_(share.total)
        if recipe.ema:
            self.state.average.update(self.model, recipe.ema)
        return [*torch.stack(sums).sum(0).tolist(), mine, float(likelihood.count(share.y))]

    def _clip(self, share: Share) -> None:
        """Limits the gradient norms of weights and latents separately."""
        for optimiser in self.state.optimisers:
            parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
            norm: Any = self.engine.accelerator.clip_grad_norm_(parameters, self.recipe.clip or float("inf"))
            if self.recipe.precision != "fp16":  # there, accelerate skips such a step
                self._check_finite(float(norm), "the gradient's norm", share)

    def _check_finite(self, value: float, what: str, share: Share) -> None:
        """Raises if a number is not finite, because of the inputs or because the run has diverged."""
        if math.isfinite(value):
            return
        step, recipe, folder = self.state.progress.step, self.recipe, self.session.folder
        if not all(bool(t.isfinite().all()) for t in tensors(share.x) if t.is_floating_point()):
            got = f"NaN or infinity in the batch of step {step}"
            raise ValueError(complaint("train", "finite", got, "Clean or drop such rows."))
        named = list(self.model.named_parameters())
        named += [(f"gradient of {name}", p.grad) for name, p in named if p.grad is not None]
        bad = next((f" ({name} is not finite)" for name, tensor in named if not bool(tensor.isfinite().all())), "")
        kept = f" The last good checkpoint is kept in {folder}." if folder else ""
        raise DivergedError(
            f"Training diverged at step {step}: {what} is {value}{bad}. Lower lr={recipe.lr:g} or "
            f"latent_lr={recipe.latent_lr:g}, set clip to 1, or convert with less init_std.{kept}"
        )

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
            self.journal.write(epoch, self._rates(step - 1), self.held_out, callbacks)
        if last:
            state.progress.finished = "finished"
        elif self.length.patience and step >= self.length.least and state.progress.waited >= self.length.patience:
            state.progress.finished = "patience"
        if state.progress.finished and state.best:
            self.model.load_state_dict(state.best)
        if state.progress.finished and state.steering is not None:
            state.steering.settle()
        self.session.after_step(at_epoch=epoch % self.length.every == 0)


class _Loss(nn.Module):
    """The objective as a module, because DDP hooks onto a forward."""

    def __init__(self, model: Trainable, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.samples, self.spread = model, recipe.samples, recipe.spread

    def forward(self, x: Any, y: Tensor, weights: Mapping[str, Any], part: tuple[int, int]) -> Any:
        return self.model.elbo(x, y, samples=self.samples, spread=self.spread, part=part, **weights)
