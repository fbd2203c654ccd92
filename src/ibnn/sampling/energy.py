"""Computes the energy of several chains and its gradient, on all data or estimated from minibatches.

U(z) = −(Σ log p(y | x, z) + log p(z)) / T, where the likelihood has its full weight. A minibatch's estimate is that
of all data at an anchor near the chain, plus its estimate of the difference (control variates; Baker et al., 2019).
Without it the noise of minibatches, not the posterior, would dictate the step size.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn.batches import Source
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, check_rows, repeat_rows, slice_rows, tree_map
from ibnn.layers.explain import explaining_shapes
from ibnn.network import IBNN, prior_stds
from ibnn.normal import Space, address, words

PROBED = 32  # rows of a minibatch to try things on, where steps take all data
AT_ONCE = 256  # rows that go through the network at once, for each chain


class DivergedChainError(RuntimeError):
    """A chain left the finite numbers; the model is as it was."""


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
    """U of K chains at z (K, nodes), for a network in eval mode.

    Data of at most four minibatches are taken whole: a step computes two of them, and carries their noise.
    """

    def __init__(self, model: IBNN, source: Source, batch_size: int | None, temperature: float, seed: int) -> None:
        self.model, self.source, self.temperature, self.seed = model, source, temperature, seed
        self.device, self.dtype = model.examples.device, model.posterior().mean.dtype
        self.prior_std = torch.as_tensor(prior_stds(model)).to(self.device, self.dtype)
        self.batch_size = None if batch_size is None or 4 * batch_size >= source.rows else batch_size
        self._probe_rows = self.batch_size or min(PROBED, source.rows)
        self._whole = [] if self.batch_size else list(self._all())
        self._in_one_pass = False
        self._check(*self._rows(torch.arange(min(2, source.rows))))

    def _rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        x, y = self.source.take(numbers)
        return tree_map(lambda t: t.to(self.device), as_tensors(x, self.dtype)), y.to(self.device)

    def _all(self) -> Iterable[Piece]:
        return (Piece(*self._rows(part), len(part)) for part in torch.arange(self.source.rows).split(AT_ONCE))

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

    def batch(self, step: int, number: int = 0) -> list[Piece]:
        """Returns the data of a step: all, or a minibatch; `number` counts further minibatches, to try things on.

        Rows are drawn by address, with replacement. Each chain has its own: shared ones would make chains dependent.
        """
        if self.batch_size is None and not number:
            return self._whole
        chain, row = torch.arange(self.model.components)[:, None], torch.arange(self._probe_rows)
        drawn = words(address(self.seed, Space.CHAIN_BATCH, step, number, chain, row)).view(-1, len(row))
        parts = (drawn % self.source.rows).split(AT_ONCE, 1)
        return [Piece(*self._rows(part.flatten()), part.shape[1]) for part in parts]

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
        return Anchor(z, *self._likelihood(z, self._all(), True))

    def _likelihood(self, z: Tensor, data: Iterable[Piece], each: bool) -> tuple[Tensor, Tensor]:
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
        for _ in range(repeats):
            probe = probe / probe.norm(dim=1, keepdim=True)
            moved = self(z + width * scale.sqrt() * probe, data, each=False)[1]
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
