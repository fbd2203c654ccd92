"""What `diagnose` checks: each function looks at one side of a model and yields its findings, or None for none."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import SGD, Optimizer

from ibnn.latent import Latent
from ibnn.likelihood import own_activation
from ibnn.mixture import Mixture, kl_components
from ibnn.network import IBNN, prior_stds
from ibnn.sampling.chains import FEWEST, MOST, disagreement, effective_size

_DISTINCT = 0.75  # share of the components that should count: 3 of 4 do if two are one
_TOGETHER = 0.01  # share of the latents' variance between components: their means are 0.1 σ apart
_ON_PRIOR = 0.01  # nats a node: as much as means 0.14 s away from 1, or σ 10 % away from s
_WIDE = 3.0  # σ/s: each node pays 2.9 nats for noise that the prior does not ask for
_DEAD = 0.01  # σ/s: each node pays 4.1 nats; with s = 0.3 the noise is below the rounding error of bfloat16
_DROPOUT = 0.3  # rate from which the network's own dropout is noise on a level with the latents'
_AGREED = 0.015  # epistemic share of the uncertainty: what is shown as 0 or 1 %
_NOVEL = 0.01  # p-value below which inputs are usually called novel
_EFFECTIVE = 50  # effective samples: an average over them is within 14 % of a standard deviation

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
class Case:
    """What the checks examine."""

    model: IBNN
    q: Mixture  # on the CPU, in double precision
    layers: tuple[LayerDiagnosis, ...]
    effective_components: float
    optimisers: list[Optimizer]
    fresh: bool  # whether the latents are where convert put them
    share: float | None = None  # epistemic over total uncertainty of the inputs
    outputs: Tensor | None = None  # of the network for some of the inputs, (J, B, …)

    def where(self, test: Callable[[nn.Parameter], bool]) -> list[str]:
        """Returns the layers with a latent parameter that is trained and passes a test."""
        latents = self.model.latents.items()
        return [name for name, latent in latents if any(p.requires_grad and test(p) for p in latent.parameters())]


Findings = Iterator[Finding | None]


def _about(names: Sequence[str], severity: Severity, what: str, remedy: str) -> Finding | None:
    """Returns a finding about layers, whose names replace @ in `what`; None if there are none."""
    listed = ", ".join(repr(name or "(net)") for name in names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
    return Finding(severity, names[0], what.replace("@", listed), remedy) if names else None


def non_finite(case: Case) -> Findings:
    """Finds NaN and infinite values."""
    names = dict[str, None]()
    for name, module in [*case.model.net.named_modules(), ("likelihood", case.model.likelihood)]:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if isinstance(module, Latent):  # ρ = −∞ stands for σ = 0
            name, tensors = name.rpartition(".")[0], [module.mean, module.std]
        names |= {} if all(bool(tensor.isfinite().all()) for tensor in tensors) else {name: None}
    remedy = "Go back to the last good checkpoint; then lower the learning rates, or clip the latents' gradient norm."
    yield _about(list(names), "problem", "There are NaN or infinite values in @.", remedy)


def _components(case: Case) -> Findings:
    """Checks what the components of a mixture learnt; a sampled posterior's chains should agree instead."""
    model, q, k, distinct = case.model, case.q, case.model.components, case.effective_components
    if model.bank is not None:
        return
    # The KL "components" pulls all components to the prior, and untrained ones may be meant so.
    severity: Severity = "warning" if model.examples > 0 and model.kl_kind != "components" else "note"
    remedy = "Convert with fewer components, or drive them apart: larger init_std, gamma above 0, smaller beta."
    between, within = q.mean.var(0, correction=0).sum().item(), q.std.square().mean(0).sum().item()
    share = between / (between + within or 1.0)
    prior = torch.as_tensor(prior_stds(model)).to(q.std)
    kl = min(kl_components(q, std).item() for std in (prior, _pull(model) * prior)) / model.nodes
    if kl < _ON_PRIOR:
        what = f"The posterior is the prior ({kl:.4f} nats a node away): the latents have learnt nothing."
        remedy = "Lower beta or train longer. If strong noise is all you want, one component does the same for less."
    elif distinct < _DISTINCT * k:
        what = f"The {k} components count as {distinct:.1f}: some repeat others."
    elif k > 1 and share < _TOGETHER:
        what = f"The means of the {k} components have collapsed: {share:.2%} of the latents' variance is between them."
    else:
        return
    yield Finding(severity, None, what, remedy)


def _pull(model: IBNN) -> float:
    """Returns the σ/s at which the model's KL is smallest: √K for the paper's surrogate."""
    return math.sqrt(model.components) if model.kl_kind == "mean" else 1.0


def _noise(case: Case) -> Findings:
    """Checks how large σ is in each layer."""
    ratios = {row.name: row.std_ratio for row in case.layers}
    least = min(ratios.values())
    names = sorted((n for n in ratios if ratios[n] > _WIDE * _pull(case.model)), key=lambda name: -ratios[name])
    what = f"σ is far above the prior's, up to {max(ratios.values()):.1f} times, in @."
    yield _about(names, "warning", what, "Raise beta, or lower the latents' learning rate.")

    names = sorted((name for name in ratios if ratios[name] < _DEAD), key=lambda name: ratios[name])
    what = f"The noise is off (σ down to {least:.4f} of the prior's) in @: as overconfident as a plain network."
    remedy = "Raise beta, or lower the latents' learning rate; by hand: model.set_posterior(std=0.1)."
    yield _about(names, "warning", what, remedy)


