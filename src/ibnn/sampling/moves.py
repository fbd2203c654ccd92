"""Moves chains by one step, and adapts scales and step size in the warm-up.

A `State` is all that a chain depends on; a step makes a new one and draws by address, so that a saved state goes on to
the bit. `scale` (nodes,) is the inverse mass, best the posterior variance of each node.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.normal import Space, address, normals, words
from ibnn.sampling.energy import Energy, refuse_not_finite
from ibnn.sampling.settings import Settings

WINDOWS = (0.1, 0.25, 0.5, 0.9)  # shares of the warm-up after which scales and step size are found anew
KNOWN = 10.0  # time that the scales of the window before count for: in less, a chain does not go as far as it could
WIDEST = 4.0  # scales above so many prior variances are not believed
DIVERGENT = 1000.0  # nats of energy that a trajectory may gain
ACCEPTANCE = 0.8  # what the step size of HMC aims at
LONGEST = 256  # steps of a trajectory
TRAJECTORY = math.pi / 2  # mean time of a trajectory of HMC


def leapfrog(
    state: tuple[Tensor, Tensor],
    gradient: Tensor,
    energy: Callable[[Tensor, bool], tuple[Tensor, Tensor]],  # of z, and whether it is the last
    scale: Tensor,
    step: float,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns z, v, U and its gradient at the end of a trajectory of HMC."""
    z, v = state
    potential = torch.zeros(len(z))
    for number in range(1, steps + 1):
        v = v - 0.5 * step * scale * gradient
        z = z + step * v
        potential, gradient = energy(z, number == steps)
        v = v - 0.5 * step * scale * gradient
    return z, v, potential, gradient


def kinetic(v: Tensor, scale: Tensor) -> Tensor:
    """Returns ½ Σ v²/m, (K,), in double precision on the CPU: some devices have none."""
    return 0.5 * (v.cpu().double().square() / scale.cpu().double()).sum(1)


class State(NamedTuple):
    """Where K chains are."""

    at: Tensor  # steps done
    z: Tensor  # (K, nodes)
    potential: Tensor  # U at z (K,)
    gradient: Tensor  # of U at z (K, nodes)
    scale: Tensor  # m (nodes,)
    step: Tensor  # h, float64
    seen: Tensor  # steps of the present window …
    mean: Tensor  # … their mean (K, nodes) …
    spread: Tensor  # … and sum of squared deviations from it (K, nodes)
    dual: Tensor  # of dual averaging: centre, error, log of the averaged step, count
    accepted: Tensor  # sum of acceptance probabilities since the warm-up, float64
    divergent: Tensor  # trajectories that diverged since then


