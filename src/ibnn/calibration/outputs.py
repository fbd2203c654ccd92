"""NOISE: outputs of a network for held-out rows, with noise of a given scale on its latents.

The latents of every layer are z ~ N(μ, (a·w·σ)²): a is the scale, w a factor of the layer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ibnn.inputs import Inputs, batch_length, tree_map
from ibnn.network import IBNN
from ibnn.normal import Space, address, normals
from ibnn.prediction import draws

DRAWS = 8  # of all components together, in the search
NARROW, HARDLY = 8, 1e-3  # z of fewer channels (an image's colours) multiply all that follows: nothing averages out


class Outputs:
    """A model, the inputs of all held-out rows, and the posterior (μ, σ) whose σ is scaled.

    Attributes:
        trained: Whether the latents were trained; if not, μ is 1 and σ the same for all but narrow layers.
        layers: How many nodes each layer has, (L,).
        by_row: Whether every row can have draws of its own.
    """

    def __init__(self, model: IBNN, x: Inputs, *, samples: int, seed: int, batch_size: int, tick: Callable[[], None]):
        self.model, self.x, self.rows, self.device = model, x, batch_length(x), model.examples.device
        self.samples, self.seed, self.batch_size, self.tick = samples, seed, batch_size, tick
        self.trained = int(model.examples) > 0
        self.layers = torch.tensor([latent.nodes for latent in model.latents.values()], device=self.device)
        q = model.posterior()
        self.mean, self.base = (q.mean.clone(), q.std.clone()) if self.trained else self._untrained(q.mean)
        self.few = max(1, min(samples, -(-DRAWS // model.components)))  # draws per component in the search
        self.by_row = True

    def _untrained(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Returns μ and σ to begin with: 1, but hardly any noise on few channels if there are others."""
        wide = torch.tensor([latent.axis == -1 or latent.nodes >= NARROW for latent in self.model.latents.values()])
        relative = torch.where(wide | ~wide.any(), 1.0, HARDLY).to(mean)
        return torch.ones_like(mean), relative.repeat_interleave(self.layers).expand_as(mean)

    def std(self, factors: Tensor, scale: float) -> Tensor:
        """Returns a·w·σ, (K, nodes), for factors w (L,)."""
        std: Tensor = scale * factors.repeat_interleave(self.layers) * self.base
        return std

    def plain(self, rows: slice) -> Tensor:
        """Returns the outputs without noise, (K, 1, N, …); components that were never trained are alike, and K is 1."""
        z = self.mean if self.trained else self.mean[:1]
        return self._by_batch(rows, lambda part: self.model.outputs(self.inputs(part), z))[:, None]

    def noisy(self, factors: Tensor, scale: float, rows: slice) -> Tensor:
        """Returns the outputs of a few draws of each component, (K, S, N, …), other ones for every row.

        They are the same at every scale, so what is found is true of any draws and not of a lucky few. (A layer of one
        node, such as the first of a network for gray images, multiplies all that comes after it: 20 shared draws of
        it are anything but typical.)
        """
        if scale == 0:
            return self.plain(rows)

        def outputs(part: slice) -> Tensor:
            numbers, inputs = torch.arange(part.start, part.stop), self.inputs(part)
            drawn = (self.latents(factors * scale, j, numbers) for j in range(self.few * self.model.components))
            return torch.cat([self.model.outputs(inputs, z[None]) for z in drawn])

        return self._by_batch(rows, outputs).unflatten(0, (-1, self.few))  # type: ignore[no-any-return]

    def predicted(self, factors: Tensor, scale: float) -> Tensor:
        """Returns the outputs that `predict` makes its answers of, (K, S, N, …); sets the model's σ."""
        self.model.set_posterior(std=self.std(factors, scale))
        self.tick()
        drawn = draws(self.model, self.x, samples=self.samples, seed=self.seed, batch_size=self.batch_size)
        return drawn.to(self.device)

    def _by_batch(self, rows: slice, outputs: Callable[[slice], Tensor]) -> Tensor:
        """Returns what a function of rows gives for at most `batch_size` of them at a time, (J, N, …)."""
        parts = []
        for start in range(rows.start, rows.stop, self.batch_size):
            parts.append(outputs(slice(start, min(start + self.batch_size, rows.stop))))
            self.tick()
        return torch.cat(parts, 1)

    def latents(self, std: Tensor, draw: int, rows: Tensor) -> Tensor:
        """Returns z of one draw for each of some rows (R, nodes), or one for all if layers do not see the batch first.

        Args:
            std: w·a by layer, (L,).
            draw: Number of the draw; decides the component.
            rows: Numbers of the rows.
        """
        rows = rows.to(self.device) if self.by_row else torch.zeros(1, dtype=torch.int64, device=self.device)
        noise = normals(address(self.seed, Space.SEARCH, draw, rows), self.base.shape[1])
        k = draw // self.few % self.model.components
        z: Tensor = self.mean[k] + std.repeat_interleave(self.layers) * self.base[k] * noise
        return z if self.by_row else z[0]

    def inputs(self, rows: slice | Tensor) -> Inputs:
        """Returns some rows of the inputs, on the model's device."""
        inputs: Inputs = tree_map(lambda t: (t[rows] if t.dim() and len(t) == self.rows else t).to(self.device), self.x)
        return inputs
