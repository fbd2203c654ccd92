"""Computes the energy of several chains and its gradient on all data.

U(z) = −(Σ log p(y | x, z) + log p(z)) / T, where the likelihood has its full weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, check_rows, repeat_rows, slice_rows, tree_map
from ibnn.layers.explain import explaining_shapes
from ibnn.network import IBNN, prior_stds
from ibnn.normal import Space, address, words

PROBED = 32  # rows of a minibatch from which scales are guessed
AT_ONCE = 256  # rows that go through the network at once, for each chain


class DivergedChainError(RuntimeError):
    """A chain left the finite numbers; the model is as it was."""


class Piece(NamedTuple):
    """Some data: the same rows for all chains, or as many for each chain, one chain after the other."""

    x: Inputs
    y: Tensor
    rows: int  # of a chain


class Energy:
    """U of K chains at z (K, nodes), for a network in eval mode."""

    def __init__(self, model: IBNN, source: Source, temperature: float, seed: int) -> None:
        self.model, self.source, self.temperature, self.seed = model, source, temperature, seed
        self.device, self.dtype = model.examples.device, model.posterior().mean.dtype
        self.prior_std = torch.as_tensor(prior_stds(model)).to(self.device, self.dtype)
        pieces = torch.arange(source.rows).split(AT_ONCE)
        self.data = [Piece(*self._rows(numbers), len(numbers)) for numbers in pieces]
        self._in_one_pass = False
        self._check(*self._rows(torch.arange(min(2, source.rows))))

    def _rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        x, y = self.source.take(numbers)
        return tree_map(lambda t: t.to(self.device), as_tensors(x, self.dtype)), y.to(self.device)

    def _check(self, x: Inputs, y: Tensor) -> None:
        """Raises unless targets fit the network's outputs; finds out whether it takes a z for each row."""
        z = self.model.posterior().mean.detach()
        with torch.no_grad(), explaining_shapes(self.model.net, x):
            expected = self.model.outputs(x, z)
            check_rows(expected[0], len(y))
        whole = self.source.data[1] if isinstance(self.source.data, tuple) else y  # a Dataset's come batch by batch
        self.model.likelihood.check(expected[0], whole.to(self.device))
        if len(z) > 1:
            self._in_one_pass = True
            try:
                with torch.no_grad():
                    gap = (self._outputs(z, Piece(x, y, len(y))) - expected).abs().max()
                self._in_one_pass = bool(gap <= torch.finfo(gap.dtype).eps ** 0.5 * expected.abs().max())
            except Exception:  # a layer that does not see the batch, a network of one batch length …
                self._in_one_pass = False

    def _probe(self, step: int, number: int) -> list[Piece]:
        """Returns a minibatch of each chain, drawn by address with replacement."""
        chain, row = torch.arange(self.model.components)[:, None], torch.arange(min(PROBED, self.source.rows))
        drawn = words(address(self.seed, Space.CHAIN_BATCH, step, number, chain, row)).view(-1, len(row))
        return [Piece(*self._rows((drawn % self.source.rows).flatten()), len(row))]

    def __call__(self, z: Tensor, data: list[Piece] | None = None, *, each: bool = True) -> tuple[Tensor, Tensor]:
        """Returns U (K,) and its gradient (K, nodes), from all data or estimated from some.

        Without `each`, U is the chains' mean, which costs less and has the same gradient.
        """
        data = self.data if data is None else data
        deviation = (z - 1) / self.prior_std
        energy, prior = 0.5 * deviation.square().sum(1), deviation / self.prior_std
        energy = energy if each else energy.mean().expand(len(z))
        share = sum(piece.rows for piece in data) / self.source.rows
        loss, gradient = (part / share for part in self._likelihood(z, data, each))
        return (energy + loss) / self.temperature, (prior + gradient) / self.temperature

    def _likelihood(self, z: Tensor, data: list[Piece], each: bool) -> tuple[Tensor, Tensor]:
        """Returns −Σ log p(y | x, z) of some data, (K,), or without `each` its mean, and its gradient (K, nodes)."""
        total, gradient = torch.zeros_like(z[:, 0]), torch.zeros_like(z)
        likelihood, chains = self.model.likelihood, len(z)
        for piece in data:
            y = piece.y if len(piece.y) != piece.rows else piece.y.repeat(chains, *[1] * (piece.y.dim() - 1))
            with torch.enable_grad():
                at = z.detach().requires_grad_()
                outputs = self._outputs(at, piece)  # (K, rows, …)
                if each:
                    every = list(map(likelihood.terms, outputs, y.split(piece.rows)))
                    losses = torch.stack([terms.nll * terms.count.to(z) for terms in every])
                else:
                    terms = likelihood.terms(outputs.flatten(0, 1), y)
                    losses = (terms.nll * terms.count.to(z) / chains).expand(chains)
                (part,) = torch.autograd.grad(losses.sum(), at)
            total, gradient = total + losses.detach(), gradient + part
        return total, gradient

    def _outputs(self, z: Tensor, piece: Piece) -> Tensor:
        """Returns the outputs of all chains, (K, rows, …): in one pass, if the network takes a z for each row."""
        rows, chains, shared = piece.rows, len(z), len(piece.y) == piece.rows
        if self._in_one_pass:
            x = tree_map(lambda t: repeat_rows(t, rows, chains), piece.x) if shared else piece.x
            output = self.model.outputs(x, z.repeat_interleave(rows, 0)[None])[0]
            return output.reshape(chains, rows, *output.shape[1:])
        if shared:
            return self.model.outputs(piece.x, z)
        parts = [slice_rows(piece.x, slice(k * rows, (k + 1) * rows), len(piece.y)) for k in range(chains)]
        return torch.cat([self.model.outputs(x, z[k : k + 1]) for k, x in enumerate(parts)])

    def information(self, z: Tensor, step: int, repeats: int = 16) -> Tensor:
        """Returns the empirical Fisher information of U, (nodes,), the mean over chains: a guess of its curvature."""
        found = torch.stack([self(z, self._probe(step, number), each=False)[1] for number in range(1, repeats + 1)])
        return found.var(0).mean(0) * min(PROBED, self.source.rows) * self.temperature / self.source.rows

    def curvature(self, z: Tensor, scale: Tensor, probe: Tensor, step: int, repeats: int = 8) -> float:
        """Returns the largest curvature along scaled nodes, in any direction and over all chains.

        Power iteration on differences of gradients: layers may have backward passes that cannot be differentiated.
        """
        width, gradient = 0.1, self(z, each=False)[1]
        for _ in range(repeats):
            probe = probe / probe.norm(dim=1, keepdim=True)
            moved = self(z + width * scale.sqrt() * probe, each=False)[1]
            probe = scale.sqrt() * (moved - gradient) / width  # (K, nodes)
        return refuse_not_finite(probe.norm(dim=1), "curvature", step).max().item()


def refuse_not_finite(values: Tensor, what: str, step: int) -> Tensor:
    """Returns values of chains, (K, …); raises if one of them is NaN or infinite."""
    good = values.reshape(len(values), -1).isfinite().all(1)
    if not bool(good.all()):
        got = f"NaN or infinity for the {what} of chain {int(good.long().argmin())} at step {step}"
        remedy = "Pass a smaller step_size or a longer warmup; are all inputs finite and scaled like the training data?"
        raise DivergedChainError(complaint("model", "one whose chains stay finite", got, remedy))
    return values