def _training(case: Case) -> Findings:
    """Checks whether latents are trained: their gradients, and what the optimisers do to them."""
    model = case.model
    if case.fresh:
        yield Finding("note", None, "The latents are where convert put them.", "Train the model.")
    if any(_nonzero(p.grad) for p in model.parameters()):
        names = case.where(lambda p: not _nonzero(p.grad))
        remedy = "Train on model.elbo(...).loss; check that forward calls these layers and nothing after them detaches."
        yield _about(names, "warning", "Other parameters got a gradient, but not all latents of @.", remedy)

    groups = [group for optimiser in case.optimisers for group in optimiser.param_groups]
    decays = {id(p): group.get("weight_decay", 0) for group in groups for p in group["params"]}
    names = case.where(lambda p: decays.get(id(p), 0) != 0)
    what = "Weight decay pulls μ to 0 and σ to 0.69, and not to the prior, in @."
    remedy = "Make the optimiser from model.parameter_groups(lr, weight_decay=...), which spares the latents."
    yield _about(names, "warning", what, remedy)

    held = Counter(id(p) for group in groups for p in group["params"])
    names = case.where(lambda p: bool(groups) and not held[id(p)])
    remedy = "Make it from model.parameter_groups(lr), after convert; or freeze these latents: requires_grad_(False)."
    yield _about(names, "problem", "The optimiser does not have the latents of @.", remedy)
    remedy = "Leave them in one group of one optimiser: model.parameter_groups(lr)."
    names = case.where(lambda p: held[id(p)] > 1)
    yield _about(names, "problem", "More than one parameter group moves the latents of @.", remedy)

    sgd = [optimiser for optimiser in case.optimisers if isinstance(optimiser, SGD)]
    if sgd and model.gradient_scale == 1 < model.components:
        by_sgd = {id(p) for optimiser in sgd for group in optimiser.param_groups for p in group["params"]}
        what = f"SGD moves the latents of @ by 1/{model.components} of their gradient: the components share the batch."
        remedy = "Make it from model.parameter_groups(lr), which undoes that; nothing, if their rate was raised by K."
        yield _about(case.where(lambda p: id(p) in by_sgd), "note", what, remedy)


def _nonzero(value: Tensor | None) -> bool:
    return value is not None and (value.is_sparse or bool(value.any()))


def _modules(case: Case) -> Findings:
    """Checks BatchNorm's mode and the network's own dropout."""
    modules = dict(case.model.net.named_modules())
    names = [] if case.model.training else [n for n, m in modules.items() if isinstance(m, _BatchNorm) and m.training]
    what = "The model is in eval mode but BatchNorm in train mode, so answers depend on their batch: @."
    yield _about(names, "problem", what, "Call model.eval() after anything that changes modes.")
    rates = {name: m.p for name, m in modules.items() if isinstance(m, _DropoutNd) and m.p >= _DROPOUT}
    what = f"The network's own dropout (up to {max(rates.values(), default=0.0):g}) adds to the noise: @."
    remedy = "If training is slow or the model is underconfident, disable it (p = 0): the latents already regularise."
    yield _about(list(rates), "note", what, remedy)


def _answers(case: Case) -> Findings:
    """Checks what predictions are made of."""
    model = case.model
    if case.share is not None and case.share < _AGREED:
        what = f"{case.share:.1%} of the uncertainty is epistemic: the draws hardly disagree, as if of one network."
        remedy = "Go by the total. For more disagreement: a larger beta or prior_std, or components farther apart."
        yield Finding("warning" if model.examples > 0 else "note", None, what, remedy)
    if end := own_activation(model.likelihood, model.net, case.outputs):
        what = f"The network ends in a {end}, and the likelihood adds its own: no probability can be near 1."
        yield Finding("warning", None, what, f"Take the {end} out of the network: its outputs should be logits.")


def _novelty(case: Case) -> Findings:
    """Checks whether the model can detect novel inputs."""
    model, reference = case.model, case.model.reference
    if reference is None and model.examples and not (model.training or case.optimisers):  # it is trained
        remedy = "Call ibnn.fit_novelty(model, train, valid) with data it was not trained on; ibnn.fit does it too."
        yield Finding("note", None, "The model cannot tell novel inputs: it has no reference data.", remedy)
    if reference is not None and (least := 1 / (reference.ranked + 1)) > _NOVEL:
        what = f"No input has a p-value below {least:.3g}: too few inputs were held out."
        rows = math.ceil(1 / _NOVEL - 1)
        remedy = f"Hold out {rows} or more: ibnn.fit_novelty(model, train, valid). Or use p.novel({least:.3g})."
        yield Finding("note", None, what, remedy)


def _chains(case: Case) -> Findings:
    """Checks the chains of a sampled posterior."""
    bank = case.model.bank
    if bank is None or bank.shape[1] < FEWEST:
        return
    if (differing := disagreement(bank.cpu())) is not None:
        yield Finding("warning", None, *differing)
    worth, count = effective_size(bank.cpu()).quantile(MOST).item(), bank.shape[0] * bank.shape[1]
    if worth < _EFFECTIVE:
        what = f"The {count:,} samples are worth {worth:.0f} independent ones, at the worst {MOST:.0%} of the nodes."
        remedy = "Sample with a larger thin, or more samples; predictions need fewer than estimates of single latents."
        yield Finding("warning", None, what, remedy)


CHECKS: tuple[Callable[[Case], Findings], ...] = (
    non_finite, _components, _noise, _training, _modules, _answers, _novelty, _chains,
)  # fmt: skip
