"""DOCTOR: reads a model and says in plain words what is wrong with its posterior or its training, and what to do.

Nothing is changed, and nothing run but for inputs that are given. Every finding has a function of its own, listed at
the end in `_CHECKS`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import LBFGS, SGD, Optimizer

from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, batch_length, slice_rows, tree_map
from ibnn.latent import Latent, inverse_softplus
from ibnn.likelihood import Bernoulli, Categorical, Weighted
from ibnn.mixture import CLOSED_FORMS, Mixture, kl_components
from ibnn.network import IBNN
from ibnn.normal import Space, address, normals
from ibnn.prediction import JointPrediction

Severity = Literal["problem", "warning", "note"]

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
_ROWS = 64  # inputs at once
_SUM = 1e-3  # how near to 1 probabilities sum up, in half precision too
_TINY = torch.finfo(torch.float32).tiny  # stands in for σ = 0, whose KL is infinite and has no shares


@dataclass(frozen=True)
class LayerDiagnosis:
    """A layer's latents; means over components and nodes, unless said otherwise."""

    name: str
    nodes: int
    kl: float  # nats, summed over nodes
    kl_share: float  # of the whole model's; 0 where that is 0
    std: float  # σ
    std_ratio: float  # σ/s
    spread: float  # of the component means: root mean square over nodes of their standard deviation over k
    shift: float  # |μ − 1|


