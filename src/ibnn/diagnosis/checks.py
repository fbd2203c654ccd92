"""What `diagnose` checks: each function looks at one side of a model and yields its findings, or None for none."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import LBFGS, SGD, Optimizer

from ibnn.latent import Latent, inverse_softplus
from ibnn.likelihood import Bernoulli, Categorical, own_activation
from ibnn.mixture import Mixture, kl_components
from ibnn.network import IBNN, prior_stds
from ibnn.noise import initial_noise, initial_std
from ibnn.sampling.chains import FEWEST, MOST, disagreement, effective_size

_SAME = 0.99  # overlap exp(−BD): total variation ≤ √(1 − 0.99²), a draw's component is guessed right 57 % of times
_TOGETHER = 0.01  # share of the latents' variance between components: their means are 0.1 σ apart
_ON_PRIOR = 0.01  # nats a node: as much as means 0.14 s away from 1, or σ 10 % away from s
_WIDE = 3.0  # σ/s: each node pays 2.9 nats for noise that the prior does not ask for
_DEAD = 0.01  # σ/s: each node pays 4.1 nats; with s = 0.3 the noise is below the rounding error of bfloat16
_MOST_KL, _FEW_NODES = 0.9, 0.5  # a layer holds most of the KL but few of the nodes
_DROPOUT = 0.3  # rate from which the network's own dropout is noise on a level with the latents'
_AGREED = 0.015  # epistemic share of the uncertainty: what is shown as 0 or 1 %
_ROUNDING = 4.0  # units in the last place within which a latent is where it started
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
    overlap: Tensor  # exp(−BD) of all pairs of components, (K, K)
    effective_components: float
    optimisers: list[Optimizer]
    share: float | None = None  # epistemic over total uncertainty of the inputs
    disagreement: float | None = None  # of components about the inputs' labels
    outputs: Tensor | None = None  # of the network for some of the inputs, (J, B, …)

    @property
    def groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Every parameter group with its optimiser."""
        return [(optimiser, group) for optimiser in self.optimisers for group in optimiser.param_groups]

    def where(self, test: Callable[[nn.Parameter], bool]) -> list[str]:
        """Returns the layers with a latent parameter that passes a test."""
        return [name for name, latent in self.model.latents.items() if any(map(test, latent.parameters()))]


Findings = Iterator[Finding | None]


def shown(name: str) -> str:
    """Returns the name of a layer for readers."""
    return name or "(net)"


