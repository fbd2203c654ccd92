"""Measures whether chains agree (split-R̂) and how many independent draws they are worth (effective sample size).

arviz has both (its "split" and "mean" methods), but brings xarray, pandas, scipy and matplotlib with it.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FEWEST = 4  # samples of a chain: two halves, each with a variance
AGREE = 1.1  # split-R̂ up to which chains have seen the same
MOST = 0.05  # share of the nodes that may be worse
APART = 1.5  # split-R̂ from which chains are in different places, if each of them stays in its own


def _halves(x: Tensor) -> Tensor:
    """Returns each chain as two, (2K, S/2, …), in double precision."""
    half = x.shape[1] // 2
    return torch.cat([x[:, :half], x[:, x.shape[1] - half :]]).double()


def split_rhat(x: Tensor) -> Tensor:
    """Split-R̂ of chains (K, S, …): √(variance of all / mean variance within halves of chains), near 1 if they agree.

    >>> torch.manual_seed(0).initial_seed(), round(split_rhat(torch.randn(4, 1000)).item(), 2)
    (0, 1.0)
    >>> bool(split_rhat(torch.randn(4, 1000) + torch.arange(4)[:, None]) > 1.1)
    True
    """
    halves = _halves(x)
    within = halves.var(1).mean(0)
    between = halves.mean(1).var(0)
    length = halves.shape[1]
    return (((length - 1) / length * within + between) / within.clamp_min(1e-300)).sqrt()


def disagreement(x: Tensor) -> tuple[str, str] | None:
    """Returns in words how far chains (K, S, nodes) disagree, and why and what to do; None if they agree.

    Where the halves of each chain agree and the chains are far apart, there are modes that they do not leave.
    """
    rhat = split_rhat(x)
    above = rhat > AGREE
    if (share := above.double().mean().item()) <= MOST:
        return None
    alone = torch.stack([split_rhat(chain[None, :, above]) for chain in x]).median().item()
    found = f"The chains disagree: {share:.0%} of the nodes have a split-R̂ above {AGREE}."
    if alone <= AGREE and rhat[above].median() > APART:
        return found, "Each keeps to a mode of its own: longer chains hardly help; predictions average over the modes."
    factor = min(max(math.ceil(x[..., 0].numel() / effective_size(x).median().item()), 2), 20)
    return found, f"They are too short: take {factor} times the thin and warmup."


def effective_size(x: Tensor) -> Tensor:
    """Effective sample size of chains (K, S, …), for their mean: K·S over the integrated autocorrelation time.

    Autocorrelations are of all halves of chains together, so that chains that disagree have few; they are summed in
    pairs up to the first negative one, and made to fall (Geyer, 1992).

    >>> torch.manual_seed(0).initial_seed(), 3000 < effective_size(torch.randn(4, 1000)).item() < 5000
    (0, True)
    """
    halves = _halves(x)  # (M, n, …)
    chains, length = halves.shape[:2]
    centred = halves - halves.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * length, dim=1)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * length, dim=1)[:, :length].mean(0) / length  # (n, …)
    within = covariance[0] * length / (length - 1)
    total = covariance[0] + halves.mean(1).var(0)
    correlation = 1 - (within - covariance) / total.clamp_min(1e-300)
    correlation[0] = 1.0
    even = length - length % 2
    pairs = correlation[0:even:2] + correlation[1:even:2]
    pairs = pairs * (pairs > 0).cumprod(0)  # up to the first that is not positive
    time = -1 + 2 * pairs.cummin(0).values.sum(0)
    draws = chains * length
    worth: Tensor = draws / time.clamp_min(1 / math.log10(draws))
    return worth


@dataclass(frozen=True)
class Samples:
    """Samples of z, and how they were drawn; `print` it."""

    z: Tensor  #: (K, S, nodes), a chain for each component, in order; the model's `bank`.
    energy: Tensor  #: −log p(data, z) of each, but for a constant, (K, S).
    temperature: float  #: T.
    step_size: float  #: What the chains ended with.
    acceptance: float  #: Mean probability with which a proposal was accepted.
    divergent: int  #: Trajectories that diverged after the warm-up.
    seconds: float  #: Time taken, over all resumed parts.

    @cached_property
    def rhat(self) -> Tensor:
        """Split-R̂ of each node, (nodes,)."""
        return split_rhat(self.z)

    @cached_property
    def ess(self) -> Tensor:
        """Effective sample size of each node, (nodes,), over all chains."""
        return effective_size(self.z)

    def __str__(self) -> str:
        chains, kept, nodes = self.z.shape
        lines = [
            f"{chains} chains of {kept} samples of {nodes:,} nodes in {self.seconds:.1f} s",
            f"R̂: median {self.rhat.median():.4g}, worst {self.rhat.max():.4g}, energy {split_rhat(self.energy):.4g}",
            f"effective samples: median {self.ess.median():.0f}, worst {self.ess.min():.0f}, "
            f"energy {effective_size(self.energy):.0f}",
            f"T = {self.temperature:g}, step {self.step_size:.3g}, acceptance {self.acceptance:.2f}, "
            f"divergent {self.divergent}",
            " ".join(disagreement(self.z) or ()),
        ]
        return "\n".join(filter(None, lines))
