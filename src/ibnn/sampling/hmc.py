"""HMC: the energy of several chains on all data, trajectories, and the warm-up that adapts scales and step size.

U(z) = −(Σ log p(y | x, z) + log p(z)) / T, where the likelihood has its full weight. A `State` is all that chains
depend on; a step makes a new one and draws by address, so that a saved state goes on to the bit.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, check_rows, repeat_rows, tree_map
from ibnn.layers.explain import explaining_shapes
from ibnn.network import IBNN, prior_stds
from ibnn.normal import Space, address, normals, words

AT_ONCE = 256  # rows that go through the network at once, for each chain
PROBED, PROBES = 32, 16  # rows of a minibatch from which scales are guessed, and minibatches
ITERATIONS, WIDTH = 8, 0.1  # of the search for the largest curvature, and the distance of its differences
WINDOWS = (0.1, 0.25, 0.5, 0.9)  # shares of the warm-up after which scales and step size are found anew
KNOWN = 10.0  # time that the scales of the window before count for: in less, a chain does not go as far as it could
WIDEST = 4.0  # scales above so many prior variances are not believed
DIVERGENT = 1000.0  # nats of energy that a trajectory may gain
ACCEPTANCE = 0.8  # what the step size aims at
LONGEST = 256  # steps of a trajectory
TRAJECTORY = math.pi / 2  # mean time of a trajectory


class DivergedChainError(RuntimeError):
    """A chain left the finite numbers; the model is as it was."""


def refuse_not_finite(values: Tensor, what: str, step: int) -> Tensor:
    """Returns values of chains, (K, …); raises if one of them is NaN or infinite."""
    good = values.reshape(len(values), -1).isfinite().all(1)
    if not bool(good.all()):
        got = f"NaN or infinity for the {what} of chain {int(good.long().argmin())} at step {step}"
        remedy = "Pass a longer warmup; are all inputs finite and scaled like the training data?"
        raise DivergedChainError(complaint("model", "one whose chains stay finite", got, remedy))
    return values


class Energy:
    """U of K chains at z (K, nodes), for a network in eval mode."""

    def __init__(self, model: IBNN, source: Source, temperature: float, seed: int) -> None:
        self.model, self.source, self.temperature, self.seed = model, source, temperature, seed
        self.device, self.dtype = model.examples.device, model.posterior().mean.dtype
        self.prior_std = torch.as_tensor(prior_stds(model)).to(self.device, self.dtype)
        self.data = [self._rows(numbers) for numbers in torch.arange(source.rows).split(AT_ONCE)]
        x, y = self._rows(torch.arange(2))
        with torch.no_grad(), explaining_shapes(model.net, x):
            output = model.outputs(x, model.posterior().mean[:1])[0]
            check_rows(output, len(y))
        whole = source.data[1] if isinstance(source.data, tuple) else y  # a Dataset's come batch by batch
        model.likelihood.check(output, whole.to(self.device))

    def _rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        x, y = self.source.take(numbers)
        return tree_map(lambda t: t.to(self.device), as_tensors(x, self.dtype)), y.to(self.device)

    def __call__(self, z: Tensor, *, each: bool = True) -> tuple[Tensor, Tensor]:
        """Returns U (K,) and its gradient (K, nodes); without `each`, U is the chains' mean, which costs less."""
        deviation = (z - 1) / self.prior_std
        energy, gradient = 0.5 * deviation.square().sum(1), deviation / self.prior_std
        energy = energy if each else energy.mean().expand(len(z))
        total, slope = torch.zeros_like(z[:, 0]), torch.zeros_like(z)
        for x, y in self.data:
            repeat = partial(repeat_rows, rows=len(y), samples=len(z))
            loss, part = self._likelihood(z, tree_map(repeat, x), repeat(y), each)
            total, slope = total + loss, slope + part
        return (energy + total) / self.temperature, (gradient + slope) / self.temperature

    def _likelihood(self, z: Tensor, x: Inputs, y: Tensor, each: bool) -> tuple[Tensor, Tensor]:
        """Returns −Σ log p(y | x, z), (K,), or without `each` its mean, and its gradient (K, nodes).

        The rows are those of the first chain, then as many of the second and so on; all go through in one pass.
        """
        likelihood, chains = self.model.likelihood, len(z)
        rows = len(y) // chains
        with torch.enable_grad():
            at = z.detach().requires_grad_()
            output = self.model.outputs(x, at.repeat_interleave(rows, 0)[None])[0]
            if each:
                every = list(map(likelihood.terms, output.split(rows), y.split(rows)))
                losses = torch.stack([terms.nll * terms.count.to(z) for terms in every])
            else:
                terms = likelihood.terms(output, y)
                losses = (terms.nll * terms.count.to(z) / chains).expand(chains)
            (gradient,) = torch.autograd.grad(losses.sum(), at)
        return losses.detach(), gradient

    def information(self, z: Tensor, step: int) -> Tensor:
        """Returns the empirical Fisher information of U, (nodes,), the mean over chains: a guess of its curvature."""
        rows, chain, found = min(PROBED, self.source.rows), torch.arange(len(z))[:, None], []
        for number in range(1, PROBES + 1):
            drawn = words(address(self.seed, Space.CHAIN_BATCH, step, number, chain, torch.arange(rows)))
            found.append(self._likelihood(z, *self._rows(drawn % self.source.rows), each=False)[1])
        return torch.stack(found).var(0).mean(0) * self.source.rows / rows / self.temperature

    def curvature(self, z: Tensor, scale: Tensor, probe: Tensor, step: int) -> float:
        """Returns the largest curvature along scaled nodes, in any direction and over all chains.

        Power iteration on differences of gradients: layers may have backward passes that cannot be differentiated.
        """
        gradient = self(z, each=False)[1]
        for _ in range(ITERATIONS):
            probe = probe / probe.norm(dim=1, keepdim=True)
            moved = self(z + WIDTH * scale.sqrt() * probe, each=False)[1]
            probe = scale.sqrt() * (moved - gradient) / WIDTH  # (K, nodes)
        return refuse_not_finite(probe.norm(dim=1), "curvature", step).max().item()


