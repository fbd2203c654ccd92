"""CHECKS: one function for every finding; each takes a `Case` and returns its finding or None."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import LBFGS, SGD, Optimizer

from ibnn.latent import Latent, inverse_softplus
from ibnn.likelihood import Bernoulli, Categorical, Weighted
from ibnn.mixture import Mixture, kl_components
from ibnn.network import IBNN
from ibnn.posterior import initial_std

_SAME = 0.99  # overlap exp(−BD): total variation ≤ √(1 − 0.99²), a draw's component is guessed right 57 % of times
_TOGETHER = 0.01  # share of the latents' variance between components: their means are 0.1 σ apart
_ON_PRIOR = 0.01  # nats a node: as much as means 0.14 s away from 1, or σ 10 % away from s
_WIDE = 3.0  # σ/s: each node pays 2.9 nats for noise that the prior does not ask for
_DEAD = 0.01  # σ/s: each node pays 4.1 nats; with s = 0.3 the noise is below the rounding error of bfloat16
_MOST, _FEW = 0.9, 0.5  # a layer holds most of the KL but few of the nodes
_INVERTED = 0.2  # share of a component's means below 0: twice that of the paper's widest start, N(1, 0.75²), …
_CHANCE = 1.0  # … and this over √nodes more: 3.5 standard errors of that start, for small networks
_DROPOUT = 0.3  # rate of the network's own dropout from which it is noise beside the latents', not a touch of it
_AGREED = 0.015  # epistemic share of the uncertainty: what is shown as 0 or 1 %
_ROUNDING = 4.0  # units in the last place within which a latent is where it started
NOVEL = 0.01  # p-value below which inputs are usually called novel
_SUM = 1e-3  # how near to 1 probabilities sum up, in half precision too
TINY = torch.finfo(torch.float32).tiny  # stands in for σ = 0, whose KL is infinite and has no shares


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
    overlap: Tensor  # (K, K)
    optimisers: list[Optimizer]
    share: float | None = None  # epistemic over total uncertainty of the inputs
    disagreement: float | None = None  # of components about the inputs' labels
    outputs: Tensor | None = None  # of the network for some of them, (J, B, …)

    @property
    def effective_components(self) -> float:
        """How many components are distinct."""
        return self.overlap.mean(1).log().mean().neg().exp().item()

    @property
    def pull(self) -> float:
        """The σ/s at which the model's KL is smallest: for the paper's surrogate √K."""
        return math.sqrt(self.model.components) if self.model.kl_kind == "mean" else 1.0

    @property
    def kl_per_node(self) -> float:
        """KL of the components to the prior, or to the optimum of the model's own KL if they are nearer to that."""
        prior = torch.as_tensor(self.model.prior_stds).to(self.q.std)
        stds = (prior, self.pull * prior)
        return min(kl_components(self.q, std).item() for std in stds) / self.model.nodes

    @property
    def blame(self) -> Severity:
        """Severity of an uninformative posterior; the KL "components" pulls all to the prior, and so gets a note."""
        return "warning" if self.model.examples > 0 and self.model.kl_kind != "components" else "note"

    @property
    def groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Every parameter group with its optimiser."""
        return [(optimiser, group) for optimiser in self.optimisers for group in optimiser.param_groups]

    def where(self, test: Callable[[nn.Parameter], bool]) -> list[str]:
        """Returns the layers with a latent parameter that passes a test."""
        return [name for name, latent in self.model.latents.items() if any(map(test, latent.parameters()))]

    def norms(self, test: Callable[[_BatchNorm], bool]) -> list[str]:
        """Returns the BatchNorms that pass a test."""
        return [name for name, m in self.model.net.named_modules() if isinstance(m, _BatchNorm) and test(m)]


def shown(name: str) -> str:
    """Returns the name of a layer for readers."""
    return name or "(net)"


def _about(names: Sequence[str], severity: Severity, what: str, remedy: str) -> Finding | None:
    """Returns a finding about layers, whose names replace @ in `what`; None if there are none."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    listed = ", ".join(repr(shown(name)) for name in names[:3]) + more
    return Finding(severity, names[0], what.replace("@", listed), remedy) if names else None


