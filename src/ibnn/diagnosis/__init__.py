"""Says in plain words what is wrong with a model's posterior or its training, and what to do about it.

Nothing is changed, and nothing is run except on inputs that are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from ibnn.diagnosis.checks import CHECKS, Case, Finding, LayerDiagnosis, Severity, non_finite
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, batch_length, slice_rows, tree_map
from ibnn.mixture import CLOSED_FORMS, Mixture, kl_components, kl_pairwise
from ibnn.network import IBNN, prior_stds
from ibnn.prediction import JointPrediction

__all__ = ["Diagnosis", "Finding", "LayerDiagnosis", "Severity", "diagnose"]

_TINY = torch.finfo(torch.float32).tiny  # stands in for σ = 0, whose KL is infinite and has no shares


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `print` it."""

    layers: tuple[LayerDiagnosis, ...]  #: A row for every layer with latents.
    findings: tuple[Finding, ...]  #: The worst first.
    kl_kind: str  #: The model's KL. "pairwise" and "montecarlo" do not split over layers: rows show "components" then.
    effective_components: float  #: How many components are distinct, 1 … K: exp(−meanᵢ log 1/K Σⱼ exp(−BDᵢⱼ)).
    epistemic_share: float | None = None  #: Mean epistemic over mean total uncertainty of the inputs, if any.

    @property
    def healthy(self) -> bool:
        """Whether there are no warnings and no problems."""
        return all(finding.severity == "note" for finding in self.findings)

    def __str__(self) -> str:
        width = max(len("layer"), *(len(row.name or "(net)") for row in self.layers))
        lines = [f"{'layer':<{width}}    nodes  KL share  mean σ  σ/prior  spread of μ  mean |μ−1|"]
        for row in self.layers:
            start = f"{row.name or '(net)':<{width}}  {row.nodes:>7,}  {row.kl_share:>8.1%}  {row.std:>6.3f}"
            lines.append(f"{start}  {row.std_ratio:>7.2f}  {row.spread:>11.3f}  {row.shift:>10.3f}")
        kl = f"KL {sum(row.kl for row in self.layers):,.1f} nats ({_splitting(self.kl_kind)!r})"
        share = "" if self.epistemic_share is None else f", epistemic share {self.epistemic_share:.1%}"
        lines.append(f"{kl}, distinct components {self.effective_components:.1f}{share}")
        return "\n".join([*lines, *(map(str, self.findings) if self.findings else ["Nothing to worry about."])])


def diagnose(
    model: IBNN,
    *,
    optimiser: Optimizer | Sequence[Optimizer] | None = None,
    inputs: Inputs | None = None,
    batch_size: int | None = 64,
) -> Diagnosis:
    """Examines a model's posterior, gradients and modes, without changing anything.

    Args:
        model: A converted network, before, during or after training.
        optimiser: What trains it, one or several; reveals weight decay on latents, forgotten latents and more.
        inputs: What one call of the network takes, a hundred rows or so like those it will meet. Predicting them
            reveals draws that hardly disagree, and a network that ends in a softmax of its own.
        batch_size: Rows of these that go through the network at once; None never cuts them, as in `predict`.

    >>> import ibnn
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> print(diagnose(ibnn.convert(net, components=4, kl="mean", seed=0)))
    layer    nodes  KL share  mean σ  σ/prior  spread of μ  mean |μ−1|
    0            4     31.1%   0.055     0.18        0.098       0.088
    2            8     68.9%   0.045     0.15        0.100       0.078
    KL 23.8 nats ('mean'), distinct components 4.0
    note: The latents are where convert put them.
        Train the model.
    """
    if not isinstance(model, IBNN):
        remedy = "Pass the model: `.module` of a wrapped one, `.members[0]` of an ensemble."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    optimisers = [optimiser] if isinstance(optimiser, Optimizer) else list(optimiser or ())
    if wrong := [type(each).__name__ for each in optimisers if not isinstance(each, Optimizer)]:
        raise TypeError(complaint("optimiser", "torch optimisers", wrong[0], "Pass a list of them."))
    with torch.no_grad():
        q = Mixture(*(part.cpu().double() for part in model.posterior()))
        inner = [getattr(each, "optimizer", each) for each in optimisers]  # accelerate wraps them
        clear = Mixture(q.mean, q.std.clamp_min(_TINY))
        distinct = (kl_components(clear, 1.0) - kl_pairwise(clear, 1.0)).exp().item()
        case = Case(model, q, _layers(model, q), distinct, inner, model.fresh)
        if inputs is not None and not any(non_finite(case)):
            case = replace(case, **_answers(model, as_tensors(inputs), batch_size))
        findings = [finding for check in CHECKS for finding in check(case) if finding]
    findings.sort(key=lambda finding: ("problem", "warning", "note").index(finding.severity))
    return Diagnosis(case.layers, tuple(findings), model.kl_kind, distinct, case.share)


def _answers(model: IBNN, inputs: Inputs, batch_size: int | None) -> dict[str, Any]:
    """Returns what `Case` keeps of inputs: the epistemic share, and some outputs."""
    prediction: Any = model.predict(inputs, samples=2, batch_size=batch_size, progress=False, novelty=False)
    parts: list[Any] = list(prediction.heads.values()) if isinstance(prediction, JointPrediction) else [prediction]
    heads = [head for head in parts if hasattr(head, "total") and hasattr(head, "epistemic")]
    means = [(float(part.cpu().double().mean()) for part in (head.epistemic, head.total)) for head in heads]
    share = max((epistemic / total for epistemic, total in means if total > 0), default=None)
    outputs = None
    if len(heads) == 1:  # several stand side by side
        first = slice_rows(inputs, slice(batch_size), batch_length(inputs))
        outputs = model.draw_logits(tree_map(lambda t: t.to(model.examples.device), first), 1)
    return {"share": share, "outputs": outputs}


def _splitting(kind: str) -> str:
    """Returns the KL that is reported per layer: the model's, if it splits over layers."""
    return kind if kind in ("mean", "components") else "components"


def _layers(model: IBNN, q: Mixture) -> tuple[LayerDiagnosis, ...]:
    sizes = [latent.nodes for latent in model.latents.values()]
    stds = torch.as_tensor(prior_stds(model)).to(q.std).expand(sum(sizes)).split(sizes)
    parts = list(zip(q.mean.split(sizes, 1), q.std.split(sizes, 1), stds, strict=True))
    kl_of = CLOSED_FORMS[_splitting(model.kl_kind)]
    kls = [kl_of(Mixture(mean, std.clamp_min(_TINY)), s).item() for mean, std, s in parts]
    return tuple(
        LayerDiagnosis(
            name,
            nodes=mean.shape[1],
            kl=kl,
            kl_share=kl / (sum(kls) or 1.0),
            std=std.mean().item(),
            std_ratio=(std.mean() / s.mean()).item(),
            spread=mean.var(0, correction=0).mean().sqrt().item(),
            shift=(mean - 1).abs().mean().item(),
        )
        for name, (mean, std, s), kl in zip(model.latents, parts, kls, strict=True)
    )
