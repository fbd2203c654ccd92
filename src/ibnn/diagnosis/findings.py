"""FINDINGS: what a diagnosis holds, and how it prints."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["problem", "warning", "note"]


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer's latents; numbers are means over components and nodes unless noted."""

    name: str
    nodes: int
    kl: float  # nats, summed over nodes
    kl_share: float  # of the model's KL; 0 where that is 0
    std: float  # σ
    std_ratio: float  # σ/s
    spread: float  # of the component means: their standard deviation over k, root mean square over nodes
    shift: float  # |μ − 1|


@dataclass(frozen=True)
class Finding:
    """Something worth knowing ("note"), that may hurt ("warning") or is wrong ("problem"), and what to do about it."""

    severity: Severity
    layer: str | None  # where to look first; None for the whole model
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}\n    {self.remedy}"


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `print` it.

    Attributes:
        layers: A row for every layer with latents.
        findings: The worst first.
        kl_kind: The model's KL. "pairwise" and "montecarlo" do not split over layers: the rows show "components" then.
        effective_components: How many components are distinct, 1 … K: exp(−meanᵢ log 1/K Σⱼ exp(−BDᵢⱼ)).
        epistemic_share: Mean epistemic over mean total uncertainty of the inputs; None without inputs.
    """

    layers: tuple[LayerDiagnosis, ...]
    findings: tuple[Finding, ...]
    kl_kind: str
    effective_components: float
    epistemic_share: float | None = None

    @property
    def healthy(self) -> bool:
        """Whether there are no warnings and no problems."""
        return all(finding.severity == "note" for finding in self.findings)

    def __str__(self) -> str:
        width = max(len("layer"), *(len(shown(row.name)) for row in self.layers))
        lines = [f"{'layer':<{width}}    nodes  KL share  mean σ  σ/prior  spread of μ  mean |μ−1|"]
        for row in self.layers:
            start = f"{shown(row.name):<{width}}  {row.nodes:>7,}  {row.kl_share:>8.1%}  {row.std:>6.3f}"
            lines.append(f"{start}  {row.std_ratio:>7.2f}  {row.spread:>11.3f}  {row.shift:>10.3f}")
        kind = splitting(self.kl_kind)
        why = "" if kind == self.kl_kind else f", because {self.kl_kind!r} does not split over layers"
        kl = f"KL {sum(row.kl for row in self.layers):,.1f} nats ({kind!r}{why})"
        share = "" if self.epistemic_share is None else f", epistemic share {self.epistemic_share:.1%}"
        lines.append(f"{kl}, distinct components {self.effective_components:.1f}{share}")
        return "\n".join([*lines, *(map(str, self.findings) if self.findings else ["Nothing to worry about."])])


def splitting(kind: str) -> str:
    """Returns the KL that is reported per layer: the model's, if it splits over layers."""
    return kind if kind in ("mean", "components") else "components"


def shown(name: str) -> str:
    """Returns the name of a layer for readers."""
    return name or "(net)"