def _live(value: object) -> bool:
    """Whether something is a tensor (not a mere counter) with a value other than 0."""
    return isinstance(value, Tensor) and value.dim() > 0 and (value.is_sparse or bool(value.any()))


def non_finite(case: Case) -> Finding | None:
    """Finds NaN and infinite values."""
    names = []
    for name, module in [*case.model.net.named_modules(), ("likelihood", case.model.likelihood)]:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if isinstance(module, Latent):  # ρ = −∞ is how σ = 0 is said
            name, own = name.rpartition(".")[0], [module.mean, module.std]
        if name not in names and not all(bool(tensor.isfinite().all()) for tensor in own):
            names.append(name)
    remedy = "Go back to the last good checkpoint; then lower the learning rates, or clip the latents' gradient norm."
    return _about(names, "problem", "There are NaN or infinite values in @.", remedy)


def nothing_learnt(case: Case) -> Finding | None:
    """Finds a posterior that is the prior."""
    what = f"The posterior is the prior ({case.kl_per_node:.4f} nats a node away): the latents have learnt nothing."
    remedy = "Lower beta or train longer. If strong noise is all you want, one component does the same for less."
    return Finding(case.blame, None, what, remedy) if case.kl_per_node < _ON_PRIOR else None


def duplicates(case: Case) -> Finding | None:
    """Finds components that repeat others."""
    twins = (case.overlap.triu(1) > _SAME).any(0).nonzero().flatten().tolist()
    if not twins or case.kl_per_node < _ON_PRIOR:  # where all are the prior, that is the finding
        return None
    count = f"The {len(case.overlap)} components count as {case.effective_components:.1f}"
    what = f"{count}: {', '.join(map(str, twins))} repeat earlier ones (overlap above {_SAME})."
    remedy = "Convert with fewer components, or drive them apart: larger init_std, gamma above 0, smaller beta."
    return Finding(case.blame, None, what, remedy)


def collapsed(case: Case) -> Finding | None:
    """Finds components whose means are alike."""
    between, within = case.q.mean.var(0, correction=0).sum().item(), case.q.std.square().mean(0).sum().item()
    share, k = between / (between + within or 1.0), case.model.components
    if k == 1 or not share < _TOGETHER or case.kl_per_node < _ON_PRIOR or duplicates(case):
        return None
    what = f"The means of the {k} components have collapsed: {share:.2%} of the latents' variance is between them."
    remedy = "Convert with fewer components, or drive them apart: larger init_std, gamma above 0, smaller beta."
    return Finding(case.blame, None, what, remedy)


def _wide(case: Case) -> Finding | None:
    rows = sorted((row for row in case.layers if row.std_ratio > _WIDE), key=lambda row: -row.std_ratio)
    worst = rows[0].std_ratio if rows else 0.0
    remedy = "Raise beta, or lower the latents' learning rate."
    if case.pull > 1:
        remedy += f" The 'mean' KL itself asks for {case.pull:.1f} (√K) times the prior's; kl='components' does not."
    what = f"σ is far above the prior's, up to {worst:.1f} times, in @."
    return _about([row.name for row in rows], "warning" if worst > _WIDE * case.pull else "note", what, remedy)


def _dead(case: Case) -> Finding | None:
    rows = sorted((row for row in case.layers if row.std_ratio < _DEAD), key=lambda row: row.std_ratio)
    least = rows[0].std_ratio if rows else 0.0
    what = f"The noise is off (σ down to {least:.4f} of the prior's) in @: as overconfident as a plain network."
    remedy = "Raise beta, or lower the latents' learning rate; by hand: model.set_posterior(std=0.1)."
    return _about([row.name for row in rows], "warning", what, remedy)


