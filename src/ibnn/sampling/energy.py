"""ENERGY: U(z) = −(Σ log p(y | x, z) + log p(z)) / T of several chains, and its gradient, on all data or a minibatch.

The likelihood has its full weight, and nothing else is in it. Minibatches are drawn with replacement, by address: their
noise is then independent from step to step, its variance can be estimated, and a chain is resumed from its step alone.

An estimate from a minibatch starts from what all data say at an anchor near the chain, and adds what the minibatch says
of the difference (control variates; Baker et al., 2019). Both terms see the same rows, so that most of their noise
cancels. Without it the noise of minibatches, not the posterior, would dictate the step size.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, call_arguments, check_rows, slice_rows, tree_map
from ibnn.layers.observe import explaining_shapes
from ibnn.network import IBNN
from ibnn.normal import Space, address, words
from ibnn.passes import Draws

BLOCK = 64  # steps whose random numbers are drawn together
PROBED = 32  # rows of a minibatch to try things on, where steps take all data
AT_ONCE = 256  # rows that go through the network at once, for each chain


class Piece(NamedTuple):
    """Some data: the same rows for all chains, or as many for each chain, one chain after the other."""

    x: Inputs
    y: Tensor
    rows: int  # of a chain


class Anchor(NamedTuple):
    """A place near each chain, and −Σ log p(y | x, z) of all data there."""

    z: Tensor  # (K, nodes)
    loss: Tensor  # (K,)
    gradient: Tensor  # (K, nodes)


class Energy:
    """U of K chains at z (K, nodes).

    Args:
        model: The network, in eval mode; its weights stay as they are.
        source: The data.
        batch_size: Rows of a minibatch; None for all data, which are then held in memory. Data of at most four
            minibatches are also taken whole: a step computes two of them, and carries their noise.
        temperature: T.
        seed: Decides the minibatches.
    """

    def __init__(self, model: IBNN, source: Source, batch_size: int | None, temperature: float, seed: int) -> None:
        self.model, self.source, self.temperature, self.seed = model, source, temperature, seed
        self.device, self.dtype = model.examples.device, model.posterior().mean.dtype
        self.prior_std = torch.as_tensor(model.prior_stds).to(self.device, self.dtype)
        self.batch_size = None if batch_size is None or 4 * batch_size >= source.rows else batch_size
        self._probe_rows = self.batch_size or min(PROBED, source.rows)
        self._block = -1, torch.zeros(0)  # rows of a block of minibatches, by its number
        self._whole: list[Piece] = []
        if self.batch_size is None:
            parts = torch.arange(source.rows).split(AT_ONCE)
            self._whole = [Piece(*self.rows(part), len(part)) for part in parts]
        self._check(*self.rows(torch.arange(min(2, source.rows))))

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        """Returns data by their numbers."""
        x, y = self.source.take(numbers)
        return tree_map(lambda t: t.to(self.device), as_tensors(x, self.dtype)), y.to(self.device)

    def _check(self, x: Inputs, y: Tensor) -> None:
        """Raises unless targets fit the network's outputs."""
        with torch.no_grad(), explaining_shapes(self.model.net, x):
            output = self.model.outputs(x, self.model.posterior().mean[:1])[0]
            check_rows(output, len(y))
        whole = self.source.data[1] if isinstance(self.source.data, tuple) else y  # a Dataset's come batch by batch
        self.model.likelihood.check(output, whole.to(self.device))

    def batch(self, step: int, number: int = 0) -> list[Piece]:
        """Returns the data of a step: all, or a minibatch; `number` counts further minibatches, to try things on."""
        if number:
            return self._own(self._drawn(torch.tensor([step]), number, self._probe_rows)[0])
        if self.batch_size is None:
            return self._whole
        block, place = divmod(step, BLOCK)
        if self._block[0] != block:
            self._block = block, self._drawn(block * BLOCK + torch.arange(BLOCK), 0, self.batch_size)
        return self._own(self._block[1][place])

    def _own(self, numbers: Tensor) -> list[Piece]:
        """Returns a minibatch for each chain: shared ones would make chains depend on each other."""
        return [Piece(*self.rows(part.flatten()), part.shape[1]) for part in numbers.split(AT_ONCE, 1)]

    def _drawn(self, steps: Tensor, number: int, rows: int) -> Tensor:
        """Returns numbers of rows, drawn with replacement, (steps, K, rows)."""
        chain = torch.arange(self.model.components)[:, None]
        at = address(self.seed, Space.CHAIN_BATCH, steps[:, None, None], number, chain, torch.arange(rows))
        return words(at).view(len(steps), -1, rows) % self.source.rows

    def __call__(
        self, z: Tensor, data: list[Piece], *, each: bool = True, anchor: Anchor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns U (K,) and its gradient (K, nodes), from all data or estimated from minibatches.

        Without `each`, U is the chains' mean, which costs less and has the same gradient.
        """
        deviation = (z - 1) / self.prior_std
        energy, prior = 0.5 * deviation.square().sum(1), deviation / self.prior_std
        energy = energy if each else energy.mean().expand(len(z))
        share = sum(piece.rows for piece in data) / self.source.rows
        loss, gradient = (part / share for part in self._likelihood(z, data, each))
        if anchor is not None:
            there = [part / share for part in self._likelihood(anchor.z, data, each)]
            start = anchor.loss if each else anchor.loss.mean()
            loss, gradient = start + (loss - there[0]), anchor.gradient + (gradient - there[1])
        return (energy + loss) / self.temperature, (prior + gradient) / self.temperature

    def anchor(self, z: Tensor) -> Anchor:
        """Returns an anchor at z; it takes a pass over all data."""
        numbers = torch.arange(self.source.rows).split(AT_ONCE)
        return Anchor(z, *self._likelihood(z, (Piece(*self.rows(part), len(part)) for part in numbers), True))

    def _likelihood(self, z: Tensor, data: Iterable[Piece], each: bool) -> tuple[Tensor, Tensor]:
        """Returns −Σ log p(y | x, z) of some data, (K,), and its gradient (K, nodes)."""
        total, gradient = torch.zeros_like(z[:, 0]), torch.zeros_like(z)
        for piece in data:
            with torch.enable_grad():
                at = z.detach().requires_grad_()
                losses = self._losses(at, piece, each)  # (K,)
                (part,) = torch.autograd.grad(losses.sum(), at)
            total, gradient = total + losses.detach(), gradient + part
        return total, gradient

    def _losses(self, z: Tensor, piece: Piece, each: bool) -> Tensor:
        """Returns −Σ log p(y | x, z) of a piece, (K,), or without `each` its mean over chains."""
        likelihood, y, chains = self.model.likelihood.unweighted(), piece.y, len(z)
        outputs = self._outputs(z, piece)  # (K, rows, …)
        targets = y.repeat(chains, *[1] * (y.dim() - 1)) if len(y) == piece.rows else y
        if not each:
            total = likelihood.nll(outputs.flatten(0, 1), targets) * likelihood.mass(targets).to(z)
            return (total / chains).expand(chains)
        pairs = zip(outputs, targets.split(piece.rows), strict=True)
        return torch.stack([likelihood.nll(output, own) * likelihood.mass(own).to(z) for output, own in pairs])

    def _outputs(self, z: Tensor, piece: Piece) -> Tensor:
        """Returns the outputs of all chains, (K, rows, …): in one pass, if rows do not affect each other."""
        call, rows, shared = call_arguments(piece.x), piece.rows, len(piece.y) == piece.rows
        own = call if shared else slice_rows(call, slice(0, rows), len(piece.y))
        with torch.no_grad():
            together = len(z) > 1 and self.model._entries_as_rows(own, Draws(z[0]))
        if together and shared:
            return self.model._rows_of_draws(call, Draws(z))
        if together:
            output = self.model._read(self.model._run(call, Draws(z).each_row(rows)))
            return output.reshape(len(z), rows, *output.shape[1:])
        parts = [slice_rows(piece.x, slice(k * rows, (k + 1) * rows), len(piece.y)) for k in range(len(z))]
        xs = [piece.x] * len(z) if shared else parts
        return torch.cat([self.model.outputs(x, z[k : k + 1]) for k, x in enumerate(xs)])

    def row_variance(self, z: Tensor, step: int, anchor: Anchor | None = None, repeats: int = 16) -> Tensor:
        """Returns the variance of gradients of U estimated from one row, (nodes,), the mean over chains.

        Divided by the rows of a minibatch it is the variance of its gradient; without an anchor, times T/N, it is the
        empirical Fisher information of U, a guess of its curvature along each node.
        """
        batches = (self.batch(step, number) for number in range(1, repeats + 1))
        found = [self(z, batch, each=False, anchor=anchor)[1] for batch in batches]
        return torch.stack(found).var(0).mean(0) * self._probe_rows

    def curvature(self, z: Tensor, scale: Tensor, probe: Tensor, step: int, repeats: int = 8) -> float:
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
