"""Turns a plain network into an iBNN and back. Everything is checked before anything is touched."""

import copy as copying
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import ibnn.layers.attention
import ibnn.layers.recurrent  # noqa: F401  # both register their layer types
from ibnn import check
from ibnn.errors import complaint
from ibnn.inputs import Pick
from ibnn.latent import Latent, attach, strip
from ibnn.layers.registry import duplicate, layer_type
from ibnn.layers.selection import Patterns, reasons
from ibnn.likelihood import ALIASES, LIKELIHOODS, Categorical, Heads, Likelihood
from ibnn.mixture import KLKind
from ibnn.network import IBNN
from ibnn.noise import DrawsPer

Where = Literal["input", "output", "both"]
BiasLatents = Literal["none", "layer", "node"]


@dataclass(frozen=True)
class PlannedLayer:
    """A module with weights, and what `convert` would do to it."""

    name: str
    type: str
    nodes: int = 0  # that get a latent
    weights: int = 0
    where: str = "input"  # or "output", or several: "input + output + bias"
    reason: str = ""  # why it gets no latent


@dataclass(frozen=True)
class Plan:
    """What `convert` would do to a network; `print` it."""

    layers: tuple[PlannedLayer, ...]  # that get a latent
    skipped: tuple[PlannedLayer, ...]  # that do not
    weights: int  # of the whole network

    @property
    def nodes(self) -> int:
        """Number of latent variables over all layers."""
        return sum(layer.nodes for layer in self.layers)

    def __str__(self) -> str:
        elsewhere = any(e.where != "input" for e in self.layers)
        cells = [("layer", "type", "nodes", f"{'weights':>12}" + "  where" * elsewhere)]
        cells += [
            (e.name or "(net)", e.type, f"{e.nodes:,}", f"{e.weights:>12,}" + f"  {e.where}" * elsewhere)
            for e in self.layers
        ]
        cells += [(e.name or "(net)", e.type, "skipped", e.reason) for e in self.skipped]
        names, types = (max(len(row[column]) for row in cells) for column in (0, 1))
        lines = [f"{name:<{names}}  {kind:<{types}}  {nodes:>9}  {rest}" for name, kind, nodes, rest in cells]
        ratio = f", {self.weights / self.nodes:,.0f} weights per node" if self.nodes else ""
        return "\n".join([*lines, f"{self.nodes:,} nodes, {self.weights:,} weights{ratio}"])


def plan(
    net: nn.Module,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    where: Where = "input",
    bias_latents: BiasLatents = "none",
) -> Plan:
    """Says what `convert` would do, without touching the network.

    Args:
        net: Any network.
        include: Layers to convert, by name ("conv1"), by the name of a module that contains them ("layer4"), by glob
            (`"*.attention.*"`) or by class (nn.Conv2d). Default: all that can be converted but embeddings, which must
            be included by their own name or class and get a latent on their output.
        exclude: Layers to leave out, named likewise.
        where: Which nodes get latents, as in `convert`.
        bias_latents: Whether biases get latents, as in `convert`.

    >>> print(plan(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))))
    layer  type             nodes       weights
    0      Conv2d               1            40
    3      Linear              16            34
    1      BatchNorm2d    skipped  normalisation: scales and shifts, no input weights
    17 nodes, 82 weights, 5 weights per node
    """
    check.choice("where", where, get_args(Where))
    check.choice("bias_latents", bias_latents, get_args(BiasLatents))
    _check_plain(net)
    modules = {name: m for name, m in net.named_modules() if "parametrizations" not in name.split(".")}
    why_not = reasons(net, modules, include, exclude)
    if (where, bias_latents) != ("input", "none"):
        from ibnn.contrib import sides

        return sides.planned(net, modules, why_not, where, bias_latents)
    return planned(net, modules, why_not)


