"""POSTERIOR: the mixture over the nodes of all layers; its draws, by address; its KL to the prior.

A draw is one z for every node of the network, and where units have factors a word for every layer, from which they come
(`layers.units`). The factors of units keep their prior, N(1, τ²), so the number of places adds nothing to the KL. In
predictions every second component has the noise of the one before it with the other sign: what is odd in the noise
cancels in their mean. Where there is a bank of sampled z (`ibnn.sample`), draws are rows of it, and the mixture has its
moments.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import mixture
from ibnn.errors import complaint
from ibnn.latent import Latent, scale_gradient
from ibnn.layers.units import MIRRORED
from ibnn.likelihood import Likelihood
from ibnn.mixture import KLKind, Mixture
from ibnn.normal import Space, address, check_seed, next_words, normals, normals_of, numbered_words, words
from ibnn.passes import Draws, LatentNetwork

_KEPT = 2**20  # entries of noise that are worth keeping for the next prediction
START = 0.05  # where σ and τ start
HARDLY = 1e-3  # part of the noise that few channels get
TRAINED = 0.03  # the least part in training: learning rates could not keep to a smaller one
CHANNELS = 0.5  # noise of channels as a part of that of units, where both have some
LAYERS = 4  # layers of a network whose units have noise s in each; the noise of all layers adds up
DrawsPer = Literal["channel", "unit", "both"]


class Posterior(LatentNetwork):
    """A network with a posterior over its latents; see `IBNN`, which can do more with it."""

    seed: Tensor
    examples: Tensor
    prior_factors: Tensor
    bank: Tensor | None

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        *,
        components: int,
        prior_std: float,
        init_std: float,
        kl_kind: KLKind,
        seed: int,
        draws: DrawsPer = "channel",
    ) -> None:
        """Wraps a network whose layers carry latents already; use `ibnn.convert`."""
        super().__init__(net, likelihood)
        self.components, self.prior_std, self.kl_kind = components, prior_std, kl_kind
        self.draws: DrawsPer = draws if any(latent.placed for latent in self.latents.values()) else "channel"
        self.gradient_scale = 1.0
        device = next(net.parameters()).device
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("examples", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("prior_factors", torch.ones(len(self.latents), device=device))
        self.register_buffer("bank", None)
        self.init_seed = seed  # decided the latents' start
        self._last_noise: tuple[Any, Tensor, Draws] | None = None
        self.reseed(seed)
        for_mean, for_std = self.initial_noise()
        self.set_posterior(mean=1 + init_std * for_mean, std=initial_std(for_std), unit_std=START)

    def posterior(self) -> Mixture:
        """The mixture over the nodes of all layers, (K, nodes)."""
        latents = list(self.latents.values())
        if not latents:
            raise RuntimeError(complaint("model", "a converted network", "a reverted one", "Convert it again."))
        mean, rho = torch.cat([latent.mean for latent in latents], 1), torch.cat([latent.rho for latent in latents], 1)
        scale = self.gradient_scale
        return Mixture(scale_gradient(mean, scale), scale_gradient(F.softplus(rho), scale))  # σ as a `Latent` has it

    def mean_latents(self) -> Tensor:
        """Returns the posterior mean of every latent, over components, (nodes,)."""
        return torch.cat([latent.mean.mean(0) for latent in self.latents.values()])

    def set_posterior(
        self,
        *,
        mean: Tensor | float | None = None,
        std: Tensor | float | None = None,
        unit_std: Tensor | float | None = None,
    ) -> None:
        """Overwrites μ and/or σ of all latents with a number, or with a tensor that broadcasts to (K, nodes).

        A bank is dropped: draws come from the mixture again, whose μ and σ are the bank's where they are not given.
        `set_posterior(mean=1.0, std=0.0)` switches all noise off: every component is the network before conversion.

        Args:
            mean: μ.
            std: σ.
            unit_std: τ, a number, or one for each layer, (layers,); only layers whose units have factors take it.
        """
        if isinstance(unit_std, Tensor) and unit_std.dim() and unit_std.shape != self.unit_std.shape:
            expected, remedy = f"a number, or one for each of {len(self.unit_std)} layers", "See model.unit_std."
            raise ValueError(complaint("unit_std", expected, f"shape {tuple(unit_std.shape)}", remedy))
        for name, value in (("std", std), ("unit_std", unit_std)):
            if value is not None and not bool((torch.as_tensor(value) >= 0).all()):
                raise ValueError(complaint(name, "not negative", value, "Pass 0 for no noise."))
        if unit_std is None and std is not None and not bool(torch.as_tensor(std).any()):
            unit_std = 0.0
        given = {name: value for name, value in (("mean", mean), ("std", std)) if value is not None}
        shape = (self.components, self.nodes)
        parts = {name: self.by_layer(torch.as_tensor(value).expand(shape)) for name, value in given.items()}
        before, self.bank = self.posterior().mean.detach(), None
        for name, layers in parts.items():
            for _, latent, part in layers:
                latent.set(**{name: part})
        if unit_std is not None:
            self.unit_std.copy_(torch.as_tensor(unit_std).to(self.unit_std) * self.has_units)
        self.forget(answers_alone=torch.equal(self.posterior().mean, before))

    def set_bank(self, z: Tensor) -> None:
        """Makes samples of z the posterior: draws are rows of them, and μ and σ of component k the moments of chain k.

        `set_posterior()` goes back to a mixture, that of these moments, and with z = `model.draw_latents(S)` a mixture
        becomes a bank: `model.set_bank(z.view(K, S, -1))`. A bank has no factors of units; the mixture keeps its τ.

        Args:
            z: S samples from each of K chains, (K, S, nodes), in the order in which they were drawn.
        """
        if z.dim() != 3 or (z.shape[0], z.shape[2]) != (self.components, self.nodes) or not z.shape[1]:
            expected, remedy = (
                f"of shape ({self.components}, samples, {self.nodes})",
                "Pass a chain for each component.",
            )
            raise ValueError(complaint("z", expected, tuple(z.shape), remedy))
        if not bool(z.isfinite().all()):
            raise ValueError(complaint("z", "finite", "NaN or infinity", "Leave those samples out."))
        z = z.detach().to(self.posterior().mean)
        self.set_posterior(mean=z.mean(1), std=z.std(1, correction=0), unit_std=self.unit_std.clone())
        self.bank = z.clone()

    def expect_bank(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Makes room for the bank in a state; a state without one leaves none."""
        saved = state_dict.get(f"{prefix}bank")
        self.bank = None if saved is None else torch.empty_like(saved, device=self.examples.device)

    def require_mixture(self) -> None:
        """Raises if there is a bank, which what comes next would not change along with the mixture."""
        if self.bank is not None:
            got = f"a bank of {self.bank.shape[1]} samples for each component"
            remedy = "Call model.set_posterior() to go on from the mixture of its moments."
            raise ValueError(complaint("model", "one whose posterior is a mixture", got, remedy))

    def _banked(self, seed: int, k: Tensor, s: Tensor) -> Tensor:
        """Returns draws s of components k, (K·S, nodes): rows of each chain in an order that the seed decides."""
        assert self.bank is not None
        kept = self.bank.shape[1]  # each comes once before any comes again
        row = torch.arange(kept, device=k.device)
        order = words(address(seed, Space.BANK, k[:, None], row)).view(len(k), kept).argsort(1)
        return self.bank[k[:, None], order[:, s % kept]].flatten(0, 1)

    @property
    def has_units(self) -> Tensor:
        """Whether the units of each layer's input have factors of their own, (layers,)."""
        placed = [latent.placed and self.draws != "channel" for latent in self.latents.values()]
        return torch.tensor(placed, device=self.unit_std.device)

    @property
    def prior_stds(self) -> Tensor | float:
        """Standard deviation of the prior of every node, (nodes,): s times its layer's factor; s if all are 1."""
        if self.draws == "channel":
            return self.prior_std
        return self.prior_std * by_node(self.latents.values(), self.prior_factors)

    def divide_noise(self) -> Tensor:
        """Divides the prior's noise among layers, channels and units; returns τ of each layer, (layers,).

        Where units have no noise, all layers have the same, as in the paper.
        """
        if not bool(self.has_units.any()):
            return torch.zeros_like(self.unit_std)
        channels, units = torch.tensor(noise_shares(self.latents.values(), self.draws)).to(self.unit_std)
        self.prior_factors.copy_(channels.clamp(min=TRAINED) * self.depth_factor)
        unit_std: Tensor = self.prior_std * self.depth_factor * units
        return unit_std

    @property
    def depth_factor(self) -> float:
        """√(`LAYERS` / L) of L layers with noise, where units have some, else 1.

        What noise does to the output adds up over layers, so that a deep network takes less in each.
        """
        if not bool(self.has_units.any()):
            return 1.0
        shares = zip(*noise_shares(self.latents.values(), self.draws), strict=True)
        return math.sqrt(LAYERS / sum(channels > HARDLY or units > 0 for channels, units in shares))

    def initial_noise(self) -> tuple[Tensor, Tensor]:
        """Returns the standard normals behind the initial μ and σ, (K, nodes) each, on the CPU."""
        row, seed, nodes = torch.arange(self.components), self.init_seed, self.nodes
        return normals(address(seed, Space.INIT_MEAN, row), nodes), normals(address(seed, Space.INIT_STD, row), nodes)

    def reseed(self, seed: int) -> None:
        """Starts the draws of training anew from a seed."""
        check_seed(seed)
        self.seed.fill_(seed)
        self.examples.zero_()

    def _assign(self, rows: int) -> Tensor:
        """Places of a batch's examples in the endless round of components: (rows,), place mod K is the component."""
        # A batch takes up the round where the last one stopped, so counts differ by at most one and even out. Examples
        # change places at random within each K in a row: a repeated batch does not give a component the same examples.
        width = self.components
        groups = -(-rows // width)
        shuffle = next_words(self.seed, self.examples, Space.ASSIGN, 0, groups * width)
        if groups * width > rows:
            position = torch.arange(groups * width, device=shuffle.device)
            shuffle = torch.where(position < rows, shuffle, 2**32)  # places beyond the batch stay behind those in it
        first = torch.arange(0, groups * width, width, device=shuffle.device)[:, None]
        return (shuffle.view(groups, width).argsort(1) + first + self.examples).flatten()[:rows]

    def _training_draws(
        self, q: Mixture, rows: int, samples: int = 1, spread: bool = False, part: tuple[int, int] | None = None
    ) -> Draws:
        """Draws for the rows of S copies of a batch, or of a part of one, S·rows, copy-major."""
        self.require_mixture()
        self.forget()
        first, total = part or (0, rows)
        place = self._assign(total)[first : first + rows]
        if spread:
            place = place * samples + torch.arange(samples, device=place.device)[:, None]
        component = (place if spread else place.expand(samples, -1)) % self.components
        at = next_words(self.seed, self.examples, Space.TRAIN, first, rows, samples)
        noise = normals_of(at, q.mean.shape[1])
        z = q.draw(component.flatten(), noise)
        if self.draws == "channel":
            return Draws(z)
        at = next_words(self.seed, self.examples, Space.TRAIN_UNITS, first, rows, samples)
        return Draws(z, numbered_words(at, len(self.latents)))

    def draw_each(
        self, samples: int = 5, seed: int = 0, *, components: Sequence[int] | None = None, first: int = 0
    ) -> Draws:
        """Returns the draws that `predict` makes, K·S, component-major; see `draw_latents`."""
        if self.bank is not None:
            with torch.inference_mode(False):  # others may need gradients
                return Draws(self._banked(seed, *self._chosen(samples, components, first)))
        component, noise = self._predictive_noise(samples, seed, components, first)
        return Draws(self.posterior().draw(component, noise.z), noise.at)

    def draw_latents(
        self, samples: int = 5, seed: int = 0, *, components: Sequence[int] | None = None, first: int = 0
    ) -> Tensor:
        """Returns z of the draws that `predict` makes, (K·S, nodes), component-major.

        z of (seed, k, s) depends on nothing else but the posterior. Its noise is that of (seed, k − 1, s) with the
        other sign where k is odd. Of a bank it is sample s of chain k in an order that the seed decides, beginning
        again after the last.

        Args:
            samples: S.
            seed: Decides the draws.
            components: Which components; default all.
            first: Index of the first draw of every component.
        """
        return self.draw_each(samples, seed, components=components, first=first).z

    def _chosen(self, samples: int, components: Sequence[int] | None, first: int) -> tuple[Tensor, Tensor]:
        """Returns the numbers of components and draws."""
        device, chosen = self.examples.device, range(self.components) if components is None else components
        if not len(chosen) or not all(0 <= k < self.components for k in chosen):
            remedy = "Count components from 0, or leave them out for all."
            raise IndexError(complaint("components", f"some of 0 … {self.components - 1}", list(chosen), remedy))
        return torch.tensor(list(chosen), device=device), torch.arange(first, first + samples, device=device)

    def _predictive_noise(
        self, samples: int, seed: int, components: Sequence[int] | None, first: int
    ) -> tuple[Tensor, Draws]:
        """Returns the component of every draw that `predict` makes, (K·S,), its standard normals, and its words."""
        nodes, layers = self.nodes, 0 if self.draws == "channel" else len(self.latents)  # that have words
        chosen, compiling = None if components is None else tuple(components), torch.compiler.is_compiling()
        key = (seed, samples, chosen, first, self.components, nodes, layers, self.examples.device)
        if not compiling and self._last_noise is not None and self._last_noise[0] == key:
            return self._last_noise[1:]  # input after input asks for the same
        if not compiling:
            check_seed(seed, least=-(2**63))
        with torch.inference_mode(False):  # others may need gradients
            k, s = self._chosen(samples, components, first)
            pair, mirrored = (k - k % 2)[:, None], (k % 2).repeat_interleave(samples)[:, None]
            noise = Draws((1 - 2 * mirrored) * normals(address(seed, Space.PREDICT, pair, s), nodes))
            if layers:
                at = words(address(seed, Space.PREDICT_UNITS, pair, s))
                noise.at = numbered_words(at, layers) + MIRRORED * mirrored
            component = k.repeat_interleave(samples)
        if noise.z.numel() <= _KEPT and not compiling:
            self._last_noise = key, component, noise
        return component, noise

    def kl(self, kind: KLKind | None = None) -> Tensor:
        """KL of the posterior to the prior in nats, summed over nodes and layers. Divide by the training-set size only.

        Args:
            kind: "mean" (the paper's surrogate), "components" or "pairwise" (upper bounds: β = 1 gives a true lower
                bound of the evidence), or "montecarlo" (unbiased, one draw per component); default `kl_kind`.
        """
        return self._kl(self.posterior(), kind or self.kl_kind)

    def _kl(self, q: Mixture, kind: KLKind) -> Tensor:
        if kind == "montecarlo":
            row = torch.arange(self.components, device=self.examples.device)
            noise = normals(address(self.seed, Space.KL, self.examples, row), self.nodes)
            return mixture.kl_montecarlo(q, self.prior_stds, noise)
        if kind not in mixture.CLOSED_FORMS:
            names = ", ".join([*mixture.CLOSED_FORMS, "montecarlo"])
            raise ValueError(complaint("kind", f"one of {names}", repr(kind), 'Pass "mean" for the paper\'s.'))
        return mixture.CLOSED_FORMS[kind](q, self.prior_stds)

    def entropy(self) -> Tensor:
        """Ĥ, a lower bound of the posterior's entropy in nats, joint over layers."""
        return mixture.entropy_bound(self.posterior())

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles get no noise."""
        return super().__getstate__() | {"_last_noise": None}


def layer_noise(latent: Latent, draws: DrawsPer) -> tuple[float, float]:
    """Returns the noise of a layer's channels (or its only nodes) and of its units, as parts of that of the network.

    >>> layer_noise(Latent(1, 16, axis=-3), "both"), layer_noise(Latent(1, 3, axis=-3), "both")
    ((0.5, 1.0), (0.001, 0.0))
    """
    if latent.narrow:
        return HARDLY, 0.0
    if draws == "channel" or not latent.placed:
        return 1.0, 0.0
    return (HARDLY, 1.0) if draws == "unit" else (CHANNELS, 1.0)


def noise_shares(latents: Iterable[Latent], draws: DrawsPer) -> tuple[list[float], list[float]]:
    """Returns what `layer_noise` gives to channels and units of layers; few channels get more if nothing else does."""
    shares = [layer_noise(latent, draws) for latent in latents]
    if all(channels == HARDLY and not units for channels, units in shares):
        shares = [(1.0, 0.0)] * len(shares)
    return [channels for channels, _ in shares], [units for _, units in shares]


def by_node(latents: Iterable[Latent], factors: Tensor) -> Tensor:
    """Returns factors of layers' inputs (layers,) for every node, (nodes,): latents of outputs and biases have 1.

    >>> by_node([Latent(1, 2, axis=-1), Latent(1, 3, axis=-1)], torch.tensor([0.5, 1.0]))
    tensor([0.5000, 0.5000, 1.0000, 1.0000, 1.0000])
    """
    inputs = [(latent.nodes if latent.sides is None else latent.sides.inputs, latent.nodes) for latent in latents]
    counts = torch.tensor([count for own, nodes in inputs for count in (own, nodes - own)], device=factors.device)
    both = torch.stack([factors, torch.ones_like(factors)], 1).flatten()
    return both.repeat_interleave(counts, output_size=sum(nodes for _, nodes in inputs))


def initial_std(noise: Tensor) -> Tensor:
    """Returns the σ that a latent starts with, |N(0.05, 0.02²)|."""
    return (START + 0.02 * noise).abs()
