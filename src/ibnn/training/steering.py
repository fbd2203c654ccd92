"""Lets held-out labels decide, while training goes on, how large the prior's standard deviation s is.

A *look* is an evaluation on held-out data that moves s. A network needs more noise if it is overconfident there (the
temperature T that minimises its held-out NLL is above 1) or overfits (its training NLL, noise and all, is far below the
held-out one), and less if not. The KL has a fixed weight per node and datum, so that s means the same noise for 200 and
for 20,000 nodes, for 1,000 and for 1,000,000 examples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.calibration import Calibration, calibrate
from ibnn.likelihood import Heads, Likelihood
from ibnn.likelihood.temperature import confidence, nll, supported_temperature
from ibnn.network import IBNN, prior_stds
from ibnn.noise import depth_factor, divide_noise
from ibnn.training.data import HeldOut

START = 0.6  # s at the start of training, as a part of the converted `prior_std`
WARM = 0.2  # share of training in which β, and the noise of the units of an untrained model, rise
FIRST, LAST, LOOKS = 0.2, 0.9, 20  # shares of training before the first and the last look, and their largest number
GAIN, RISE, FALL = 0.75, 0.4, 0.12  # log s moves by this part of the desired change, at most so far up and down
GAP = 0.5  # log of held-out over training NLL that a network should have at the end of training
UNDERFIT, OVERFIT = 0.25, 0.5  # what a smaller and a larger gap count at most
SHRINKAGES = (1.0, 0.7, 0.5, 0.35, 0.25)  # factors on σ that are tried in turn at the end, while T is below 1
MIN_STD, MAX_STD = 0.02, 1.5  # bounds of s
LEAST_STD = 1e-3  # where σ = 0 starts: its ρ is −∞ and its KL infinite, so it cannot be trained
BUDGET, END = 0.12, 0.035  # forward passes of all looks, and of one evaluation at the end, as shares of training's
KL_WEIGHT = 20.0  # nats of loss per datum for a KL of one nat per node
DRAWS, END_DRAWS = 4, 16  # for each held-out example of a look, and at the end
MIN_LOOKS, ROWS, END_ROWS = 12, (100, 1000), (200, 2000)  # fewest looks; fewest and most examples, as there are any


def look_steps(total: int, looks: int = LOOKS) -> frozenset[int]:
    """Returns the steps before which there is a look."""
    steps = (int(total * (FIRST + (LAST - FIRST) * look / max(looks - 1, 1))) for look in range(looks))
    return frozenset(step for step in steps if step)  # a look needs a training NLL


class Plan(NamedTuple):
    """How many looks there are, and how many held-out examples each of them, and each evaluation at the end, takes."""

    looks: int
    rows: int
    end_rows: int


def look_budget(training_rows: int, *, calibrated: bool = False) -> Plan:
    """Returns a plan whose forward passes are at most `BUDGET` (and `END`) of training's, except in very short runs."""

    def within(bounds: tuple[int, int], number: float) -> int:
        return min(max(int(number), bounds[0]), bounds[1])

    examples = BUDGET * training_rows / DRAWS  # of all looks
    looks = within((MIN_LOOKS, LOOKS), examples / ROWS[0])
    # A run that starts calibrated is short: a few hundred examples would leave its temperature in place.
    end = END_ROWS[1] if calibrated else within(END_ROWS, END * training_rows / END_DRAWS)
    return Plan(looks, within(ROWS, examples / looks), end)


def kl_weight(t: float, *, n_data: int, nodes: int) -> float:
    """Returns β when the share t of training is done: it rises to `KL_WEIGHT` per node and datum."""
    return KL_WEIGHT * n_data / nodes * min(1.0, t / WARM)


def desired_change(likelihood: Likelihood, look: Mapping[str, float], t: float) -> float:
    """Returns the logarithm of the factor by which the noise should change when the share t of training is done.

    It is log T, corrected by the gap between the held-out NLL and the training NLL (by ratio of probabilities, by
    difference of densities). Noise is there against overfitting: a network whose gap exceeds `GAP` · t is steered
    to be underconfident (a temperature can restore its confidence), one whose gap is smaller gets less noise, and none
    gets more noise than its gap.
    """
    training, held_out = look["training_nll"], look["held_out_nll"]
    if likelihood.discrete:
        gap, least = math.log(max(held_out, 1e-9) / max(training, 1e-9)), -UNDERFIT
    else:  # of densities a good fit has no gap
        gap, least = held_out - training, 0.0
    surplus = max(least, min(OVERFIT, gap - GAP * t))
    return min(math.log(look["temperature"]) + surplus, max(0.0, gap))


def next_std(prior_std: float, change: float) -> float:
    """Returns s after a look that desires a change of log s."""
    step = max(-FALL, min(RISE, GAIN * change))
    return max(MIN_STD, min(MAX_STD, prior_std * math.exp(step)))