def _dominated(case: Case) -> Finding | None:
    rows = [row for row in case.layers if row.kl_share > _MOST and row.nodes < _FEW * case.model.nodes]
    if not rows or case.kl_per_node < _ON_PRIOR:  # shares of nothing mean nothing
        return None
    what = f"{rows[0].kl_share:.0%} of the KL is of @, with {rows[0].nodes:,} of {case.model.nodes:,} nodes."
    remedy = "See its σ and means above; lower the latents' learning rate, clip their gradients, or exclude the layer."
    return _about([rows[0].name], "warning", what, remedy)


def never_moved(case: Case) -> Finding | None:
    """Finds latents that are where convert put them."""
    still, examples = _at_start(case), int(case.model.examples)
    if not examples:  # a mean of 1 is also a start, but may be set by hand: nothing may have been touched
        fresh = all(id(p) in still for latent in case.model.latents.values() for p in latent.parameters())
        return Finding("note", None, "The latents are where convert put them.", "Train the model.") if fresh else None
    names = case.where(lambda p: p.requires_grad and id(p) in still)
    what = f"After {examples:,} examples latents are still where convert put them in @."
    remedy = "Give them to the optimiser (model.parameter_groups), with a learning rate above 0."
    return _about(names, "warning", what, remedy)


def _at_start(case: Case) -> set[int]:
    """Returns the ids of latent parameters that have their initial values: ρ = f(seed), μ = 1 + init_std · g(seed)."""
    model, still = case.model, set()
    noises = [noise.split([layer.nodes for layer in case.layers], 1) for noise in model.initial_noise()]
    for latent, mean_noise, std_noise in zip(model.latents.values(), *noises, strict=True):
        g, mean = mean_noise.double(), latent.mean.cpu().double()
        init_std = ((mean - 1) * g).sum() / g.square().sum()  # the model does not keep it: the one that fits best
        starts = (1 + init_std * g, inverse_softplus(initial_std(std_noise).double()))
        for parameter, start in zip((latent.mean, latent.rho), starts, strict=True):
            unit = _ROUNDING * max(torch.finfo(dtype).eps for dtype in (parameter.dtype, torch.float32))
            known = parameter is latent.rho or g.numel() > 1  # a single mean fits any init_std
            if known and torch.allclose(parameter.cpu().double(), start, rtol=unit, atol=unit):
                still.add(id(parameter))
    return still


def _frozen(case: Case) -> Finding | None:
    names = case.where(lambda p: not p.requires_grad)
    remedy = "Nothing, if that is deliberate; else model.requires_grad_(True)."
    return _about(names, "note", "Latents are frozen (requires_grad is False) in @.", remedy)


def _no_gradient(case: Case) -> Finding | None:
    backward = any(_live(p.grad) for p in case.model.parameters())
    kept, live = set(), set()  # parameters whose gradients an optimiser remembers, and those where there was one
    for optimiser, group in case.groups:
        if isinstance(optimiser, LBFGS) or (isinstance(optimiser, SGD) and not group["momentum"]):
            continue  # LBFGS remembers all in one place, plain SGD nothing
        kept |= {id(p) for p in group["params"]}
        live |= {id(p) for p in group["params"] if any(map(_live, optimiser.state.get(p, {}).values()))}
    forgotten = kept - live if live else set()
    names = case.where(lambda p: p.requires_grad and ((backward and not _live(p.grad)) or id(p) in forgotten))
    remedy = "Train on model.elbo(...).loss; see that forward calls these layers and that nothing after them detaches."
    return _about(names, "warning", "Other parameters got a gradient, but not all latents of @.", remedy)


def _weight_decay(case: Case) -> Finding | None:
    decays = {id(p): group.get("weight_decay", 0) for _, group in case.groups for p in group["params"]}
    names = case.where(lambda p: p.requires_grad and decays.get(id(p), 0) != 0)
    worst = max((decays.get(id(p), 0) for name in names for p in case.model.latents[name].parameters()), default=0)
    what = f"Weight decay ({worst}) pulls μ to 0 and σ to 0.69, and not to the prior, in @."
    remedy = "Make the optimiser from model.parameter_groups(lr, weight_decay=...), which spares the latents."
    return _about(names, "warning", what, remedy)


