"""The result of `sample`: the chains, whether they agree, and their figures."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ibnn.sampling.chains import disagreement, effective_size, split_rhat
from ibnn.sampling.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Samples:
    """Samples of z, and how they were drawn; `print` it."""

    z: Tensor  #: (K, S, nodes), a chain for each component, in order; the model's `bank`.
    energy: Tensor  #: −log p(data, z) of each, but for a constant, (K, S); of minibatches an estimate.
    layers: dict[str, int]  #: Nodes of each layer, in order.
    settings: Settings  #: What was asked for.
    step_size: float  #: What the chains ended with.
    acceptance: float | None  #: Mean probability with which a proposal of "hmc" was accepted; None of other methods.
    divergent: int  #: Trajectories of "hmc" that diverged after the warm-up.
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
        how = f"{self.settings.method}, T = {self.settings.temperature:g}, step {self.step_size:.3g}"
        if self.acceptance is not None:
            how += f", acceptance {self.acceptance:.2f}, divergent {self.divergent}"
        lines.append(f"{chains} chains of {kept} samples; {energy}; {how}; {self.seconds:.1f} s")
        lines += [" ".join(disagreement(self.z) or ())]
        if self.unit_std:
            lines.append(f"Factors of units are 1 in the samples; in the mixture their τ is up to {self.unit_std:.2g}.")
        return "\n".join(filter(None, lines))

    def plot(self, path: str | Path | None = None, *, nodes: int = 3) -> "Figure":
        """Draws traces of the energy and of the nodes whose chains agree least, with their histograms.

        Args:
            path: File to write the figure to, if any.
            nodes: How many nodes.
        """
        from matplotlib.figure import Figure

        worst = self.rhat.argsort(descending=True)[:nodes].tolist()
        names = [f"{name or '(net)'}[{place}]" for name, count in self.layers.items() for place in range(count)]
        rows = [("energy", self.energy, split_rhat(self.energy), effective_size(self.energy))]
        rows += [(names[node], self.z[:, :, node], self.rhat[node], self.ess[node]) for node in worst]
        figure = Figure(figsize=(9.0, 1.7 * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), 2, squeeze=False, width_ratios=[4, 1])
        for (trace, histogram), (name, values, rhat, ess) in zip(panels, rows, strict=True):
            for number, chain in enumerate(values.detach().cpu().double()):
                trace.plot(chain, color=f"C{number}", lw=0.8)
                histogram.hist(chain, bins=25, orientation="horizontal", histtype="step", color=f"C{number}")
            trace.set_ylabel(name)
            trace.set_title(f"R̂ {rhat:.3f}, ESS {ess:.0f}", fontsize=9, loc="right")
            trace.margins(x=0)
            histogram.set_ylim(trace.get_ylim())
            histogram.tick_params(labelleft=False, bottom=False, labelbottom=False)
        panels[-1][0].set_xlabel("sample")
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure
