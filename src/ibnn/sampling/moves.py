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
from ibnn.sampling.energy import Anchor, Energy, refuse_not_finite
from ibnn.sampling.settings import Settings

WINDOWS = (0.1, 0.25, 0.5, 0.9)  # shares of the warm-up after which scales and step size are found anew
KNOWN = 10.0  # time that the scales of the window before count for: in less, a chain does not go as far as it could
WIDEST = 4.0  # scales above so many prior variances are not believed
DIVERGENT = 1000.0  # nats of energy that a trajectory may gain
ACCEPTANCE = 0.8  # what the step size of HMC aims at
LONGEST = 256  # steps of a trajectory
HEAT = 0.1  # share of a node's noise that may come from its gradients, of which only the variances are known
FRICTION = 1.0  # γ of SGHMC: velocities are forgotten over a time of 1/γ
TRAJECTORY = math.pi / 2  # mean time of a trajectory of HMC


def underdamped(
    z: Tensor, v: Tensor, gradient: Tensor, scale: Tensor, step: float, friction: float, normal: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """SGHMC, as a splitting: kick by the gradient, half a drift, friction and noise, half a drift (BAOAB).

    Of a Gaussian, with exact gradients, the distribution of z is right for every stable step, h √(m λ) < 2. `normal`
    holds standard normals, `noise` the variance of the gradient: as much noise less is injected.
    """
    kept = math.exp(-friction * step)
    v = v - step * scale * gradient
    z = z + 0.5 * step * v
    variance = ((1 - kept**2) * scale - (kept * step * scale).square() * noise).clamp_min(0)
    v = kept * v + variance.sqrt() * normal
    return z + 0.5 * step * v, v


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
    """Returns ½ Σ v²/m, (K,), in double precision."""
    return 0.5 * (v.double().square() / scale.double()).sum(1)


class State(NamedTuple):
    """Where K chains are."""

    at: Tensor  # steps done
    z: Tensor  # (K, nodes)
    velocity: Tensor  # (K, nodes)
    potential: Tensor  # U (K,), at z (HMC), or before the step on its minibatch
    gradient: Tensor  # of U at z (K, nodes), of HMC
    scale: Tensor  # m (nodes,)
    noise: Tensor  # variance of the gradient (nodes,)
    anchor: Tensor  # where minibatches are compared with all data (K, nodes) …
    anchor_loss: Tensor  # … −Σ log p(y | x, z) of all data there (K,) …
    anchor_gradient: Tensor  # … and its gradient (K, nodes)
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
        self.energy, self.settings, self.whole = energy, settings, settings.method == "hmc"
        self.adapts = settings.step_size is None
        self.prior_variance = settings.temperature * energy.prior_std.square()
        self.windows = {round(share * settings.warmup) for share in WINDOWS} if settings.warmup else set()

    def start(self, z: Tensor) -> State:
        """Returns chains that start at z (K, nodes)."""
        zero, count = torch.zeros_like(z), torch.zeros((), dtype=torch.int64)
        potential, gradient = self.energy(z, self.energy.batch(0))
        refuse_not_finite(potential, "energy", 0)
        refuse_not_finite(gradient, "gradient", 0)
        exact = torch.zeros((), dtype=torch.float64)
        state = State(
            count, z, self._normals(-1, z), potential, gradient, torch.ones_like(z[0]), zero[0], z,
            zero[:, 0], zero, exact, count, zero, zero, torch.zeros(4, dtype=torch.float64), exact, count,
        )  # fmt: skip
        return self._with_step(self._anchored(state, z), 0, guess=True)

    def advance(self, state: State) -> State:
        """Returns the chains one step on; in the warm-up they also adapt."""
        step = int(state.at)
        warming = step < self.settings.warmup
        state = self._trajectory(state, step, warming) if self.whole else self._stochastic(state, step)
        if warming:
            state = self._adapted(state, step + 1)
        return state._replace(at=state.at + 1)

    def _normals(self, step: int, z: Tensor) -> Tensor:
        """Returns the standard normals of a step, (K, nodes)."""
        chain = torch.arange(len(z), device=z.device)
        return normals(address(self.settings.seed, Space.CHAIN, step, chain), z.shape[1]).to(z.dtype)

    def _uniform(self, step: int, purpose: int, chains: int, device: torch.device) -> Tensor:
        """Returns uniform numbers of a step in (0, 1), (chains,), float64."""
        chain = torch.arange(chains, device=device)
        found = words(address(self.settings.seed, Space.CHAIN_CHOICE, step, chain, purpose))
        return (found.double() + 0.5) * 2.0**-32

    def _stochastic(self, state: State, step: int) -> State:
        """Takes a step of SGHMC on a minibatch."""
        kept, normal = self.settings.index(step) is not None, self._normals(step, state.z)
        potential, gradient = self.energy(state.z, self.energy.batch(step), each=kept, anchor=self._anchor(state))
        z, velocity = underdamped(
            state.z, state.velocity, gradient, state.scale, float(state.step), FRICTION, normal, state.noise
        )
        refuse_not_finite(z, "latents", step)
        return state._replace(z=z, velocity=velocity, potential=potential)

    def _anchored(self, state: State, z: Tensor) -> State:
        """Returns chains whose minibatches are compared with all data at z; they need no anchor without minibatches."""
        if self.energy.batch_size is None:
            return state
        at = self.energy.anchor(z)
        refuse_not_finite(at.gradient, "gradient", int(state.at))
        return state._replace(anchor=at.z, anchor_loss=at.loss, anchor_gradient=at.gradient)

    def _anchor(self, state: State) -> Anchor | None:
        found = Anchor(state.anchor, state.anchor_loss, state.anchor_gradient)
        return found if self.energy.batch_size else None

    def _trajectory(self, state: State, step: int, warming: bool) -> State:
        """Takes a step of HMC."""
        z, scale, size = state.z, state.scale, float(state.step)
        v = scale.sqrt() * self._normals(step, z)
        time = TRAJECTORY * (0.5 + float(self._uniform(step, 1, 1, z.device)))
        steps, everything = min(max(round(time / size), 1), LONGEST), self.energy.batch(step)
        end, v_end, potential, gradient = leapfrog(
            (z, v), state.gradient, lambda at, last: self.energy(at, everything, each=last), scale, size, steps
        )
        before = state.potential.double() + kinetic(v, scale)
        gained = (potential.double() + kinetic(v_end, scale) - before).nan_to_num(math.inf, math.inf, math.inf)
        probability = (-gained).exp().clamp_max(1)
        taken = self._uniform(step, 0, len(z), z.device) < probability  # (K,)
        state = state._replace(
            z=torch.where(taken[:, None], end, z),
            gradient=torch.where(taken[:, None], gradient, state.gradient),
            potential=torch.where(taken, potential, state.potential),
        )
        if not warming:
            divergent = state.divergent + (gained > DIVERGENT).sum().cpu()
            return state._replace(accepted=state.accepted + probability.mean().cpu(), divergent=divergent)
        return _averaged(state, float(probability.mean())) if self.adapts else state

    def _adapted(self, state: State, done: int) -> State:
        """Notes where the chains are; at the end of a window finds scales, noise of gradients and step size anew."""
        seen, off = state.seen + 1, state.z - state.mean
        mean = state.mean + off / seen
        state = state._replace(seen=seen, mean=mean, spread=state.spread + off * (state.z - mean))
        if done == self.settings.warmup and self.whole and self.adapts:
            state = state._replace(step=state.dual[2].exp())
        if done not in self.windows:
            return state
        guess, zero = done == min(self.windows), torch.zeros_like(mean)  # chains have not been far yet
        if int(seen) > 1 and not guess:
            variance = state.spread.mean(0) / (seen - 1)
            time = float(seen) * (TRAJECTORY if self.whole else float(state.step))
            state = self._with_scale(state, (time * variance + KNOWN * state.scale) / (time + KNOWN))
        state = self._anchored(state, mean)
        return self._with_step(state._replace(seen=torch.zeros_like(seen), mean=zero, spread=zero), done, guess)

    def _with_scale(self, state: State, scale: Tensor) -> State:
        """Returns chains with other scales, and velocities that fit them."""
        scale = scale.clamp(min=1e-6 * self.prior_variance, max=WIDEST * self.prior_variance)
        return state._replace(scale=scale, velocity=state.velocity * (scale / state.scale).sqrt())

    def _with_step(self, state: State, done: int, guess: bool = False) -> State:
        """Returns chains with the noise of their gradients and, unless it is given, a stable step size.

        A `guess` of their scales is the inverse of the prior's precision and the Fisher information together.
        """
        energy, noise, size = self.energy, torch.zeros_like(state.scale), self.settings.step_size
        chain = torch.arange(len(state.z), device=state.z.device)
        probe = normals(address(self.settings.seed, Space.CHAIN_PROBE, done, chain), state.z.shape[1]).to(state.z)
        if guess:
            fisher = energy.row_variance(state.z, done) * self.settings.temperature / energy.source.rows
            state = self._with_scale(state, 1 / (1 / self.prior_variance + fisher))
        if energy.batch_size:
            width = state.scale.minimum(self.prior_variance).sqrt()
            away = state.anchor + width * probe if guess else state.z  # at first they have not moved yet
            noise = energy.row_variance(away, done, self._anchor(state)) / energy.batch_size
        if size is None:
            curvature = max(energy.curvature(state.z, state.scale, probe, done), 1.0)
            heat = max(float((state.scale * noise).max()), 1e-12) / HEAT
            size = min(1 / math.sqrt(curvature), 2 * FRICTION / heat)  # half the stable step, or less
        dual = torch.tensor([math.log(10 * size), 0.0, 0.0, 0.0], dtype=torch.float64)
        return state._replace(noise=noise, step=torch.tensor(size, dtype=torch.float64), dual=dual)


def _averaged(state: State, accepted: float) -> State:
    """Moves the step size towards the `ACCEPTANCE` of proposals: dual averaging (Hoffman and Gelman, 2014)."""
    centre, error, average, count = state.dual.tolist()
    count += 1
    error += (ACCEPTANCE - accepted - error) / (count + 10)  # 10, 0.05 and 0.75 are theirs
    log_step = centre - math.sqrt(count) / 0.05 * error
    average += count**-0.75 * (log_step - average)
    step = torch.tensor(math.exp(log_step), dtype=torch.float64)
    return state._replace(step=step, dual=torch.tensor([centre, error, average, count], dtype=torch.float64))