def _forgotten(case: Case) -> Finding | None:
    held = {id(p) for _, group in case.groups for p in group["params"]}
    names = case.where(lambda p: bool(case.optimisers) and p.requires_grad and id(p) not in held)
    remedy = "Make it from model.parameter_groups(lr), after convert; or freeze these latents: requires_grad_(False)."
    return _about(names, "problem", "The optimiser does not have the latents of @.", remedy)


def _twice(case: Case) -> Finding | None:
    held = Counter(id(p) for _, group in case.groups for p in group["params"])
    names = case.where(lambda p: held[id(p)] > 1)
    remedy = "Leave them in one group of one optimiser: model.parameter_groups(lr)."
    return _about(names, "problem", "More than one parameter group moves the latents of @.", remedy)


def _unscaled(case: Case) -> Finding | None:
    held = {id(p) for optimiser, group in case.groups if isinstance(optimiser, SGD) for p in group["params"]}
    k = case.model.components
    names = case.where(lambda p: id(p) in held and case.model.gradient_scale == 1 < k)
    what = f"SGD moves the latents of @ by 1/{k} of their gradient, because the components share the batch."
    remedy = "Make it from model.parameter_groups(lr), which undoes that; nothing, if their rate was raised by K."
    return _about(names, "note", what, remedy)


def _batchnorm_training(case: Case) -> Finding | None:
    names = case.norms(lambda m: m.training and not case.model.training)
    what = "The model is in eval mode but BatchNorm in train mode, so answers depend on their batch: @."
    return _about(names, "problem", what, "Call model.eval() after anything that changes modes.")


def _batchnorm_frozen(case: Case) -> Finding | None:
    names = case.norms(lambda m: not m.training and case.model.training)
    what = "The model is in train mode but BatchNorm in eval mode, with fixed statistics: @."
    return _about(names, "note", what, "Nothing, if you fine-tune so on purpose; else call model.train().")


def _batchnorm_of_batch(case: Case) -> Finding | None:
    names = case.norms(lambda m: m.running_mean is None and not case.model.training)
    what = "BatchNorm keeps no running statistics, so answers depend on the batch even in eval mode: @."
    return _about(names, "note", what, "Build it with track_running_stats=True, or predict in large batches.")


def _batchnorm_average(case: Case) -> Finding | None:
    names = case.norms(lambda m: m.momentum is None and m.running_mean is not None and not case.model.training)
    what = "BatchNorm averages over all of training, its start included (momentum=None): @."
    return _about(names, "note", what, "Build it with momentum=0.1, or reset its statistics and run some batches.")


def _dropout(case: Case) -> Finding | None:
    own = {name: m for name, m in case.model.net.named_modules() if isinstance(m, _DropoutNd) and m.p >= _DROPOUT}
    what = f"The network's own dropout (up to {max((m.p for m in own.values()), default=0.0):g}) adds to the noise: @."
    remedy = "If training is slow or the answers are shy, train without: set its p to 0. The latents do its work."
    return _about(list(own), "note", what, remedy)


def _inverted(case: Case) -> Finding | None:
    share, k = case.q.mean.lt(0).double().mean(1).max(0)
    limit = _INVERTED + _CHANCE / math.sqrt(case.model.nodes)
    what = f"{share:.0%} of the means of component {k} are below 0: it inverts those inputs."
    remedy = "Harmless if its error is like the others'; else start nearer to 1, with a smaller init_std."
    return Finding("note", None, what, remedy) if share > limit else None


def _means_only(case: Case) -> Finding | None:
    what = "eval_samples is 0: model(x) in eval mode shows the component means only, without their σ."
    remedy = "Set model.eval_samples to 1 or more; model.predict draws in any case."
    return Finding("note", None, what, remedy) if case.model.eval_samples == 0 else None