def planned(net: nn.Module, modules: Mapping[str, nn.Module], why_not: Mapping[str, str | None]) -> Plan:
    """Returns the plan of a network, from the reasons why modules get no latent."""
    layers, skipped = [], []
    for name, module in modules.items():
        kind, reason, type_name = layer_type(module), why_not[name], type(module).__name__
        if kind is not None and reason is None:
            weights = sum(parameter.numel() for parameter in module.parameters())
            place = "output" if set(kind.ports(module)) == {"output"} else "input"  # of an embedding
            layers.append(PlannedLayer(name, type_name, kind.nodes(module), weights, place))
        elif kind is not None or any(True for _ in module.parameters(recurse=False)):
            skipped.append(PlannedLayer(name, type_name, reason=str(reason)))
    if not layers:
        found = ", ".join(f"{e.name or '(net)'} ({e.reason})" for e in skipped[:5]) or "no weights at all"
        remedy = "Register your layer: ibnn.register_layer."
        raise ValueError(complaint("net", "a network with layers to convert", found, remedy))
    return Plan(tuple(layers), tuple(skipped), sum(p.numel() for p in net.parameters()))


def convert(
    net: nn.Module,
    *,
    components: int = 8,
    prior_std: float = 0.3,
    init_std: float = 0.1,
    likelihood: str | Likelihood | Mapping[str, str | Likelihood] = "categorical",
    kl: KLKind = "components",
    seed: int | None = None,
    draws: DrawsPer = "both",
    logits: Pick | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    copy: bool = True,
    where: Where = "input",
    bias_latents: BiasLatents = "none",
) -> IBNN:
    """Turns any network into an implicit Bayesian neural network; its weights keep their values and names.

    Args:
        net: Any network; pretrained is fine.
        components: K, the number of Gaussians in the posterior's mixture.
        prior_std: s, standard deviation of the prior of every latent. If `fit` chooses s, it starts with 0.6 of this.
        init_std: σ0, how far the component means start from 1: about 0.1 for a pretrained network, up to 0.75 from
            scratch. At 0 every component mean starts as exactly the given network.
        likelihood: "categorical", "gaussian", "bernoulli", or a `Likelihood`. For several outputs, a dict of these by
            name, {"age": "gaussian", "sex": "bernoulli"}; targets and predictions are then dicts of the same names.
        kl: The KL of the training loss: "components", "mean" (the paper's), "pairwise" or "montecarlo".
        seed: Decides the start of the latents and every draw of training; default from torch's global generator.
        draws: For convolutions, what gets its own factor: each "channel" (the paper's), each "unit" (a channel at one
            pixel), or "both". Networks without convolutions ignore it.
        logits: Which part of the network's output is predicted, if it is not the output itself or its `logits`: a path
            of keys, attributes or numbers ("heads.age", "0"), or a function of the output.
        include: Layers to convert, as in `plan`.
        exclude: Layers to leave out, as in `plan`.
        copy: False converts the given network itself, not a copy.
        where: Which nodes of layers have latents: "input" (the paper's), "output" or "both".
        bias_latents: Whether biases have latents: "none", one for each "layer" (the authors' code) or "node".

    >>> model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), components=4, seed=0)
    >>> model.eval()(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    check.integer("components", components, remedy="Pass components=8.")
    check.number("prior_std", prior_std, above=0, remedy="Pass prior_std=0.3.")
    check.number("init_std", init_std, least=0, remedy="Pass init_std=0 to start all components alike.")
    check.choice("kl", kl, get_args(KLKind))
    check.choice("draws", draws, get_args(DrawsPer))
    if logits is not None and not callable(logits) and not (isinstance(logits, str) and logits):
        remedy = 'Pass e.g. logits="heads.age", or a function of the output.'
        raise TypeError(complaint("logits", "a path or a function", repr(logits), remedy))
    chosen = _likelihood(likelihood)
    check.seed(0 if seed is None else seed)
    layers = plan(net, include=include, exclude=exclude, where=where, bias_latents=bias_latents).layers
    if meta := [name for name, parameter in net.named_parameters() if parameter.is_meta]:
        remedy = "Load its weights first, for example with net.to_empty(device='cpu') and net.load_state_dict(...)."
        raise ValueError(complaint("net", "a network with weights", f"{meta[:3]} on the meta device", remedy))
    seed = int(torch.randint(2**31, ())) if seed is None else seed
    net, chosen = (duplicate(net), copying.deepcopy(chosen)) if copy else (net, chosen)
    _follow_class(chosen, net)
    give: Callable[[nn.Module, str, int], object] = attach
    if (where, bias_latents) != ("input", "none"):
        from ibnn.contrib.sides import attach_at

        give = partial(attach_at, where=where, bias_latents=bias_latents)
    for entry in layers:
        give(net.get_submodule(entry.name), entry.name, components)
    return IBNN(
        net,
        chosen.to(next(net.parameters()).device),
        components=components,
        prior_std=float(prior_std),
        init_std=float(init_std),
        kl_kind=kl,
        seed=seed,
        draws=draws,
        logits=logits,
        where=where,
        bias_latents=bias_latents,
    )


def revert(model: IBNN) -> nn.Module:
    """Removes the latents from a converted network, in place, and returns the plain network with its weights U.

    After `convert(..., copy=False)` that is the very network that was converted. The model cannot be used afterwards.

    >>> net = nn.Linear(3, 2)
    >>> revert(convert(net, copy=False)) is net
    True
    """
    if not isinstance(model, IBNN):
        raise TypeError(complaint("model", "an IBNN made by convert", type(model).__name__, "Pass the model itself."))
    strip(model.net)
    model.latents.clear()
    return model.net


def _likelihood(named: str | Likelihood | Mapping[str, str | Likelihood]) -> Likelihood:
    """Returns the likelihood of a name, of several names, or the object itself."""
    if isinstance(named, Mapping):
        return Heads({name: _likelihood(head) for name, head in named.items()})
    if isinstance(named, str):
        known = ALIASES.get(named.lower(), named)
        check.choice("likelihood", known, LIKELIHOODS)
        return LIKELIHOODS[known]()
    if not isinstance(named, Likelihood):
        expected, got = "a name, a Likelihood object, or a dict of them", type(named).__name__
        raise TypeError(complaint("likelihood", expected, got, 'Pass "categorical".'))
    return named


def _follow_class(likelihood: Likelihood, net: nn.Module) -> None:
    """Sets, where it is open, the class axis and the shift of labels that the class of a Hugging Face model implies."""
    net = net.get_base_model() if hasattr(net, "get_base_model") else net  # type: ignore[operator]  # peft's
    kind = type(net)
    if not isinstance(likelihood, Categorical) or "PreTrainedModel" not in (c.__name__ for c in kind.__mro__):
        return
    causal = re.search(r"^(?!XLNet|XLMWith).*(ForCausalLM|LMHeadModel)", kind.__name__)
    tokens = re.search(r"ForTokenClassification|ForMaskedLM|ForConditionalGeneration|WithLMHead", kind.__name__)
    if likelihood.axis is None and (causal or tokens):
        likelihood.axis = -1
    if likelihood.next_token is None and causal:
        likelihood.next_token = True


def _check_plain(net: nn.Module) -> None:
    """Raises unless a network is an nn.Module of plain Python, not converted yet, whose parameters have shapes."""
    if not isinstance(net, nn.Module):
        raise TypeError(complaint("net", "an nn.Module", type(net).__name__, "Pass the network itself."))
    if hasattr(net, "_orig_mod") or isinstance(net, torch.jit.ScriptModule):
        got = f"a {type(net).__name__}, compiled or scripted"
        raise TypeError(complaint("net", "an nn.Module in plain Python", got, "Convert first, then compile or export."))
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        got = f"a {type(net).__name__}"
        raise TypeError(complaint("net", "a plain network", got, "Convert what it wraps: ibnn.convert(net.module)."))
    for name, module in net.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            got = f"a quantised layer ({name!r})"
            raise TypeError(complaint("net", "of floating-point layers", got, "Convert it before it is quantised."))
        if isinstance(module, Latent):
            got = f"one converted before (see {name!r})"
            raise ValueError(complaint("net", "a plain network", got, "Revert it: ibnn.revert(model)."))
    if lazy := [name for name, parameter in net.named_parameters() if is_lazy(parameter)]:
        got = f"lazy parameters {lazy[:3]}"
        raise ValueError(complaint("net", "materialised", got, "Run net(x) once on a batch, then convert."))
