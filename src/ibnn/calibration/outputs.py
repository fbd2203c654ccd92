"""NOISE: outputs of a network for held-out rows, with noise of a given scale on its latents.

The latents of every layer are z ~ N(μ, (a·w·σ)²), and the factors of its units, if they have any, u ~ N(1, (a·v·τ)²): a
is the scale, w and v are factors of the layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ibnn.inputs import Inputs, batch_length, tree_map
from ibnn.network import IBNN
from ibnn.normal import Space, address, normals, numbered_words, words
from ibnn.passes import Draws
from ibnn.posterior import HARDLY, by_node, noise_shares


class Outputs:
    """A model, the inputs of all held-out rows, and the posterior (μ, σ, τ) whose σ and τ are scaled.

    Attributes:
        trained: Whether the latents were trained; if not, μ is 1 and σ and τ are those of `layer_noise`.
        layers: How many nodes each layer has, (L,).
        flat: Factors w and v of 1, (2, L).
        noisy_parts: Which of these the scale is a mean of, (2, L): beside units, not channels with hardly any noise.
        by_row: Whether every row can have draws of its own.
        tick: Called with `passed` when that grows.
        passed: How many rows went through the network; those with a gradient count more.
    """

    def __init__(self, model: IBNN, x: Inputs, *, samples: int, seed: int, batch_size: int) -> None:
        self.model, self.x, self.rows, self.device = model, x, batch_length(x), model.examples.device
        self.samples, self.seed, self.batch_size = samples, seed, batch_size
        self.passed = 0
        self.tick: Callable[[int], object] = lambda done: None
        self.trained = int(model.examples) > 0
        self.layers = torch.tensor([latent.nodes for latent in model.latents.values()], device=self.device)
        q, shares = model.posterior(), noise_shares(model.latents.values(), model.draws)
        self.mean, self.base, self.unit_base = q.mean.clone(), q.std.clone(), model.unit_std.clone()
        relative = torch.tensor(shares).to(self.mean)  # (2, L)
        if not self.trained:
            self.mean, self.unit_base = torch.ones_like(q.mean), relative[1].to(model.unit_std)
            self.base = by_node(model.latents.values(), relative[0]).expand_as(q.mean).clone()
        self.flat = torch.ones_like(relative)
        noisy = [share != HARDLY or model.draws == "channel" for share in shares[0]]
        self.noisy_parts = torch.stack([torch.tensor(noisy, device=self.device), self.unit_base > 0])
        self.everything = torch.arange(self.rows)
        self.by_row = True

    def std(self, factors: Tensor, scale: float) -> Tensor:
        """Returns a·w·σ, (K, nodes), for factors w and v (2, L)."""
        std: Tensor = scale * factors[0].repeat_interleave(self.layers) * self.base
        return std

    def set_noise(self, factors: Tensor, scale: float) -> None:
        """Sets the model's σ and τ."""
        self.model.set_posterior(std=self.std(factors, scale), unit_std=scale * factors[1] * self.unit_base)

    def plain(self, rows: Tensor) -> Tensor:
        """Returns the outputs without noise, (K, 1, N, …); components that were never trained are alike, and K is 1."""
        z = self.mean if self.trained else self.mean[:1]
        return self._by_batch(rows, lambda part: self.model.outputs(self.inputs(part), z))[:, None]

    def noisy(self, factors: Tensor, scale: float, rows: Tensor, number: int) -> Tensor:
        """Returns the outputs of a few draws in opposite pairs, (1, J, N, …), other ones for every row.

        The noise of every second draw is minus that of the one before: what is linear in it cancels. Draws are the same
        at every scale, so what is found is true of any draws and not of a lucky few. (A layer of one node, such as the
        first of a network for gray images, multiplies all that comes after it: 20 shared draws of it are anything but
        typical.)
        """

        def outputs(part: Tensor) -> Tensor:
            inputs = self.inputs(part)
            std = factors * scale
            drawn = [self.latents(own, [j], part) for j in range(number // 2) for own in (std, -std)]
            return torch.cat([self.model.outputs(inputs, draw) for draw in drawn])

        return self._by_batch(rows, outputs)[None]

    def predicted(self, rows: Tensor, samples: int, first: int = 0) -> Tensor:
        """Returns outputs that `predict` makes its answers of, draws `first` … of each component, (K, S, N, …)."""
        draws = self.model.draw_each(samples, self.seed, first=first)
        drawn = self._by_batch(rows, lambda part: self.model.outputs(self.inputs(part), draws))
        return drawn.unflatten(0, (self.model.components, samples))  # type: ignore[no-any-return]

    def _by_batch(self, rows: Tensor, outputs: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what a function of rows gives for at most `batch_size` of them at a time, (J, N, …)."""
        parts: list[Tensor] = []
        for part in rows.split(self.batch_size):
            parts.append(outputs(part))
            self.count(len(parts[-1]) * len(part))
        return torch.cat(parts, 1)

    def count(self, rows: int) -> None:
        """Counts rows that went through the network."""
        self.passed += rows
        self.tick(self.passed)

    def latents(self, std: Tensor, numbers: Sequence[int], rows: Tensor) -> Draws:
        """Returns some draws for each of some rows, or for all if layers do not see the batch first.

        Args:
            std: a·w and a·v by layer, (2, L).
            numbers: Numbers of the draws, which with the row's decide the components.
            rows: Numbers of the rows.
        """
        rows = rows.to(self.device) if self.by_row else torch.zeros(1, dtype=torch.int64, device=self.device)
        number = torch.tensor(numbers, device=self.device)
        shape, nodes = (len(number), len(rows), -1), self.base.shape[1]
        noise = normals(address(self.seed, Space.SEARCH, number[:, None], rows), nodes).view(shape)
        k = (number[:, None] + rows) % self.model.components
        z = self.mean[k] + std[0].repeat_interleave(self.layers) * self.base[k] * noise
        at = None
        if self.model.draws != "channel":
            at = words(address(self.seed, Space.SEARCH_UNITS, number[:, None], rows))
            at = numbered_words(at, len(self.layers)).view(shape)
        unit_std = std[1] * self.unit_base
        return Draws(z, at, unit_std) if self.by_row else Draws(z[:, 0], at if at is None else at[:, 0], unit_std)

    def inputs(self, rows: Tensor) -> Inputs:
        """Returns some rows of the inputs, on the model's device."""
        inputs: Inputs = tree_map(lambda t: (t[rows] if t.dim() and len(t) == self.rows else t).to(self.device), self.x)
        return inputs