@dataclass
class SteeringState:
    """What steering has found so far; a checkpoint holds it."""

    looks: list[dict[str, float]] = field(default_factory=list)  # what each saw and did (see `History.looks`)
    looked: int = 0  # forward passes for the looks and at the end, in rows
    unit_std: list[float] = field(default_factory=list)  # τ of each layer
    rising: bool = False  # whether it rises to that from 0


class Steering:
    """Moves s at the looks of a run (before each of `steps`), and sets temperature and noise at its end."""

    def __init__(
        self, model: IBNN, held_out: HeldOut, *, total: int, batch_size: int, calibrated: bool = False
    ) -> None:
        self.model, self.held_out, self.total = model, held_out, total
        self.state = SteeringState()
        self.plan = look_budget(total * batch_size, calibrated=calibrated)
        self.steps = look_steps(total, self.plan.looks)

    def set_units(self, t: float) -> None:
        """Sets the units' noise when the share t of training is done: that of an untrained model rises as β does."""
        if any(self.state.unit_std):
            part = min(1.0, t / WARM) if self.state.rising else 1.0
            self.model.unit_std.copy_(torch.tensor(self.state.unit_std) * part)

    def look(self, step: int, training_nll: float) -> None:
        """Moves s, and σ with it, by held-out labels and the mean training NLL since the last look."""
        model, looks = self.model, self.state.looks
        draws, targets = self._draws(DRAWS, self.plan.rows, turn=len(looks))
        best, lowest = confidence(model.likelihood, draws, targets)
        look = {"step": step, "temperature": best, "training_nll": training_nll, "held_out_nll": lowest}
        change = desired_change(model.likelihood, look, step / self.total)
        if looks:  # held-out scores jump about: noise rises only as far as two looks in a row ask for
            last = desired_change(model.likelihood, looks[-1], looks[-1]["step"] / self.total)
            change = min(change, max(0.0, last))
        look["prior_std"] = next_std(model.prior_std, change)
        ratio = look["prior_std"] / model.prior_std
        model.set_posterior(std=model.posterior().std * ratio)
        model.prior_std = look["prior_std"]
        self.state.unit_std = [std * ratio for std in self.state.unit_std]
        looks.append(look)

    def settle(self) -> None:
        """Sets the temperature that held-out labels ask for, and less noise if the network is underconfident.

        A temperature below 1 sharpens every draw but leaves their disagreement; less noise reduces it.
        """
        model, likelihood = self.model, self.model.likelihood
        std, unit_std = model.posterior().std.detach(), model.unit_std.clone()
        if isinstance(likelihood, Heads):
            likelihood.balance(*self._draws(END_DRAWS, self.plan.end_rows), supported_temperature)
        found: list[tuple[float, float, float]] = []  # NLL, factor on σ and τ, temperature
        for factor in SHRINKAGES:
            model.set_posterior(std=std * factor, unit_std=unit_std * factor)
            draws, targets = self._draws(END_DRAWS, self.plan.end_rows)
            best = supported_temperature(likelihood, draws, targets)
            found.append((nll(likelihood, draws, targets, best), factor, best))
            if found[-1] > min(found) or confidence(likelihood, draws, targets)[0] >= 1:
                break
        _, factor, temperature = min(found)
        model.set_posterior(std=std * factor, unit_std=unit_std * factor)
        likelihood.set_temperature(temperature)

    def _draws(self, draws: int, rows: int, turn: int = 0) -> tuple[Tensor, Tensor]:
        """Returns up to so many draws for each of so many held-out examples, (K, S, N, …), and their targets.

        Every look takes its turn of components, draws and examples, so that chance evens out over the looks.
        """
        components = self.model.components
        chosen = [(turn * draws + number) % components for number in range(min(draws, components))]
        outputs, targets = self.held_out.draws(max(draws // components, 1), rows, components=chosen, turn=turn)
        self.state.looked += math.prod(outputs.shape[:3])
        return outputs, targets


def start_divided(model: IBNN, part: float = 1.0) -> None:
    """Divides a part of the prior's noise, and starts latents with less of it than others as much nearer to 1."""
    model.prior_std *= part
    unit_std = divide_noise(model)
    model.set_posterior(unit_std=unit_std)
    stds = prior_stds(model)
    if isinstance(stds, Tensor):
        q, share = model.posterior(), (stds / model.prior_std).clamp(max=1.0)
        model.set_posterior(mean=1 + (q.mean - 1) * share, std=q.std * share)


def start_calibrated(model: IBNN, held_out: Source, *, seed: int, progress: bool) -> Calibration:
    """Starts untrained latents from the noise and the temperature that `calibrate` finds for the weights."""
    found = calibrate(model, held_out, seed=seed, progress=progress)
    model.prior_std = max(found.scale / depth_factor(model.latents.values(), model.draws), MIN_STD)
    share = divide_noise(model) > 0  # of the units; it is the prior's that is divided
    unit_std = torch.where(share, model.unit_std.clamp_min(LEAST_STD), 0.0)
    model.set_posterior(std=model.posterior().std.clamp_min(LEAST_STD), unit_std=unit_std)
    return found