def _about(names: Sequence[str], severity: Severity, what: str, remedy: str) -> Finding | None:
    """Returns a finding about layers, whose names replace @ in `what`; None if there are none."""
    listed = ", ".join(repr(shown(name)) for name in names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
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
    model, q, k = case.model, case.q, case.model.components
    if model.bank is not None:
        return
    # The KL "components" pulls all components to the prior, and untrained ones may be meant so.
    severity: Severity = "warning" if model.examples > 0 and model.kl_kind != "components" else "note"
    remedy = "Convert with fewer components, or drive them apart: larger init_std, gamma above 0, smaller beta."
    twins = (case.overlap.triu(1) > _SAME).any(0).nonzero().flatten().tolist()
    between, within = q.mean.var(0, correction=0).sum().item(), q.std.square().mean(0).sum().item()
    share = between / (between + within or 1.0)
    if (kl := _kl_per_node(case)) < _ON_PRIOR:
        what = f"The posterior is the prior ({kl:.4f} nats a node away): the latents have learnt nothing."
        remedy = "Lower beta or train longer. If strong noise is all you want, one component does the same for less."
    elif twins:
        repeated = f"{', '.join(map(str, twins))} repeat earlier ones (overlap above {_SAME})"
        what = f"The {k} components count as {case.effective_components:.1f}: {repeated}."
    elif k > 1 and share < _TOGETHER:
        what = f"The means of the {k} components have collapsed: {share:.2%} of the latents' variance is between them."
    else:
        return
    yield Finding(severity, None, what, remedy)


def _pull(case: Case) -> float:
    """Returns the σ/s at which the model's KL is smallest: √K for the paper's surrogate."""
    return math.sqrt(case.model.components) if case.model.kl_kind == "mean" else 1.0


def _kl_per_node(case: Case) -> float:
    """Returns the KL of the components to the prior, or to the optimum of the model's own KL if that is nearer."""
    prior = torch.as_tensor(prior_stds(case.model)).to(case.q.std)
    return min(kl_components(case.q, std).item() for std in (prior, _pull(case) * prior)) / case.model.nodes


def _noise(case: Case) -> Findings:
    """Checks how large σ is in each layer, and which layer the KL comes from."""
    pull, ratios = _pull(case), {row.name: row.std_ratio for row in case.layers}
    worst, least = max(ratios.values()), min(ratios.values())
    names = sorted((name for name in ratios if ratios[name] > _WIDE), key=lambda name: -ratios[name])
    what = f"σ is far above the prior's, up to {worst:.1f} times, in @."
    remedy = "Raise beta, or lower the latents' learning rate."
    if pull > 1:
        remedy += f" The 'mean' KL itself asks for {pull:.1f} (√K) times the prior's; kl='components' does not."
    yield _about(names, "warning" if worst > _WIDE * pull else "note", what, remedy)

    names = sorted((name for name in ratios if ratios[name] < _DEAD), key=lambda name: ratios[name])
    what = f"The noise is off (σ down to {least:.4f} of the prior's) in @: as overconfident as a plain network."
    remedy = "Raise beta, or lower the latents' learning rate; by hand: model.set_posterior(std=0.1)."
    yield _about(names, "warning", what, remedy)

    rows = [row for row in case.layers if row.kl_share > _MOST_KL and row.nodes < _FEW_NODES * case.model.nodes]
    if rows and _kl_per_node(case) >= _ON_PRIOR:  # shares of nothing mean nothing
        what = f"{rows[0].kl_share:.0%} of the KL is in @, with {rows[0].nodes:,} of {case.model.nodes:,} nodes."
        remedy = "See σ and the means above; lower the latents' learning rate, clip their gradients, or exclude it."
        yield _about([rows[0].name], "warning", what, remedy)


def _moved(case: Case) -> Findings:
    """Finds latents that are where convert put them, unless they were sampled."""
    model, examples, still = case.model, int(case.model.examples), set()  # latents at ρ = f(seed) or μ = 1 + s g(seed)
    if model.bank is not None:
        return
    noises = [noise.split([layer.nodes for layer in case.layers], 1) for noise in initial_noise(model)]
    for latent, mean_noise, std_noise in zip(model.latents.values(), *noises, strict=True):
        g, mean = mean_noise.double(), latent.mean.cpu().double()
        init_std = ((mean - 1) * g).sum() / g.square().sum()  # the model does not keep it: the one that fits best
        starts = (1 + init_std * g, inverse_softplus(initial_std(std_noise).double()))
        for parameter, start in zip((latent.mean, latent.rho), starts, strict=True):
            unit = _ROUNDING * max(torch.finfo(dtype).eps for dtype in (parameter.dtype, torch.float32))
            known = parameter is latent.rho or g.numel() > 1  # a single mean fits any init_std
            if known and torch.allclose(parameter.cpu().double(), start, rtol=unit, atol=unit):
                still.add(id(parameter))
    if not examples:  # a mean of 1 is also a start, but may be set by hand: all must be untouched
        fresh = all(id(p) in still for latent in model.latents.values() for p in latent.parameters())
        yield Finding("note", None, "The latents are where convert put them.", "Train the model.") if fresh else None
        return
    names = case.where(lambda p: p.requires_grad and id(p) in still)
    what = f"After {examples:,} examples latents are still where convert put them in @."
    remedy = "Give them to the optimiser (model.parameter_groups), with a learning rate above 0."
    yield _about(names, "warning", what, remedy)


def _gradients(case: Case) -> Findings:
    """Finds latents that are frozen or get no gradient."""
    names = case.where(lambda p: not p.requires_grad)
    remedy = "Nothing, if that is deliberate; else model.requires_grad_(True)."
    yield _about(names, "note", "Latents are frozen (requires_grad is False) in @.", remedy)

    backward = any(_nonzero(p.grad) for p in case.model.parameters())
    live = dict[int, bool]()  # whether parameters, of optimisers that remember gradients, got one
    for optimiser, group in case.groups:
        if not isinstance(optimiser, LBFGS | SGD) or group.get("momentum"):  # LBFGS remembers all in one place
            for p in group["params"]:
                live[id(p)] = live.get(id(p), False) or any(map(_nonzero, optimiser.state.get(p, {}).values()))
    forgotten = {p for p, got in live.items() if not got} if any(live.values()) else set()
    names = case.where(lambda p: p.requires_grad and ((backward and not _nonzero(p.grad)) or id(p) in forgotten))
    remedy = "Train on model.elbo(...).loss; check that forward calls these layers and nothing after them detaches."
    yield _about(names, "warning", "Other parameters got a gradient, but not all latents of @.", remedy)


def _nonzero(value: object) -> bool:
    """Whether something is a tensor (not a mere counter) with a value other than 0."""
    return isinstance(value, Tensor) and value.dim() > 0 and (value.is_sparse or bool(value.any()))


def _optimisers(case: Case) -> Findings:
    """Checks what the optimisers do to the latents."""
    decays = {id(p): group.get("weight_decay", 0) for _, group in case.groups for p in group["params"]}
    names = case.where(lambda p: p.requires_grad and decays.get(id(p), 0) != 0)
    worst = max((decays.get(id(p), 0) for name in names for p in case.model.latents[name].parameters()), default=0)
    what = f"Weight decay ({worst}) pulls μ to 0 and σ to 0.69, and not to the prior, in @."
    remedy = "Make the optimiser from model.parameter_groups(lr, weight_decay=...), which spares the latents."
    yield _about(names, "warning", what, remedy)

    held = Counter(id(p) for _, group in case.groups for p in group["params"])
    names = case.where(lambda p: bool(case.optimisers) and p.requires_grad and not held[id(p)])
    remedy = "Make it from model.parameter_groups(lr), after convert; or freeze these latents: requires_grad_(False)."
    yield _about(names, "problem", "The optimiser does not have the latents of @.", remedy)
    remedy = "Leave them in one group of one optimiser: model.parameter_groups(lr)."
    names = case.where(lambda p: held[id(p)] > 1)
    yield _about(names, "problem", "More than one parameter group moves the latents of @.", remedy)

    by_sgd = {id(p) for optimiser, group in case.groups if isinstance(optimiser, SGD) for p in group["params"]}
    k = case.model.components
    names = case.where(lambda p: id(p) in by_sgd and case.model.gradient_scale == 1 < k)
    what = f"SGD moves the latents of @ by 1/{k} of their gradient, because the components share the batch."
    remedy = "Make it from model.parameter_groups(lr), which undoes that; nothing, if their rate was raised by K."
    yield _about(names, "note", what, remedy)


def _modules(case: Case) -> Findings:
    """Checks BatchNorm's modes and statistics, and the network's own dropout."""
    training, modules = case.model.training, dict(case.model.net.named_modules())
    norms = {name: m for name, m in modules.items() if isinstance(m, _BatchNorm)}
    names = [name for name, m in norms.items() if m.training and not training]
    what = "The model is in eval mode but BatchNorm in train mode, so answers depend on their batch: @."
    yield _about(names, "problem", what, "Call model.eval() after anything that changes modes.")
    names = [name for name, m in norms.items() if training and not m.training]
    what = "The model is in train mode but BatchNorm in eval mode, with fixed statistics: @."
    yield _about(names, "note", what, "Nothing, if you fine-tune so on purpose; else call model.train().")
    names = [name for name, m in norms.items() if m.running_mean is None and not training]
    what = "BatchNorm keeps no running statistics, so answers depend on the batch even in eval mode: @."
    yield _about(names, "note", what, "Build it with track_running_stats=True, or predict in large batches.")

    rates = {name: m.p for name, m in modules.items() if isinstance(m, _DropoutNd) and m.p >= _DROPOUT}
    what = f"The network's own dropout (up to {max(rates.values(), default=0.0):g}) adds to the noise: @."
    remedy = "If training is slow or the model is underconfident, disable it (p = 0): the latents already regularise."
    yield _about(list(rates), "note", what, remedy)


def _answers(case: Case) -> Findings:
    """Checks what predictions are made of."""
    model = case.model
    if model.eval_samples == 0:
        what = "eval_samples is 0: model(x) in eval mode shows the component means only, without their σ."
        remedy = "Set model.eval_samples to 1 or more; model.predict draws in any case."
        yield Finding("note", None, what, remedy)
    if case.share is not None and case.share < _AGREED:
        what = f"{case.share:.1%} of the uncertainty is epistemic: the draws hardly disagree, as if of one network."
        remedy = "Go by the total. For more disagreement: a larger beta or prior_std, or components farther apart."
        yield Finding("warning" if model.examples > 0 else "note", None, what, remedy)

    likelihood = getattr(model.likelihood, "inner", model.likelihood)  # of one whose rows have weights
    end = own_activation(model.net, case.outputs)
    top = math.exp(1 / float(likelihood.temperature))  # odds of an output of 1 against one of 0
    if end and isinstance(likelihood, Categorical | Bernoulli):
        limit = "no class can have a probability near 1"
        if isinstance(likelihood, Bernoulli):
            limit = f"all probabilities are between 50% and {top / (top + 1):.0%}"
        elif case.outputs is not None:
            limit = f"no class can be more probable than {top / (top + case.outputs.shape[2] - 1):.0%}"
        what = f"The network ends in a {end}, and the likelihood adds its own: {limit}."
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
    non_finite, _components, _noise, _moved, _gradients, _optimisers, _modules, _answers, _novelty, _chains,
)  # fmt: skip