class Moves:
    """Steps of K chains on an energy."""

    def __init__(self, energy: Energy, settings: Settings) -> None:
        self.energy, self.settings = energy, settings
        self.adapts = settings.step_size is None
        self.prior_variance = settings.temperature * energy.prior_std.square()
        self.windows = {round(share * settings.warmup) for share in WINDOWS} if settings.warmup else set()

    def start(self, z: Tensor) -> State:
        """Returns chains that start at z (K, nodes)."""
        potential, gradient = self.energy(z)
        refuse_not_finite(potential, "energy", 0)
        refuse_not_finite(gradient, "gradient", 0)
        zero, count, exact = torch.zeros_like(z), torch.zeros((), dtype=torch.int64), torch.zeros(4).double()
        state = State(
            at=count, z=z, potential=potential, gradient=gradient, scale=zero[0], step=exact[0], seen=count,
            mean=zero, spread=zero, dual=exact, accepted=exact[0], divergent=count,
        )  # fmt: skip
        return self._with_step(state, 0, guess=True)

    def advance(self, state: State) -> State:
        """Returns the chains one trajectory on; in the warm-up they also adapt."""
        step = int(state.at)
        warming = step < self.settings.warmup
        state = self._trajectory(state, step, warming)
        if warming:
            state = self._adapted(state, step + 1)
        return state._replace(at=state.at + 1)

    def _uniform(self, step: int, purpose: int, chains: int) -> Tensor:
        """Returns uniform numbers of a step in (0, 1), (chains,), float64."""
        chain = torch.arange(chains)
        found = words(address(self.settings.seed, Space.CHAIN_CHOICE, step, chain, purpose))
        return (found.double() + 0.5) * 2.0**-32

    def _trajectory(self, state: State, step: int, warming: bool) -> State:
        """Takes a step of HMC."""
        z, scale, size = state.z, state.scale, float(state.step)
        chain = torch.arange(len(z), device=z.device)
        v = scale.sqrt() * normals(address(self.settings.seed, Space.CHAIN, step, chain), z.shape[1]).to(z.dtype)
        time = TRAJECTORY * (0.5 + float(self._uniform(step, 1, 1)))
        steps = min(max(round(time / size), 1), LONGEST)
        end, v_end, potential, gradient = leapfrog(
            (z, v), state.gradient, lambda at, last: self.energy(at, each=last), scale, size, steps
        )
        before = state.potential.cpu().double() + kinetic(v, scale)
        gained = (potential.cpu().double() + kinetic(v_end, scale) - before).nan_to_num(math.inf, math.inf, math.inf)
        probability = (-gained).exp().clamp_max(1)
        taken = (self._uniform(step, 0, len(z)) < probability).to(z.device)  # (K,)
        state = state._replace(
            z=torch.where(taken[:, None], end, z),
            gradient=torch.where(taken[:, None], gradient, state.gradient),
            potential=torch.where(taken, potential, state.potential),
        )
        if not warming:
            divergent = state.divergent + (gained > DIVERGENT).sum()
            return state._replace(accepted=state.accepted + probability.mean(), divergent=divergent)
        return _averaged(state, float(probability.mean())) if self.adapts else state

    def _adapted(self, state: State, done: int) -> State:
        """Notes where the chains are; at the end of a window finds scales and step size anew."""
        seen, off = state.seen + 1, state.z - state.mean
        mean = state.mean + off / seen
        state = state._replace(seen=seen, mean=mean, spread=state.spread + off * (state.z - mean))
        if done == self.settings.warmup and self.adapts:
            state = state._replace(step=state.dual[2].exp())
        if done not in self.windows:
            return state
        guess, zero = done == min(self.windows), torch.zeros_like(mean)  # chains have not been far yet
        if int(seen) > 1 and not guess:
            variance = state.spread.mean(0) / (seen - 1)
            time = float(seen) * TRAJECTORY
            state = self._with_scale(state, (time * variance + KNOWN * state.scale) / (time + KNOWN))
        return self._with_step(state._replace(seen=torch.zeros_like(seen), mean=zero, spread=zero), done, guess)

    def _with_scale(self, state: State, scale: Tensor) -> State:
        limits = {"min": 1e-6 * self.prior_variance, "max": WIDEST * self.prior_variance}
        return state._replace(scale=scale.clamp(**limits))

    def _with_step(self, state: State, done: int, guess: bool = False) -> State:
        """Returns chains with half the largest stable step size, unless it is given.

        A `guess` of their scales is the inverse of the prior's precision and the Fisher information together.
        """
        size = self.settings.step_size
        if guess:
            state = self._with_scale(state, 1 / (1 / self.prior_variance + self.energy.information(state.z, done)))
        if size is None:
            chain = torch.arange(len(state.z), device=state.z.device)
            at = address(self.settings.seed, Space.CHAIN_PROBE, done, chain)
            probe = normals(at, state.z.shape[1]).to(state.z.dtype)
            size = 1 / math.sqrt(max(self.energy.curvature(state.z, state.scale, probe, done), 1.0))
        dual = torch.tensor([math.log(10 * size), 0.0, 0.0, 0.0], dtype=torch.float64)
        return state._replace(step=torch.tensor(size, dtype=torch.float64), dual=dual)


def _averaged(state: State, accepted: float) -> State:
    """Moves the step size towards the `ACCEPTANCE` of proposals: dual averaging (Hoffman and Gelman, 2014)."""
    centre, error, average, count = state.dual.tolist()
    count += 1
    error += (ACCEPTANCE - accepted - error) / (count + 10)  # 10, 0.05 and 0.75 are theirs
    log_step = centre - math.sqrt(count) / 0.05 * error
    average += count**-0.75 * (log_step - average)
    step = torch.tensor(math.exp(log_step), dtype=torch.float64)
    return state._replace(step=step, dual=torch.tensor([centre, error, average, count], dtype=torch.float64))