@dataclass(frozen=True)
class Finding:
    """Something to know ("note"), that may hurt ("warning") or is wrong ("problem"), and what to do about it."""

    severity: Severity
    layer: str | None  # the one to look at first; None: the whole model
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}\n    {self.remedy}"


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` saw; `print` it.

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
        width = max(len("layer"), *(len(_shown(row.name)) for row in self.layers))
        lines = [f"{'layer':<{width}}    nodes  KL share  mean σ  σ/prior  spread of μ  mean |μ−1|"]
        for row in self.layers:
            start = f"{_shown(row.name):<{width}}  {row.nodes:>7,}  {row.kl_share:>8.1%}  {row.std:>6.3f}"
            lines.append(f"{start}  {row.std_ratio:>7.2f}  {row.spread:>11.3f}  {row.shift:>10.3f}")
        kind = _splitting(self.kl_kind)
        why = "" if kind == self.kl_kind else f", because {self.kl_kind!r} does not split over layers"
        kl = f"KL {sum(row.kl for row in self.layers):,.1f} nats ({kind!r}{why})"
        share = "" if self.epistemic_share is None else f", epistemic share {self.epistemic_share:.1%}"
        lines.append(f"{kl}, distinct components {self.effective_components:.1f}{share}")
        return "\n".join([*lines, *(map(str, self.findings) if self.findings else ["Nothing to worry about."])])


def diagnose(
    model: IBNN, *, optimiser: Optimizer | Sequence[Optimizer] | None = None, inputs: Inputs | None = None
) -> Diagnosis:
    """Examines a model's posterior, gradients and modes, without changing anything.

    Args:
        model: A converted network, before, during or after training.
        optimiser: What trains it, one or several; shows weight decay on latents, forgotten latents and more.
        inputs: What one call of the network takes, a hundred rows or so like those it will meet. They are predicted,
            which shows draws that hardly disagree, and a network that ends in a softmax of its own.

    >>> from ibnn import convert
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> print(diagnose(convert(net, components=4, kl="mean", seed=0)))
    layer    nodes  KL share  mean σ  σ/prior  spread of μ  mean |μ−1|
    0            4     31.1%   0.055     0.18        0.098       0.088
    2            8     68.9%   0.045     0.15        0.100       0.078
    KL 23.8 nats ('mean'), distinct components 4.0
    note: The latents are where convert put them.
        Train the model.
    """
    if not isinstance(model, IBNN):
        remedy = "Pass the model itself, `.module` of a wrapped one."
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, remedy))
    optimisers = [optimiser] if isinstance(optimiser, Optimizer) else list(optimiser or ())
    for each in optimisers:
        if not isinstance(each, Optimizer):
            raise TypeError(complaint("optimiser", "torch optimisers", type(each).__name__, "Pass a list of them."))
    with torch.no_grad():
        q = Mixture(*(part.cpu().double() for part in model.posterior()))
        inner = [getattr(each, "optimizer", each) for each in optimisers]  # accelerate wraps them
        case = _Case(model, q, _layers(model, q), _overlap(q), inner)
        if inputs is not None and _non_finite(case) is None:
            case = replace(case, **_answers(model, as_tensors(inputs)))
        findings = [finding for check in _CHECKS if (finding := check(case))]
    findings.sort(key=lambda finding: ("problem", "warning", "note").index(finding.severity))
    return Diagnosis(case.layers, tuple(findings), model.kl_kind, case.effective_components, case.share)


def _answers(model: IBNN, inputs: Inputs) -> dict[str, Any]:
    """The epistemic share of the uncertainty of inputs, and the network's outputs for some of them."""
    found: Any = model.predict(inputs, samples=2, batch_size=_ROWS, progress=False)
    heads = list(found.heads.values()) if isinstance(found, JointPrediction) else [found]
    heads = [head for head in heads if hasattr(head, "total") and hasattr(head, "epistemic")]
    totals, epistemics = ([float(getattr(h, name).double().mean()) for h in heads] for name in ("total", "epistemic"))
    shares = [epistemic / total for total, epistemic in zip(totals, epistemics, strict=True) if total > 0]
    rows, device = batch_length(inputs), model.examples.device
    some = tree_map(lambda t: t.to(device), slice_rows(inputs, slice(0, _ROWS), rows))
    outputs = model.draw_logits(some, 1) if len(heads) == 1 else None  # those of several heads stand side by side
    if outputs is not None and isinstance(model.likelihood, Categorical):
        outputs = outputs.movedim(model.likelihood.class_dim(outputs, 1), 2)
    return {"share": max(shares, default=None), "outputs": outputs}


def _splitting(kind: str) -> str:
    """The KL that layers have shares of."""
    return kind if kind in ("mean", "components") else "components"


def _layers(model: IBNN, q: Mixture) -> tuple[LayerDiagnosis, ...]:
    sizes, s = [latent.nodes for latent in model.latents.values()], model.prior_std
    parts = list(zip(q.mean.split(sizes, 1), q.std.split(sizes, 1), strict=True))
    kl_of = CLOSED_FORMS[_splitting(model.kl_kind)]
    kls = [kl_of(Mixture(mean, std.clamp_min(_TINY)), s).item() for mean, std in parts]
    rows = []
    for name, (mean, std), kl in zip(model.latents, parts, kls, strict=True):
        share, width = kl / (sum(kls) or 1.0), std.mean().item()
        spread, shift = mean.var(0, correction=0).mean().sqrt().item(), (mean - 1).abs().mean().item()
        rows.append(LayerDiagnosis(name, mean.shape[1], kl, share, width, width / s, spread, shift))
    return tuple(rows)


def _overlap(q: Mixture) -> Tensor:
    """exp(−BD) of all pairs of components over all layers, (K, K); a row at a time: K²·nodes can be too many."""
    std = q.std.clamp_min(_TINY)
    distance = torch.zeros(len(std), len(std), dtype=std.dtype)
    for i in range(len(std) - 1):
        summed = std[i].square() + std[i + 1 :].square()  # (K − 1 − i, D)
        per_node = (
            0.25 * (q.mean[i] - q.mean[i + 1 :]).square() / summed + 0.5 * (summed / (2 * std[i] * std[i + 1 :])).log()
        )
        distance[i, i + 1 :] = per_node.sum(-1)
    return (-distance - distance.T).exp()


@dataclass(frozen=True)
class _Case:
    """What the checks look at."""

    model: IBNN
    q: Mixture  # on the CPU, in double precision
    layers: tuple[LayerDiagnosis, ...]
    overlap: Tensor  # (K, K)
    optimisers: list[Optimizer]
    share: float | None = None  # epistemic over total uncertainty of the inputs
    outputs: Tensor | None = None  # of the network for some of them, (J, B, …)

    @property
    def effective_components(self) -> float:
        return self.overlap.mean(1).log().mean().neg().exp().item()

    @property
    def pull(self) -> float:
        """The σ/s at which the model's KL is smallest: for the paper's surrogate √K."""
        return math.sqrt(self.model.components) if self.model.kl_kind == "mean" else 1.0

    @property
    def kl_per_node(self) -> float:
        """Of the components to the prior, or to where the model's KL alone takes them if they are nearer to that."""
        stds = (self.model.prior_std, self.pull * self.model.prior_std)
        return min(kl_components(self.q, std).item() for std in stds) / self.model.nodes

    @property
    def blame(self) -> Severity:
        """Of a posterior that tells little: after training it should tell more, set by hand it may be meant so.

        The KL "components" takes all components to the prior, and what it leaves is the noise that was chosen.
        """
        return "warning" if self.model.examples > 0 and self.model.kl_kind != "components" else "note"

    @property
    def groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        return [(optimiser, group) for optimiser in self.optimisers for group in optimiser.param_groups]

    def where(self, test: Callable[[nn.Parameter], bool]) -> list[str]:
        """The layers with a latent parameter that passes a test."""
        return [name for name, latent in self.model.latents.items() if any(map(test, latent.parameters()))]

    def norms(self, test: Callable[[_BatchNorm], bool]) -> list[str]:
        """The BatchNorms that pass a test."""
        return [name for name, m in self.model.net.named_modules() if isinstance(m, _BatchNorm) and test(m)]


def _about(names: Sequence[str], severity: Severity, what: str, remedy: str) -> Finding | None:
    """A finding about layers, whose names take the place of @ in `what`; None without any."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    listed = ", ".join(repr(_shown(name)) for name in names[:3]) + more
    return Finding(severity, names[0], what.replace("@", listed), remedy) if names else None


def _shown(name: str) -> str:
    return name or "(net)"


def _live(value: object) -> bool:
    """Whether something is a tensor, not a mere counter, with a value that is not 0."""
    return isinstance(value, Tensor) and value.dim() > 0 and (value.is_sparse or bool(value.any()))


def _non_finite(case: _Case) -> Finding | None:
    names = []
    for name, module in [*case.model.net.named_modules(), ("likelihood", case.model.likelihood)]:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if isinstance(module, Latent):  # ρ = −∞ is how σ = 0 is said
            name, own = name.rpartition(".")[0], [module.mean, module.std]
        if name not in names and not all(bool(tensor.isfinite().all()) for tensor in own):
            names.append(name)
    remedy = "Go back to the last good checkpoint; then lower the learning rates, or clip the latents' gradient norm."
    return _about(names, "problem", "There are NaN or infinite values in @.", remedy)


def _nothing_learnt(case: _Case) -> Finding | None:
    what = f"The posterior is the prior ({case.kl_per_node:.4f} nats a node away): the latents have learnt nothing."
    remedy = "Lower beta or train longer. If strong noise is all you want, one component does the same for less."
    return Finding(case.blame, None, what, remedy) if case.kl_per_node < _ON_PRIOR else None


def _duplicates(case: _Case) -> Finding | None:
    twins = (case.overlap.triu(1) > _SAME).any(0).nonzero().flatten().tolist()
    if not twins or case.kl_per_node < _ON_PRIOR:  # where all are the prior, that is the finding
        return None
    count = f"The {len(case.overlap)} components count as {case.effective_components:.1f}"
    what = f"{count}: {', '.join(map(str, twins))} repeat earlier ones (overlap above {_SAME})."
    remedy = "Convert with fewer components, or drive them apart: larger init_std, gamma above 0, smaller beta."
    return Finding(case.blame, None, what, remedy)


def _collapsed(case: _Case) -> Finding | None:
    between, within = case.q.mean.var(0, correction=0).sum().item(), case.q.std.square().mean(0).sum().item()
    share, k = between / (between + within or 1.0), case.model.components
    if k == 1 or not share < _TOGETHER or case.kl_per_node < _ON_PRIOR or _duplicates(case):
        return None
    what = f"The means of the {k} components have collapsed: {share:.2%} of the latents' variance is between them."
    remedy = "Convert with fewer components, or drive them apart: larger init_std, gamma above 0, smaller beta."
    return Finding(case.blame, None, what, remedy)


def _wide(case: _Case) -> Finding | None:
    rows = sorted((row for row in case.layers if row.std_ratio > _WIDE), key=lambda row: -row.std_ratio)
    worst = rows[0].std_ratio if rows else 0.0
    remedy = "Raise beta, or lower the latents' learning rate."
    if case.pull > 1:
        remedy += f" The 'mean' KL itself asks for {case.pull:.1f} (√K) times the prior's; kl='components' does not."
    what = f"σ is far above the prior's, up to {worst:.1f} times, in @."
    return _about([row.name for row in rows], "warning" if worst > _WIDE * case.pull else "note", what, remedy)


def _dead(case: _Case) -> Finding | None:
    rows = sorted((row for row in case.layers if row.std_ratio < _DEAD), key=lambda row: row.std_ratio)
    least = rows[0].std_ratio if rows else 0.0
    what = f"The noise is off (σ down to {least:.4f} of the prior's) in @: as overconfident as a plain network."
    remedy = "Raise beta, or lower the latents' learning rate; by hand: model.set_posterior(std=0.1)."
    return _about([row.name for row in rows], "warning", what, remedy)


def _dominated(case: _Case) -> Finding | None:
    rows = [row for row in case.layers if row.kl_share > _MOST and row.nodes < _FEW * case.model.nodes]
    if not rows or case.kl_per_node < _ON_PRIOR:  # shares of nothing mean nothing
        return None
    what = f"{rows[0].kl_share:.0%} of the KL is of @, with {rows[0].nodes:,} of {case.model.nodes:,} nodes."
    remedy = "See its σ and means above; lower the latents' learning rate, clip their gradients, or exclude the layer."
    return _about([rows[0].name], "warning", what, remedy)


def _never_moved(case: _Case) -> Finding | None:
    still, examples = _at_start(case), int(case.model.examples)
    if not examples:  # a mean of 1 is also a start, but may be set by hand: nothing may have been touched
        fresh = all(id(p) in still for latent in case.model.latents.values() for p in latent.parameters())
        return Finding("note", None, "The latents are where convert put them.", "Train the model.") if fresh else None
    names = case.where(lambda p: p.requires_grad and id(p) in still)
    what = f"After {examples:,} examples latents are still where convert put them in @."
    remedy = "Give them to the optimiser (model.parameter_groups), with a learning rate above 0."
    return _about(names, "warning", what, remedy)


def _at_start(case: _Case) -> set[int]:
    """Ids of the latent parameters that are where `convert` put them: ρ = f(seed), μ = 1 + init_std · g(seed)."""
    model, still = case.model, set()
    row, sizes = torch.arange(model.components), [layer.nodes for layer in case.layers]
    keys = [address(model.init_seed, Space.INIT_MEAN, row), address(model.init_seed, Space.INIT_STD, row)]
    noises = [normals(key, model.nodes).split(sizes, 1) for key in keys]
    for latent, mean_noise, std_noise in zip(model.latents.values(), *noises, strict=True):
        g, mean = mean_noise.double(), latent.mean.cpu().double()
        init_std = ((mean - 1) * g).sum() / g.square().sum()  # the model does not keep it: the one that fits best
        starts = (1 + init_std * g, inverse_softplus((0.05 + 0.02 * std_noise).abs().double()))
        for parameter, start in zip((latent.mean, latent.rho), starts, strict=True):
            unit = _ROUNDING * max(torch.finfo(dtype).eps for dtype in (parameter.dtype, torch.float32))
            known = parameter is latent.rho or g.numel() > 1  # a single mean fits any init_std
            if known and torch.allclose(parameter.cpu().double(), start, rtol=unit, atol=unit):
                still.add(id(parameter))
    return still


def _frozen(case: _Case) -> Finding | None:
    names = case.where(lambda p: not p.requires_grad)
    remedy = "Nothing, if that is deliberate; else model.requires_grad_(True)."
    return _about(names, "note", "Latents are frozen (requires_grad is False) in @.", remedy)


def _no_gradient(case: _Case) -> Finding | None:
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


def _weight_decay(case: _Case) -> Finding | None:
    decays = {id(p): group.get("weight_decay", 0) for _, group in case.groups for p in group["params"]}
    names = case.where(lambda p: p.requires_grad and decays.get(id(p), 0) != 0)
    worst = max((decays.get(id(p), 0) for name in names for p in case.model.latents[name].parameters()), default=0)
    what = f"Weight decay ({worst}) pulls μ to 0 and σ to 0.69, and not to the prior, in @."
    remedy = "Make the optimiser from model.parameter_groups(lr, weight_decay=...), which spares the latents."
    return _about(names, "warning", what, remedy)


def _forgotten(case: _Case) -> Finding | None:
    held = {id(p) for _, group in case.groups for p in group["params"]}
    names = case.where(lambda p: bool(case.optimisers) and p.requires_grad and id(p) not in held)
    remedy = "Make it from model.parameter_groups(lr), after convert; or freeze these latents: requires_grad_(False)."
    return _about(names, "problem", "The optimiser does not have the latents of @.", remedy)


def _twice(case: _Case) -> Finding | None:
    held = Counter(id(p) for _, group in case.groups for p in group["params"])
    names = case.where(lambda p: held[id(p)] > 1)
    remedy = "Leave them in one group of one optimiser: model.parameter_groups(lr)."
    return _about(names, "problem", "More than one parameter group moves the latents of @.", remedy)


def _unscaled(case: _Case) -> Finding | None:
    held = {id(p) for optimiser, group in case.groups if isinstance(optimiser, SGD) for p in group["params"]}
    k = case.model.components
    names = case.where(lambda p: id(p) in held and case.model.gradient_scale == 1 < k)
    what = f"SGD moves the latents of @ by 1/{k} of their gradient, because the components share the batch."
    remedy = "Make it from model.parameter_groups(lr), which undoes that; nothing, if their rate was raised by K."
    return _about(names, "note", what, remedy)


def _batchnorm_training(case: _Case) -> Finding | None:
    names = case.norms(lambda m: m.training and not case.model.training)
    what = "The model is in eval mode but BatchNorm in train mode, so answers depend on their batch: @."
    return _about(names, "problem", what, "Call model.eval() after anything that changes modes.")


def _batchnorm_frozen(case: _Case) -> Finding | None:
    names = case.norms(lambda m: not m.training and case.model.training)
    what = "The model is in train mode but BatchNorm in eval mode, with fixed statistics: @."
    return _about(names, "note", what, "Nothing, if you fine-tune so on purpose; else call model.train().")


def _batchnorm_of_batch(case: _Case) -> Finding | None:
    names = case.norms(lambda m: m.running_mean is None and not case.model.training)
    what = "BatchNorm keeps no running statistics, so answers depend on the batch even in eval mode: @."
    return _about(names, "note", what, "Build it with track_running_stats=True, or predict in large batches.")


def _batchnorm_average(case: _Case) -> Finding | None:
    names = case.norms(lambda m: m.momentum is None and m.running_mean is not None and not case.model.training)
    what = "BatchNorm averages over all of training, its start included (momentum=None): @."
    return _about(names, "note", what, "Build it with momentum=0.1, or reset its statistics and run some batches.")


def _dropout(case: _Case) -> Finding | None:
    own = {name: m for name, m in case.model.net.named_modules() if isinstance(m, _DropoutNd) and m.p >= _DROPOUT}
    what = f"The network's own dropout (up to {max((m.p for m in own.values()), default=0.0):g}) adds to the noise: @."
    remedy = "If training is slow or the answers are shy, train without: set its p to 0. The latents do its work."
    return _about(list(own), "note", what, remedy)


def _inverted(case: _Case) -> Finding | None:
    share, k = case.q.mean.lt(0).double().mean(1).max(0)
    limit = _INVERTED + _CHANCE / math.sqrt(case.model.nodes)
    what = f"{share:.0%} of the means of component {k} are below 0: it inverts those inputs."
    remedy = "Harmless if its error is like the others'; else start nearer to 1, with a smaller init_std."
    return Finding("note", None, what, remedy) if share > limit else None


def _means_only(case: _Case) -> Finding | None:
    what = "eval_samples is 0: model(x) in eval mode shows the component means only, without their σ."
    remedy = "Set model.eval_samples to 1 or more; model.predict draws in any case."
    return Finding("note", None, what, remedy) if case.model.eval_samples == 0 else None


def _agreement(case: _Case) -> Finding | None:
    if case.share is None or case.share >= _AGREED:
        return None
    what = f"{case.share:.1%} of the uncertainty is epistemic: the draws hardly disagree, as if there were one network."
    remedy = "Go by the total. For more of it: more noise (a larger beta or prior_std), or components farther apart."
    return Finding("warning" if case.model.examples > 0 else "note", None, what, remedy)


def _second_softmax(case: _Case) -> Finding | None:
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


def _end(case: _Case) -> str:
    """Which function the network ends in, as far as its modules or its outputs tell; "" for none."""
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


_CHECKS: tuple[Callable[[_Case], Finding | None], ...] = (
    _non_finite, _nothing_learnt, _duplicates, _collapsed, _wide, _dead, _dominated,
    _never_moved, _frozen, _no_gradient, _weight_decay, _forgotten, _twice, _unscaled,
    _batchnorm_training, _batchnorm_frozen, _batchnorm_of_batch, _batchnorm_average, _dropout,
    _inverted, _means_only, _agreement, _second_softmax,
)  # fmt: skip