def _agreement(case: Case) -> Finding | None:
    if case.share is None or case.share >= _AGREED:
        return None
    what = f"{case.share:.1%} of the uncertainty is epistemic: the draws hardly disagree, as if there were one network."
    remedy = "Go by the total. For more of it: more noise (a larger beta or prior_std), or components farther apart."
    return Finding("warning" if case.model.examples > 0 else "note", None, what, remedy)


def _second_softmax(case: Case) -> Finding | None:
    likelihood = case.model.likelihood
    likelihood = likelihood.inner if isinstance(likelihood, Weighted) else likelihood
    end, top = _end(case), math.exp(1 / float(likelihood.temperature))  # odds of an output of 1 against one of 0
    if not end or not isinstance(likelihood, Categorical | Bernoulli):
        return None
    if end == "log-softmax":
        what = "The network ends in a log-softmax, which the likelihood's own softmax leaves as it is."
        remedy = "Nothing: logits would do as well."
        return Finding("note", None, what, remedy) if isinstance(likelihood, Categorical) else None
    if isinstance(likelihood, Bernoulli):
        limit = f"all probabilities are between 50% and {top / (top + 1):.0%}"
    elif case.outputs is None:
        limit = "no class can have a probability near 1"
    else:
        limit = f"no class can be more probable than {top / (top + case.outputs.shape[2] - 1):.0%}"
    what = f"The network ends in a {end}, and the likelihood adds its own: {limit}."
    return Finding("warning", None, what, f"Take the {end} out of the network: its outputs are to be logits.")


def _end(case: Case) -> str:
    """Returns the function that the network ends in, judged by its modules or its outputs; "" for none."""
    last = case.model.net
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    kinds = {nn.Softmax: "softmax", nn.Softmax2d: "softmax", nn.LogSoftmax: "log-softmax", nn.Sigmoid: "sigmoid"}
    if type(last) in kinds or case.outputs is None or case.outputs.dim() < 3:
        return kinds.get(type(last), "")
    outputs = case.outputs.double()  # (J, B, C, …)
    sums = {"softmax": outputs.sum(2), "log-softmax": outputs.exp().sum(2)}
    found = [name for name, total in sums.items() if bool(((total - 1).abs() < _SUM).all())]
    return next((name for name in found if name == "log-softmax" or bool((outputs >= 0).all())), "")


def _no_reference(case: Case) -> Finding | None:
    model = case.model
    if model.reference is not None or model.training or case.optimisers or not model.examples:
        return None  # or it is not trained yet
    remedy = (
        "Call ibnn.fit_novelty(model, train, valid) with data that it was not trained on; ibnn.fit does, given some."
    )
    return Finding("note", None, "The model cannot tell novel inputs: it has no reference data.", remedy)


def _few_held_out(case: Case) -> Finding | None:
    reference = case.model.reference
    if reference is None or 1 / (len(reference.scores) + 1) <= NOVEL:
        return None
    least, rows = 1 / (len(reference.scores) + 1), 2 * math.ceil(1 / NOVEL - 1)
    what = f"No input has a p-value of novelty below {least:.3g}: too few inputs were held out."
    remedy = f"Hold out {rows} or more: ibnn.fit_novelty(model, train, valid). Until then, ask p.novel({least:.3g})."
    return Finding("note", None, what, remedy)


CHECKS: tuple[Callable[[Case], Finding | None], ...] = (
    non_finite, nothing_learnt, duplicates, collapsed, _wide, _dead, _dominated,
    never_moved, _frozen, _no_gradient, _weight_decay, _forgotten, _twice, _unscaled,
    _batchnorm_training, _batchnorm_frozen, _batchnorm_of_batch, _batchnorm_average, _dropout,
    _inverted, _means_only, _agreement, _second_softmax,
    _no_reference, _few_held_out,
)  # fmt: skip