def leapfrog(
    z: Tensor, v: Tensor, gradient: Tensor, energy: Callable[..., Any], scale: Tensor, step: float, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns z, v, U and its gradient at the end of a trajectory."""
    potential = torch.zeros(len(z))
    for number in range(1, steps + 1):
        v = v - 0.5 * step * scale * gradient
        z = z + step * v
        potential, gradient = energy(z, each=number == steps)
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
    scale: Tensor  # m, the inverse mass (nodes,): best the posterior variance of each node
    step: Tensor  # h, float64
    seen: Tensor  # steps of the present window …
    mean: Tensor  # … their mean (K, nodes) …
    spread: Tensor  # … and sum of squared deviations from it (K, nodes)
    dual: Tensor  # of dual averaging: centre, error, log of the averaged step, count
    accepted: Tensor  # sum of acceptance probabilities since the warm-up, float64
    divergent: Tensor  # trajectories that diverged since then


ON_CPU = {"at", "step", "seen", "dual", "accepted", "divergent"}  # numbers of a state that Python reads


class Moves:
    """Steps of K chains on an energy."""

    def __init__(self, energy: Energy, warmup: int, seed: int) -> None:
        self.energy, self.warmup, self.seed = energy, warmup, seed
        self.prior_variance = energy.temperature * energy.prior_std.square()
        self.windows = {round(share * warmup) for share in WINDOWS}

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
        state, gained = self._trajectory(state, step)
        probability = (-gained).exp().clamp_max(1).mean()
        if step < self.warmup:
            state = self._adapted(_averaged(state, float(probability)), step + 1)
        else:
            divergent = state.divergent + (gained > DIVERGENT).sum()
            state = state._replace(accepted=state.accepted + probability, divergent=divergent)
        return state._replace(at=state.at + 1)

    def _uniform(self, step: int, purpose: int, chains: int) -> Tensor:
        """Returns uniform numbers of a step in (0, 1), (chains,), float64."""
        found = words(address(self.seed, Space.CHAIN_CHOICE, step, torch.arange(chains), purpose))
        return (found.double() + 0.5) * 2.0**-32

    def _trajectory(self, state: State, step: int) -> tuple[State, Tensor]:
        """Returns the chains after a trajectory that each accepts or not, and the energy that it gained, (K,)."""
        z, scale, size = state.z, state.scale, float(state.step)
        chain = torch.arange(len(z), device=z.device)
        v = scale.sqrt() * normals(address(self.seed, Space.CHAIN, step, chain), z.shape[1]).to(z.dtype)
        time = TRAJECTORY * (0.5 + float(self._uniform(step, 1, 1)))
        steps = min(max(round(time / size), 1), LONGEST)
        end, v_end, potential, gradient = leapfrog(z, v, state.gradient, self.energy, scale, size, steps)
        before = state.potential.cpu().double() + kinetic(v, scale)
        gained = (potential.cpu().double() + kinetic(v_end, scale) - before).nan_to_num(math.inf, math.inf, math.inf)
        taken = (self._uniform(step, 0, len(z)) < (-gained).exp()).to(z.device)  # (K,)
        state = state._replace(
            z=torch.where(taken[:, None], end, z),
            gradient=torch.where(taken[:, None], gradient, state.gradient),
            potential=torch.where(taken, potential, state.potential),
        )
        return state, gained

    def _adapted(self, state: State, done: int) -> State:
        """Notes where the chains are; at the end of a window finds scales and step size anew."""
        seen, off = state.seen + 1, state.z - state.mean
        mean = state.mean + off / seen
        state = state._replace(seen=seen, mean=mean, spread=state.spread + off * (state.z - mean))
        if done == self.warmup:
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
        return state._replace(scale=scale.clamp(1e-6 * self.prior_variance, WIDEST * self.prior_variance))

    def _with_step(self, state: State, done: int, guess: bool) -> State:
        """Returns chains with half the largest stable step size.

        A `guess` of their scales is the inverse of the prior's precision and the Fisher information together.
        """
        if guess:
            state = self._with_scale(state, 1 / (1 / self.prior_variance + self.energy.information(state.z, done)))
        chain = torch.arange(len(state.z), device=state.z.device)
        probe = normals(address(self.seed, Space.CHAIN_PROBE, done, chain), state.z.shape[1]).to(state.z.dtype)
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
