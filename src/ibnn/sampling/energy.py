"""ENERGY: U(z) = −(Σ log p(y | x, z) + log p(z)) / T of several chains, and its gradient, on all data or a minibatch.

The likelihood has its full weight, and nothing else is in it. Minibatches are drawn with replacement, by address: their
noise is then independent from step to step, its variance can be estimated, and a chain is resumed from its step alone.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, call_arguments, check_rows, tree_map
from ibnn.layers.observe import explaining_shapes
from ibnn.network import IBNN
from ibnn.normal import Space, address, words
from ibnn.passes import Draws

BLOCK = 64  # steps whose random numbers are drawn together
AT_ONCE = 1024  # rows of all data that go through the network at once, for each chain


class Energy:
    """U of K chains at z (K, nodes).

    Args:
        model: The network, in eval mode; its weights stay as they are.
        source: The data.
        batch_size: Rows of a minibatch; None for all data, which are then held in memory.
        temperature: T.
        seed: Decides the minibatches.
    """

    def __init__(self, model: IBNN, source: Source, batch_size: int | None, temperature: float, seed: int) -> None:
        self.model, self.source, self.temperature, self.seed = model, source, temperature, seed
        self.device, self.dtype = model.examples.device, model.posterior().mean.dtype
        self.prior_std = torch.as_tensor(model.prior_stds).to(self.device, self.dtype)
        self.batch_size = None if batch_size is None or batch_size >= source.rows else batch_size
        self._block = -1, torch.zeros(0)  # rows of a block of minibatches, by its number
        self._whole = list(self._pieces()) if self.batch_size is None else []
        x, y = self._whole[0] if self._whole else self.rows(torch.arange(min(2, source.rows)))
        self._check(x, y)

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        """Returns data by their numbers."""
        x, y = self.source.take(numbers)
        return tree_map(lambda t: t.to(self.device), as_tensors(x, self.dtype)), y.to(self.device)

    def _pieces(self) -> Iterator[tuple[Inputs, Tensor]]:
        return (self.rows(part) for part in torch.arange(self.source.rows).split(AT_ONCE))

    def _check(self, x: Inputs, y: Tensor) -> None:
        """Raises unless targets fit the network's outputs."""
        with torch.no_grad(), explaining_shapes(self.model.net, x):
            output = self.model.outputs(x, self.model.posterior().mean[:1])[0]
            check_rows(output, len(y))
        self.model.likelihood.check(output, y)

    def batch(self, step: int, number: int = 0) -> list[tuple[Inputs, Tensor]]:
        """Returns the data of a step: all, or a minibatch; `number` counts further minibatches of the step."""
        if self.batch_size is None:
            return self._whole
        return [self.rows(self._numbers(step, number))]

    def _numbers(self, step: int, number: int) -> Tensor:
        """Returns the rows of a minibatch; those of a block of steps are drawn together, which is faster."""
        block, place = divmod(step, BLOCK)
        if number or self._block[0] != block:
            steps = torch.tensor([step]) if number else block * BLOCK + torch.arange(BLOCK)
            at = address(self.seed, Space.CHAIN_BATCH, steps[:, None], number, torch.arange(self.batch_size or 0))
            drawn = words(at).view(len(steps), -1) % self.source.rows
            if number:
                return drawn[0]
            self._block = block, drawn
        return self._block[1][place]

    def __call__(
        self, z: Tensor, data: list[tuple[Inputs, Tensor]], *, each: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns U (K,) and its gradient (K, nodes), from all data or estimated from a minibatch.

        Without `each`, U is the chains' mean, which costs less and has the same gradient.
        """
        deviation = (z - 1) / self.prior_std
        energy, gradient = 0.5 * deviation.square().sum(1), deviation / self.prior_std
        energy = energy if each else energy.mean().expand(len(z))
        rows = sum(len(y) for _, y in data)
        for x, y in data:
            with torch.enable_grad():
                at = z.detach().requires_grad_()
                losses = self._losses(at, x, y, each) * (self.source.rows / rows)  # (K,)
                (part,) = torch.autograd.grad(losses.sum(), at)
            energy, gradient = energy + losses.detach(), gradient + part
        return energy / self.temperature, gradient / self.temperature

    def _losses(self, z: Tensor, x: Inputs, y: Tensor, each: bool) -> Tensor:
        """Returns −Σ log p(y | x, z) of the rows, (K,), or without `each` its mean over chains."""
        likelihood, outputs = self.model.likelihood, self._outputs(z, x)
        if each:
            losses = torch.stack([likelihood.nll(output, y) for output in outputs])
        else:
            losses = likelihood.nll(outputs.flatten(0, 1), y.repeat(len(z), *[1] * (y.dim() - 1))).expand(len(z))
        return losses * likelihood.mass(y).to(z)

    def _outputs(self, z: Tensor, x: Inputs) -> Tensor:
        """Returns the outputs of all chains, (K, B, …): in one pass, if rows do not affect each other."""
        call = call_arguments(x)
        with torch.no_grad():
            together = len(z) > 1 and self.model._entries_as_rows(call, Draws(z[0]))
        return self.model._rows_of_draws(call, Draws(z)) if together else self.model.outputs(x, z)

    def noise(self, z: Tensor, step: int, repeats: int = 32) -> Tensor:
        """Returns the variance of minibatch gradients at z, (nodes,), the mean over chains; 0 for all data."""
        if self.batch_size is None:
            return torch.zeros_like(z[0])
        found = [self(z, self.batch(step, number), each=False)[1] for number in range(1, repeats + 1)]
        return torch.stack(found).var(0).mean(0)

    def curvature(self, z: Tensor, scale: Tensor, probe: Tensor, step: int, repeats: int = 10) -> float:
        """Returns the largest curvature along scaled nodes, in any direction and over all chains.

        Power iteration on differences of gradients: layers may have backward passes that cannot be differentiated.
        """
        width, data = 0.1, self.batch(step)
        gradient = self(z, data, each=False)[1]
        largest = torch.zeros(len(z), dtype=z.dtype, device=z.device)
        for _ in range(repeats):
            probe = probe / probe.norm(dim=1, keepdim=True)
            moved = self(z + width * scale.sqrt() * probe, data, each=False)[1]
            probe = scale.sqrt() * (moved - gradient) / width  # (K, nodes)
            largest = probe.norm(dim=1)
        return refuse_not_finite(largest, "curvature", step).max().item()


def refuse_not_finite(values: Tensor, what: str, step: int) -> Tensor:
    """Returns values of chains, (K, …); raises if one of them is NaN or infinite."""
    good = values.reshape(len(values), -1).isfinite().all(1)
    if not bool(good.all()):
        chain = int((~good).nonzero()[0])
        remedy = "Pass a smaller step_size or a longer warmup; are all inputs finite and scaled like the training data?"
        got = f"NaN or infinity for the {what} of chain {chain} at step {step}"
        raise DivergedChainError(complaint("model", "one whose chains stay finite", got, remedy))
    return values


class DivergedChainError(RuntimeError):
    """A chain left the finite numbers; the model is as it was."""
