"""Says in plain words what is wrong with a model's posterior or its training, and what to do about it.

Nothing is changed, and nothing is run except on inputs that are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ibnn.diagnosis.checks import CHECKS, Case, Finding, LayerDiagnosis, Severity, non_finite, shown
from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, batch_length, slice_rows, tree_map
from ibnn.likelihood import Categorical
from ibnn.mixture import CLOSED_FORMS, Mixture
from ibnn.network import IBNN, prior_stds
from ibnn.prediction import JointPrediction

__all__ = ["Diagnosis", "Finding", "LayerDiagnosis", "Severity", "diagnose"]

_TINY = torch.finfo(torch.float32).tiny  # stands in for σ = 0, whose KL is infinite and has no shares


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `print` it.

    Attributes:
        layers: A row for every layer with latents.
        findings: The worst first.
        kl_kind: The model's KL. "pairwise" and "montecarlo" do not split over layers: the rows show "components" then.
        effective_components: How many components are distinct, 1 … K: exp(−meanᵢ log 1/K Σⱼ exp(−BDᵢⱼ)).
        epistemic_share: Mean epistemic over mean total uncertainty of the inputs; None without inputs.
        disagreement: Share of pairs of components whose networks, without noise, give an input different labels, mean
            over the inputs; None without inputs, with one component, or where the model does not choose among classes.
    """

    layers: tuple[LayerDiagnosis, ...]
    findings: tuple[Finding, ...]
    kl_kind: str
    effective_components: float
    epistemic_share: float | None = None
    disagreement: float | None = None

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
        kind = _splitting(self.kl_kind)
        why = "" if kind == self.kl_kind else f", because {self.kl_kind!r} does not split over layers"
        kl = f"KL {sum(row.kl for row in self.layers):,.1f} nats ({kind!r}{why})"
        share = "" if self.epistemic_share is None else f", epistemic share {self.epistemic_share:.1%}"
        apart = "" if self.disagreement is None else f", labels of two components differ on {self.disagreement:.1%}"
        lines.append(f"{kl}, distinct components {self.effective_components:.1f}{share}{apart}")
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
        ensemble = hasattr(model, "members")
        remedy = (
            "Diagnose its members: model.members[0]." if ensemble else "Pass the model, `.module` of a wrapped one."
        )
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    optimisers = [optimiser] if isinstance(optimiser, Optimizer) else list(optimiser or ())
    if wrong := [type(each).__name__ for each in optimisers if not isinstance(each, Optimizer)]:
        raise TypeError(complaint("optimiser", "torch optimisers", wrong[0], "Pass a list of them."))
    with torch.no_grad():
        q = Mixture(*(part.cpu().double() for part in model.posterior()))
        inner = [getattr(each, "optimizer", each) for each in optimisers]  # accelerate wraps them
        overlap = _overlap(q)
        distinct = overlap.mean(1).log().mean().neg().exp().item()
        case = Case(model, q, _layers(model, q), overlap, distinct, inner)
        if inputs is not None and not any(non_finite(case)):
            case = replace(case, **_answers(model, as_tensors(inputs), batch_size))
        findings = [finding for check in CHECKS for finding in check(case) if finding]
    findings.sort(key=lambda finding: ("problem", "warning", "note").index(finding.severity))
    return Diagnosis(case.layers, tuple(findings), model.kl_kind, distinct, case.share, case.disagreement)


def _answers(model: IBNN, inputs: Inputs, batch_size: int | None) -> dict[str, Any]:
    """Returns what `Case` keeps of inputs: the epistemic share, the components' disagreement, and some outputs."""
    prediction: Any = model.predict(inputs, samples=2, batch_size=batch_size, progress=False, novelty=False)
    parts: list[Any] = list(prediction.heads.values()) if isinstance(prediction, JointPrediction) else [prediction]
    heads = [head for head in parts if hasattr(head, "total") and hasattr(head, "epistemic")]
    means = [(float(part.cpu().double().mean()) for part in (head.epistemic, head.total)) for head in heads]
    share = max((epistemic / total for epistemic, total in means if total > 0), default=None)
    rows, k, likelihood, disagreement = batch_length(inputs), model.components, model.likelihood, None
    inputs = tree_map(lambda t: t.to(model.examples.device), inputs)
    size = batch_size or rows
    pieces = [slice_rows(inputs, slice(start, start + size), rows) for start in range(0, rows, size)]
    outputs = model.draw_logits(pieces[0], 1) if len(heads) == 1 else None  # several heads stand side by side
    if isinstance(likelihood, Categorical) and outputs is not None:
        outputs = outputs.movedim(likelihood.class_dim(outputs, 1), 2)
    if isinstance(likelihood, Categorical) and k > 1:
        with model.evaluating():
            each = [model.outputs(piece, model.posterior().mean) for piece in pieces]  # (K, B, …)
        labels = torch.cat([part.argmax(likelihood.class_dim(part, 1)).flatten(1) for part in each], 1)
        disagreement = sum(float((labels != one).cpu().double().mean()) for one in labels) / (k - 1)
    return {"share": share, "disagreement": disagreement, "outputs": outputs}


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


def _overlap(q: Mixture) -> Tensor:
    """Returns exp(−BD) of all pairs of components, (K, K), row by row: K²·nodes numbers may not fit in memory."""
    std = q.std.clamp_min(_TINY)
    distance = torch.zeros(len(std), len(std), dtype=std.dtype)
    for i in range(len(std) - 1):
        mean, summed = q.mean[i] - q.mean[i + 1 :], std[i].square() + std[i + 1 :].square()  # (K − 1 − i, D)
        per_node = 0.25 * mean.square() / summed + 0.5 * (summed / (2 * std[i] * std[i + 1 :])).log()
        distance[i, i + 1 :] = per_node.sum(-1)
    return (-distance - distance.T).exp()
