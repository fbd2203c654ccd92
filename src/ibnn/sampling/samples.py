"""The result of `sample`: the chains, and whether they agree."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ibnn.sampling.chains import disagreement, effective_size, split_rhat
from ibnn.sampling.settings import Settings


@dataclass(frozen=True)
class Samples:
    """Samples of z, and how they were drawn; `print` it."""

    z: Tensor  #: (K, S, nodes), a chain for each component, in order; the model's `bank`.
    energy: Tensor  #: −log p(data, z) of each, but for a constant, (K, S).
    layers: dict[str, int]  #: Nodes of each layer, in order.
    settings: Settings  #: What was asked for.
    step_size: float  #: What the chains ended with.
    acceptance: float  #: Mean probability with which a proposal was accepted.
    divergent: int  #: Trajectories that diverged after the warm-up.
    seconds: float  #: Time taken, over all resumed parts.
    unit_std: float = 0.0  #: Largest τ of the mixture, the std of factors of units; chains have none.

    @cached_property
    def rhat(self) -> Tensor:
        """Split-R̂ of each node, (nodes,)."""
        return split_rhat(self.z)

    @cached_property
    def ess(self) -> Tensor:
        """Effective sample size of each node, (nodes,), over all chains."""
        return effective_size(self.z)

    def __str__(self) -> str:
        width = max(len("layer"), *(len(name) for name in self.layers))
        lines = [f"{'layer':<{width}}    nodes  mean z   std  median R̂  worst R̂  median ESS  worst ESS"]
        sizes = list(self.layers.values())
        parts = zip(*(x.split(sizes, -1) for x in (self.z.double(), self.rhat, self.ess)), strict=True)
        for name, (z, rhat, ess) in zip(self.layers, parts, strict=True):
            start = f"{name or '(net)':<{width}}  {z.shape[2]:>7,}  {z.mean():>6.3f}  {z.std((0, 1)).mean():>4.2f}"
            agreement = f"{rhat.median():>9.3f}  {rhat.max():>8.3f}  {ess.median():>10.0f}  {ess.min():>9.0f}"
            lines.append(f"{start}  {agreement}")
        chains, kept = self.z.shape[:2]
        energy = f"energy R̂ {split_rhat(self.energy):.3f}, ESS {effective_size(self.energy):.0f}"
        how = f"hmc, T = {self.settings.temperature:g}, step {self.step_size:.3g}"
        how += f", acceptance {self.acceptance:.2f}, divergent {self.divergent}"
        lines.append(f"{chains} chains of {kept} samples; {energy}; {how}; {self.seconds:.1f} s")
        lines += [" ".join(disagreement(self.z) or ())]
        if self.unit_std:
            lines.append(f"Factors of units are 1 in the samples; in the mixture their τ is up to {self.unit_std:.2g}.")
        return "\n".join(filter(None, lines))
